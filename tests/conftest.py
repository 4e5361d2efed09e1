"""Settings and models that several tests share."""

import gc
import os
import subprocess
import sys

# Read once, at the first import of torch or triton. Passive waiting keeps two test processes on two cores from starving
# each other; without a GPU the Triton kernels run in the interpreter; nothing in a test may ask the hub.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core (pytest -n) computes on one thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.disable()  # until all is imported and collected (pytest_collection_finish): of that nothing is garbage
if not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic, process_time  # tests put others in their places
from zlib import crc32

import composed_once
import pytest
import selection
import torch
import touched
from hypothesis import HealthCheck, settings
from places import GONE, ROOT, TESTS, WITHOUT

from kvbench.config import extensions
from kvbench.errors import MissingWeightsError
from kvbench.kernels.cpu.abi import ISA_VARIABLE, load
from kvbench.kernels.cpu.build import BuildError
from kvbench.models.load import LoadedModel, load_model

# How long a drawn case takes depends on what else the machine does, so no test fails for it.
settings.register_profile("kvbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvbench")


# Processor seconds that the call of a default test may take, and that of a `long` one; and by how much the same test's
# seconds differ from one quiet run to the next, which no run should fail for.
LIMIT_S, LONG_LIMIT_S, NOISE = 5, 40, 1.25
WORK_S = 0.04  # what `slowness` does takes so long on the processor that the limits are set for, a core of Zen 4
TAKEN: list[tuple[float, float, str, float]] = []  # processor and wall seconds, test, limit


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option of `make suite`."""
    said = f"show the N slowest tests; a default test beyond {LIMIT_S} s of processor time fails the run"
    parser.addoption("--slowest", type=int, default=0, metavar="N", help=said)


def pytest_sessionstart() -> None:
    """Compiles the C++ kernels that default tests take once, before there are several processes to wait for them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with suppress(BuildError), pytest.MonkeyPatch.context() as patch:
            for isa in ("portable", "auto"):
                patch.setenv(ISA_VARIABLE, isa)
                load()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes what a test takes: time on the wall says nothing where others use the machine."""
    begun, wall = processor_s(), monotonic()
    try:
        return (yield)
    finally:
        limit = LONG_LIMIT_S if item.get_closest_marker("long") else LIMIT_S
        limit = float("inf") if item.get_closest_marker("exhaustive") else limit
        item.user_properties.append(("taken", (processor_s() - begun, monotonic() - wall, limit)))


def processor_s() -> float:
    """Processor time of this process and of its children: of those that have ended, and of those that live, such as
    tests/runs/conftest.py's, with what theirs took."""
    spent, ticks = sum(os.times()[:4]), os.sysconf("SC_CLK_TCK")
    with suppress(OSError):  # only Linux has such a list
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            spent += sum(map(int, fields[11:15])) / ticks
    return spent


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collects what the tests of all processes took."""
    if report.when == "call" and (taken := dict(report.user_properties).get("taken")):  # none of a process that ended
        spent, wall, limit = taken
        TAKEN.append((spent, wall, report.nodeid, limit))


@cache
def slowness() -> float:
    """How many times as long a processor of this machine takes as the one that the limits are set for, at least 1."""

    def work() -> float:
        begun, x = process_time(), torch.ones(48, 48)
        for _ in range(4000):
            x = torch.softmax(x @ x, -1)
        sum(number * number for number in range(400_000))
        return process_time() - begun

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes of xdist; the one that began them has a thread per core
    try:
        return max(1.0, min(work() for _ in range(5)) / WORK_S)
    finally:
        torch.set_num_threads(threads)


def too_long(spent_s: float, limit_s: float) -> bool:
    """True for a test that takes longer than its limit, whatever the machine."""
    return spent_s > NOISE * limit_s and spent_s > NOISE * limit_s * slowness()


def too_long_alone(tests: list[str], config: pytest.Config) -> bool:
    """True if one of these tests takes too long alone, too.

    Processes that share caches and a core's units take twice the processor seconds, which `slowness` cannot measure.
    """
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", "--slowest", "1", "-m", config.option.markexpr, *tests]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    return (
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, stdout=sys.stderr, env=one_thread).returncode
        != 0
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run with a default test that takes too long, where the times are shown."""
    option = session.config.option
    if not option.slowest or session.exitstatus:
        return
    slow = [test for spent, _, test, limit in TAKEN if too_long(spent, limit)]
    is_parallel = getattr(option, "numprocesses", None)
    if slow and (not is_parallel or too_long_alone(slow, session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """Shows the slowest tests, and those that take too long."""
    config = terminalreporter.config
    if config.option.verbose < 0 and chooses_extensions(config):  # -q shows no header
        terminalreporter.line(touched.described(ROOT, extensions.discovered())[1])
    if number := config.option.slowest:
        terminalreporter.section(f"{number} slowest tests: processor and wall seconds")
        for spent, wall, test, limit in sorted(TAKEN, reverse=True)[:number]:
            said = f"  > {limit * slowness():.1f} s, TOO LONG" * too_long(spent, limit)
            terminalreporter.line(f"{spent:6.1f} {wall:6.1f} {test}{said}")
        terminalreporter.section("processor seconds by folder")
        terminalreporter.line(", ".join(f"{name} {spent:.0f}" for name, spent in by_folder().most_common()))


def by_folder() -> Counter[str]:
    """Processor seconds of the tests of each folder of tests/, and of each extension."""
    taken: Counter[str] = Counter()
    for spent, _, test, _ in TAKEN:
        parts = Path(test.partition("::")[0]).parts[1:]
        parts = parts[1:] if parts[0] == "extensions" else parts
        taken[parts[0].removesuffix(".py")] += spent
    return taken


def pytest_configure(config: pytest.Config) -> None:
    """Tells tests whether exhaustive ones run too; if not, spares the time of composing settings again."""
    selection.FULL = "not exhaustive" not in config.option.markexpr
    if not selection.FULL:
        composed_once.install()
        os.fsync = lambda descriptor: None  # no power is cut here, and others wait for the disk


def chooses_extensions(config: pytest.Config) -> bool:
    """True for a default run over all tests; who names an extension's tests, or tests with -k, gets all of them."""
    whole = any(TESTS.is_relative_to(os.path.abspath(arg)) for arg in config.args)
    return whole and not selection.FULL and not config.option.keyword


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Says which extensions' tests run."""
    return [touched.described(ROOT, extensions.discovered())[1]] if chooses_extensions(config) else []


@pytest.hookimpl(tryfirst=True)  # before pytest looks for what is `exhaustive`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `every(n)`, one case in n stays in the default run; which, follows from the cases' names. Who
    names tests with -k gets all of them. Of extensions that the change does not touch, tests marked `smoke` stay.

    Tests marked `long` begin first, so that in the end no process is alone with one while others have nothing; with
    them those that share the process of tests/runs/conftest.py, so that hardly any other has to start it."""
    if chooses_extensions(config):
        changed, _ = touched.described(ROOT, extensions.discovered())
        for item in items:
            name = touched.extension_of(item.nodeid)
            if name and name not in changed and not item.get_closest_marker("smoke"):
                item.add_marker(pytest.mark.exhaustive)
    listed: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("every") and not item.get_closest_marker("exhaustive"):
            listed.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in listed.values() if not config.option.keyword else ():
        cases.sort(key=lambda case: crc32(case.nodeid.encode()))
        for case in cases[-(-len(cases) // cases[0].get_closest_marker("every").args[0]) :]:
            case.add_marker(pytest.mark.exhaustive)
    items.sort(key=lambda item: item.get_closest_marker("long") is None and "server" not in item.fixturenames)


def pytest_collection_finish() -> None:
    """Looks through what libraries and tests are made of for garbage; Python does so again at a quarter more.

    It is not frozen: a command counts frozen objects (kvbench/config/garbage.py), which takes a tenth of a second here.
    """
    gc.collect()
    gc.enable()


if WITHOUT:

    @pytest.fixture(autouse=True)
    def skipped_where_a_command_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
        """Skips a test at the first use of a command that went with the deleted extension."""
        from kvbench.cli import words
        from kvbench.config import files

        def checked(plain: Callable) -> Callable:
            def call(given: str | list[str]) -> object:
                said = [given] if isinstance(given, str) else given
                chosen = [word[5:] for word in said if word.startswith(("view=", "what="))]
                if {word.rpartition("/")[2] for word in [*said[:1], *chosen]} & {*GONE}:
                    pytest.skip(f"without {WITHOUT}")
                return plain(given)

            return call

        monkeypatch.setattr(words, "take_config_dir", checked(words.take_config_dir))  # of all that `main` is given
        monkeypatch.setattr(files, "full_command", checked(files.full_command))


# Query heads and KV heads of the tiny models: plain multi-head attention, and groups of 3 and 7 query heads per KV
# head.
HEADS = {"mha": (4, 4), "gqa3": (6, 2), "gqa7": (14, 2)}


@pytest.fixture(scope="session")
def embedded_model() -> LoadedModel:
    """Gives SmolLM2-135M-Instruct in float32 on the CPU, or skips where it is neither cached nor to be fetched."""
    try:
        return load_model({"kind": "embedded", "dtype": "float32", "device": "cpu"})
    except MissingWeightsError as error:
        pytest.skip(f"embedded model not available (`make model` fetches it): {error}")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., LoadedModel]:
    """Factory of small random models.

    tiny_model(model_type, heads, head_dim, dtype, num_layers, seed, narrow).

    A narrow one is a fourth as wide as its heads are together: the same cache, with less to compute beside it.
    """

    @cache
    def build(
        model_type: str = "llama",
        heads: str = "gqa3",
        head_dim: int = 64,
        dtype: str = "float32",
        num_layers: int = 2,
        seed: int = 0,
        narrow: bool = False,
    ) -> LoadedModel:
        num_heads, num_kv_heads = HEADS[heads]
        hidden_size = num_heads * head_dim // (4 if narrow else 1)
        overrides = {
            "model_type": model_type,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "hidden_size": hidden_size,
            # Attention as peaked as in real models: query . key / sqrt(head_dim) has a standard deviation near 2.
            "initializer_range": (2.0 / hidden_size) ** 0.5,
        }
        if model_type == "mistral":
            overrides["sliding_window"] = None
        settings = {"kind": "random", "preset": "tiny", "overrides": overrides, "num_layers": num_layers}
        return load_model(settings | {"seed": seed, "dtype": dtype, "device": "cpu"})

    return build
