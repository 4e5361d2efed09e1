"""DuoAttention: some heads keep everything, the others only sinks and recent tokens, by a table learnt beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

import kvbench.policy as kv


@dataclass(kw_only=True)
class DuoAttention(kv.Policy):
    """Keeps all tokens in retrieval heads; streaming heads keep the first `sinks` and the last `recent` tokens.

    Which head is which comes from a table of gates, one per layer and KV head, that the authors' training finds for a
    model (0: the head can stream, 1: it needs the whole context).

    Args:
        table: Path of a file with one line per layer and one number per KV head, parted by tabs, commas or blanks (the
            authors' full_attention_heads.tsv), or of a .json file with a list of lists; or the list of lists itself.
            Gates belong to one model; the YAML's are the embedded model's, measured by `kvbench calibrate what=gates`.
        sparsity: Share of heads that stream, those with the lowest gates, in [0, 1]; null = those with a gate <= 0.5.
        sinks: First tokens that streaming heads keep; >= 0.
        recent: Last tokens that streaming heads keep; >= 1.
        tier: Precision of what is kept.

    Source: mit-han-lab/duo-attention duo_attn/utils.py (load_attn_pattern, sparsify_attention_heads) and
        patch/static_kv_cache.py; sinks 64 and recent 256 are its defaults, sparsity 0.5 its choice for GQA models.
    Differs: the prompt's own output is exact in all heads (the original masks streaming heads while it reads the
        prompt, as in its training); the number of streaming heads is `sparsity` of all heads rounded down, and of equal
        gates the later head streams (the original takes a quantile after adding noise).
    """

    table: Annotated[str | Sequence[Sequence[float]] | None, kv.TABLE_OR_PATH] = None
    sparsity: Annotated[float | None, kv.Number(0, 1)] = 0.5
    sinks: Annotated[int, kv.Whole(0, unit="tokens")] = 64
    recent: Annotated[int, kv.Whole(1, unit="tokens")] = 256
    tier: kv.TierText = "fp16"
    acts_in_decode = True

    def declare(self) -> None:
        self.tiers = (kv.Tier.parse(self.tier),)
        if self.table is None:
            return
        self.table = kv.read_table(self.table)  # the gates themselves, so that a run's identity does not hang on a path
        gates = torch.tensor(self.table).clamp(0, 1)
        if self.sparsity is None:
            self._streams = gates <= 0.5
        else:
            num_full = gates.numel() - int(self.sparsity * gates.numel() + 1e-9)
            self._streams = (kv.rank_descending(gates.flatten()) >= num_full).view_as(gates)

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        if self.table is None:
            raise kv.NotForModel(
                "method.table=null: duo_attention needs the gates of this model; give a file of "
                f"{num_layers} lines (layers) with {num_kv_heads} numbers (KV heads) as method.table=PATH; "
                "`kvbench calibrate what=gates` measures them",
                setting="method.table",
            )
        shape = tuple(self._streams.shape)
        if shape != (num_layers, num_kv_heads):
            raise kv.NotForModel(
                f"method.table has {shape[0]} layers x {shape[1]} heads, but the model has {num_layers} layers x "
                f"{num_kv_heads} KV heads; gates belong to one model, give those of this one "
                "(`kvbench calibrate what=gates` measures them)",
                setting="method.table",
            )

    def plan_prefill(self, view: kv.PrefillView) -> kv.PrefillPlan:
        tier_of = view.filled(0)
        outside = torch.arange(view.num_tokens, device=tier_of.device)
        outside = (outside >= self.sinks) & (outside < view.num_tokens - self.recent)
        streams = self._streams_on(tier_of.device)[view.layers]
        return kv.PrefillPlan(tier_of=tier_of.masked_fill(streams[..., None] & outside, kv.EVICT))

    def plan_decode(self, view: kv.DecodeView) -> kv.DecodePlan:
        """Overwrites slot sinks + t mod recent at overwrite t of streaming heads, so no positions need to be stored."""
        turns = view.tokens_seen - view.prompt_tokens.clamp(min=self.sinks + self.recent)
        slot = torch.where(turns >= 0, self.sinks + turns % self.recent, -1)
        return kv.DecodePlan(slot=torch.where(self._streams_on(slot.device), slot[:, None, None], -1))

    def _streams_on(self, device: torch.device) -> torch.Tensor:
        """The streaming heads, bool [L, H], which go to the cache's device once: no captured step could fetch them."""
        if self._streams.device != device:
            self._streams = self._streams.to(device)
        return self._streams

    def bounds(self, extent: kv.Extent) -> kv.Bounds:
        streams, limit = int(self._streams.sum()), self.sinks + self.recent
        prompt, end = (
            ((extent.lists - streams) * seen + streams * min(seen, limit)) / extent.lists
            for seen in (extent.prompt_tokens, extent.tokens_seen)
        )
        why = f"{streams} streaming heads of {limit} make"
        return kv.Bounds(why=why, prompt_mean=(prompt, prompt), end_mean=(end, end))
