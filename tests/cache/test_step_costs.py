"""Costs of a decode step on a GPU, by method, as in docs/reference/gpu.md: the host never waits."""

from functools import cache

import pytest
import torch
from selection import few

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from no_data import NothingOnTheHost, as_if_read, without_data
from open_settings import open_settings
from places import ROOT
from step_meter import Cost, metered, run

from kvbench.cache import scores
from kvbench.cache.async_counts import ReplayLog, Rows
from kvbench.cache.layout import ModelShape
from kvbench.cache.options import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.config.files import options
from kvbench.kernels.backend import Backend
from kvbench.kernels.gpu import parts
from kvbench.kernels.gpu.backend import Gpu
from kvbench.runs.choices import make_method

Case = pytest.importorskip("kvbench.extensions.bench.check_methods").Case
changes = pytest.importorskip("kvbench.extensions.bench.check_methods").changes

ROWS, DIM, HEADS, GROUP, PROMPT = 2, 64, 2, 2, 22
WARM, STEPS = 2, 3  # the first steps of a format make small tables on the device
ALONE = Case((((1,), 3),))
EVICTS = "kv_compress continual=true budget=96"
PAGE = (ROOT / "docs" / "reference" / "gpu.md").read_text(encoding="utf-8")
# Method -> per layer: torch kernels, Triton launches; beside the layers: torch kernels, Triton launches; all of 32
# layers; and why it is more than 160.
SAID = {
    name: (*map(int, cells[1:6]), cells[6])
    for line in PAGE.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 7 and cells[1].isdigit()
    for name in cells[0].split(", ")
}


def opened(words: str, layers: int, device: str, dtype: torch.dtype, backend) -> CompressedStore:
    """A store for two rows."""
    place = torch.device(device)
    shape = ModelShape(
        num_layers=layers,
        num_q_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=dtype,
        device=place,
        inv_freq=torch.ones(DIM // 2, device=place),
        output_projections=[torch.ones(8, HEADS * GROUP * DIM, device=place)] * layers,
    )
    return CompressedStore(
        make_method(words),
        shape,
        rows=ROWS,
        max_prompt_tokens=40,
        max_new_tokens=16,
        options=StoreOptions(),
        backend=backend,
    )


def bare_step(method: str, layers: int) -> Cost:
    """The cost of a step of tensors without data, as it is captured; of `EVICTS`, a step that evicts."""
    name, _, own = method.partition(" ")
    settings = changes(name, ALONE) | open_settings(name, layers=layers)
    if own:
        settings = {key: value for key, value in settings.items() if key != "budget"}
    words = " ".join(f"{key}={str(value).replace(' ', '')}" for key, value in settings.items())
    with without_data():
        store = opened(f"{method} {words}", layers, "meta", torch.bfloat16, Gpu())
        as_if_read(store.policy)
        rows = [store.open_row() for _ in range(ROWS)]
        for row in rows:  # as if prompts had been read
            store.counters.hold(row, 24)
            store.counters.prompt_tokens[row] = 24
        store.pages.counts.log = ReplayLog()  # lists of any length, as in a graph
        q, k = (torch.empty(ROWS, n, DIM, dtype=torch.bfloat16, device="meta") for n in (HEADS * GROUP, HEADS))
        there = torch.empty(ROWS, dtype=torch.int64, device="meta")
        for _ in range(2):  # the first one looks things up that do not change
            for row in rows:
                store.holding.due.learn([row], [method == EVICTS])
            with metered(runs=False) as cost, NothingOnTheHost():
                store.begin_step(Rows(there, rows))
                for layer in range(layers):
                    store.attend(layer, q, k, k, 0.2)
                store.end_step()
    return cost


@pytest.mark.every(3)
@pytest.mark.parametrize("method", [*options("method"), EVICTS])
def test_a_step_launches_what_the_documentation_says(method: str):
    """Torch kernels and Triton launches, for each layer and beside the layers; at most 5 and, of 32 layers, 160, or
    the documentation says why not."""
    two, three = (bare_step(method, layers).totals[1:] for layers in (2, 3))
    layer = tuple(b - a for a, b in zip(two, three, strict=True))
    rest = tuple(a - 2 * b for a, b in zip(two, layer, strict=True))
    found = (*layer, *rest, 32 * sum(layer) + sum(rest))
    *said, why = SAID.get(method, SAID["full"])
    assert list(found) == said, f"| {method} | {' | '.join(map(str, found))} | |"
    assert why or (sum(layer) <= 5 and found[-1] <= 160)


class Priced(Gpu):
    """The GPU's backend, of which a prompt's scores are computed at once: they are no part of a step."""

    column_scores, takes_lse = Backend.column_scores, False


@cache
def real_steps(words: str) -> list[Cost]:
    """The costs of some steps behind two prompts, on tensors in main memory."""
    layers = 2
    store = opened(words, layers, "cpu", torch.float32, Priced())
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


REAL = ["h2o budget=12", "kivi residual_tokens=8 group=8", "kv_compress budget=16 block=8 continual=true"]


@pytest.mark.parametrize("words", few(REAL, *REAL[:2]))
def test_the_host_waits_for_nothing_in_a_real_step(words: str):
    """With data, one step after the other: no number is read, no size depends on content, and no tensor is made of the
    host's numbers."""
    for cost in real_steps(words):
        assert not cost.reads and cost.launches


def waits_of_a_prompt(words: str, layers: int) -> int:
    """Waits for the device in a prompt behind two others, which are planned twice, on tensors in main memory."""
    store = opened(words, layers, "cpu", torch.float32, Priced())
    store.pages.pool.pages.zero_()
    for _ in range(3):
        row = store.open_row()
        with metered() as cost:
            for layer in range(layers):
                q, k, v = (torch.ones(n, PROMPT, DIM) for n in (HEADS * GROUP, HEADS, HEADS))
                store.prefill_layer(row, layer, q, k, v, 0.2)
        store.close_row(row)
    return cost.reads.total()


WAITS = {
    "full": 0,
    "snapkv budget=12 window=4": 0,
    "diffkv window=8": 0,
    "kivi residual_tokens=8 group=8": 1,
    "int4": 0,
}


@pytest.mark.parametrize("words", WAITS)
def test_a_prompt_waits_once_in_a_layer_at_most(words: str, monkeypatch: pytest.MonkeyPatch):
    """Only where slots share scales does the host ask whether all are kept: with masks it waited sixteen times."""
    monkeypatch.setattr(scores, "_finite", lambda x: True)  # asked in main memory alone
    assert waits_of_a_prompt(words, 3) - waits_of_a_prompt(words, 2) == WAITS[words]


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
