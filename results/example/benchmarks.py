"""Packs the runs of the study on real benchmarks, and makes its tables and pictures in the documents of them.

    python results/example/benchmarks.py pack FOLDER   # the complete runs below FOLDER, into results/example/benchmarks
    python results/example/benchmarks.py [PART ...]    # `make findings` does this

What is the benchmarks' own does not come along: right answers, ends of prompts, and answers, which repeat the problem;
nor do paths of the machine that ran them.
"""

import json
import lzma
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from findings import HERE, Row, markdown, picture, read, renew, run, write
from findings import STUDY as SMALL

from kvbench.cli.commands import compose_command
from kvbench.evidence.across import between
from kvbench.evidence.answer_traits import mean_of
from kvbench.evidence.load import Group, StoredRun, find_runs, load_groups
from kvbench.evidence.samples import measure
from kvbench.extensions.papers import published
from kvbench.results.lines import PACKED, journal_lines
from kvbench.results.measures import LENGTH, LOOPS, RESIDENT
from kvbench.results.record import RunRecord
from kvbench.results.sample import write_line
from kvbench.results.writing import write_atomic
from kvbench.show.terminal import p_text
from kvbench.sizing.stored import changed_settings
from kvbench.stats.repetition import ends_in_loop

STUDY = HERE / "benchmarks"
METRICS = ("score", "nll", "kl", "top1")
OWN = ("index", "task_id", "level", "subject")  # of a sample's facts; the others may be the benchmark's text
LEFT = ("gold", "drift")  # of a sample's entries: the right answer's text, and what no table has
ROUNDED = ("fidelity", "ledger", "kept", "timing")  # of them, to DIGITS: float32 has seven
DIGITS = 6
THERE = {"length": 512}  # of the small study's questions those that are the nearest to the benchmarks'
HELD = ("rotation", "key_offset")  # settings of the store that tell runs apart
NAMED = ("budget", "bits")  # settings that stand beside a method even where they are its configuration's
SETS = {"all settings of both": {}, "eviction to 50 % of the tokens": {"budget": 0.5}}
# Printed scores: share, problems, where.
PRINTED = {
    ("humaneval_plus", "qwen2.5-coder-0.5b"): (0.573, 164),
    ("humaneval_plus", "qwen2.5-coder-1.5b"): (0.665, 164),
}


def pack(source: Path, to: Path = STUDY, states: Sequence[str] = ("complete",)) -> None:
    """Copy every run in one of these states into the study; samples are packed, and each line is sealed anew."""
    for folder, record in find_runs(source, {}):
        if record.status not in states:
            print(f"{folder} is {record.status}, and is left out")
            continue
        lines = b"".join(
            write_line(_own(line.record), record.hash)
            for line in journal_lines(folder / "samples.jsonl", record.hash, is_sealed=record.sealed)
            if line.record is not None
        )
        target = to / folder.relative_to(source)
        target.mkdir(parents=True, exist_ok=True)
        stored = json.loads((folder / "run.json").read_text()) | {"drift": []}
        for session in stored["sessions"]:
            given = (word for word in session["command"] if word != "--config-dir")
            session["command"] = [word for word in given if not _is_path(word.rpartition("=")[2])]
        config = yaml.safe_load((folder / "config.yaml").read_text())
        write_atomic(target / f"samples.jsonl{PACKED}", lzma.compress(lines, preset=9 | lzma.PRESET_EXTREME))
        write_atomic(target / "run.json", json.dumps(stored, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        write_atomic(target / "config.yaml", yaml.safe_dump(_without_paths(config), sort_keys=False).encode())


def _own(record: Any) -> Any:
    """A sample without the benchmark's texts.

    Answers repeat the problem, so of one that ends in a loop only the equality of tokens is kept, of others the length.
    """
    kept = {name: _rounded(value) if name in ROUNDED else value for name, value in record.items() if name not in LEFT}
    facts = {name: value for name, value in record["meta"].items() if name in OWN}
    tokens, first = record["token_ids"], dict[int, int]()
    if not ends_in_loop(tokens):
        tokens = range(len(tokens))
    tokens = [first.setdefault(token, len(first)) for token in tokens]
    return kept | {"prompt": record["prompt"] | {"tail": ""}, "meta": facts, "text": "", "token_ids": tokens}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.strip("'\"").startswith("/")


def _without_paths(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: _without_paths(value) for key, value in settings.items() if key != "results_dir"}
    return None if _is_path(settings) else settings


def words(one: StoredRun) -> str:
    """Method and settings of a run as `method=` takes them today, which are the same in every version of the code."""
    stored = one.record.identity.get("method", {})
    changed = changed_settings(one.method, stored)
    own = [f"{key}={stored[key]}" for key in stored if key in changed or (key in NAMED and stored[key] is not None)]
    held = one.record.identity.get("store", {})
    return " ".join(
        [one.method, *own, *(f"store.{key}={held[key]}" for key in HELD if held.get(key, "none") != "none")]
    )


def models() -> list[str]:
    """Models of the study."""
    return sorted({path.name for path in STUDY.glob("*/*")})


def runs(folder: Path) -> None:
    """Every run by every measure, as its record and `compare` have it."""
    found = []
    for model, metric in product(models(), METRICS):  # each model is a family of Holm's correction
        asked = [f"metric={metric}", f"models={model}"]
        run("compare", *asked, "regressions=0", f"out={folder / 'compare.csv'}", study=STUDY)
        beside = {row["hash"]: row for row in read(folder / "compare.csv").to_dict("records")}
        for group in load_groups(compose_command("compare", [f"results_dir={STUDY}", *asked])):
            found += [_cells(group, one, metric, beside.get(one.record.hash[:12], {})) for one in group.runs]
    write(HERE / "benchmarks.csv", pd.DataFrame(found))


def _cells(group: Group, one: StoredRun, metric: str, beside: Row) -> dict[str, object]:
    record: RunRecord = one.record
    part, name = measure(metric, group).in_run or ("", "")
    held = getattr(record, part)[name]
    compared = "difference low high p_holm verdict lost gained longer longer_low longer_high".split()
    return {
        "task": group.task,
        "model": group.model,
        "run": words(one),
        "method": one.method,
        "metric": metric,
        "n": held.num_samples,
        "value": held.value,
        "value_low": held.low,
        "value_high": held.high,
        **{key: beside.get(key, "") for key in compared},
        "tokens": mean_of(one, LENGTH),
        "loops": mean_of(one, LOOPS),
        "resident": RESIDENT.of_run(record),
        "longest_tokens": max(sample["num_prompt_tokens"] for sample in one.samples.values()),
        "commit": record.git.commit,
        "machine": record.machine.device if record.machine else "",
        "date": record.started[:10],
    }


def pictures(folder: Path) -> None:
    """The frontier of each benchmark."""
    for path in sorted(STUDY.glob("*/*")):
        task, model = path.relative_to(STUDY).parts
        asked = [f"tasks={task}", f"models={model}", "axes=[resident]", "kinds=[png]", f"out={folder / task / model}"]
        run("report", "view=pareto", *asked, study=STUDY)
        picture(next((folder / task / model).glob("*_resident.png")), HERE / f"pareto_{task}_{model}.png")


def across(_: Path) -> None:
    """Whether tasks and models put the methods in the same order, as `report view=ranks` has it."""
    found = []
    for title, where in SETS.items():
        for metric in METRICS[:3]:
            asked = [
                compose_command("ranks", [f"metrics={metric}", f"results_dir={study}", _where(where | more)])
                for study, more in ((SMALL, THERE), (STUDY, {}))
            ]
            groups, cfg = [group for one in asked for group in load_groups(one)], asked[0]
            named = {group.title: group for group in groups}
            for one in between(groups, metric, cfg, key=words):
                first, second = (named[title] for title in one.titles)
                places = {"task": first.task, "model": first.model, "other_task": second.task}
                low, high = one.agreement.interval or ("", "")
                values = {"correlation": one.agreement.value, "low": low, "high": high}
                halves = dict(zip(("half", "other_half"), one.agreement.halves, strict=True))
                row = {"runs": title, "count": one.num_runs, "metric": metric, **places, "other_model": second.model}
                found.append(row | values | halves)
    if found:
        write(HERE / "across.csv", pd.DataFrame(found))
    else:  # too few methods in common, and an empty table cannot be read
        (HERE / "across.csv").unlink(missing_ok=True)


def _where(settings: dict[str, object]) -> str:
    return f"where={{{','.join(f'{name}:{value}' for name, value in settings.items())}}}"


PARTS = {part.__name__: part for part in (runs, pictures, across)}


def rows_of(name: str) -> list[Row]:
    """The rows of a CSV file of this folder; none before it was made."""
    path = HERE / f"{name}.csv"
    return read(path).to_dict("records") if path.is_file() else []


def shown(row: Row, names: tuple[str, str, str], scale: float = 100, form: str = ".1f") -> str:
    """A value with its interval; empty where there is none."""
    if not row.get(names[0]):
        return ""
    value, *ends = (format(scale * float(row[name]), form) if row[name] else "?" for name in names)
    return f"{value} [{', '.join(ends)}]"


VALUE, DIFFERENCE = ("value", "value_low", "value_high"), ("difference", "low", "high")
LONGER, CORRELATION = ("longer", "longer_low", "longer_high"), ("correlation", "low", "high")


def tables() -> Iterator[tuple[str, str]]:
    """Name and text of every table of the chapter."""
    every = sorted(rows_of("benchmarks"), key=lambda row: (row["task"], row["model"]))
    made, printed, papers = [], [], []
    for (task, model), group in groupby(every, key=lambda row: (row["task"], row["model"])):
        by_run: dict[str, dict[str, Row]] = {}
        for row in group:
            by_run.setdefault(row["run"], {})[row["metric"]] = row
        runs = sorted(by_run.values(), key=lambda own: float(own["score"]["resident"]))
        headings = "run|n|bytes, %|score, % [95 %]|score - full's [95 %]|p (Holm)|verdict|lost, gained"
        headings += "|KL to full, nats [95 %]|answer longer by, tokens [95 %]|loops, %"
        yield f"{task} with {model}", markdown(headings.split("|"), map(_line, runs))
        full = by_run["full"]["score"]
        scores = [own["score"] for own in runs]
        papers += sorted(_papers(task, model, scores), key=lambda cells: cells[3])
        commits = ", ".join(sorted({own["score"]["commit"][:8] for own in runs}))
        made.append([task, model, str(len(runs)), full["n"], commits, full["machine"], full["date"]])
        if (task, model) in PRINTED:
            share, problems = PRINTED[task, model]
            inside = float(full["value_low"]) <= share <= float(full["value_high"])
            cells = [task, model, f"{100 * share:.1f} ({problems} problems)", f"{shown(full, VALUE)} ({full['n']})"]
            printed.append([*cells, "yes" if inside else "no"])
    if made:
        yield "runs", markdown("task|model|runs|n|commit|machine|date".split("|"), made)
        headings = "task|model|printed, %|full cache here, % [95 %]|printed lies in the interval"
        yield "printed", markdown(headings.split("|"), printed)
        headings = "task|printed in|model there|method|memory there, %|score - full's, printed|model here|run here"
        yield "papers", markdown([*headings.split("|"), "bytes, %", "score - full's [95 %]"], papers)
    headings = "methods|between|how many|by score|by gold NLL|by KL|each score with itself"
    if rows_of("across"):
        yield "across", markdown(headings.split("|"), _orders())


def _papers(task: str, model: str, scores: list[Row]) -> Iterator[list[str]]:
    """Printed results of the same methods on the task, each with the run here whose bytes are nearest."""
    mine: dict[str, list[Row]] = {}
    for row in scores:
        if row["low"]:
            mine.setdefault(published.method_name(row["method"]), []).append(row)
    once = {point[1:]: point for point in reversed(published.points(task, [row["method"] for row in scores]))}
    for point in reversed(once.values()):  # LeanKV prints DiffKV's rows again, and comes behind it
        of_method = mine.get(published.method_name(point.method), ())
        of_bits = [row for row in of_method if _bits(row["run"]) in point.variant]
        far = {abs(100 * float(row["resident"]) - point.memory_pct): row for row in of_bits}
        if far:
            row = far[min(far)]
            there = [task, point.paper, point.model, f"{point.method} {point.variant}".strip(), f"{point.memory_pct:g}"]
            here = [model, row["run"], f"{100 * float(row['resident']):.1f}", shown(row, DIFFERENCE, form="+.1f")]
            yield [*there, f"{100 * point.difference:+.1f}", *here]


def _bits(run: str) -> str:
    """How a printed row names the bits of a run that has them as a setting; empty of another run."""
    found = re.search(r"bits=(\d)", run)
    return f"{found[1]}bit" if found else ""


def _line(own: dict[str, Row]) -> list[str]:
    score, beside = own["score"], ["", "", "", ""]  # the full cache is not beside itself
    if score["p_holm"]:
        changed = f"{score['lost']}, {score['gained']}"
        beside = [shown(score, DIFFERENCE, form="+.1f"), p_text(float(score["p_holm"])), score["verdict"], changed]
    cells = [score["run"], score["n"], f"{100 * float(score['resident']):.1f}", shown(score, VALUE), *beside]
    cells += [shown(own["kl"], VALUE, 1, ".3f"), shown(score, LONGER, 1, "+.0f")]
    return [*cells, f"{100 * float(score['loops']):.1f}"]


def _orders() -> Iterator[list[str]]:
    """A line for each set of runs and pair of places."""
    places = ("task", "model", "other_task", "other_model")
    found: dict[tuple, dict[str, Row]] = {}
    for row in rows_of("across"):
        found.setdefault((row["runs"], *(row[name] for name in places)), {})[row["metric"]] = row
    for (title, task, model, other_task, other_model), by in found.items():
        score = by["score"]
        pair = f"{task} ({model}) and {other_task} ({other_model})"
        halves = [f"{float(score[name]):.2f}" if score[name] else "?" for name in ("half", "other_half")]
        each = [shown(by[metric], CORRELATION, 1, "+.2f") if metric in by else "" for metric in METRICS[:3]]
        yield [title, pair, score["count"], *each, ", ".join(halves)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["pack"]:
        pack(Path(sys.argv[2]))
        sys.exit()
    for part in sys.argv[1:] or (PARTS if STUDY.is_dir() else ()):
        with tempfile.TemporaryDirectory() as name:
            PARTS[part](Path(name))
    renew(tables())
