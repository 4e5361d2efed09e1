"""The study of docs/findings.md: its tables are those of its files, and its files those of its samples."""

import csv
import importlib.util

import pytest
from places import ROOT

from kvbench.cli.commands import compose_command
from kvbench.evidence.load import load_groups
from kvbench.evidence.pareto import panels_of
from kvbench.results.record import RunRecord
from kvbench.results.sample import read_samples

EXAMPLE = ROOT / "results" / "example"
STUDY = EXAMPLE / "study"
MOST_BYTES = 5_000_000
RUN = "snapkv budget=0.25 tier=fp16"


def script():
    """results/example/findings.py, as a module."""
    spec = importlib.util.spec_from_file_location("findings", EXAMPLE / "findings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_files():
    """`make findings` would leave the document as it is."""
    text = (ROOT / "docs" / "findings.md").read_text()
    assert script().put(text) == text


@pytest.mark.parametrize("metric", ["nll", "partial"])
def test_the_files_are_those_of_the_samples(metric):
    """Means, intervals, bytes and n of a method's runs, computed again from the packed samples."""
    words = [f"results_dir={STUDY}", f"metric={metric}", "methods=[snapkv]", "where={budget:0.25,tier:fp16}"]
    cfg = compose_command("pareto", words)
    panels = panels_of(load_groups(cfg), cfg)
    with (EXAMPLE / "measures.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == RUN and row["metric"] == metric]
    assert len(rows) == len(panels) == 3 and rows[-1]["n"] == "200"
    for row, panel in zip(rows, panels, strict=True):
        (point,) = (point for point in panel.points if point.method == "snapkv")
        assert (row["group"], int(row["n"])) == (panel.title, panel.num_samples)
        found = [point.score, point.quality, *point.interval, point.costs["resident"].value]
        stored = [float(row[key]) for key in ("value", "difference", "low", "high", "resident")]
        assert stored == pytest.approx(found, abs=1e-9)


def test_every_sample_is_there():
    """All runs are complete, over 200 questions of four kinds; those of one method are read to the last line."""
    asked = {}
    for path in STUDY.glob("*/*/*/*/run.json"):
        run = RunRecord.load(path.parent)
        assert run.status == "complete" and run.counts.ok == run.counts.total, path
        asked.setdefault(run.protocol["length"], set()).add(run.counts.total)
    assert asked == {512: {140}, 1024: {60}}
    questions = set()
    for path in (STUDY / "longctx" / "smollm2-135m" / "snapkv").glob("*/run.json"):
        run = RunRecord.load(path.parent)
        samples, damaged = read_samples(path.with_name("samples.jsonl"), run.hash)
        assert not damaged and len(samples) == run.counts.total
        questions |= {(record["subset"], record["sample_id"], *record["gold"]) for record in samples.values()}
    assert len(questions) == 200 and {subset for subset, *_ in questions} == {"multikey", "kv", "recall", "passkey"}


def test_the_example_is_small():
    """The committed part of the study stays a small part of a checkout."""
    assert sum(path.stat().st_size for path in EXAMPLE.rglob("*") if path.is_file()) < MOST_BYTES
