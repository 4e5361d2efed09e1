"""Teacher forcing: how far a compressed cache's predictions are from the full cache's, on a given continuation."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ChoiceMeter:
    """Adds up the log-likelihood of one continuation, token by token.

    Args:
        gold: The continuation.
    """

    gold: tuple[int, ...]
    nll: list[float] = field(default_factory=list)
    hit: list[bool] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """All tokens were scored."""
        return len(self.nll) == len(self.gold)

    def add(self, logits: Tensor) -> None:
        """Scores the next token under logits fp32 [vocabulary]."""
        token, logp = self.gold[len(self.nll)], torch.log_softmax(logits, -1)
        self.nll.append(-float(logp[token]))
        self.hit.append(int(logp.argmax()) == token)

    def report(self) -> dict:
        """The journal's record of this choice: `loglikelihood` (nats), `greedy`, `num_tokens`."""
        return {"loglikelihood": -sum(self.nll), "greedy": all(self.hit), "num_tokens": len(self.gold)}


@dataclass
class FidelityMeter:
    """Collects one row's comparison, token by token.

    Args:
        gold: The continuation.
        reference: fp32 [len(gold), vocabulary] log-probabilities of the full, uncompressed cache for each gold token.
        exact_first: The first gold token is predicted by the prompt's own forward pass; False when the end of the
            prompt was already read through the compressed cache.
    """

    gold: tuple[int, ...]
    reference: Tensor
    exact_first: bool = True
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    hit: list[bool] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """All gold tokens were scored."""
        return len(self.nll) == len(self.gold)

    def add(self, logits: Tensor) -> None:
        """Scores the next gold token under logits fp32 [vocabulary]."""
        index = len(self.nll)
        logp, ref = torch.log_softmax(logits, -1), self.reference[index]
        best = int(logp.argmax())
        self.nll.append(-float(logp[self.gold[index]]))
        self.kl.append(float((ref.exp() * (ref - logp)).sum().clamp(min=0.0)))
        self.agree.append(best == int(ref.argmax()))
        self.hit.append(best == self.gold[index])

    def report(self) -> dict:
        """The journal's `fidelity` record.

        A first gold token that is predicted by the prompt's own forward pass, which is exact for every method, counts
        in the NLL and the gold match, but KL and agreement are over the tokens that were read from the compressed
        cache.

        Returns:
            `nll`, `nll_full` (mean per token, nats), `kl_mean`, `kl_max` (nats; None without such a token),
            `top1_agreement`, `gold_argmax_share`, `gold_exact` (0 or 1), `num_tokens`.
        """
        count = len(self.nll)
        full = -self.reference[torch.arange(count), torch.tensor(self.gold[:count], device=self.reference.device)]
        through_cache, agree = self.kl[self.exact_first :], self.agree[self.exact_first :]
        return {
            "nll": sum(self.nll) / count,
            "nll_full": float(full.mean()),
            "kl_mean": sum(through_cache) / len(through_cache) if through_cache else None,
            "kl_max": max(through_cache) if through_cache else None,
            "top1_agreement": sum(agree) / len(through_cache) if through_cache else None,
            "gold_argmax_share": sum(self.hit) / count,
            "gold_exact": float(all(self.hit)),
            "num_tokens": count,
        }
