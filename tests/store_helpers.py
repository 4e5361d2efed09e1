"""Stores of a few heads, driven without a model: for the tests of the methods."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvbench.cache.layout import ModelShape
from kvbench.cache.options import StoreOptions
from kvbench.cache.ranks import ALONE
from kvbench.cache.store import CompressedStore
from kvbench.kernels.dispatch import get_backend
from kvbench.kernels.operands import PLAIN
from kvbench.policy import PrefillView

GOLDEN = Path(__file__).with_name("golden") / "methods.json"


def golden(group: str) -> dict:
    """Returns one group of the golden numbers."""
    return json.loads(GOLDEN.read_text())[group]


def make_store(
    policy,
    *,
    num_layers=1,
    num_q_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rows=1,
    max_tokens=320,
    new_tokens=128,
    dtype=torch.float32,
    inv_freq=None,
    softmax=PLAIN,
    device_spans=(),
    ranks=ALONE,
    state_bytes=0,
    device="cpu",
    backend="torch",
    **options,
) -> CompressedStore:
    """Returns a store of the given shape with room for `max_tokens` prompt tokens and `new_tokens` more; skips the test
    where a backend named cannot run."""
    try:
        chosen = get_backend(backend) if isinstance(backend, str) else backend
    except ValueError as error:
        pytest.skip(str(error))
    shape = ModelShape(
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device(device),
        inv_freq=inv_freq,
        softmax=softmax,
        device_spans=device_spans,
        ranks=ranks,
        state_bytes=state_bytes,
    )
    return CompressedStore(
        policy,
        shape,
        rows=rows,
        max_prompt_tokens=max_tokens,
        max_new_tokens=new_tokens,
        options=StoreOptions(**options),
        backend=chosen,
    )


def random_qkv(store: CompressedStore, lead: tuple[int, ...], make: torch.Generator, heads_at: int) -> list:
    """Returns queries, keys and values of one layer, the heads in dimension `heads_at`."""
    shape = store.shape
    sizes = [(*lead[:heads_at], n, *lead[heads_at:]) for n in (shape.num_q_heads, *[shape.num_kv_heads] * 2)]
    return [torch.randn(*size, shape.head_dim, generator=make).to(shape.dtype) for size in sizes]


def read_random(store: CompressedStore, length: int, make: torch.Generator, scale: float = 0.25, row=None) -> int:
    """Reads a prompt of random vectors into a new row, or an empty one."""
    row = store.open_row() if row is None else row
    for layer in range(store.shape.num_layers):
        store.prefill_layer(row, layer, *random_qkv(store, (length,), make, heads_at=0), scale)
    return row


def step_random(store: CompressedStore, rows: list[int], make: torch.Generator, scale: float = 0.25) -> None:
    """Makes a decode step of random vectors."""
    store.begin_step(torch.tensor(rows))
    for layer in range(store.shape.num_layers):
        store.attend(layer, *random_qkv(store, (len(rows),), make, heads_at=1), scale)
    store.end_step()


def prefill_view(
    score: torch.Tensor | None, num_tokens: int, num_heads=1, token_bytes=(1.0,), layers=(0,), num_layers=None, **more
) -> PrefillView:
    """Returns the view of some layers of a model, which has no others unless told; `score` is [layers x heads x
    num_tokens]."""
    return PrefillView(
        num_tokens=num_tokens,
        num_layers=num_layers or len(layers),
        num_kv_heads=num_heads,
        layers=torch.as_tensor(layers),
        score=None if score is None else score.float().reshape(len(layers), num_heads, num_tokens),
        token_bytes=tuple(token_bytes),
        **more,
    )


def held_positions(store: CompressedStore, row: int, tier: int = 0) -> list[list[int]]:
    """Returns the positions in each list of a row, in slot order; the store must track `pos`."""
    arrays = store.view(torch.tensor([row])).slots(tier)
    pos, valid = arrays.pos[0].flatten(0, 1), arrays.valid[0].flatten(0, 1)
    return [p[v].tolist() for p, v in zip(pos, valid, strict=True)]


def held_scores(store: CompressedStore, row: int, tier: int = 0) -> list[dict[int, float]]:
    """Returns position -> stored score for each list of a row."""
    arrays = store.view(torch.tensor([row])).slots(tier)
    fields = zip(arrays.pos[0].flatten(0, 1), arrays.score[0].flatten(0, 1), arrays.valid[0].flatten(0, 1), strict=True)
    return [dict(zip(pos[ok].tolist(), score[ok].tolist(), strict=True)) for pos, score, ok in fields]


def plain_attention(q, k, v, scale) -> torch.Tensor:
    """Attention of one query per head, [Hq, D], on k, v [H, n, D], in float64: the oracle of a decode step."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    prob = torch.softmax(torch.einsum("hd,hnd->hn", q.double(), k) * scale, -1)
    return torch.einsum("hn,hnd->hd", prob, v).float()


def causal_probabilities(q, k, scale) -> torch.Tensor:
    """The whole causal attention matrix [Hq, N, N] in float64, for q [Hq, N, D] and k [H, N, D]."""
    length = q.shape[1]
    k = k.double().repeat_interleave(q.shape[0] // k.shape[0], 0)
    logits = torch.einsum("hid,hjd->hij", q.double(), k) * scale
    return torch.softmax(logits.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")), -1)


def step_one(store: CompressedStore, row: int, layers, scale: float = 1.0) -> list[torch.Tensor]:
    """One decode step of one row, from each layer's query [Hq, D], key and value [H, D]; each layer's output."""
    store.begin_step(torch.tensor([row]))
    found = [store.attend(layer, q[None], k[None], v[None], scale) for layer, (q, k, v) in enumerate(layers)]
    store.end_step()
    return found


def filled(policy, layers, length=None, scale=1.0, **options) -> tuple[CompressedStore, int]:
    """A store of the layers given, of each queries, keys and values [heads, n, D], that has read their first `length`
    tokens (or all); also the row."""
    heads = {"num_q_heads": len(layers[0][0]), "num_kv_heads": len(layers[0][1]), "head_dim": layers[0][1].shape[-1]}
    store = make_store(policy, num_layers=len(layers), **heads, **options)
    row = store.open_row()
    for layer, tensors in enumerate(layers):
        store.prefill_layer(row, layer, *(x[:, :length] for x in tensors), scale)
    return store, row


def step_at(store: CompressedStore, row: int, layers, at: int, scale: float = 1.0) -> list[torch.Tensor]:
    """One decode step of the token that lies at a position of the layers' tensors; each layer's output [Hq, D]."""
    return [out[0] for out in step_one(store, row, [tuple(x[:, at] for x in one) for one in layers], scale)]


def random_layer(seed: int, heads: int, group: int, length: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Queries of `group` heads per KV head, keys and values [heads, n, D]."""
    make = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, length, dim, generator=make) for n in (heads * group, heads, heads))


def kept_of(plan) -> list[int]:
    """The positions that a plan keeps in its first layer and head."""
    return (plan.tier_of[0, 0] >= 0).nonzero()[:, 0].tolist()


def rotated(x: torch.Tensor, positions, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [H, n, D] at positions (their first one, or all), by transformers' own function."""
    places = positions + torch.arange(x.shape[1]) if isinstance(positions, int) else torch.tensor(positions)
    angle = places.float()[:, None] * inv_freq
    angle = torch.cat([angle, angle], -1)
    return apply_rotary_pos_emb(x[None], x[None], angle.cos()[None], angle.sin()[None])[0][0]


def watching(policy_class, **settings):
    """A policy that also keeps, in the list returned beside it, the view of each prompt that it planned."""
    seen = []

    class Watched(policy_class):
        def plan_prefill(self, view):
            seen.append(view)
            return super().plan_prefill(view)

    return Watched(**settings), seen
