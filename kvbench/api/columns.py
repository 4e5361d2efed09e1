"""Columns of a batch, by which transformers counts: tokens, padding and positions that fit what a cache has read."""

import torch
from torch import Tensor

from kvbench.errors import ArgumentValue


class Columns:
    """The tokens that a cache has read, int64 [B, N], and which of them are no padding, bool [B, N]."""

    def __init__(self) -> None:
        self._tokens: Tensor | None = None
        self._kept: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self._tokens is None else self._tokens.shape[1]

    def append(self, tokens: Tensor, kept: Tensor) -> None:
        """Append columns that were read."""
        if self._tokens is None or self._kept is None:
            self._tokens, self._kept = tokens, kept
        else:
            self._tokens, self._kept = torch.cat([self._tokens, tokens], 1), torch.cat([self._kept, kept], 1)

    def of_prompt(self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Mask of the prompt tokens (int64 [B, N]) that are not padding, bool [B, N]: the last ones of every row."""
        kept = _kept(tokens, mask)
        _check_positions(positions, kept, torch.zeros(len(kept), 1, dtype=torch.int64, device=kept.device), 0)
        return kept

    def of_turn(self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Mask bool [B, n] of the tokens of a turn or step (int64 [B, n]) that are not padding.

        `mask` covers these columns or all.
        """
        assert self._kept is not None, "a prompt was read"
        kept, width = torch.ones_like(tokens, dtype=torch.bool), tokens.shape[1]
        if mask is not None:
            if mask.ndim != 2 or len(mask) != len(tokens):
                raise ArgumentValue(
                    f"attention_mask has shape {tuple(mask.shape)}; give one of the new columns, "
                    f"{tuple(tokens.shape)}, or of all",
                    setting="attention_mask",
                )
            mask = mask.to(tokens.device).bool()
            if mask.shape[1] > width and not torch.equal(mask[:, :-width], self._kept):
                raise ArgumentValue(
                    "attention_mask hides tokens that the cache has read, such as the padding behind a row that ended "
                    "before others; go on with such rows one by one",
                    setting="attention_mask",
                )
            kept = mask[:, -width:]
            if not bool(kept[:, -1].all()):
                raise ArgumentValue(
                    "attention_mask hides the last token of a row; put the padding of a turn at its left",
                    setting="attention_mask",
                )
        _check_positions(positions, kept, self._kept.sum(1, keepdim=True), len(self))
        return kept

    def check_conversation(self, prompt: Tensor | None) -> int:
        """New columns of a conversation (int64 [B, N]).

        Raises ValueError unless it begins with the columns that were read, and has more.
        """
        assert self._tokens is not None, "a prompt was read"
        read, seen, shape = self._tokens, len(self), None if prompt is None else tuple(prompt.shape)
        if prompt is None or prompt.ndim != 2 or len(prompt) != len(read) or prompt.shape[1] <= seen:
            raise ArgumentValue(
                f"input_ids has shape {shape}, but the cache that goes on has read {tuple(read.shape)}; give the whole "
                "conversation: what generate returned, and the next turn behind it",
                setting="input_ids",
            )
        if bool((other := (prompt[:, :seen].to(read.device) != read).any(0)).any()):
            raise ArgumentValue(
                f"input_ids differs from what the cache has read at column {int(other.nonzero()[0, 0])} of {seen}; put "
                "the tokens of the next turn behind those that generate returned (a chat that is rendered anew may "
                "have others), or leave past_key_values out",
                setting="input_ids",
            )
        return prompt.shape[1] - seen


def _kept(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Mask of the tokens (int64 [B, N]) that are not padding, bool [B, N]: the last ones of every row."""
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    if mask.shape != tokens.shape:
        raise ArgumentValue(
            f"attention_mask has shape {tuple(mask.shape)}; give one of input_ids' {tuple(tokens.shape)}",
            setting="attention_mask",
        )
    kept = mask.to(tokens.device).bool()
    counts = kept.sum(1)
    expected = torch.arange(tokens.shape[1], device=tokens.device) >= tokens.shape[1] - counts[:, None]
    if not bool((kept == expected).all()):
        raise ArgumentValue(
            "attention_mask hides tokens elsewhere than at the left of a row; set tokenizer.padding_side = 'left'",
            setting="attention_mask",
        )
    if not bool(counts.all()):
        raise ArgumentValue("a row of the batch has nothing but padding; leave it out", setting="attention_mask")
    return kept


def _check_positions(positions: Tensor | None, kept: Tensor, before: Tensor, columns: int) -> None:
    """Raises ValueError unless positions [..., B or 1, n] are those of the new columns.

    They come after so many tokens (int64 [B, 1]) and columns: counted without padding, as by generate, or by column, as
    by a model that is passed none. Positions of padding may be any.
    """
    if positions is None:
        return
    counted = before + kept.long().cumsum(1) - 1
    by_column = torch.arange(columns, columns + kept.shape[1], device=kept.device)
    if positions.ndim >= 1 and positions.shape[-1] == kept.shape[1] and _broadcasts(positions, kept):
        position_ids = positions.to(kept.device)
        if any(bool(((position_ids == wanted) | ~kept).all()) for wanted in (counted, by_column)):
            return
    raise ArgumentValue(
        f"position_ids of shape {tuple(positions.shape)} are not those of the text: a compressed cache counts tokens "
        f"from 0 on, without padding, and the next one is {counted[:, 0].tolist()[:4]}; leave position_ids out",
        setting="position_ids",
    )


def _broadcasts(positions: Tensor, kept: Tensor) -> bool:
    return positions.ndim == 1 or positions.shape[-2] in (1, len(kept))
