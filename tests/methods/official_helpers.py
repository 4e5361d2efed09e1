"""What official code made of small tensors (tests/golden/official.json), and a store that reads the same tensors."""

import json
from functools import cache

import torch
from places import TESTS
from store_helpers import held_positions

from kvbench.cache.layout import ModelShape, StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.kernels.dispatch import get_backend


@cache
def official() -> dict[str, torch.Tensor]:
    """Returns the file's tensors by name; make_official.py says what each is."""
    data = json.loads((TESTS / "golden" / "official.json").read_text())
    return {name: torch.tensor(value) for name, value in data.items()}


def watching(policy_class, **settings):
    """A policy that also keeps, in `seen`, the view of each prompt it planned."""
    seen = []

    class Watched(policy_class):
        def plan_prefill(self, view):
            seen.append(view)
            return super().plan_prefill(view)

    return Watched(**settings), seen


def official_store(policy, rows: int = 1) -> CompressedStore:
    """A store of one layer of the official model's shape."""
    data = official()
    shape = ModelShape(
        num_layers=1,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        inv_freq=data["inv_freq"],
        output_projections=(data["output_projection"],),
    )
    return CompressedStore(
        policy,
        shape,
        rows=rows,
        max_prompt_tokens=64,
        max_new_tokens=64,
        options=StoreOptions(track=("pos",)),
        backend=get_backend("torch"),
    )


def read_official(policy, length: int = 21):
    """A store that has read the official prompt's first tokens; also its row and the positions kept per head."""
    data, store = official(), official_store(policy)
    row = store.open_row()
    store.prefill_layer(row, 0, data["q"][:, :length], data["k"][:, :length], data["v"][:, :length], 0.5)
    return store, row, [sorted(positions) for positions in held_positions(store, row)]


def step(store, row, q, k, v, scale: float = 0.5) -> None:
    """One decode step of a one-layer store: q [Hq, D], k and v [H, D]."""
    store.begin_step(torch.tensor([row]))
    store.attend(0, q[None], k[None], v[None], scale)
    store.end_step()
