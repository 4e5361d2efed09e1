"""What a decode step of the store costs a GPU, by method, as docs/architecture.md says it: the host never waits."""

from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")

from places import ROOT
from step_meter import Cost, metered, run

from kvbench.bench.choices import make_method
from kvbench.cache.layout import ModelShape, StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.kernels.gpu import parts
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.reference.backend import Reference

ROWS, DIM, HEADS, GROUP, PROMPT = 2, 32, 2, 2, 22
WARM, STEPS = 2, 4  # the first steps of a format make small tables on the device
SETTINGS = {
    "full": "",
    "snapkv": "budget=12 window=4",
    "h2o": "budget=12",
    "tova": "budget=12",
    "streaming_llm": "sinks=2 budget=12",
    "kivi": "residual_tokens=8 group=8",
    "diffkv": "window=8",
    "kv_compress": "budget=16 block=8 continual=true",
}
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Method -> per layer: torch kernels, Triton launches; beside the layers: torch kernels, Triton launches.
SAID = {
    cells[0]: tuple(map(int, cells[1:5]))
    for line in PAGE.splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] in SETTINGS and len(cells) == 6
}


class Priced(Gpu):
    """The GPU's backend, of which a prompt's scores are computed at once: they are no part of a step."""

    column_scores, takes_lse = Reference.column_scores, False


@cache
def steps_of(method: str, layers: int) -> list[Cost]:
    """The costs of some steps behind two prompts."""
    shape = ModelShape(
        num_layers=layers,
        num_q_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
        inv_freq=torch.ones(DIM // 2),
    )
    store = CompressedStore(
        make_method(f"{method} {SETTINGS[method]}"),
        shape,
        rows=ROWS,
        max_prompt_tokens=PROMPT,
        max_new_tokens=16,
        options=StoreOptions(),
        backend=Priced(),
    )
    store.pages.pool.pages.zero_()
    make, rows, found = torch.Generator().manual_seed(0), [], []

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, DIM, generator=make)

    with parts.recording(run):
        for _ in range(ROWS):
            rows.append(store.open_row())
            for layer in range(layers):
                q, k, v = (random(n, PROMPT) for n in (HEADS * GROUP, HEADS, HEADS))
                store.prefill_layer(rows[-1], layer, q, k, v, 0.2)
    for _ in range(WARM + STEPS):
        tokens = [[random(ROWS, n) for n in (HEADS * GROUP, HEADS, HEADS)] for _ in range(layers)]
        with metered() as cost:
            store.begin_step(rows)
            for layer, (q, k, v) in enumerate(tokens):
                store.attend(layer, q, k, v, 0.2)
            store.end_step()
        found.append(cost)
    return found[WARM:]


@pytest.mark.parametrize("method", SETTINGS)
def test_the_host_waits_for_nothing_in_a_step(method: str):
    """No number is read, no size depends on content, and no tensor is made of the host's numbers."""
    for cost in steps_of(method, 2) + steps_of(method, 3):
        assert not cost.reads


@pytest.mark.parametrize("method", SETTINGS)
def test_a_step_launches_what_the_documentation_says(method: str):
    """Torch kernels and Triton launches of the most expensive step: for each layer, and beside the layers."""
    two, three = (max(cost.totals[1:] for cost in steps_of(method, layers)) for layers in (2, 3))
    layer = tuple(b - a for a, b in zip(two, three, strict=True))
    rest = tuple(a - 2 * b for a, b in zip(two, layer, strict=True))
    assert layer + rest == SAID[method], f"| {method} | {' | '.join(map(str, layer + rest))} | |"
    assert sum(layer) <= 5 and 32 * sum(layer) + sum(rest) <= 160


def test_what_waits_is_counted():
    """Numbers, lists, masks and sizes that depend on content, tensors of the host's numbers; not what was sent."""
    x = torch.arange(4)
    for wait in (
        lambda: int(x.sum()),
        lambda: x.tolist(),
        lambda: x[x > 1],
        lambda: x.nonzero(),
        lambda: bool((x > 0).any()),
        lambda: x.repeat_interleave(x),
        lambda: torch.tensor([1, 2]),
        lambda: x.to("cpu"),
        lambda: x.unique(),
    ):
        with metered() as cost:
            wait()
        assert cost.reads.total() == 1, wait
    with metered() as cost:
        sent = (x * 2).to("cpu", non_blocking=True)
        assert sent.tolist() == [0, 2, 4, 6]
    assert cost.totals == (0, 2, 0)
