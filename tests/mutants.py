"""A mutation run: changes one spot of the code at a time, runs tests that reach it, and prints what nobody noticed.

    python tests/mutants.py [number=200] [seed=0] [only=methods/] [index=3,17] [seconds=120] [at_least=0.95]
        [code=FILE,FOLDER] [tests=FILE,FOLDER] [reached=FILE]

Mutants (tests/mutation.py) of methods/, kvbench/policy/ and kvbench/cache/, or `code`, are drawn by a hash of `seed`
and their names, so that a change elsewhere leaves the draw as it is; `index` takes only some of those drawn. Before
them all tests of these folders, or `tests`, run once, which must pass, and each notes how long it takes and which lines
it reaches; `reached` names a file that keeps the notes for a further run of the same code. A mutant meets the tests
that reach its statement, until one fails (of what runs at an import: those that reach its function, or its file): first
those that reach a branch of it which few others reach; then those beside it in the tree (a method has a file, other
code a folder), then the others; of all, the cases of less than a second, then one further case of every test, and so
on, the quickest first, for about `seconds` of what they take.

All times are the processor's, and no test has a time limit: a busy machine notices nothing. A mutant that keeps a test
busy ten times as long as the code does runs for ever, and counts as noticed. Every file is printed anew from its syntax
before the first run, so that no test fails for a comment that is gone, and all tests that noticed something run once
more at the end without a mutant.

tests/mutants_equivalent.yaml lists, with reasons, mutants that no test can notice; they are not drawn. The exit status
is 1 when a smaller share than `at_least` was noticed.
"""

import ast
import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

import pytest
from coverage import Coverage
from mutation import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
CODE = ("methods", "kvbench/policy", "kvbench/cache")
TESTS = (
    "tests/policy",
    "tests/cache",
    "tests/methods",
    "tests/engine",
    "tests/models",
    "tests/runs/test_experiment.py",
)
EQUIVALENT = ROOT / "tests" / "mutants_equivalent.yaml"
# No time limits, and the same drawn cases for every mutant.
QUIET = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0", "--hypothesis-seed=0"]
START_S, SLACK_S, STUCK_S, QUICK_S = 120, 20, 1800, 1


@dataclass
class Reached:
    """The time that the tests take, and those that reach a line."""

    seconds: dict[str, float]
    """Test -> its processor time."""
    lines: dict[str, dict[int, int]]
    """File -> line -> the tests that reach it, as the bits of a number: the first test is the lowest one."""
    imported: dict[str, list[int]]
    """File -> lines that run when it is imported."""

    @classmethod
    def of(cls, coverage: Coverage, copy: Path, seconds: dict[str, float]) -> "Reached":
        """From what was noted in a copy of the repository; contexts are the tests."""
        data, bit = coverage.get_data(), {test: 1 << index for index, test in enumerate(seconds)}
        lines: dict[str, dict[int, int]] = {}
        imported: dict[str, list[int]] = {}
        for path in files():
            found = data.contexts_by_lineno(str(copy / path))
            lines[path] = {line: sum(bit[test] for test in tests if test) for line, tests in found.items()}
            imported[path] = [line for line, tests in found.items() if "" in tests]
        return cls(seconds, lines, imported)

    def tests_of(self, path: str, lines: range) -> list[str]:
        """Tests that reach one of the lines."""
        reach = 0
        for line in lines:
            reach |= self.lines[path].get(line, 0)
        return [test for index, test in enumerate(self.seconds) if reach >> index & 1]


@dataclass
class Notes:
    """A plugin of pytest that fills `seconds`, and the file `failed` with the test that failed first."""

    failed: Path
    limits: dict[str, float] = field(default_factory=dict)
    """Test -> seconds of processor time after which it runs for ever; for tests that are not in it, none."""
    coverage: Coverage | None = None
    """Notes the lines, where they are asked for."""
    seconds: dict[str, float] = field(default_factory=dict)

    def pytest_collection_finish(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self.failed.write_text(item.nodeid)
        signal.setitimer(signal.ITIMER_PROF, self.limits.get(item.nodeid, 0))
        if self.coverage:
            self.coverage.switch_context(item.nodeid)
        begun = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = round(time.process_time() - begun, 3)
            if self.coverage:
                self.coverage.switch_context("")


def run(copy: Path, tests: list[str], log: Path, *, limits: dict[str, float], traces: bool = False) -> int | None:
    """Runs tests in a copy of the repository, in a child process until one fails, and gives pytest's exit status.

    It is negative for a process that ended by a signal, such as that of a time limit, and None when the child got
    nowhere for a long time without work for the processor, which says nothing.
    """
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)  # of processes that a test starts
        others = [path for path in sys.path if not Path(path or ".").resolve().is_relative_to(ROOT)]
        sys.path[:] = [str(copy), str(copy / "tests"), *others]
        signal.setitimer(signal.ITIMER_PROF, 0 if traces else START_S)
        notes = Notes(log.with_name("failed"), limits)
        if traces:
            notes.coverage = Coverage(data_file=None, config_file=False, include=[str(copy / path) for path in files()])
            notes.coverage.start()
        status = int(pytest.main([*QUIET, *([] if traces else ["-x"]), *tests], plugins=[notes]))
        if notes.coverage:
            notes.coverage.stop()
            log.with_name("reached").write_bytes(pickle.dumps(Reached.of(notes.coverage, copy, notes.seconds)))
        os._exit(status)
    end, done = time.monotonic() + STUCK_S * (4 if traces else 1), False
    try:
        while time.monotonic() < end:
            found, status = os.waitpid(child, os.WNOHANG)
            done = found != 0
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:  # whatever ends this run, a signal too, ends its child
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def tests_for(mutant: Mutant, reached: Reached, seconds: float) -> list[str]:
    """The tests that may notice a mutant, in the order to run them."""
    text = plain(mutant.path)
    pairs = zip(text.splitlines(), mutant.source.splitlines(), strict=False)
    line = next(number for number, (old, new) in enumerate(pairs, 1) if old != new)
    nodes = list(ast.walk(ast.parse(text)))
    found = reached.tests_of(mutant.path, range(line, line + 1))
    if not found and line in reached.imported[mutant.path]:
        spans = _around(line, nodes, ast.FunctionDef | ast.ClassDef)
        spans.append(range(1, len(text.splitlines()) + 1))
        found = next((tests for span in spans if (tests := reached.tests_of(mutant.path, span))), [])
    found.sort(key=reached.seconds.__getitem__)
    room, stem = Path(mutant.path).parent.name, Path(mutant.path).stem
    own = f"tests/{room}/test_{stem}.py::" if room == "methods" else f"tests/{room}/"
    (statement, *_) = [*_around(line, nodes, ast.stmt), range(line, line + 1)]
    within = [set(reached.tests_of(mutant.path, range(at, at + 1))) for at in statement]
    cases: dict[str, int] = {}
    rounds = []
    for test in found:
        name = test.split("[")[0]
        if reached.seconds[test] > QUICK_S:
            cases[name] = cases.get(name, 0) + 1
        rare = min((len(tests) for tests in within if test in tests), default=0)
        rounds.append((rare, not test.startswith(own), cases.get(name, 0), test))
    chosen, spent = [], 0.0
    for *_, test in sorted(rounds, key=lambda entry: entry[:3]):
        if spent + reached.seconds[test] <= seconds or not chosen:
            chosen.append(test)
            spent += reached.seconds[test]
    return chosen


def _around(line: int, nodes: list[ast.AST], kinds: type | UnionType) -> list[range]:
    """The lines of each piece of code of these kinds that holds a line, the shortest first."""
    spans = [range(node.lineno, (node.end_lineno or 0) + 1) for node in nodes if isinstance(node, kinds)]
    return sorted((span for span in spans if line in span), key=len)


def copied(folder: Path) -> Path:
    """A copy of the files that git knows or does not ignore, without results, its code printed from its syntax."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    for name in listed.stdout.decode().split("\0"):
        if not name or name.startswith("results/") or not (ROOT / name).exists():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)  # roots are linked into the package
    for path in files():
        (folder / path).write_text(plain(path), encoding="utf-8")
    return folder


_code: Sequence[str] = CODE  # files and folders that have mutants


def files() -> list[str]:
    """The files that have mutants, from the root of the repository."""
    each = [[path] if (path := ROOT / name).is_file() else sorted(path.glob("*.py")) for name in _code]
    return [str(path.relative_to(ROOT)) for paths in each for path in paths]


def plain(path: str) -> str:
    """A file as its syntax prints."""
    return ast.unparse(ast.parse((ROOT / path).read_text(encoding="utf-8")))


def put(target: Path, source: str) -> None:
    """Writes a file of the copy, and takes its bytecode away, which may be of the same second and size."""
    for stale in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
        stale.unlink()
    target.write_text(source, encoding="utf-8")


def preload() -> None:
    """Imports what every test needs and no mutant changes."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import hydra  # noqa: F401
    import hypothesis  # noqa: F401
    import scipy.stats  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401


def main(arguments: list[str]) -> int:
    """Draws and runs the mutants; see the head of this file."""
    global _code
    said = dict(item.split("=", 1) for item in arguments)
    number, seed, only = int(said.pop("number", 200)), int(said.pop("seed", 0)), said.pop("only", "")
    seconds, at_least = float(said.pop("seconds", 120)), float(said.pop("at_least", 0.95))
    index, kept = said.pop("index", ""), said.pop("reached", "")
    tests, _code = said.pop("tests", ",".join(TESTS)).split(","), said.pop("code", ",".join(CODE)).split(",")
    if said:
        print(
            f"unknown: {', '.join(said)}; there are number, seed, only, index, seconds, at_least, code, tests, reached"
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import yaml

    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in files() if path.startswith(only)}
    found = [mutant for path, text in texts.items() for mutant in mutants_of(path, text)]
    listed = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    known = {(entry["file"], entry["code"], entry["change"]) for entry in listed}
    assert all(entry["reason"] for entry in listed)
    if gone := {name for name in known if name[0] in texts} - {mutant.name for mutant in found}:
        print(f"no longer in the code, take out of {EQUIVALENT.name}: {sorted(gone)}")
        return 2
    found = [mutant for mutant in found if mutant.name not in known]
    found.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())
    drawn = list(enumerate(found[:number], 1))
    drawn = [pair for pair in drawn if not index or str(pair[0]) in index.split(",")]
    print(f"{len(drawn)} of {len(found)} mutants, seed {seed}; {len(known)} more are listed as equivalent", flush=True)
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        copy, log = copied(Path(temporary).resolve() / "copy"), Path(temporary) / "log"
        if not (kept and Path(kept).is_file()):
            if run(copy, tests, log, limits={}, traces=True):
                print(f"the tests fail without a mutant:\n{log.read_text()}")
                return 2
            if kept:
                shutil.copy(log.with_name("reached"), kept)
        reached = pickle.loads((Path(kept) if kept else log.with_name("reached")).read_bytes())
        print(f"{len(reached.seconds)} tests take {sum(reached.seconds.values()):.0f} s", flush=True)
        return judge(copy, log, drawn, reached, seconds, at_least)


def judge(
    copy: Path, log: Path, drawn: list[tuple[int, Mutant]], reached: Reached, seconds: float, at_least: float
) -> int:
    """Runs the mutants drawn and prints those that survive."""
    limits = {test: SLACK_S + 10 * taken for test, taken in reached.seconds.items()}
    survivors, watchers, failed = [], {}, log.with_name("failed")
    for index, mutant in drawn:
        target, begun = copy / mutant.path, time.monotonic()
        tests = tests_for(mutant, reached, seconds)
        failed.write_text("the imports")
        put(target, mutant.source)
        status = run(copy, tests, log, limits=limits) if tests else 0
        put(target, plain(mutant.path))
        shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # failures of this mutant, which would be tried again
        if status in (None, 0):
            survivors.append(mutant)
            word = f"SURVIVED {len(tests)} tests" + " (STUCK)" * (status is None)
        else:
            watchers[failed.read_text()] = mutant
            word = f"noticed by {failed.read_text()}" + f" (ended by signal {-status})" * (status < 0)
        print(f"{index} {time.monotonic() - begun:.1f} s {mutant}\n    {word}", flush=True)
    again = [test for test in reached.seconds if test in watchers]
    if again and run(copy, again, log, limits={}):
        print(f"{failed.read_text()} fails without a mutant too, so that it noticed nothing:\n{log.read_text()}")
        return 2
    score = 1 - len(survivors) / max(1, len(drawn))
    print(f"\n{len(drawn) - len(survivors)} of {len(drawn)} noticed: {100 * score:.1f} %, asked {100 * at_least:g} %")
    print("\n".join(str(mutant) for mutant in survivors))
    return int(score < at_least)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
