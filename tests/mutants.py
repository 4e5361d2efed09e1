"""A mutation run: changes one spot of the code at a time, runs the tests that watch it, and prints what nobody noticed.

    python tests/mutants.py [number=200] [seed=0] [only=methods/] [seconds=300] [at_least=0.95] [depth=9]

Mutants of methods/, kvbench/policy/ and kvbench/cache/ are drawn at random by `seed`. Each is written into a copy of
the repository; a child process, forked from one that has imported torch and transformers, runs the file's tests there
until one fails. A mutant that runs over `seconds` counts as noticed. tests/mutants_equivalent.yaml lists, with reasons,
mutants that no test can notice; they are not drawn. The exit status is 1 when a smaller share than `at_least` was
noticed. `depth` is how many of a file's groups of tests run, the quickest first: with 1 only those beside it.
"""

import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("methods", "kvbench/policy", "kvbench/cache")
EQUIVALENT = ROOT / "tests" / "mutants_equivalent.yaml"
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Mod: ast.FloorDiv,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Args:
        path: The file, from the root of the repository.
        line: Its line there, from 1.
        code: That line, without its indentation.
        change: What becomes of the node, as `old -> new`.
        source: The whole file with the change.
    """

    path: str
    line: int
    code: str
    change: str
    source: str

    @property
    def name(self) -> tuple[str, str, str]:
        """What a list of mutants knows it by, wherever its line moves."""
        return self.path, self.code, self.change

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.change}\n    {self.code}"


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may become instead."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
    elif isinstance(node, ast.AugAssign | ast.Raise) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    ):
        yield ast.Pass()
    elif isinstance(node, ast.If) and not node.orelse:
        yield ast.If(ast.Constant(False), node.body, [])


def spots(node: ast.AST, path: tuple = ()) -> Iterator[tuple[tuple, ast.AST]]:
    """Every node that may change, with the way to it; not annotations, messages of errors and decorators."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "exc", "msg", "type_params"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                way = (*path, (field, index))
                yield way, child
                yield from spots(child, way)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    text = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    for way, node in spots(tree):
        for new in replacements(node):
            changed = deepcopy(tree)
            owner: ast.AST = changed
            for field, index in way[:-1]:
                owner = getattr(owner, field) if index is None else getattr(owner, field)[index]
            field, index = way[-1]
            if index is None:
                setattr(owner, field, new)
            else:
                getattr(owner, field)[index] = new
            line = node.lineno  # type: ignore[attr-defined]
            old, after = (" ".join(ast.unparse(ast.fix_missing_locations(x)).split()) for x in (node, new))
            source = ast.unparse(ast.fix_missing_locations(changed))
            yield Mutant(str(path.relative_to(ROOT)), line, lines[line - 1].strip(), f"{old} -> {after}", source)


def tests_of(path: str) -> list[list[str]]:
    """Arguments for pytest, the quickest first: the tests that watch a file."""
    plain = [
        "tests/methods",
        *(f"--ignore={p.relative_to(ROOT)}" for p in ROOT.glob("tests/methods/test_conformance*")),
    ]
    suite = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("tests/methods/test_conformance*.py"), reverse=True)]
    masks = ["tests/engine/test_against_masks.py", "tests/engine/test_invariants.py"]
    if path.startswith("methods/"):
        module, own = Path(path).stem, f"tests/methods/test_{Path(path).stem}.py"
        names = [p.stem for p in ROOT.glob("conf/method/*.yaml") if f".methods.{module}." in p.read_text()]
        first = [[own]] if (ROOT / own).is_file() else []
        return [*first, plain, [*suite, "-k", " or ".join(names)], masks]
    if path.startswith("kvbench/policy/"):
        return [["tests/policy"], plain, suite, masks]
    return [["tests/cache"], plain, suite, masks]


def run(copy: Path, tests: list[list[str]], seconds: float, log: Path) -> bool:
    """Whether all tests pass in a copy of the repository, in a child process."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(copy)
        sys.path[:] = [str(copy), str(copy / "tests"), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        import pytest

        status = 0
        for arguments in tests:
            status = status or int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))
            status = 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status
        os._exit(min(status, 255))
    end, done = time.monotonic() + seconds, False
    try:
        while time.monotonic() < end:
            found, status = os.waitpid(child, os.WNOHANG)
            done = found != 0
            if done:
                return status == 0
            time.sleep(0.05)
        return False
    finally:  # whatever ends this run, a signal too, ends its child
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def copied(folder: Path) -> Path:
    """A copy of the files that git knows or does not ignore, without results."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and not name.startswith("results/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def preload() -> None:
    """Imports what every test needs and no mutant changes."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.dont_write_bytecode = True  # two mutants of one second and size would share it
    import hydra  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401


def main(arguments: list[str]) -> int:
    """Draws and runs the mutants; see the head of this file."""
    said = dict(item.split("=", 1) for item in arguments)
    number, seed, only = int(said.pop("number", 200)), int(said.pop("seed", 0)), said.pop("only", "")
    seconds, at_least = float(said.pop("seconds", 300)), float(said.pop("at_least", 0.95))
    depth = int(said.pop("depth", 9))
    if said:
        print(f"unknown: {', '.join(said)}; settings are number, seed, only, seconds, at_least, depth")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    preload()
    import yaml

    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
    found = [mutant for path in files if str(path.relative_to(ROOT)).startswith(only) for mutant in mutants_of(path)]
    listed = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    known = {(entry["file"], entry["code"], entry["change"]) for entry in listed}
    assert all(entry["reason"] for entry in listed)
    if not only and (gone := known - {mutant.name for mutant in found}):
        print(f"no longer in the code, take out of {EQUIVALENT.name}: {sorted(gone)}")
        return 2
    found = [mutant for mutant in found if mutant.name not in known]
    drawn = random.Random(seed).sample(found, min(number, len(found)))
    print(f"{len(drawn)} of {len(found)} mutants, seed {seed}; {len(known)} more are listed as equivalent", flush=True)
    survivors = []
    with tempfile.TemporaryDirectory() as temporary:
        copy, log = copied(Path(temporary) / "copy"), Path(temporary) / "log"
        for kind in dict.fromkeys(mutant.path for mutant in drawn):
            if not run(copy, tests_of(kind)[:depth], 4 * seconds, log):
                print(f"the tests of {kind} fail without a mutant:\n{log.read_text()}")
                return 2
        for index, mutant in enumerate(drawn, 1):
            target, begun = copy / mutant.path, time.monotonic()
            target.write_text(mutant.source, encoding="utf-8")
            passed = run(copy, tests_of(mutant.path)[:depth], seconds, log)
            shutil.copy(ROOT / mutant.path, target)
            survivors += [mutant] * passed
            word = "SURVIVED" if passed else "noticed"
            print(f"{index} {word} {time.monotonic() - begun:.1f} s {mutant if passed else mutant.path}", flush=True)
    score = 1 - len(survivors) / max(1, len(drawn))
    print(f"\n{len(drawn) - len(survivors)} of {len(drawn)} noticed: {100 * score:.1f} %, asked {100 * at_least:g} %")
    print("\n".join(str(mutant) for mutant in survivors))
    return int(score < at_least)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
