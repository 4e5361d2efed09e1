"""TriAttention: where a head's queries gather before their rotation says how far back it will look."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

import kvbench.policy as kv


@dataclass(frozen=True)
class TrigonometricScore(kv.Statistic):
    """Logit of a head's mean query from later positions, plus a term of the queries' norms; the largest of a group.

    The second term does not depend on their direction.

    Args:
        centres: Per layer, for each query head the mean query before its rotary embedding (D numbers), then per
            frequency the mean length of its two channels (D / 2 numbers); or so for each KV head.
        reach: Longest distance ahead; positions 1, 2, 4, .. up to it count alike.
    """

    centres: tuple[tuple[float, ...], ...]
    reach: int
    needs: ClassVar[frozenset[kv.Need]] = frozenset({"before_rope"})
    in_chunks: ClassVar[bool] = True
    words: ClassVar[str] = "logits of mean queries at positions to come"

    def of_prompt(self, seen: kv.LayerTensors) -> Tensor:
        half = seen.k.shape[-1] // 2
        table = torch.tensor(self.centres[seen.layer], device=seen.k.device).view(-1, 3 * half)
        mean, length = seen.of_these_heads(table).split([2 * half, half], -1)
        keys = seen.k.float()
        # A key that is rotated by its position meets a query rotated by its own: the mean over offsets is one query.
        future = seen.tokens_seen + 2 ** torch.arange(self.reach.bit_length(), device=keys.device)
        query = seen.rotated(mean.expand(len(future), *mean.shape), future[:, None]).mean(0)
        spread = length - torch.hypot(mean[:, :half], mean[:, half:])
        logit = torch.einsum("hgd,hnd->hgn", seen.grouped(query), keys)
        longer = torch.einsum("hgd,hnd->hgn", seen.grouped(spread), torch.hypot(keys[..., :half], keys[..., half:]))
        return (logit + longer).amax(1)

    of_slots = of_prompt


@dataclass(kw_only=True)
class TriAttention(kv.Scored):
    """Keeps the prompt, and answer tokens that later queries would attend to, were they at their head's mean.

    Scored by a model's table, without looking at any query.

    Args:
        budget: Tokens kept of the answer: ratio, tokens per head, or bytes, which count the prompt too.
        centres: The model's table: the path of a file that `kvbench calibrate what=centres` wrote, or a list of lists.
            null = none, then the model is refused.
        reach: Longest distance ahead that counts; distances are 1, 2, 4, .. up to it. >= 1.
        protect: `prompt`: only the answer is compressed. `none`: the prompt too.

    Source: WeianMao/triattention at c3744ee6, triattention/methods/pruning_utils.py (Mao et al. 2026, arXiv
        2604.04921): mean over offsets, largest of a group.
    Differs: every KV head of every layer keeps its own set (its `per_layer_perhead_pruning`), by scores as they are;
        its default pools the layers first. It evicts every 32 steps unless told otherwise, the original every 128. The
        budget is of the answer, where the original's counts the prompt.
    """

    centres: Annotated[str | Sequence[Sequence[float]] | None, kv.TABLE_OR_PATH] = None
    reach: Annotated[int, kv.Whole(1, kv.MAX_TOKENS, unit="steps")] = 65536
    protect: kv.Protect = "prompt"
    decode_every: kv.Steps = 32

    def declare(self) -> None:
        super().declare()
        if self.centres is not None:  # the numbers themselves, so that a run's identity does not hang on a path
            self.centres = kv.read_table(self.centres, "centres")
        self.score_by(TrigonometricScore(self.centres or (), self.reach))

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        super().check_model(num_layers, num_kv_heads)
        layers = len(self.centres) if self.centres is not None else 0
        if self.centres is None or layers != num_layers or len(self.centres[0]) % (3 * num_kv_heads):
            raise kv.NotForModel(
                f"method.centres has {layers} layers, but the model has {num_layers} layers x {num_kv_heads} KV heads; "
                "triattention needs the table of this model, which `kvbench calibrate what=centres` measures: give it "
                "as method.centres=PATH",
                setting="method.centres",
            )
