"""The auditor: made tables, right and wrong, and what it finds in the papers."""

import pandas as pd
import pytest
from omegaconf import DictConfig
from stored import store, yes_no

from kvbench.cli.main import main
from kvbench.evidence import audit, published
from kvbench.evidence.dead_settings import dead_settings
from kvbench.evidence.load import load_groups

COLUMNS = ("task", "metric", "printed")


def table(*rows, **common):
    """Printed rows as `published.rows()` has them: task, metric, printed value, and what differs from the usual."""
    usual = {"paper": "P", "locator": "Table 1", "model": "M", "method": "X", "variant": "v", "unit": "points"}
    usual |= {"memory_pct": float("nan"), "memory_kind": "unstated", "conditions": ""} | common
    found = [usual | dict(zip(COLUMNS, row[:3], strict=True)) | (row[3] if len(row) > 3 else {}) for row in rows]
    return pd.DataFrame([row | {"value": float(row["printed"])} for row in found])


def said(found, kind=None):
    """What the auditor says of a table: kind and arithmetic."""
    return [(one.kind, one.arithmetic) for one in audit.audit(found) if kind in (None, one.kind)]


def averaged(printed, *cells):
    """A line of cells with its average."""
    mean = ("avg3", "mean_printed", printed)
    return table(*((f"task {n}", "accuracy", cell) for n, cell in enumerate(cells)), mean)


@pytest.mark.parametrize(
    ("printed", "cells"),
    [
        ("2.0", ("1.0", "2.0", "3.0")),
        ("2.1", ("1.0", "2.0", "3.0")),  # cells may be 0.05 more, each, and the mean 2.05
        ("5.0", ("1.0", "2.0")),  # a cell is missing: nothing can be said
        ("33.33", ("33.33", "33.34", "33.33")),
    ],
)
def test_averages_within_rounding_are_no_findings(printed, cells):
    """A printed number stands for all that round to it, of which some are as large as can be."""
    assert not said(averaged(printed, *cells))


def test_a_wrong_average_is_shown_with_its_sum():
    """Beyond rounding the sum is printed, whether it was cut off, and which other lines lie between."""
    assert not said(averaged("2.4", "1.0", "2.0", "4.0")), "7 / 3 = 2.33 may be 2.38, and 2.4"
    ((kind, text),) = said(averaged("2.6", "1.0", "2.0", "4.0"))
    assert kind == "average" and text == "1.0 + 2.0 + 4.0 = 7.00; / 3 = 2.3333, so 2.3"
    ((_, text),) = said(averaged("41.2", "41.27", "41.27", "41.27"))
    assert text.endswith("41.2700, so 41.3: cut off, not rounded")
    lines = pd.concat([averaged("9.00", "9.50", "9.50", "9.50"), averaged("9.20", "9.20", "9.20", "9.20")])
    lines["variant"] = ["v"] * 4 + ["w"] * 4
    ((_, text),) = said(lines.reset_index(drop=True))
    assert text.endswith("Between the two lie X w (9.20)")


def test_fractions_need_the_number_of_answers():
    """57.3 % of 164 is 94 right; 57.6 is between two; five runs can give it; without a number nothing is said."""
    once = {"conditions": "runs=1"}
    assert round(100 * 94 / 164, 1) == 57.3 and not said(table(("HumanEval+", "accuracy", "57.3", once)))
    ((kind, text),) = said(table(("HumanEval+", "accuracy", "57.6", once)))
    assert kind == "fraction" and "94 / 164 = 57.32 % and 95 / 164 = 57.93 %" in text
    assert not said(table(("HumanEval+", "accuracy", "57.6", {"conditions": "weights=FP16;runs=5"})))
    assert not said(table(("HumanEval+", "accuracy", "57.6"))) and not said(table(("TREC", "accuracy", "57.6")))


def test_sentences_are_held_to_their_table():
    """Means, ranges and losses: one reading that holds is enough, a bound is none, and only the named table counts."""
    full = {"method": "Full"}
    cells = [("a", "accuracy", "50.0", {"memory_pct": 20.0}), ("a", "accuracy", "60.0", full)]
    cells += [("b", "accuracy", "79.0", {"memory_pct": 30.5}), ("b", "accuracy", "80.0", full)]
    text = {"locator": "Sec 1", "model": "all", "unit": "%"}

    def found(task, metric, printed, **more):
        return said(table(*cells, (task, metric, printed, text | more)), "prose")

    low, high = {"conditions": "bound=range_low"}, {"conditions": "bound=range_high"}
    assert not found("Table 1 range", "memory_share", "20.0", **low)
    assert not found("Table 1 range", "memory_share", "30.5", **high) and not found(
        "Table 2 mean", "memory_share", "9.0"
    )
    assert not found("Table 1 mean", "memory_share", "25.2")  # 25.25
    assert found("Table 1 range", "memory_share", "21.0", **low)[0][1].endswith("M on a (Table 1) = 20")
    assert found("Table 1 mean", "memory_share", "27.0") == [("prose", "(20 + 30.5) / 2 = 25.25")]
    # 16.7 % and 1.25 %: mean 8.96 %, of the means 11 / 140 = 7.86 %, 5.5 points.
    for printed in ("9.0", "7.9", "5.5"):
        assert not found("Table 1 mean", "accuracy_loss", printed)
    assert "= 7.857" in found("Table 1 mean", "accuracy_loss", "12.0")[0][1]
    assert not found("a", "accuracy_loss", "16.7") and "(60.0 - 50.0) / 60.0" in found("a", "accuracy_loss", "19")[0][1]
    assert not found("a", "accuracy_loss", "30.0", conditions="bound=lt")
    assert not found("a", "share_of_full_cache_score", "83.3", variant="v")
    assert found("a", "share_of_full_cache_score", "93.3", variant="v") == [("prose", "100 x 50.0 / 60.0 = 83.33")]


def test_columns_that_are_not_the_highest_are_counted():
    """Among settings with the same budget; a tie may be counted or not."""
    mine, other = {"variant": "C=8 own"}, {"method": "Y", "variant": "C=8"}
    rows = [("a", "f1", "5.0", mine), ("a", "f1", "6.0", other), ("b", "f1", "5.0", mine), ("b", "f1", "5.0", other)]
    rows.append(("a", "f1", "9.0", {"method": "Z", "variant": "C=16"}))
    text = {"locator": "Sec 1", "unit": "subsets", **mine}
    for count, is_wrong in (("0", True), ("1", False), ("2", False), ("3", True)):
        assert bool(said(table(*rows, ("T", "subsets_not_highest", count, text)), "prose")) == is_wrong


def test_rows_that_are_there_twice():
    """The same row, one cell with two values, and two settings with the same cells; a few may be equal by chance."""
    assert said(table(("a", "f1", "5.0"), ("a", "f1", "5.0"))) == [("duplicate", "X v, a: 5.0 in 2 rows")]
    assert said(table(("a", "f1", "5.0"), ("a", "f1", "5.1"))) == [("duplicate", "X v, a: 5.0 and 5.1 in 2 rows")]
    for count, is_found in ((5, False), (6, True)):
        each = [(f"t{n}", "f1", f"{n}.0", {"variant": name}) for name in ("v", "w") for n in range(count)]
        assert bool(said(table(*each))) == is_found
        each[-1] = (*each[-1][:2], "77.0", each[-1][3])
        assert not said(table(*each))


def test_nominal_bytes():
    """Bits alone, one label of two budgets, gigabytes of another share, and half of the memory with no more room."""
    half = {"memory_pct": 25.0, "memory_kind": "nominal"}
    assert said(table(("a", "f1", "5.0", half | {"conditions": "bits=4;group=32"}))) == []
    ((_, text),) = said(table(("a", "f1", "5.0", half | {"conditions": "bits=4;group=unstated"})))
    assert text.startswith("4 / 16 bits = 25 %;") and text.endswith("(4 + 32 / 128) / 16 = 26.6 %")
    words = "budget=C*2*{} KVs total;C=64"
    budgets = [("a", "f1", "5.0", {"conditions": words.format(n), "method": f"m{n}"}) for n in (8, 4)]
    ((_, text),) = said(table(*budgets))
    assert text == "m8: 64 x 2 x 8 = 1,024; m4: 64 x 2 x 4 = 512: a factor of 2, at every C"
    assert not said(table(budgets[0]))
    sizes = [("run", "kv_cache_size", "2.4", {"method": "Full", "unit": "GB"})]
    sizes.append(("run", "kv_cache_size", "0.33", {"unit": "GB", "memory_pct": 13.75}))
    assert not said(table(*sizes))
    sizes[1][3]["memory_pct"] = 15.0
    assert said(table(*sizes)) == [("bytes", "0.33 / 2.4 GB = 13.8 % (rounding allows 13.3 to 14.3)")]
    # 15 % of 9,000 prompt tokens are 13.5 % of all 10,000, where the paper says that it counts those of the prompt.
    for row in sizes:
        row[3]["task"] = "9000 prompt + 1000 generated"
    assert said(table(*sizes)) and not said(
        table(*((*row[:3], row[3] | {"conditions": "memory_basis=prompt-token budget"}) for row in sizes))
    )
    room = [("t", "batch_size", "2.7", {"locator": "Sec 7", "method": name}) for name in ("Full", "X")]
    cell = ("a", "f1", "5.0", {"memory_pct": 50.0})
    ((_, text),) = said(table(*room, cell))
    assert text.endswith("50 % of it would leave room for 2 times as many keys and values")
    room[1] = (*room[1][:2], "2.8", room[1][3])
    assert not said(table(*room, cell))


def test_findings_of_the_papers():
    """What is found in the four papers, each recomputed by hand (docs/evidence.md); every printed average is judged."""
    found = audit.audit(published.rows())
    assert [(one.where, one.words.split(" is printed as ")[1][:5]) for one in found if one.kind == "average"] == [
        ("KV-Compress, Table 1, Llama-3.1-8B-Instruct", "46.30"),
        ("MiniKV, Table 1, Mistral-7B-Instruct-v0.2", "41.2,"),
        ("MiniKV, Table 1, Mistral-7B-Instruct-v0.2", "38.4,"),
    ]
    assert "776.59; / 16 = 48.5369" in found[0].arithmetic and "KVC C=512 w8-L2 (47.69)" in found[0].arithmetic
    judged = published.rows()[lambda rows: rows["metric"] == audit.AVERAGE]
    sizes = published.rows().groupby(audit.LINE)["task"].count()
    for row in judged.itertuples():
        assert row.task.endswith(f"{sizes[row.paper, row.locator, row.model, row.method, row.variant] - 1}")
    assert len(judged) == 62
    parts = [(one.where.split(",")[0], one.words) for one in found if one.kind == "fraction"]
    shares = {(paper, words.split(" is ")[1].split(" %")[0]) for paper, words in parts}
    wrong = {"75.5", "64.3", "67.0", "61.6", "20.2", "51.0", "42.3", "18.2"}
    assert shares == {("DiffKV", value) for value in wrong} | {("LeanKV", "75.5"), ("LeanKV", "64.3")}
    prose = [(one.where.split(",")[0], one.arithmetic) for one in found if one.kind == "prose"]
    assert [paper for paper, _ in prose] == ["DiffKV", "DiffKV", "LeanKV", "LeanKV", "KV-Compress"]
    assert prose[0][1].endswith("Llama3-8B on MBPP+ (Table 1) = 17.6") and "QwQ-32B, % = 14.83" in prose[1][1]
    assert "Musique 27.53 < 29.27" in prose[4][1] and prose[4][1].endswith("columns = 4")
    assert sum(one.kind == "bytes" for one in found) == 9 and not any(one.kind == "duplicate" for one in found)


def test_command_prints_findings_of_what_was_asked(tmp_path, capsys):
    """The arithmetic stands below each; filters choose among findings and never change one; the CSV has them too."""
    out = tmp_path / "found.csv"
    assert main(["published", "audit=true", "papers=minikv", f"out={out}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "/ 13 = 41.2669, so 41.3: cut off, not rounded" in shown and "KV-Compress" not in shown
    assert len(pd.read_csv(out)) == int(shown.split(" findings.")[0].split()[-1])
    assert main(["published", "audit=true", "papers=minikv", "tasks=LongBench-E-avg13"]) == 0
    assert "41.2669" in capsys.readouterr().out
    assert main(["published", "results_dir=x"]) == 2 and "audit=true" in capsys.readouterr().err


def test_dead_settings(tmp_path):
    """Two settings with equal samples are one finding; another byte, token or likelihood is none, nor is another
    method."""
    scores = yes_no(0.8, {"a": 9})
    store(tmp_path, "full", scores, ratio=1.0)
    for kernel in (5, 7):
        store(tmp_path, "snapkv", scores, settings={"budget": 0.5, "kernel": kernel})
    store(tmp_path, "snapkv", scores, ratio=0.25, settings={"budget": 0.25, "kernel": 5})
    store(tmp_path, "snapkv", scores, nll=0.2, settings={"budget": 0.5, "kernel": 9})
    store(tmp_path, "h2o", scores)
    everything = dict.fromkeys(("tasks", "models", "methods", "where"))
    groups = load_groups(DictConfig({"results_dir": str(tmp_path), "code": "newest", **everything}))
    (found,) = dead_settings(groups)
    assert found.words == "snapkv: kernel=5 | 7 changes nothing in any sample"
    assert found.arithmetic.startswith("9 samples, 18 tokens: all texts are equal in toy/tiny/snapkv/")
    assert main(["published", "audit=true", "papers=minikv", f"results_dir={tmp_path}"]) == 0
