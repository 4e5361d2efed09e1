"""Every method of conf/method in whole runs whose steps are captured, or cannot be: the answers of plain steps."""

import zlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from engine_helpers import answers, comparable, random_tokens, request
from open_settings import open_settings

from kvbench.config.files import options
from kvbench.errors import NotForModel
from kvbench.kernels.gpu.emulator import record
from kvbench.models.load import load_model
from kvbench.runs import choices

Case = pytest.importorskip("kvbench.extensions.bench.check_methods").Case
changes = pytest.importorskip("kvbench.extensions.bench.check_methods").changes

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of what empty slots hold
    pytest.mark.usefixtures("without_overflow_checks"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, check_methods --graphs captures real graphs"),
]
# What would begin behind the answers here.
SOONER = {
    "r_kv": {"decode_every": 4},
    "random_trace": {"decode_every": 4, "budget": 4, "window": 2},
    "triattention": {"decode_every": 4, "budget": 4},
    "simlayerkv": {"threshold": 0.05, "recent": 8},
}
# Operations of a step at least, at one of which a capture fails, another one for each method.
OPERATIONS = 40


@pytest.fixture(scope="module")
def models():
    """Models of one and two layers with one KV head each: the interpreter's time is that of the lists."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    settings = {"kind": "random", "preset": "tiny", "overrides": heads, "seed": 0}
    settings |= {"dtype": "float32", "device": "cpu", "linear": "plain"}
    return {layers: load_model(settings | {"num_layers": layers}) for layers in (1, 2)}


def policy_of(method: str, layers: int):
    """A method at settings at which it acts within some steps, with tables of a model above; words behind its name are
    further settings."""
    method, *words = method.split()
    settings = changes(method, Case(())) | SOONER.get(method, {}) | open_settings(method, kv_heads=1, layers=layers)
    return choices.make_method(
        " ".join([method, *(f"{k}={str(v).replace(' ', '')}" for k, v in settings.items()), *words])
    )


class FailsAt(TorchDispatchMode):
    """A capture that fails at an operation of a step, when the host has noted more than the device has done."""

    def __init__(self, operation: int) -> None:
        super().__init__()
        self.left = operation

    def __call__(self, step):
        with self:
            step()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.left:
            raise RuntimeError("operation not permitted when stream is capturing\nand a stack")
        self.left -= 1
        return function(*args, **(kwargs or {}))


def asked(greedy_tokens: int, drawn_tokens: int, drawn: int) -> list:
    """A greedy answer, and drawn ones of a second prompt."""
    how = {"temperature": 0.9, "top_p": 0.9, "num_samples": drawn, "min_new_tokens": 1}
    return [
        request("greedy", random_tokens(21), max_new_tokens=greedy_tokens, min_new_tokens=1),
        request("drawn", random_tokens(14, 1), max_new_tokens=drawn_tokens, **how),
    ]


# Three rows, which a fourth pads, and then one. A ring of 16 tokens flushes in replays of both.
LONG = asked(14, 6, 2)
SHORT = asked(8, 4, 1)  # a run whose capture fails makes the steps behind it one by one


def run(models, method: str, requests: list, **settings) -> tuple[dict, dict]:
    """What every answer says of itself, and how the steps were made."""
    layers = 2 if open_settings(method) else 1  # tables say how layers differ
    counts: dict[str, int] = {}
    try:
        policy = policy_of(method, layers)
        found = answers(models[layers], policy, requests, counts=counts, fidelity_max_tokens=0, **settings)
    except NotForModel as error:
        pytest.skip(str(error))
    assert {outcome.status for outcome in found.values()} == {"ok"}
    if requests is LONG:
        assert [len(found[key].token_ids) for key in sorted(found)] == [6, 6, 14]
        acts(policy, found["greedy", 0].kept)
    return {key: comparable(outcome) for key, outcome in found.items()}, counts


def acts(policy, kept: dict) -> None:
    """Holds that a method has done, while it decoded, what it is there for: another one needs settings of `SOONER`."""
    first, prompt = kept["slots_per_tier"][0], kept["prompt_slots"]
    if policy.acts_in_decode or policy.compaction:  # tokens went, or went down
        assert first < prompt + kept["lists"] * (kept["tokens_seen"] - kept["prompt_tokens"])
    if policy.residual:  # a ring went to pages
        assert first > prompt


SINGLE = {"backend": "torch", "capture": None}


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", options("method"))
def test_captured_steps_give_what_single_steps_give(models, method: str):
    """Tokens, greedy and drawn, bytes now and over time, and kept slots are those of plain torch; most steps behind an
    eviction come from graphs as those before it do."""
    want, _ = run(models, method, LONG, **SINGLE)
    got, counts = run(models, method, LONG, backend="triton", capture=record)
    assert got == want
    assert counts["failed_captures"] == 0 < counts["captures"] < counts["replayed"], counts


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["h2o", "snapkv", "ada_snapkv", "tova", "knorm", "streaming_llm", "quest"])
def test_a_share_of_what_was_seen_is_kept_to_in_captured_steps(models, method: str):
    """What makes room, and what is read, is decided on the device: steps come from graphs."""
    share = f"{method} {'read_budget' if method == 'quest' else 'budget'}=40%seen"
    want, _ = run(models, share, LONG, **SINGLE)
    got, counts = run(models, share, LONG, backend="triton", capture=record)
    assert got == want
    assert counts["failed_captures"] == 0 < counts["captures"] < counts["replayed"], counts


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", options("method"))
def test_a_capture_that_fails_gives_what_single_steps_give(models, method: str):
    """The rows are read again, and a warning and the counts say so; the same answers as of a run without graphs."""
    want, _ = run(models, method, SHORT, **SINGLE)
    with pytest.warns(UserWarning, match=r"captured \(RuntimeError: operation not permitted when stream"):
        fails = FailsAt(zlib.crc32(method.encode()) % OPERATIONS)
        got, counts = run(models, method, SHORT, backend="triton", capture=fails)
    assert got == want
    assert (counts["failed_captures"], counts["replayed"]) == (1, 0) < (1, counts["one_at_a_time"]), counts
