"""The papers: the list of tables and figures is complete, cells stand beside the right runs, and no verdict is given
that the numbers do not carry."""

import re

import pandas as pd
import pytest
from omegaconf import OmegaConf
from places import ROOT
from stored import store, yes_no

from kvbench.config import files
from kvbench.extensions.papers import papers, printed, published
from kvbench.extensions.papers.papers import Entry, Paper
from kvbench.extensions.papers.printed import Ran
from kvbench.stats.intervals import wilson

# The design notes and collected numbers that the list is from lie beside the repository where it is worked on. A clone
# has what was taken from them: published.csv, whose locators name the same places.
SHARED = ROOT.parent / "shared"
NAMES = {"KV-cache survey": "survey"}  # as the notes spell it -> as here
NAMED = re.compile(
    r"(?P<paper>DiffKV|LeanKV|KV-Compress|MiniKV|KV-cache survey)"
    r"|\b(?P<kind>(?i:fig|table))(?:ure)?s?\.? (?P<first>\d+)(?:-(?P<last>\d+))?(?P<part>[ab]?)\b"
)
CLAIMS = {"survey": 13}  # claims that the issue names; the survey has neither tables nor figures of results


def places_of_text(text):
    """Paper, kind and number of every table and figure that a text names: of the paper that it named last before."""
    paper = ""
    for match in NAMED.finditer(text):
        if match["paper"]:
            paper = NAMES.get(match["paper"], match["paper"])
            continue
        kind = {"t": "table", "f": "figure"}[match["kind"][0].lower()]
        for number in range(int(match["first"]), int(match["last"] or match["first"]) + 1):
            yield paper, kind, f"{number}{match['part']}"


def collected_places():
    """Paper, kind and number of every table and figure that the numbers and the notes name."""
    shipped = published.rows().astype(str)
    places = set(places_of_text("\n".join(shipped["paper"] + " " + shipped["locator"].map(spelt))))
    if SHARED.is_dir():
        for path in sorted((SHARED / "published").glob("*.csv")):
            lines = pd.read_csv(path, dtype=str, keep_default_na=False)
            places |= set(places_of_text("\n".join(lines["paper"] + " " + lines["locator"].map(spelt))))
        for path in sorted((SHARED / "design").glob("*.md")):
            places |= set(places_of_text(path.read_text(encoding="utf-8")))
    return places


def spelt(locator):
    """A locator with every place in full: `Figure 11 + 13` names two."""
    return ", ".join(published.locators_of(locator))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the numbers as they were collected lie beside the repository alone")
def test_the_shipped_numbers_are_the_collected_ones():
    """Every row, with all its digits and conditions."""
    columns = ["paper", "locator", "model", "method", "variant", "task", "metric", "value", "unit", "memory_kind"]
    paths = sorted((SHARED / "published").glob("*.csv"))
    collected = pd.concat([pd.read_csv(path, dtype=str, keep_default_na=False) for path in paths])
    ours = published.rows().assign(value=published.rows()["printed"], config=published.rows()["conditions"])
    assert sorted(collected[[*columns, "config"]].agg("|".join, axis=1)) == sorted(
        ours[[*columns, "config"]].agg("|".join, axis=1)
    )


def test_places_of_a_text():
    """A range, several spellings, a part; a place is of the paper that was named last before it."""
    places = places_of_text(
        "DiffKV (figs 8-9), KV-Compress [P Fig. 1a]: the page table. Its Table 2; the KV-cache survey"
    )
    assert [*places] == [("DiffKV", "figure", "8"), ("DiffKV", "figure", "9")] + [
        ("KV-Compress", *locator) for locator in (("figure", "1a"), ("table", "2"))
    ]


@pytest.mark.parametrize("key", sorted(files.options("paper")))
def test_every_table_and_figure_has_an_entry(key):
    """Every number from 1 to the largest that is named, a figure in parts by each part; every locator of published.csv
    that names a table or a figure is at that entry, and every other locator is somewhere."""
    paper = papers.find(key)
    numbers = {kind: [e.at.split()[1] for e in paper.entries if e.at.startswith(kind)] for kind in papers.KINDS}
    assert all(len(set(each)) == len(each) for each in numbers.values())
    for kind in ("table", "figure"):
        named = {number for name, sort, number in collected_places() if (name, sort) == (paper.name, kind)}
        there = {int(re.match(r"\d+", number)[0]) for number in numbers[kind]}
        largest = max((int(re.match(r"\d+", number)[0]) for number in named), default=0)
        assert there == set(range(1, max(largest, len(there)) + 1)), "no number is left out"
        assert {number for number in named if number[-1].isalpha()} <= set(numbers[kind])
    assert len(numbers["claim"]) >= CLAIMS.get(key, 0)
    rows = published.rows()
    named = {locator for entry in paper.entries for locator in entry.cells}
    there = set(rows[rows["paper"] == paper.name]["locator"])
    assert named == there
    for entry in paper.entries:
        for locator in entry.cells:
            for kind, first in re.findall(r"(Table|Figure) (\d+[ab]?)", locator)[:1]:
                assert (
                    entry.at in (f"{kind.lower()} {first}", "claim prose") or f"+ {entry.at.split()[1]}" in locator
                ), (entry.at, locator)


@pytest.mark.parametrize("key", sorted(files.options("paper")))
def test_every_printed_row_of_a_table_has_a_line_or_a_reason(key):
    """Rows are named as the paper prints them, on each of its models."""
    paper = papers.find(key)
    for entry in paper.entries:
        if not entry.at.startswith("table"):
            continue
        for _, line in entry.printed(paper).iterrows():
            row = printed.row_of(line["method"], line["variant"])
            assert row in entry.rows(line["model"]) or entry.reason(line["metric"], line["method"], row), (
                entry.at,
                row,
            )
            assert line["model"] in paper.models


@pytest.mark.parametrize("key", sorted(files.options("paper")))
def test_every_printed_speed_and_size_has_a_counterpart_or_says_why(key):
    """A number that is no score has a counterpart of a bench for its row, or a reason; none is unused."""
    paper = papers.find(key)
    for entry in paper.entries:
        lines = [] if entry.cannot else [line for _, line in entry.printed(paper).iterrows()]
        needed = set()
        for line in lines:
            row, metric = printed.row_of(line["method"], line["variant"]), line["metric"]
            if line["unit"] == "points" or metric in printed.SHARES:
                assert entry.tasks or entry.reason(metric), (entry.at, metric)
            elif not entry.reason(metric, line["method"], row):
                assert metric in entry.measured and row in entry.rows(), (entry.at, metric, row)
                needed.add(metric)
        assert not lines or needed == set(entry.measured), entry.at


SMALL = Paper(
    key="small",
    name="DiffKV",
    about="",
    models={"Qwen2.5-7B": "Qwen/Qwen2.5-7B-Instruct", "Llama3-8B": "meta-llama/Meta-Llama-3-8B-Instruct"},
    entries=(),
)
ENTRY = Entry(
    at="table 1",
    shows="",
    cells=("Table 1",),
    tasks=("task=gsm8k",),
    methods={
        "Full FP16": "method=full",
        "DiffKV K8V4-K4V2": {"Llama3-8B": "method=diffkv method.alpha_h=1", "Qwen2.5-32B": "method=diffkv"},
        "KIVI {2,4}bit": "method=kivi method.bits={}",
    },
    without={"DuoAttn": "needs gates"},
)


def cells(root, model="Qwen2.5-7B-Instruct", changed=(), entry=ENTRY, **options):
    """The cells of GSM8K beside a full cache that is right in 835 of 1,000 and a KIVI that is right in 600."""
    full = store(root, "full", {"": [1] * 835 + [0] * 165}, task="gsm8k", model=model, **options)
    kivi = store(root, "kivi", {"": [1] * 600 + [0] * 400}, task="gsm8k", model=model, **options)
    ran = [Ran("Full FP16", full), Ran("KIVI 2bit", kivi), Ran("SnapKV 50%", None)]
    all_cells = printed.join(SMALL, entry, ran, changed)
    return {(c.printed["model"], c.row, c.printed["task"]): c for c in all_cells}


def test_a_cell_is_reproduced_inside_our_interval_alone(tmp_path):
    """The printed 83.5 lies in the interval of 835 of 1,000, the printed 72.2 not in that of 600; models of the paper
    that were not run, and rows without a run, say so."""
    by_cell = cells(tmp_path)
    full, kivi = by_cell["Qwen2.5-7B", "Full FP16", "GSM8K"], by_cell["Qwen2.5-7B", "KIVI 2bit", "GSM8K"]
    assert full.verdict == "reproduced" and full.ours.ends == pytest.approx(wilson(835, 1000))
    assert (full.difference, kivi.verdict) == (pytest.approx(0), "not reproduced")
    assert kivi.difference == pytest.approx(60.0 - 72.2)
    assert by_cell["Qwen2.5-7B", "SnapKV 50%", "GSM8K"].verdict == "not run"
    assert by_cell["Qwen2.5-7B", "Full FP16", "MATH"].verdict == "not run", "another task's run answers nothing"
    assert by_cell["Llama3-8B", "Full FP16", "GSM8K"].verdict == "other model"
    duo = by_cell["Llama3-8B", "DuoAttn 50%", "GSM8K"]
    assert (duo.verdict, duo.note) == ("cannot be", "needs gates")


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({"model": "smollm2-135m"}, "other model"),
        ({"changed": ["limit=20"]}, "other protocol"),
        ({"status": "stopped", "total": 1319}, "not run"),
    ],
)
def test_what_is_never_a_match(tmp_path, options, verdict):
    """Another model, a changed setting, and a run that is not whole, however near the numbers are."""
    assert cells(tmp_path, **options)["Qwen2.5-7B", "Full FP16", "GSM8K"].verdict == verdict


def test_subsets_and_averages_are_separate_cells(tmp_path):
    """A printed subset is that of the run, with or without the name of LongBench-E; the printed mean is the run's where
    it has as many subsets."""
    paper = papers.find("minikv")
    scores = {name: [0.25, 0.5, 0.75] * 5 for name in ("qasper_e", "lcc_e")}
    folder = store(tmp_path, "full", scores, task="longbench", model="Llama-2-7b-chat-hf")
    all_cells = printed.join(paper, paper.find("table", 1), [Ran("Full FP16", folder)], [])
    mine = {c.printed["task"]: c for c in all_cells if (c.printed["model"], c.row) == ("LLaMA2-7B-chat", "Full FP16")}
    assert mine["Qasper"].ours.value == mine["LCC"].ours.value == pytest.approx(0.5)
    assert mine["Qasper"].verdict == "not reproduced" and mine["TREC"].verdict == "not run"
    assert mine["LongBench-E-avg13"].verdict == "not run", "two subsets are no mean of thirteen"


@pytest.mark.parametrize(
    ("rate", "verdict"), [(0.95, "reproduced"), (0.66, "cannot tell"), (0.2, "not reproduced")], ids=str
)
def test_a_printed_bound_is_judged_by_pairs(tmp_path, rate, verdict):
    """`K4V2 keeps more than 65 %`: the score less 65 % of the full cache's, sample by sample."""
    paper = papers.find("diffkv")
    model, right = "Meta-Llama-3-8B-Instruct", yes_no(0.8, {"": 300})
    full = store(tmp_path, "full", right, task="gsm8k", model=model)
    kept = yes_no(rate, {"": 300}, seed=1)[""]
    mine = {"": [one * keep for one, keep in zip(right[""], kept, strict=True)]}
    run = store(tmp_path, "diffkv", mine, task="gsm8k", model=model)
    ran = [Ran("Full FP16", full), Ran("DiffKV K4V2", run)]
    all_cells = printed.join(paper, paper.find("figure", 8), ran, [])
    (cell,) = [
        c for c in all_cells if (c.printed["model"], c.row, c.printed["task"]) == ("Llama3-8B", "DiffKV K4V2", "GSM8K")
    ]
    assert cell.verdict == verdict
    low, high = cell.ours.ends
    assert low < cell.ours.value < high and cell.ours.value == pytest.approx(sum(mine[""]) / sum(right[""]))


def test_there_is_no_share_of_nothing(tmp_path):
    """A full cache that was right nowhere: the cell says what it takes."""
    paper, model = papers.find("diffkv"), "Meta-Llama-3-8B-Instruct"
    folders = [store(tmp_path, name, {"": [0] * 5}, task="gsm8k", model=model) for name in ("full", "diffkv")]
    ran = list(map(Ran, ("Full FP16", "DiffKV K4V2"), folders))
    (cell, *_) = printed.join(paper, paper.find("figure", 8), ran, [])
    assert cell.verdict == "not run" and cell.note == printed.NO_SHARE


def test_the_tables_that_are_written(tmp_path):
    """A printed row has ours below it, once for a model that is none of the paper's; the CSV has every cell."""
    listed = list(cells(tmp_path, model="tiny").values())
    lines = printed.grid(listed)
    full = [line for line in lines if line[0] == "Full FP16"]
    assert lines[0][:3] == ["row", "model", "GSM8K"] and len(full) == 4
    ours = [line for line in lines if line[1] == "tiny, here"]
    assert len(ours) == 2 and ours[0][2].startswith("83.5 [81.1, 85.7] other model")
    assert any("not run" in line[1] for line in lines)
    assert len(printed.csv_of(listed).splitlines()) == 1 + len(listed) == 109
    page = printed.markdown(SMALL, ENTRY, listed)
    assert "| Full FP16 | Qwen2.5-7B, printed | 83.5 |" in page and "never a match" in page


def test_rows_of_an_entry():
    """Values in a name are rows, and a model has its own line where one is written."""
    assert ENTRY.rows()["KIVI 4bit"] == "method=kivi method.bits=4"
    assert ENTRY.rows("Qwen2.5-32B")["DiffKV K8V4-K4V2"] == "method=diffkv"
    assert ENTRY.rows("Qwen2.5-7B")["DiffKV K8V4-K4V2"] == "method=diffkv method.alpha_h=1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"at": "table 9", "shows": ""}, "table 9: an entry has tasks or then, or `example`, or `cannot`"),
        ({"at": "chart 1", "shows": "", "cannot": "x"}, "at must begin with one of table, figure, claim"),
        ({"at": "table 9", "shows": "", "tasks": ["task=gsm8k"]}, "tasks need methods"),
        ({"at": "table 9", "like": "diffkv table 99"}, "like=diffkv table 99 names no entry"),
        ({"at": "table 9", "shwos": ""}, "there is no setting diffkv.yaml: table 9: shwos. Did you mean"),
    ],
)
def test_an_entry_that_is_written_wrongly(content, message):
    """The file, the entry and the rule are named."""
    with pytest.raises(ValueError, match=re.escape(message)):
        papers._entry("diffkv", OmegaConf.to_container(OmegaConf.create(content)))
