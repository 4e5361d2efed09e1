"""The printed numbers: read whole, found by name, shown with where they stand."""

import csv

import pytest
from refusals import refused

from kvbench.cli.main import main
from kvbench.extensions.papers import published


def test_rows_are_whole():
    """Every row has a paper, a place, a method, a number and what the paper says of the conditions."""
    rows = published.rows()
    assert len(rows) == 1572
    assert set(rows["paper"]) == {"DiffKV", "LeanKV", "KV-Compress", "MiniKV"}
    assert (rows[["locator", "method", "task", "metric", "unit"]] != "").all(axis=None)
    assert set(rows["memory_kind"]) == {"nominal", "unstated"} and rows["value"].notna().all()


def test_names_in_any_spelling():
    """Our names and the papers' names find the same rows; a star matches anything; a wrong name is answered."""
    ours = published.select(methods=["kv_compress"], tasks=["trec"], models=["llama-3.1-8b*"])
    assert ours.equals(published.select(methods=["KVC"], tasks=["TREC"], models=["Llama-3.1-8B-Instruct"]))
    assert not ours.empty and set(published.select(tasks=["humaneval_plus"])["task"]) == {"HumanEval+"}
    assert set(published.select(papers=["minikv"])["paper"]) == {"MiniKV"}
    with refused("name-unknown", "methods", "methods=diffvk", "mean DiffKV"):
        published.select(methods=["diffvk"])


def test_points_are_differences_within_a_table():
    """A point is a score minus the same paper's uncompressed one; what has no memory share is no point."""
    differences = {(p.model, p.variant): p.difference for p in published.points("gsm8k", ["diffkv"])}
    assert differences["Llama3-8B", "K8V4-K4V2"] == pytest.approx((75.7 - 76.3) / 100)
    assert published.points("trec", ["kv_compress"]) == [] == published.points("longctx", ["diffkv"])


def test_command_shows_and_writes(tmp_path, capsys):
    """The table says that nothing of it was measured here; the CSV holds the conditions."""
    out = tmp_path / "rows.csv"
    assert main(["published", "methods=diffkv", "tasks=gsm8k", "models='llama3-8b'", f"out={out}"]) == 0
    shown = capsys.readouterr().out
    assert "75.7 points" in shown and "19.3 (unstated)" in shown and "not measured here" in shown
    rows = list(csv.DictReader(out.open()))
    assert rows[0]["value"] == "75.7" and "alpha_h=1" in rows[0]["conditions"]
    assert main(["published", "limit=3"]) == 0
    assert "1569 more rows" in capsys.readouterr().out
    assert main(["published", "methods=minikv", "tasks=gsm8k"]) == 2
    assert "no printed number has all of methods=['minikv'], tasks=['gsm8k']" in capsys.readouterr().err


def test_places_are_selected_by_number():
    """A table, a figure or a section in any spelling; a number without a letter is all its parts; one locator may name
    several; what is not there is answered."""
    assert published.locators_of("Sec 7.3 / Figure 15a") == ["Sec 7.3", "Figure 15a"]
    assert published.locators_of("Figure 11 + 13") == ["Figure 11", "Figure 13"]
    assert published.locators_of("Sec 4.4 + 5.2") == ["Sec 4.4", "Sec 5.2"]
    frame = published.select(papers=["diffkv"], places=["figure 15"])
    assert set(frame["locator"]) == {"Sec 7.3 / Figure 15a", "Sec 7.3 / Figure 15b"}
    assert len(published.select(papers=["diffkv"], places=["Figure9"])) == 3
    assert set(published.select(places=["table 2"])["locator"]) == {"Table 2"}
    assert set(published.select(papers=["minikv"], places=["section 5.2"])["locator"]) == {
        "Sec 4.4 + 5.2",
        "Abstract + Sec 5.2",
        "Sec 5.2",
    }
    assert published.select(places=["figure*"])["locator"].str.contains("Figure").all()
    with refused("name-unknown", "places", "places=figure 99"):
        published.select(places=["figure 99"])
