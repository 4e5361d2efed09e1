"""Choosing the next token, and knowing when an answer ends."""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbench.engine.requests import Request

_FRONT = 1024  # tokens that are sorted where the nucleus is within them


def row_generator(seed: int, sample_id: str, repeat: int, device: torch.device) -> torch.Generator:
    """A random generator of one answer's own, so that a sampled answer does not depend on the batch it ran in."""
    digest = hashlib.sha256(f"{seed}\x00{sample_id}\x00{repeat}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def choose_token(logits: Tensor, request: Request, generator: torch.Generator | None, banned: list[int]) -> int:
    """The next token of one row.

    Args:
        logits: fp32 [vocabulary].
        request: Temperature and top_p are read.
        generator: The row's own; None for greedy decoding.
        banned: Tokens that may not come yet (stop tokens before `min_new_tokens`).
    """
    if banned:
        logits = logits.clone()
        logits[banned] = float("-inf")
    if request.temperature == 0:
        return int(logits.argmax())
    prob = torch.softmax(logits / request.temperature, -1)
    if request.top_p < 1:
        tokens, prob = nucleus(prob, request.top_p)
        return int(tokens[torch.multinomial(prob, 1, generator=generator)])
    return int(torch.multinomial(prob, 1, generator=generator))


def nucleus(prob: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens that reach a mass together, and the one that crosses it.

    Args:
        prob: fp32 [vocabulary].
        top_p: The mass, in (0, 1).

    Returns:
        Tokens, int64 [n], likeliest first, of equals the first; and their probabilities, fp32 [n], which sum up to the
        mass or more.
    """
    # To sort a whole vocabulary at every step takes a third of a small model's time; the mass lies in few tokens.
    floor = prob.topk(min(_FRONT, len(prob))).values[-1]
    for tokens in (prob >= floor).nonzero()[:, 0], torch.arange(len(prob), device=prob.device):
        ordered, order = prob[tokens].sort(descending=True, stable=True)
        mass = ordered.cumsum(0)
        if mass[-1] >= top_p:
            break
    keep = mass - ordered < top_p  # the first token is always kept
    return tokens[order[keep]], ordered[keep]


@dataclass
class Answer:
    """An answer in the making: its tokens and the rule that ends it.

    Args:
        request: Limits and stop rules.
        tokenizer: Decodes tokens to text.
        end_ids: End-of-sequence tokens of the model.
        room: Tokens that the model's context still holds behind the prompt; the answer ends there at the latest.
    """

    request: Request
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    room: int = 1 << 62
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    first_end: int | None = None

    def __post_init__(self) -> None:
        # A stop string of n bytes spans at most n tokens; one more covers a token that begins before it.
        self._tail = max((len(text.encode()) for text in self.request.stop), default=0) + 1

    @property
    def banned(self) -> list[int]:
        """Tokens that may not come next, because the answer is still too short."""
        if len(self.token_ids) >= self.request.min_new_tokens:
            return []
        return sorted({*self.end_ids, *self.request.stop_token_ids})

    def wants_to_end(self) -> None:
        """Notes that a banned token would have come next."""
        if self.first_end is None:
            self.first_end = len(self.token_ids)

    def add(self, token: int) -> None:
        """Takes the next token; sets `finish` when the answer is over."""
        if token in self.request.stop_token_ids:
            self.finish = "stop"
            return
        if token in self.end_ids:
            self.finish = "eos"
            return
        self.token_ids.append(token)
        if self._find_stop(max(0, len(self.token_ids) - self._tail)) is not None:
            self.finish = "stop"
        elif len(self.token_ids) >= min(self.request.max_new_tokens, self.room):
            self.finish = "length"

    @property
    def text(self) -> str:
        """The decoded answer, cut before the first stop string."""
        cut = self._find_stop(0) if self.finish == "stop" else None
        return self._decode(self.token_ids)[:cut]

    def _find_stop(self, first: int) -> int | None:
        """Where the first stop string begins in the text of the tokens from `first` on.

        Those complete within the first `min_new_tokens` tokens do not count, not even once the answer is longer.
        """
        if not self.request.stop or len(self.token_ids) <= self.request.min_new_tokens:
            return None
        text = self._decode(self.token_ids[first:])
        ignored = len(self._decode(self.token_ids[first : self.request.min_new_tokens]))
        found = [text.find(stop, max(0, ignored - len(stop) + 1)) for stop in self.request.stop]
        return min((index for index in found if index >= 0), default=None)

    def _decode(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # one sequence gives one text
        return text
