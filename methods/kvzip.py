"""KVzip: the model repeats its prompt, and what it looks back at while it does so stays."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.policy import Allocation, LayerTensors, Need, Number, Probe, Ranked, ScoreSpec, Statistic, Whole

QUERIES = 64  # at once: the attention of all of a part's would be far larger than the cache


@dataclass(frozen=True)
class Reconstruction(Statistic):
    """Largest attention that a key receives while its part of the prompt is repeated, of any query and query head."""

    sinks: int
    needs: ClassVar[frozenset[Need]] = frozenset({"replays"})
    words: ClassVar[str] = "largest attention while the prompt is repeated"

    def of_prompt(self, seen: LayerTensors) -> Tensor:
        score = torch.zeros(seen.k.shape[:2], device=seen.k.device)
        for replay in seen.replays:
            sinks = min(self.sinks, replay.first)
            behind = sinks + replay.end - replay.first  # keys of the prompt; those of the pass itself follow
            keys = torch.cat([seen.k[:, :sinks], seen.k[:, replay.first : replay.end], replay.k], 1).float()
            queries = seen.grouped(replay.q.float() * seen.scale)
            later = torch.arange(keys.shape[1], device=keys.device) - behind
            best = score[:, replay.first : replay.end]
            for begin in range(0, queries.shape[2], QUERIES):
                logits = seen.capped(torch.einsum("hgid,hjd->hgij", queries[:, :, begin : begin + QUERIES], keys))
                query_pos = begin + torch.arange(logits.shape[2], device=keys.device)
                prob = seen.softmax(logits.masked_fill(later > query_pos[:, None], float("-inf")))[..., sinks:behind]
                best = torch.maximum(best, prob.amax((1, 2)))
            score[:, replay.first : replay.end] = best
        return score


@dataclass(kw_only=True)
class KVzip(Ranked):
    """Asks the model to repeat the prompt, reads the prompt once more after itself, and keeps what was looked at.

    No question is needed, so that a context can be compressed before any is asked. The second pass takes about as long
    as the first, and the whole prompt lies there uncompressed meanwhile; both are in the record (`probe_s`,
    `peak_bytes`).

    Args:
        sinks: First tokens that always stay; >= 0.
        part: Tokens that are repeated in one pass; >= 1.
        allocation: `global`: all heads of all layers compete.

    Source: KVzip (Kim et al. 2025, arXiv 2505.23416); snu-mllab/KVzip model/wrapper.py and attention/score.py;
        NVIDIA/kvpress kvzip_press.py.
    Differs: the whole prompt is repeated, a chat's first tokens and where the task is not split its question included;
        the original keeps its system prompt and repeats what follows it. Attention is computed in fp32. Parts are
        shorter where the model's context has no room for `part` tokens after the prompt. Tokens that go are freed,
        and the budget is met exactly.
    """

    sinks: Annotated[int, Whole(0, unit="tokens")] = 4
    part: Annotated[int, Whole(1, 2**24)] = 2048
    allocation: Allocation = "global"
    alpha: Annotated[float, Number(0, 1)] = 0.0

    def declare(self) -> None:
        super().declare()
        probe = Probe(
            ask="\n\nRepeat the previous context exactly.",
            go_on="\n\nRepeat the part of the previous context exactly, starting with",
            part_tokens=self.part,
            overlap_tokens=8,
        )
        self.rank_by(ScoreSpec(statistic=Reconstruction(self.sinks), probe=probe))

    def always(self, budget: int) -> tuple[int, int]:
        return self.sinks, 0
