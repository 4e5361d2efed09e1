"""Hostile input through kvbench: nothing is written elsewhere, hangs, ends in a traceback, changes a number without a
word, or is lost or passed over.

    python -m hostile.trials 300 --seed 0         # make hostile

Each case is drawn from a seed: a folder of hostile input, and commands that read it. They run in a child that has the
libraries already, in a folder, home and environment of their own, in bounded time and memory. The child cannot write
outside of that folder: whoever tries is stopped, and has failed. What they leave behind is compared with what was there
before.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hostile import families, folders, inputs, models, own_code, rows, runs
from hostile.case import Case
from hostile.child import SECRET, carry_out, command, new_place
from refusals import ERROR

FAMILIES: dict[Callable[[random.Random, Path, Path], Case], int] = {  # and how many cases of each, more or less
    **dict.fromkeys((runs.record, runs.lines, runs.config, own_code.method, inputs.settings), 14),
    **dict.fromkeys((runs.words, rows.golds, families.config_json), 11),
    **dict.fromkeys((folders.foreign, folders.formats), 11),
    **dict.fromkeys((own_code.helpers, rows.fields), 13),
    **dict.fromkeys((runs.files, inputs.data, models.model_folder, models.template, inputs.paths), 9),
    **dict.fromkeys((models.gguf, inputs.calibration), 7),
    **dict.fromkeys((inputs.table, own_code.task, runs.sweep), 4),
}
# Words with which a reader says that not everything is as it should be.
NOTED = re.compile(
    r"left out|do not count|incomplete|was complete|answers that the run had|not sealed|FAILED|dropped|"
    rf"{ERROR}|nothing to|unreadable|NOT what was asked|another hash|was .*, is |are the same, times apart|"
    r"\d+/\d+ samples|cannot be|no finished sample|unknown number|\d (?:failed|stopped|running|lost|unfinished)"
)
TRACES = ("Traceback (most", "fault of kvbench", "Error in sys.", "Exception ignored")


def case_of(seed: int, folder: Path, base: Path, only: str = "") -> Case:
    """The case of a seed; its hostile input is written into `folder`.

    Args:
        base: Folder with what cases share: untouched results, and a small model.
        only: The family that it is of, by its name; else the seed draws one.
    """
    draw = random.Random(seed)
    (new_place(folder) / "outside" / "dir").mkdir(parents=True)
    for name in ("outside/victim", "outside/dir/victim.jsonl", "in/victim", "home/victim"):
        (folder / name).write_text("untouched\n")
    among = {family: weight for family, weight in FAMILIES.items() if only in ("", family.__name__)}
    family = draw.choices(list(among), weights=among.values())[0]
    case = family(draw, folder / "in", base)
    case.what = f"{family.__name__}: {case.what}"
    return case


def tree(folder: Path, named: list[str]) -> dict[str, tuple]:
    """Everything in a folder but what was named: kind and permissions, and the content of files."""
    found = {}
    for top, inner, files in os.walk(folder):
        for name in [*inner, *files]:
            path = Path(top) / name
            where = path.relative_to(folder).as_posix()
            if any(where == one or where.startswith(f"{one}/") for one in named):
                continue
            mode = path.lstat().st_mode
            content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
            content = os.readlink(path) if stat.S_ISLNK(mode) else content
            found[where] = (mode, content)
    return found


def leaks(folder: Path) -> list[str]:
    """Files that hold the secret of the environment."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path.relative_to(folder)) for path in files if SECRET.encode() in path.read_bytes()]


def untouched(base: Path, words: list[str]) -> list[str]:
    """The lines that a command says over the untouched results; kept beside them."""
    kept = base / "said" / (hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16] + ".json")
    if not kept.exists():
        with tempfile.TemporaryDirectory() as place:
            folder = new_place(Path(place))
            shutil.copytree(runs.untouched(base), folder / "in" / "results")
            how, [(_, text)] = carry_out(folder, [command(*words)])
        assert not how, (words, how, text)
        kept.parent.mkdir(exist_ok=True, parents=True)
        kept.write_text(json.dumps(text.splitlines()))
    return json.loads(kept.read_text())


def carried_out(case: Case, folder: Path) -> tuple[list[str], str, list[tuple[str, str]]]:
    """Carry a case out: what it changed that it does not name, how a child ended where that was not by itself, and the
    exit code of each command and what it said."""
    free, jobs = [*case.named, "tmp", "home/cache"], [command(*words) for words in case.commands]
    found: list[str] = []
    how, said = "", []
    for part in [jobs] if case.between is None else [jobs[:-1], jobs[-1:]]:
        if said and case.between is not None:
            case.between()
        before = tree(folder, free)
        ended, told = carry_out(folder, part)
        how, said = how or ended, [*said, *told]
        after = tree(folder, free)
        names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        found += [f"{name!r} was changed, made or removed" for name in names]
    return found, how, said


def faults_of(case: Case, folder: Path, base: Path) -> list[str]:
    """Carry a case out; what went wrong."""
    found, how, said = carried_out(case, folder)
    found += [f"{name!r} holds a variable of the environment" for name in leaks(folder)]
    reached = [(shown(words), *ending) for words, ending in zip(case.commands, said, strict=True)]
    if how:
        return [*found, f"{how}: {''.join(text for *_, text in reached)[-2000:]}"]
    for told in reached:
        found += manners(*told, guest=case.guest)
    words, code, text = reached[0]
    if case.wants == "refused" and code == "0":
        found.append(f"{words} is not refused: {text[-500:]}")
    if case.wants in ("refused", "named") and code != "0" and not any(word in text for word in case.says or ("",)):
        found.append(f"{words}: the refusal names none of {case.says}: {text[-500:]}")
    if case.wants == "once" and len(list((folder / "in" / "results").glob("*/*/[!f]*/*"))) > 1:
        found.append("one run has two hashes")
    if case.wants == "seen":
        for (words, code, text), asked in zip(reached, case.commands, strict=True):
            if code == "0" and (lines := changed(text.splitlines(), untouched(base, asked))):
                found.append("\n  ".join([f"{words} says something else without a word:", *lines]))
    return found + ([] if case.check is None else case.check(said))


def shown(words: list[str]) -> str:
    """A command on one line."""
    return " ".join(words).encode("unicode_escape").decode()[:150]


def manners(words: str, code: str, text: str, guest: bool) -> Iterator[str]:
    """What is wrong with how a command ended and what it said."""
    traces = TRACES[1:] if guest and re.search(f"{ERROR}.+ raised ", text) else TRACES
    if any(word in text for word in traces):
        yield f"{words}: a traceback: {text[-2000:]}"
    elif code == "130" and "stopped by SIGINT" in text:  # a method that raises KeyboardInterrupt is Ctrl-C to everybody
        return
    elif (
        code not in ("0", "1", "2")
        or (code == "2" and not re.search(ERROR, text))
        or (code == "1" and not text.strip())
    ):
        yield f"{words}: exit {code} without a word: {text[-500:]}"
    if SECRET in text:
        yield f"{words}: a variable of the environment is shown"
    if found := re.search(r"[^\n]{,80}[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f].{,80}", text):
        yield f"{words}: control characters reach the terminal: {found[0]!r}"


def changed(lines: list[str], usual: list[str]) -> list[str]:
    """Lines that are other than usual, where no line says why; one of slow work (`said_when_slow`) says nothing."""
    lines, usual = ([line for line in one if not line.endswith(" ...")] for one in (lines, usual))
    fresh, lost = ([line for line in one if line not in other] for one, other in ((lines, usual), (usual, lines)))
    words, before = (
        sorted(re.sub(r"[\d.]+ tokens/s|\d{4}-\d\d-\d\dT[-:+\d]+|,", " ", " ".join(one)).split())
        for one in (lines, usual)
    )
    if words == before or any(map(NOTED.search, fresh)):  # the order may be another, and the speed and the date
        return []
    return [f"{sign} {line}" for sign, some in (("-", lost), ("+", fresh)) for line in some[:8]]


def several(seeds: Iterable[int], folder: Path, times: bool = False, only: str = "") -> int:
    """Carry out the cases of some seeds and say what fell.

    Args:
        folder: An empty one, in which they are carried out.
        times: Say of each case what it was, and how long it took.
        only: Family of all of them; else each seed draws one.

    Returns:
        How many fell.
    """
    base, fell = folder.resolve() / "base", 0
    for seed in seeds:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=folder) as place:
            case = case_of(seed, Path(place).resolve(), base, only)
            faults = faults_of(case, Path(place).resolve(), base)
        fell += bool(faults)
        for fault in faults:
            print(f"seed {seed}: {case.what!r}\n  {fault}", flush=True)
        if times:
            print(f"{seed} {time.monotonic() - begin:.1f} s {case.what!r}", flush=True)
    return fell


def main_trials(argv: list[str]) -> int:
    """Carry out the cases and say what fell."""
    from killed_sweep import warm

    parser = argparse.ArgumentParser(description="Hostile input through kvbench.")
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case; the others follow")
    parser.add_argument("--times", action="store_true", help="say what each case was, and how long it took")
    names = [family.__name__ for family in FAMILIES]
    parser.add_argument("--only", choices=names, default="", help="draw from this family alone")
    asked = parser.parse_args(argv)
    warm()
    with tempfile.TemporaryDirectory() as folder:
        fell = several(range(asked.seed, asked.seed + asked.count), Path(folder), asked.times, asked.only)
    print(f"{asked.count} cases from seed {asked.seed}: {fell} fell")
    return int(bool(fell))


if __name__ == "__main__":
    sys.exit(main_trials(sys.argv[1:]))
