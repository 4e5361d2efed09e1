"""Teacher forcing: how far a compressed cache's predictions are from the full cache's, on a given continuation."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.engine.long_logits import Logits
from kvbench.engine.requests import BINS
from kvbench.engine.sampling import likeliest
from kvbench.stats.tails import KL_TAILS, quantile

COPIED_RUN_TOKENS = 3  # of which the last one is copied where the prompt has the same run


def copied_tokens(prompt: Sequence[int], behind: Sequence[int], positions: Sequence[int]) -> tuple[bool, ...]:
    """Flags of forced tokens that copy the prompt: with the two tokens before them they occur in it, in this order.

    Args:
        prompt: Token ids of the prompt.
        behind: All token ids after it.
        positions: Positions of the forced tokens in `behind`; the two tokens before one may belong to the prompt.

    Returns:
        One flag for each of `positions`. The first two tokens of a copied span are no copies, and words that any text
        has may count as some.
    """
    text, before = torch.tensor([*prompt, *behind], dtype=torch.int64), COPIED_RUN_TOKENS - 1
    number = torch.unique(text, return_inverse=True)[1]
    copied = torch.zeros(len(text), dtype=torch.bool)
    if len(text) > before:
        runs = number.unfold(0, COPIED_RUN_TOKENS, 1) @ int(number.max() + 1) ** torch.arange(COPIED_RUN_TOKENS)
        copied[before:] = torch.isin(runs, runs[: max(0, len(prompt) - before)])
    return tuple(copied[len(prompt) + torch.tensor(positions, dtype=torch.int64)].tolist())


def _sum(x: Tensor) -> Tensor:
    """The sum of [n] in an order that does not depend on the number of threads, as that of one long row does."""
    return torch.nn.functional.pad(x, (0, -len(x) % 1024)).view(-1, 1024).sum(1).sum()


def _best(logp: Tensor) -> Tensor:
    """The place of the largest of [vocabulary]."""
    return likeliest(logp[None])[0]


@dataclass
class ChoiceMeter:
    """Adds up the log-likelihood of one continuation, token by token."""

    gold: tuple[int, ...]
    nll: list[float] = field(default_factory=list, kw_only=True)
    hit: list[bool] = field(default_factory=list, kw_only=True)

    @property
    def done(self) -> bool:
        return len(self.nll) == len(self.gold)

    def add(self, logits: Tensor) -> None:
        self.take(self.measure(len(self.nll), logits).tolist())

    def measure(self, index: int, logits: Tensor) -> Tensor:
        """Numbers of one token that `take` consumes, fp32 on the device of its logits fp32 [vocabulary].

        Does not synchronise.
        """
        token, logp = self.gold[index], torch.log_softmax(logits, -1)
        return torch.stack([logp[token], (_best(logp) == token).float()])

    def take(self, measured: list[float]) -> None:
        """Takes what was measured on the next token."""
        logp, is_best = measured
        self.nll.append(-logp)
        self.hit.append(bool(is_best))

    def report(self) -> dict:
        """The journal's record of this choice: `loglikelihood` (nats), `greedy`, `num_tokens`."""
        return {"loglikelihood": -sum(self.nll), "greedy": all(self.hit), "num_tokens": len(self.gold)}


@dataclass
class FidelityMeter(ChoiceMeter):
    """Compares one row with the full, uncompressed cache, token by token.

    `reference` has the full cache's logits, fp32 [len(gold), vocabulary]; further ones are ignored. With `exact_first`,
    the first token is predicted by the prompt's forward pass, not after a prompt's end that was read through the
    compressed cache. The first `warmup` tokens are fed and not measured. `copied` says of each token whether it copies
    the prompt; empty: none.
    """

    reference: Logits
    exact_first: bool = True
    warmup: int = 0
    copied: tuple[bool, ...] = ()
    nll_full: list[float] = field(default_factory=list, kw_only=True)
    kl: list[float] = field(default_factory=list, kw_only=True)
    agree: list[bool] = field(default_factory=list, kw_only=True)

    @property
    def first(self) -> int:
        """Index of the first token that is measured."""
        return max(int(self.exact_first), self.warmup)

    def measure(self, index: int, logits: Tensor) -> Tensor:
        # One row at a time: of a long text, all rows at once would be gigabytes for a second time.
        logp, ref = torch.log_softmax(logits, -1), torch.log_softmax(self.reference[index], -1)
        best, token = _best(logp), self.gold[index]
        kl = _sum(ref.exp() * (ref - logp)).clamp(min=0.0)
        return torch.stack([logp[token], ref[token], kl, (best == _best(ref)).float(), (best == token).float()])

    def take(self, measured: list[float]) -> None:
        logp, ref, kl, agrees, is_best = measured
        self.nll.append(-logp)
        self.nll_full.append(-ref)
        self.kl.append(kl)
        self.agree.append(bool(agrees))
        self.hit.append(bool(is_best))

    def report(self) -> dict:
        """The journal's `fidelity` record (`SampleRecord.fidelity`).

        All means are over the same tokens: those that were predicted from the compressed cache. A first token that the
        prompt's own forward pass predicts, which is exact for every method, is not one of them; None where there is no
        other. A tail of the KL is None where the tokens are fewer than it needs (`quantile`).
        """
        count, first = len(self.nll), self.first
        measured = count - first

        def mean(values: list[float] | list[bool]) -> float | None:
            return sum(values[first:]) / measured if measured else None

        changes = [math.exp(-nll) - math.exp(-full) for nll, full in zip(self.nll, self.nll_full, strict=True)]
        copied = self.copied or (False,) * count
        new = [kl for kl, is_copied in zip(self.kl[first:], copied[first:], strict=True) if not is_copied]
        square = mean([change * change for change in changes])
        return {
            "nll": mean(self.nll),
            "nll_full": mean(self.nll_full),
            "kl_mean": mean(self.kl),
            "kl_new": sum(new) / len(new) if new else None,
            **{name: quantile(self.kl[first:], share) for name, share in KL_TAILS.items()},
            "kl_max": max(self.kl[first:], default=None),
            "dp_rms": None if square is None else math.sqrt(square),
            "top1_agreement": mean(self.agree),
            "gold_argmax_share": mean(self.hit),
            "gold_exact": float(all(self.hit)),
            "num_tokens": count,
            "num_measured": measured,
            "num_new": len(new),
        }

    def drift(self) -> dict[str, list[float]]:
        """Fidelity along the answer (`SampleRecord.drift`), without the tokens that are not measured."""
        first = self.first
        last = bisect_right(BINS, len(self.nll) - 1)
        sums = {name: [0.0] * last for name in ("tokens", "nll", "nll_full", "kl", "same_first_choice")}
        for token in range(first, len(self.nll)):
            index = bisect_right(BINS, token) - 1
            values = (1.0, self.nll[token], self.nll_full[token], self.kl[token], float(self.agree[token]))
            for name, value in zip(sums, values, strict=True):
                sums[name][index] += value
        return {name: [float(f"{value:.7g}") for value in values] for name, values in sums.items()}

    def per_token(self) -> dict[str, list[float]]:
        """Fidelity token by token, from the first of the answer on (`SampleRecord.per_token`)."""
        columns: dict[str, list[float] | list[bool]] = {
            "nll": self.nll,
            "nll_full": self.nll_full,
            "kl": self.kl,
            "same_first_choice": self.agree,
            "right_first_choice": self.hit,
            "copied": list(self.copied or (False,) * len(self.nll)),
        }
        rounded = {name: [float(f"{value:.5g}") for value in values] for name, values in columns.items()}
        return rounded | {"exact": [float(self.first)]}
