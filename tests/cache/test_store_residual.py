"""Residual buffers: which tokens are where, and attention over pages and rings, against a token-by-token oracle."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracles.slow_attention import attend_one
from oracles.slow_pages import stored_vector
from selection import few
from store_helpers import golden, make_store

from kvbench.cache.buffered import ResidualBuffer
from kvbench.cache.store import CompressedStore
from kvbench.policy import EVICT, Policy, PrefillPlan, PrefillView, Residual, Tier

DIM, LAYERS, HEADS, GROUP = 16, 2, 2, 3
SCALE = 0.4


@dataclass(kw_only=True)
class Behind(Policy):
    """Everything passes the given residual; head 1 may lose some prompt tokens."""

    tier: Tier
    buffer: Residual
    evict: int = 0

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """As given."""
        return (self.tier,)

    @property
    def residual(self) -> Residual:
        """As given."""
        return self.buffer

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        """Head 1 loses its first `evict` tokens, so that lists of one row differ."""
        tier_of = view.filled(0)
        tier_of[:, 1, : min(self.evict, view.num_tokens - 1)] = EVICT
        return PrefillPlan(tier_of=tier_of)


def store_of(policy: Policy, rows: int = 2, **options) -> CompressedStore:
    """A store of 2 layers, 2 KV heads and 6 query heads."""
    shape = {"num_layers": LAYERS, "num_q_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": DIM}
    return make_store(policy, **shape, rows=rows, max_tokens=64, new_tokens=64, **options)


class SlowList:
    """The tokens of one list and how many keys and values have left the buffer, by the words of `Residual`."""

    def __init__(self, tier: Tier, spec: Residual, k: torch.Tensor, v: torch.Tensor) -> None:
        self.tier, self.spec = tier, spec
        self.group = tier.k_group if tier.k_axis == "channel" else 1
        self.raw_k, self.raw_v = list(k), list(v)
        count, size = len(k), spec.num_tokens
        if spec.hold_prompt:
            self.num_k = count // size * size
            self.num_v = self.num_k if spec.v_flush == "all" else max(0, count - size)
        else:
            self.num_k = self.num_v = count - count % self.group
        self.k, self.v = self.quantised_keys(0, self.num_k), self.quantised_values(0, self.num_v)
        self.raw_k[self.num_k :] = [x.half().float() for x in self.raw_k[self.num_k :]]
        self.raw_v[self.num_v :] = [x.half().float() for x in self.raw_v[self.num_v :]]

    def quantised_keys(self, first: int, last: int) -> list:
        """Stored keys first..last - 1."""
        if self.group == 1:
            return [torch.from_numpy(stored_vector(x.tolist(), self.tier.k_bits)) for x in self.raw_k[first:last]]
        out = []
        for start in range(first, last, self.group):
            block = torch.stack(self.raw_k[start : start + self.group])
            channels = [stored_vector(block[:, c].tolist(), self.tier.k_bits, metadata_first=True) for c in range(DIM)]
            out += list(torch.from_numpy(np.stack(channels, 1)))
        return out

    def quantised_values(self, first: int, last: int) -> list:
        """Stored values first..last - 1."""
        groups, channel = DIM // self.tier.v_group if self.tier.v_group else 1, self.group > 1
        return [
            torch.from_numpy(stored_vector(x.tolist(), self.tier.v_bits, groups=groups, metadata_first=channel))
            for x in self.raw_v[first:last]
        ]

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes a token into the buffer and returns the keys and values that this step's attention reads."""
        self.raw_k.append(k.half().float())
        self.raw_v.append(v.half().float())
        if self.spec.when == "before_attention":
            self.flush()
            return self.read()
        seen = self.read()
        self.flush()
        return seen

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything in token order."""
        return torch.stack(self.k + self.raw_k[self.num_k :]), torch.stack(self.v + self.raw_v[self.num_v :])

    def flush(self) -> None:
        """What is due leaves: all keys at R; values with them, or the oldest as soon as R + 1 are held."""
        total, size = len(self.raw_k), self.spec.num_tokens
        full = total - self.num_k == size
        if full:
            self.k += self.quantised_keys(self.num_k, total)
            self.num_k = total
        if self.spec.v_flush == "all":
            last = total if full else self.num_v
        else:
            last = self.num_v + (total - self.num_v > size)
        self.v += self.quantised_values(self.num_v, last)
        self.num_v = last


CHANNEL = Tier(k_bits=2, v_bits=2, k_axis="channel", k_group=8, v_group=8)
TOKEN = Tier(k_bits=4, v_bits=4)
VARIANTS = [
    Residual(num_tokens=size, v_flush=v_flush, when=when, hold_prompt=hold)
    for size in (8, 16)
    for v_flush in ("oldest", "all")
    for when in ("after_attention", "before_attention")
    for hold in (True, False)
]


PAIRS = [(spec, tier) for spec in VARIANTS for tier in (CHANNEL, TOKEN)]
HALF = [(spec, (CHANNEL, TOKEN)[at.bit_count() % 2]) for at, spec in enumerate(VARIANTS)]  # no choice goes with a tier


@pytest.mark.every(2)
@pytest.mark.parametrize(("spec", "tier"), few(PAIRS, *HALF))
def test_decoding_behind_a_residual_equals_the_oracle(spec: Residual, tier: Tier):
    """Two rows of unlike prompts, some tokens evicted: counts and attention of every step equal the oracle's."""
    policy = Behind(tier=tier, buffer=spec, evict=3)
    store = store_of(policy)
    make = torch.Generator().manual_seed(spec.num_tokens)
    rows, slow = [], []
    for length in (21, 4):
        row = store.open_row()
        lists = []
        for layer in range(LAYERS):
            q, k, v = (torch.randn(n, length, DIM, generator=make) for n in (HEADS * GROUP, HEADS, HEADS))
            store.prefill_layer(row, layer, q, k, v, SCALE)
            gone = min(3, length - 1)
            lists.append([SlowList(tier, spec, k[h, gone * h :], v[h, gone * h :]) for h in range(HEADS)])
        rows.append(row)
        slow.append(lists)
    for _ in range(2 * spec.num_tokens + 3):
        store.begin_step(torch.tensor(rows))
        for layer in range(LAYERS):
            q, k, v = (torch.randn(2, n, DIM, generator=make) for n in (HEADS * GROUP, HEADS, HEADS))
            out = store.attend(layer, q, k, v, SCALE)
            for s in range(2):
                for h in range(HEADS):
                    keys, values = slow[s][layer][h].append(k[s, h], v[s, h])
                    for g in range(h * GROUP, (h + 1) * GROUP):
                        want, _, _ = attend_one(q[s, g], keys, values, SCALE)
                        assert torch.allclose(out[s, g].double(), want, rtol=0, atol=1e-5)
        store.end_step()
        each = [x for lists in slow for layer in lists for x in layer]
        assert store.holding.ring.num_k.tolist() == [x.num_k for x in each]
        assert store.holding.ring.num_v.tolist() == [x.num_v for x in each]
        assert store.holding.ring.num_tokens.tolist() == [len(x.raw_k) for x in each]
        assert store.pages.table.num_slots[0].tolist() == [max(x.num_k, x.num_v) for x in each]


@pytest.mark.parametrize(("name", "length", "steps"), [("n10_R4", 10, 3), ("n3_R4", 3, 3), ("n8_R4", 8, 1)])
def test_kivi_states_are_golden(name: str, length: int, steps: int):
    """Quantised and held keys and values after the prompt and after every step."""
    buffer = ResidualBuffer(Residual(num_tokens=4), (1, 1, 1), 8, torch.float16, 1, torch.device("cpu"))
    assert states(buffer, length, steps) == golden("kivi_state")[name]


def test_minikv_states_are_golden():
    """Keys and values leave together: [quantised, held] for ten kept tokens, groups of four and a buffer of eight."""
    spec = Residual(num_tokens=8, v_flush="all", when="before_attention", hold_prompt=False)
    found = states(ResidualBuffer(spec, (1, 1, 1), 8, torch.float16, 4, torch.device("cpu")), 10, 7)
    assert [[k, held] for k, held, _, _ in found] == golden("minikv_state")
    assert all((k, held) == (v, held_v) for k, held, v, held_v in found)


def states(buffer: ResidualBuffer, length: int, steps: int) -> list[list[int]]:
    """Keys in pages, keys held, values in pages, values held: after the prompt and after each step."""
    one = torch.tensor([0])
    num_k, num_v = buffer.split_prompt(torch.tensor([length]))
    found = []
    for total in range(length, length + steps + 1):
        if total > length:
            num_k, num_v = buffer.after_append(one)
        buffer.num_k[:], buffer.num_v[:], buffer.num_tokens[:] = num_k.int(), num_v.int(), total
        found.append([int(num_k), total - int(num_k), int(num_v), total - int(num_v)])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rings_have_the_dtype_of_sixteen_bits_or_of_a_native_tier(dtype: torch.dtype):
    """fp16, bf16 for bf16 models, and the model's own dtype behind a native tier."""
    sixteen = torch.bfloat16 if dtype is torch.bfloat16 else torch.float16
    assert store_of(Behind(tier=CHANNEL, buffer=Residual(num_tokens=8)), dtype=dtype).holding.ring.k.dtype is sixteen
    native = Behind(tier=Tier(native=True), buffer=Residual(num_tokens=8))
    assert store_of(native, dtype=dtype).holding.ring.v.dtype is dtype


def ring_of(**residual) -> ResidualBuffer:
    """A ring of 6 tokens per list, in front of groups of 2, with a number of its own in every element."""
    lists = (5, LAYERS, HEADS)
    ring = ResidualBuffer(Residual(num_tokens=6, **residual), lists, 4, torch.float16, 2, torch.device("cpu"))
    ring.k.copy_(torch.arange(ring.k.numel()).view_as(ring.k) % 2048)
    ring.v.copy_(torch.arange(ring.v.numel()).view_as(ring.v) % 1024)
    return ring


@pytest.mark.parametrize(
    ("rows", "shared"),
    [([0, 1, 2], True), ([3], True), ([2, 3, 4], True), ([1, 3], False), ([2, 1], False), ([], False)],
)
def test_rows_that_follow_one_another_are_not_copied(rows, shared):
    """One layer of any rows, in their order; a view of the rings where they lie side by side."""
    ring, which = ring_of(), torch.tensor(rows, dtype=torch.int64)
    for layer in range(LAYERS):
        for found, whole in zip(ring.of_layer(which, layer), (ring.k, ring.v), strict=True):
            assert found.equal(torch.stack([whole[row, layer] for row in rows]) if rows else whole[:0, layer])
            assert (found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) == shared


@pytest.mark.parametrize("v_flush", ["all", "oldest"])
def test_bytes_of_a_list(v_flush):
    """Six keys, and six values or one more where the newest is written before the oldest leaves."""
    ring, lists = ring_of(v_flush=v_flush), 5 * LAYERS * HEADS
    assert ring.list_bytes == (6 + 6 + (v_flush == "oldest")) * 4 * 2
    assert ring.allocated_bytes == lists * (ring.list_bytes + 3 * 4) and len(ring.num_k) == lists
