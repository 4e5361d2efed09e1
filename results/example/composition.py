"""Scores with allocations at equal bytes: runs the study, and makes its tables from the samples.

    python results/example/composition.py FOLDER [NAME=VALUE ...]      (make composition FOLDER=...)

Every score runs under every allocation at three budgets in bytes, and `random` at the same ones. One process reads each
prompt once for all of them. Run again, it goes on where it was ended; with all runs there it only makes the tables:
`composition.md` and `composition.csv` in the folder. With `tables=only` it runs nothing and tables what is there.

Settings: `items` questions of each of four kinds (35), `length` tokens of a prompt (512), `parts` of the full cache's
bytes ([0.5,0.25,0.125]), `scores` and `allocations` (those below), `rows` per batch (35), `model` (tiny: random
weights, to see that it works), `memory` for prompts (8GiB), `metric` of the tables (nll).
"""

import csv
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

import kvbench
from kvbench.cache.layout import ModelShape
from kvbench.cli.main import main as command
from kvbench.models.random_weights import random_config
from kvbench.results.record import RunRecord
from kvbench.sizing.shapes import find_shape

# Score -> the method that ranks by it, and settings without which its lists could not share a budget.
SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    "snapkv": ("snapkv", {}),
    "h2o": ("h2o", {}),
    "h2o once": ("h2o_factory", {}),
    "tova": ("tova", {"per_head": True}),
    "keydiff": ("keydiff", {}),
    "knorm": ("knorm", {}),
    "lagkv": ("lagkv", {}),
    "vatp": ("vatp", {}),
    "expected_attention": ("expected_attention", {}),
    "kvzip": ("kvzip", {}),
}
ALLOCATIONS = ("uniform", "pyramid", "ada", "ada_pyramid", "global")
TINY = "tiny"  # random weights
ALPHA = 0.2  # share of a list's budget that others cannot take, as Ada-KV has it
NEW_TOKENS = 32  # what an answer may add to a prompt, for the full cache that the parts are of
DEFAULTS: dict[str, Any] = {
    "items": 35,
    "length": 512,
    "parts": [0.5, 0.25, 0.125],
    "scores": list(SCORES),
    "allocations": list(ALLOCATIONS),
    "rows": 35,
    "model": "smollm2-135m",
    "memory": "8GiB",
    "metric": "nll",
    "tables": "too",
}


def settings_of(words: list[str]) -> dict[str, Any]:
    """The settings of a command line."""
    given = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}
    if unknown := set(given) - set(DEFAULTS):
        raise SystemExit(f"there is no setting {', '.join(sorted(unknown))}; there are {', '.join(DEFAULTS)}")
    for name, known in (("scores", SCORES), ("allocations", ALLOCATIONS)):
        if wrong := set(given.get(name, ())) - set(known):
            raise SystemExit(f"{name} has no {', '.join(sorted(wrong))}; there are {', '.join(known)}")
    return DEFAULTS | given


def budgets(asked: dict[str, Any]) -> dict[float, str]:
    """Part of the full cache -> the budget in bytes, as a method takes it."""
    shape = model_shape_of(asked["model"])
    whole = shape.fp16_bytes(asked["length"] + NEW_TOKENS)
    return {part: f"{int(part * whole)}B" for part in asked["parts"]}


def model_shape_of(name: str) -> ModelShape:
    """The shape that bytes are counted for."""
    if name != TINY:
        return find_shape(name).store_shape
    config = random_config(TINY)
    return replace(
        find_shape("smollm2-135m").store_shape,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


def runs(asked: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Method and settings of every run, those that share a score one after another."""
    amounts = list(budgets(asked).values())
    yield from (("random", {"budget": amount}) for amount in amounts)
    for score in asked["scores"]:
        method, own = SCORES[score]
        for allocation, amount in itertools.product(asked["allocations"], amounts):
            yield method, own | {"budget": amount, "allocation": allocation, "alpha": ALPHA}


def study(folder: Path, asked: dict[str, Any]) -> None:
    """Makes the runs that are not there yet."""
    shared = {"task.length": asked["length"], "task.items": asked["items"], "seed": 0, "batch_size": asked["rows"]}
    shared |= {"prompt_cache_bytes": asked["memory"]}
    model = "random" if asked["model"] == TINY else asked["model"]
    shared |= {"model.preset": TINY} if model == "random" else {}
    every = list(runs(asked))
    for number, (method, settings) in enumerate(every, 1):
        print(f"{number} of {len(every)}: {method} {settings}", flush=True)
        try:
            kvbench.run(method, task="longctx", model=model, results_dir=str(folder), settings=shared, **settings)
        except ValueError as error:  # its cell stays empty
            print(f"not run: {error}", flush=True)


def named(folder: Path) -> dict[str, tuple[str, str, str, float]]:
    """First digits of a run's hash -> its score, allocation and budget, and the bytes that it held, in percent."""
    by_method = {method: score for score, (method, _) in SCORES.items()} | {"random": "random"}
    found = {}
    for path in folder.glob("*/*/*/*/run.json"):
        record = RunRecord.load(path.parent)
        if record is None or record.method not in by_method:
            continue
        own = record.identity["method"]
        held = 100 * record.ledger.get("resident_ratio", float("nan"))
        found[record.hash[:12]] = (by_method[record.method], own["allocation"], own["budget"], held)
    return found


def compared(folder: Path, control: str, amount: str, metric: str) -> list[dict[str, str]]:
    """Every run at a budget beside the run of `random` with this hash, as `kvbench compare` has it."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "compare.csv"
        words = ["compare", f"against={control}", f"metric={metric}", f"where={{budget:{amount}}}", "regressions=0"]
        if code := command([*words, f"results_dir={folder}", f"out={out}"]):
            raise SystemExit(code)
        with out.open(newline="") as file:
            return list(csv.DictReader(file))


def tables(folder: Path, asked: dict[str, Any]) -> str:
    """Markdown: for every budget a table of scores by allocations, each cell the difference from `random`."""
    names, lines, rows = named(folder), [], []
    digits, factor = (2, 1.0) if asked["metric"] == "nll" else (1, 100.0)
    for part, amount in budgets(asked).items():
        cells: dict[tuple[str, str], str] = {}
        count = 0
        control = [known for known, (score, _, budget, _) in names.items() if (score, budget) == ("random", amount)]
        for row in compared(folder, control[0], amount, asked["metric"]) if control else ():
            if row["hash"] not in names or names[row["hash"]][2] != amount:
                continue
            score, allocation, _, held = names[row["hash"]]
            low, high = (f"{factor * float(row[end]):+.{digits}f}" if row[end] else "?" for end in ("low", "high"))
            mark = f" {row['verdict']}" if row["verdict"] in ("better", "worse", "equal") else ""
            said = f"{factor * float(row['difference']):+.{digits}f} [{low}, {high}]{mark}"
            cells[score, allocation] = f"{said} ({held:.1f})"
            count = max(count, int(row["n"]))
            rows.append({"part": part, "score": score, "allocation": allocation, "resident": held} | row)
        lines += [
            f"### {100 * part:g} % of the full cache's bytes (n={count})",
            "",
            f"| score | {' | '.join(asked['allocations'])} |",
            f"| --- |{' --- |' * len(asked['allocations'])}",
        ]
        for score in asked["scores"]:
            each = [cells.get((score, allocation), "") for allocation in asked["allocations"]]
            lines.append(f"| {score} | {' | '.join(each)} |")
        lines.append("")
    if rows:
        with (folder / "composition.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    head = (
        f"{asked['metric']} less that of `random` at the same budget, with its 95 % interval over questions and, in "
        "brackets, the bytes held in percent of an FP16 full cache.\n\n"
    )
    return head + "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    wanted, place = settings_of(sys.argv[2:]), Path(sys.argv[1])
    if wanted["tables"] != "only":
        place.mkdir(parents=True, exist_ok=True)
        (place / "composition.json").write_text(json.dumps(wanted, indent=1) + "\n")
        study(place, wanted)
    text = tables(place, wanted)
    (place / "composition.md").write_text(text)
    print(text)
