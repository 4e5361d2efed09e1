"""Runs the study of docs/study.md in stages, and leaves a method out once it is shown to be worse.

    python results/example/mission.py run TASK DATA FOLDER [WORD ...]   # a benchmark of a suite; again, it goes on
    python results/example/mission.py simulate                          # the error of the rule that stops a method
    python results/example/mission.py pack FOLDER                       # what is there, whole runs or not, to commit
    python results/example/mission.py unpack FOLDER                     # the reverse, to go on from on another machine

DATA holds the benchmarks' files. A WORD goes to every run, and `suite=NAME` names another suite than `mission`.
Programs that the model writes are run.
"""

import csv
import json
import lzma
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import yaml
from scipy.stats import binomtest

import kvbench as kb

HERE = Path(__file__).resolve().parent
SUITES = HERE.parents[1] / "kvbench" / "extensions" / "suite" / "conf" / "suite"
PACKED = HERE / "mission"
# Answers of every method at each look.
LOOKS = {"humaneval_plus": (40, 80), "gsm8k": (40, 80), "math500": (35, 70)}
# Its primary measure, by name: a run that was stopped has none in its record, of which `score` is taken.
MEASURES = {"humaneval_plus": "plus", **dict.fromkeys(("gsm8k", "math500", "aime24"), "correct")}
MEASURES |= dict.fromkeys(("longbench", "longctx"), "score")
STOP = 0.005  # at a look, of the p value times the number of methods; what is left of 0.05 is for the end
FLOOR = 0.1  # of the full cache's score at the first look: below it a benchmark tells nothing of this model
POLL_S = 15.0
# Of settings whose keys are rotated as they are read, in plain torch on a CPU. They go by themselves: runs that go
# together take their steps in turns, and these take most of the time.
SLOW = "method.pre_rope=true"
# Of what tells the settings of a suite apart.
DEFAULTS = {"method.seed": "0", "method.pre_rope": "false", "store.key_offset": "none", "store.rotation": "none"}


def settings(suite: str) -> list[str]:
    """Words of each setting of a suite, without commas."""
    lines = yaml.safe_load((SUITES / f"{suite}.yaml").read_text())["methods"]
    return [" ".join(words) for line in lines for words in product(*map(_choices, shlex.split(line)))]


def _choices(word: str) -> list[str]:
    key, _, values = word.partition("=")
    return [f"{key}={value}" for value in values.split(",")]


def find(runs: Sequence[dict], words: str) -> dict | None:
    """The stored run of a setting, or None; a setting that tells settings apart and is not named has its default."""
    wanted = DEFAULTS | dict(word.split("=", 1) for word in words.split())
    for one in runs:
        if all(_text(one.get(key), DEFAULTS.get(key)) == value for key, value in wanted.items()):
            return one
    return None


def _text(value: object, default: str | None) -> str:
    """Text of a cell; a table has NaN where only others have the setting, and then holds whole numbers as floats."""
    if value is None or value != value:
        return str(default)
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def run(task: str, data: str, folder: Path, words: Sequence[str]) -> int:
    """Run a benchmark up to each look, then to its end, with the settings that are left."""
    suite = next((word.partition("=")[2] for word in words if word.startswith("suite=")), "mission")
    every = settings(suite)
    ledger = folder / f"stopped_{suite}_{task}.csv"
    for look in (*LOOKS.get(task, ()), None):
        stopped = {row["setting"] for row in _read(ledger)}
        if "method=full" in stopped:  # the benchmark was given up
            return 0
        left = [words for words in every if words not in stopped]
        for part in ([one for one in left if SLOW not in one], [one for one in left if SLOW in one]):
            if part and not _reach(_command(suite, task, data, folder, part, words), folder, task, part, look):
                return 1
        if look is not None and not _look(folder, look, ledger).is_file():  # a second look would be one more chance
            _decide(folder, task, every, left, look, ledger)
    return 0


def _command(suite: str, task: str, data: str, folder: Path, left: Sequence[str], words: Sequence[str]) -> list[str]:
    methods = json.dumps(left, separators=(",", ":"))
    mine = [f"tasks=[{task}]", f"methods={methods}", f"data_dir={data}", f"results_dir={folder}"]
    others = [word for word in words if not word.startswith("suite=")]
    return [sys.executable, "-m", "kvbench", f"suite={suite}", *mine, "allow_code_execution=true", *others]


def _reach(command: Sequence[str], folder: Path, task: str, left: Sequence[str], look: int | None) -> bool:
    """Run until every setting that is left has so many answers, or to the end; False where the command failed."""
    if look is not None and _fewest(folder, task, left) >= look:
        return True
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            if look is not None and _fewest(folder, task, left) >= look:
                process.terminate()  # every finished answer is kept
                process.wait()
                return True
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    return process.returncode == 0


def _stored(folder: Path, task: str) -> list[dict]:
    if not (folder / task).is_dir():
        return []
    return [row for row in kb.load(folder).to_dict("records") if row["task"] == task]


def _fewest(folder: Path, task: str, left: Sequence[str]) -> int:
    runs, counts = _stored(folder, task), []
    for words in left:
        one = find(runs, words)
        path = Path(one["folder"]) / "samples.jsonl" if one else None
        counts.append(path.read_bytes().count(b"\n") if path and path.is_file() else 0)
    return min(counts)


def _look(folder: Path, look: int, ledger: Path) -> Path:
    """Where the comparison that a look decided by lies."""
    return folder / f"look_{look}_{ledger.stem}.csv"


def _decide(folder: Path, task: str, every: Sequence[str], left: Sequence[str], look: int, ledger: Path) -> None:
    """Write down which settings stop at a look, and the benchmark itself where the full cache is at the floor."""
    out = _look(folder, look, ledger)
    words = [
        "compare",
        f"metric={MEASURES[task]}",
        "regressions=0",
        f"results_dir={folder}",
        f"tasks={task}",
        f"out={out}",
    ]
    subprocess.run([sys.executable, "-m", "kvbench", *words], check=True, stdout=subprocess.DEVNULL)
    by_hash = {row["hash"][:12]: row for row in _read(out)}
    runs, rows, tests = _stored(folder, task), _read(ledger), len(every) - 1
    for words in left:
        one = find(runs, words)
        row = by_hash.get(one["hash"][:12]) if one else None
        if words == "method=full" and one is not None and _mean(Path(one["folder"]), MEASURES[task]) < FLOOR:
            rows.append({"setting": words, "look": look, "n": one["num_samples"], "p": "", "lost": "", "gained": ""})
        elif row and float(row["difference"]) < 0 and tests * float(row["p"]) <= STOP:
            rows.append({"setting": words, "look": look, **{key: row[key] for key in ("n", "p", "lost", "gained")}})
    with ledger.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["setting", "look", "n", "p", "lost", "gained"])
        writer.writeheader()
        writer.writerows(rows)


def _mean(folder: Path, name: str) -> float:
    """Mean of a measure over the answers of a run."""
    answers = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return float(np.mean([answer["scores"][name] for answer in answers if answer["status"] == "ok"]))


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def simulate(trials: int = 4000, seed: int = 0) -> Iterator[str]:
    """Share of studies with a false `worse`, where no method loses anything, by the share of answers that change."""
    draws = np.random.default_rng(seed)
    for tests, size, looks in ((29, 120, (40, 80)), (29, 100, (35, 70)), (8, 80, (40,))):
        known = {
            n: np.array([binomtest(k, n).pvalue for k in range(n + 1)]) if n else np.ones(1) for n in range(size + 1)
        }
        for changed in (0.05, 0.1, 0.2, 0.4):
            kinds = draws.choice([0, 1, -1], (trials, tests, size), p=[1 - changed, changed / 2, changed / 2])
            worse = {}
            for n in (*looks, size):
                lost, gained = (kinds[..., :n] == 1).sum(-1), (kinds[..., :n] == -1).sum(-1)
                p = np.array([known[int(n)][int(k)] for n, k in zip((lost + gained).flat, lost.flat, strict=True)])
                worse[n] = np.where(lost > gained, p.reshape(lost.shape), 1.0)
            at_looks = np.any([tests * worse[n] <= STOP for n in looks], axis=0).any(-1)
            at_end = (tests * worse[size] <= 0.05).any(-1)
            yield f"{tests} methods, {size} problems, {changed:.0%} of answers change: stopped wrongly in " + (
                f"{at_looks.mean():.2%} of studies, any false `worse` in {(at_looks | at_end).mean():.2%}"
            )


def pack(source: Path) -> None:
    """Pack all runs, and the ledgers of what was stopped."""
    from benchmarks import pack as pack_runs

    pack_runs(source, PACKED, states=("complete", "running", "stopped"))
    for path in source.glob("stopped_*.csv"):
        (PACKED / path.name).write_bytes(path.read_bytes())


def unpack(target: Path) -> None:
    """Put packed runs where a study goes on from them; what is there already stays."""
    for path in sorted(PACKED.rglob("*")):
        to = target / path.relative_to(PACKED)
        to = to.with_suffix("") if path.suffix == ".xz" else to
        if path.is_file() and not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", task, data, folder, *words]:
            sys.exit(run(task, data, Path(folder), words))
        case ["simulate"]:
            print(*simulate(), sep="\n", flush=True)
        case ["pack" | "unpack" as what, folder]:
            {"pack": pack, "unpack": unpack}[what](Path(folder))
        case _:
            sys.exit(__doc__)
