"""Steps that are captured once and replayed: the tokens and bytes of eager ones; and whole steps without a host."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from selection import in_turn

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from engine_helpers import random_tokens
from no_data import NothingOnTheHost, as_if_read, without_data
from open_settings import open_settings
from places import ROOT
from selection import few
from step_meter import Cost, metered

from kvbench.cache.async_counts import Padding, ReplayLog, Rows
from kvbench.config.files import options
from kvbench.engine import hf, sessions
from kvbench.engine.decode_loop import CapturedSteps, State
from kvbench.engine.runner import Runner
from kvbench.engine.sampling import Draws
from kvbench.errors import NotForModel
from kvbench.kernels.gpu import parts
from kvbench.kernels.gpu.compile import launch_signature
from kvbench.kernels.gpu.emulator import record
from kvbench.models import fused
from kvbench.models.load import load_model
from kvbench.runs import choices

Case = pytest.importorskip("kvbench.extensions.bench.check_methods").Case
changes = pytest.importorskip("kvbench.extensions.bench.check_methods").changes

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of what empty slots hold
    pytest.mark.usefixtures("without_overflow_checks"),
]
NO_KERNEL = {"kvquant": {"paged_decode", "write_keys", "write_values"}}
BULK = ("kv_compress continual=true budget=96", "random_trace", "scissorhands", "snapkv decode_every=4")
PROMPT, ALONE = 21, Case((((1,), 3),))


def reading(
    smallest, method: str, prompts: list[int], new_tokens: int, backend: str = "triton", rows: int = 3
) -> tuple[Runner, list[int], list[int]]:
    """A runner that has read prompts of so many tokens, its rows, and their first tokens."""
    runner = Runner(smallest, choices.make_method(method), backend=backend)
    runner.reserve(rows=rows, prompt_tokens=max(prompts), new_tokens=new_tokens)
    read = [runner.read(random_tokens(length, seed)) for seed, length in enumerate(prompts)]
    return runner, [row for row, _ in read], [int(logits[0].argmax()) for _, logits in read]


def greedy(steps: CapturedSteps, runner: Runner, rows: list[int], tokens: list[int], count: int) -> list[list[int]]:
    """The tokens of so many steps, each of which feeds the next one."""
    chosen, counts = [], runner.store.pages.counts
    state = steps.begin(rows, tokens, lambda new, _: chosen.append(new))
    counts.collect()
    for _ in range(count):
        state = steps.advance(state)
        counts.collect(leave=0 if runner.policy.compaction or not counts.is_late else 1)
    counts.collect()
    return chosen


def decoded(smallest, method: str, steps: int, capture, backend: str) -> tuple:
    """Tokens of every step, and each row's report."""
    runner, rows, first = reading(smallest, method, [PROMPT], steps, backend)
    graphs = CapturedSteps(runner, capture)
    tokens = greedy(graphs, runner, rows, first, steps)
    return tokens, [runner.store.ledger.report(row) for row in rows], graphs.replays


# Appends; overwrites by a search; demotes; flushes rings.
METHODS = (
    ("full", 8),
    pytest.param("full", 64, marks=pytest.mark.exhaustive),
    ("h2o budget=12", 6),
    ("diffkv window=8", 4),
    ("kivi residual_tokens=8 group=8", 5),
    ("streaming_llm sinks=2 budget=12", 5),
)


@pytest.mark.parametrize(("method", "steps"), METHODS)
def test_replayed_steps_are_eager_ones(smallest, method: str, steps: int):
    """Tokens, and bytes over time and at the end, are those of eager steps of the reference; the first step runs, the
    second is captured, the others are replayed."""
    eager, held, none = decoded(smallest, method, steps, None, "torch")
    tokens, found, replays = decoded(smallest, method, steps, record, "triton")
    assert (len(eager), none, replays) == (steps, 0, steps - 2)
    assert tokens == eager and found == held


WINDOWS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "model_type": "gemma3_text",
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize("method", ["full", "h2o budget=12"])
def test_captured_steps_of_layers_with_windows_are_eager_ones(method: str):
    """Tokens and bytes; in a window, new tokens overwrite those that left it."""
    settings = {"kind": "random", "preset": "tiny", "overrides": WINDOWS, "num_layers": 2, "seed": 0}
    model = load_model(settings | {"dtype": "float32", "device": "cpu", "linear": "plain"})
    eager, held, none = decoded(model, method, 6, None, "torch")
    tokens, found, replays = decoded(model, method, 6, record, "triton")
    assert (none, replays) == (0, 4)
    assert tokens == eager and found == held
    assert all(row["window_bytes"] > 0 for row, _ in found)


SPLIT = ["diffkv window=8", "full", "h2o budget=12", "kivi residual_tokens=8 group=8"]


@pytest.mark.every(2)
@pytest.mark.parametrize(("method", "prompt"), in_turn(SPLIT, (PROMPT, 1)))
def test_a_capture_compiles_nothing(smallest, method: str, prompt: int):
    """Every kernel that a captured step launches, at widths that any list may have, has been launched with the same
    types and constants by the step before it: compiling would take seconds, and older drivers refuse it."""
    launched: dict[bool, set[str]] = {True: set(), False: set()}
    captures: list[bool] = [False]

    def note(kernel, grid, arguments, constants):
        launched[captures[-1]].add(f"{kernel.__name__} {launch_signature(kernel, arguments, constants)}")
        kernel[grid](*arguments, **constants)

    def capture(step):
        captures.append(True)
        step()
        captures.append(False)
        return step

    runner, rows, first = reading(smallest, method, [prompt], 8, "triton")
    with parts.recording(note):
        greedy(CapturedSteps(runner, capture), runner, rows, first, 2)
    assert launched[True], "no step was captured"
    assert launched[True] <= launched[False], sorted(launched[True] - launched[False])


def test_one_capture_serves_all_rows_of_a_batch_size(smallest):
    """A second loop replays what the first one captured, for another row; steps that share pages run as they are."""
    found = []
    for capture, backend in ((None, "torch"), (record, "triton")):
        runner, rows, first = reading(smallest, "full", [9, 30], 16, backend)
        graphs = CapturedSteps(runner, capture)
        tokens = [greedy(graphs, runner, rows[:1], first[:1], 3), greedy(graphs, runner, rows[1:], first[1:], 3)]
        replays = graphs.replays
        fork = runner.fork(rows[0])
        tokens.append(greedy(graphs, runner, [fork], first[:1], 2))
        reports = [runner.store.ledger.report(row) for row in (*rows, fork)]
        found.append((tokens, reports))
        assert graphs.replays == replays == (0 if capture is None else 4)
    assert found[0] == found[1]


# The rows of some steps, and how many these are: one ends and one joins, and then all are a whole batch.
BATCHES = (((0, 1, 2), 2), ((3, 0, 2), 1), ((3, 0, 1, 2), 1))
PADDED = (
    "full",
    "h2o budget=12",  # scores are added to what is read
    "diffkv window=8",  # a plan that demotes
    "kivi residual_tokens=8 group=8",
    "streaming_llm sinks=2 budget=12",
    "quest read_budget=16 min_pages=1 dense_layers=0",
    "kivi residual_tokens=8 group=8 protect_layers=[0]",
    "fp8 protect_layers=[0]",
    "zipcache",
)


@pytest.mark.parametrize("method", few(PADDED, PADDED[1]))
def test_one_capture_serves_fewer_rows(smallest, method: str):
    """Rows end and others join: what pads them takes no page, counts nothing and changes nothing, and no step is
    captured twice. Tokens and bytes are those of the reference, row by row."""
    found = []
    for capture, backend in ((None, "torch"), (record, "triton")):
        runner, rows, first = reading(smallest, method, [3, 12, 5, 7], 6, backend, rows=4)
        graphs, tokens = CapturedSteps(runner, capture), dict(zip(rows, first, strict=True))
        history = []
        for batch, steps in BATCHES:
            listed = [rows[place] for place in batch]
            if capture is None:  # every row alone
                told = [greedy(graphs, runner, [row], [tokens[row]], steps) for row in listed]
                chosen = [[each[step][0] for each in told] for step in range(steps)]
            else:
                chosen = greedy(graphs, runner, listed, [tokens[row] for row in listed], steps)
            tokens |= zip(listed, chosen[-1], strict=True)
            history.append(chosen)
        found.append((history, [runner.store.ledger.report(row) for row in rows]))
    assert found[0] == found[1]
    assert (graphs.captures, graphs.replays) == (1, 2)
    assert runner.store.pages.num_pages(torch.tensor([runner.store.pages.shape[0] - 1])).tolist() == [0]


@pytest.fixture(scope="module")
def bare():
    """A model of two layers whose tensors have no data."""
    model = choices.make_model("random preset=tiny num_layers=2 dtype=bfloat16", "cpu")
    model.model.to("meta")
    with without_data():
        yield model


def step_without_data(
    smallest, method: str, due: bool = False, eager: bool = False, greedy: bool = False, meter=None
) -> SimpleNamespace:  # fmt: skip
    """Makes one step of two rows, whose bulk eviction may be due, as it is captured or not; or, captured, of one that
    is drawn and one that pads. Its launches, and the operations that have no kernel."""
    method, _, own = method.partition(" ")
    settings = changes(method, ALONE) | open_settings(method)
    words = own + " " + " ".join(f"{key}={str(value).replace(' ', '')}" for key, value in settings.items())
    runner = Runner(smallest, choices.make_method(f"{method} {words}"), backend="triton")
    runner.reserve(rows=2, prompt_tokens=40, new_tokens=8)
    store, launches = runner.store, []
    rows = [store.open_row() for _ in range(2)]
    for row in rows:  # as if prompts had been read: writing one takes sizes from its plan
        store.counters.hold(row, 24)
        store.counters.prompt_tokens[row] = 24
        store.holding.due.learn([row], [due])
    there = [torch.empty(2, dtype=torch.int64, device="meta") for _ in range(6)]
    state = State(Rows(there[0], rows), there[1], lambda *_: None)
    if not due and not eager and not greedy:
        shares = torch.empty(2, device="meta")
        state.draws = Draws(there[2], there[3], shares, shares.double())
        if store.spare_row is not None:
            state.rows = Rows(there[0], rows[:1], Padding(there[4], there[5]))
    if eager:
        store.pages.host.learner(state.rows)([24] * len(rows) * len(store.pages.formats))
        store.pages.counts._start = lambda numbers, receivers: None  # the copy to the host
    else:
        store.pages.counts.log = ReplayLog()  # lists of any length, as in a graph
    as_if_read(runner.policy)
    with (
        parts.recording(lambda kernel, *_: launches.append(kernel.__name__)),
        NothingOnTheHost(),
        meter or nullcontext(),
    ):
        CapturedSteps(runner, None).step(state)
    return SimpleNamespace(launches=launches, tiers=len(store.pages.formats), fallbacks=runner.backend.fallbacks)


@pytest.mark.every(5)
@pytest.mark.parametrize("method", options("method"))
def test_a_whole_step_asks_the_host_for_nothing(bare, method: str):
    """Plan, room, demotions, the model, the choice and the counts, of every method. What has no kernel is named; plain
    torch does it on the device."""
    try:
        found = step_without_data(bare, method)
    except NotForModel as error:
        pytest.skip(str(error))
    without = NO_KERNEL.get(method, set())
    assert found.fallbacks == without
    attended = 0 if "paged_decode" in without else 2 * -(-found.tiers // 2)  # two layers, and two tiers in a launch
    assert found.launches.count("_attend") == attended


@pytest.mark.parametrize("method", ["full", "h2o", "diffkv", "kivi", "random_trace"])
def test_the_first_eager_step_asks_the_host_for_nothing(bare, method: str):
    """In it the policy is asked again, and what is told of the answers, which may have no tensors, leaves with the
    device's own counts."""
    assert step_without_data(bare, method, eager=True).launches


def own_kernels(num_layers: int) -> tuple[int, int]:
    """Kernels of the model's own in a step, and the matrix products among them."""
    model = choices.make_model(f"random preset=tiny num_layers={num_layers} dtype=bfloat16", "cpu")
    model.model.to("meta")
    runner = Runner(model, choices.make_method("full"), backend="triton")
    runner.reserve(rows=1, prompt_tokens=8, new_tokens=8)
    session, ids = sessions.Decode(runner.store), torch.empty(1, 1, dtype=torch.int64, device="meta")
    with metered(runs=False) as cost:
        hf.forward(model.model, session, ids, ids, 8, 1)
    return cost.kernels.total() - cost.kernels["_unsafe_view"], cost.kernels["mm"]


def test_the_models_own_kernels_are_as_many_as_the_documentation_says(monkeypatch: pytest.MonkeyPatch):
    """Of a layer, without its attention, whose launches are counted by method."""
    monkeypatch.setattr(sessions.Decode, "attend", lambda session, layer, q, k, v, scale: q)
    monkeypatch.setattr(sessions.Decode, "without_grad", lambda session: torch.no_grad())  # else casts seem views
    two, three = own_kernels(2), own_kernels(3)
    layer, products = (b - a for a, b in zip(two, three, strict=True))
    said = f"{layer} kernels of its own beside attention: {products} matrix products"
    page = " ".join((ROOT / "docs" / "reference" / "gpu.md").read_text(encoding="utf-8").split())
    assert said in page and f"{32 * layer} of 32 layers" in page


def launches_of(num_layers: int, method: str) -> int:
    """Kernels of a whole step of a fused model, torch's and Triton's."""
    model = choices.make_model(f"random preset=tiny num_layers={num_layers} dtype=bfloat16 linear=fused", "cpu")
    assert model.linear == "fused"
    model.model.to("meta")
    cost = Cost()
    with without_data():
        step_without_data(model, method, greedy=True, meter=metered(runs=False, cost=cost))
    return cost.kernels.total() - cost.kernels["_unsafe_view"] + cost.launches.total()


def test_a_fused_step_launches_as_few_kernels_as_the_documentation_says(monkeypatch: pytest.MonkeyPatch):
    """Of 32 layers, the choice of tokens and the counts included, where plain layers take 1,184 of their own."""
    monkeypatch.setattr(sessions.Decode, "without_grad", lambda session: torch.no_grad())  # else casts seem views
    monkeypatch.setattr(fused, "_is_step", lambda positions: True)
    two, three = launches_of(2, "full"), launches_of(3, "full")
    found = two + 30 * (three - two)
    assert found <= 340
    page = " ".join((ROOT / "docs" / "reference" / "gpu.md").read_text(encoding="utf-8").split())
    assert f"| full | {three - two} | {found} |" in page, found


@pytest.mark.parametrize("method", BULK)
def test_a_bulk_eviction_asks_the_host_for_nothing(bare, method: str):
    """Its plan, its moves, and scores that begin anew."""
    assert step_without_data(bare, method, due=True).launches.count("_move_listed")


@pytest.mark.parametrize("method", ["r_kv", "triattention", "vatp decode_every=4"])
def test_a_statistic_of_held_slots_asks_how_many_there_are(bare, method: str):
    """As the documentation says: it is measured row by row. Others have no such eviction."""
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        step_without_data(bare, method, due=True)
