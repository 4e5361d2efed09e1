"""The table of a paper: numbers, what is bold, what is missing, and every format."""

import csv
import io
import re
from dataclasses import replace

import pytest
from stored import command_settings, flips, store, yes_no

from kvbench.cli.main import main
from kvbench.evidence.load import load_groups
from kvbench.extensions.views import table
from kvbench.extensions.views.table_content import AVERAGE, tables_of
from kvbench.results.measures import CATEGORIES, LONGBENCH, RESIDENT
from kvbench.tasks.longbench import ENGLISH, LONGBENCH_E

SIZES = {"trec": 40, "qasper": 40, "lcc": 20}
SCORES = yes_no(0.7, SIZES, seed=3)


def settings(root, *words):
    """The settings of `kvbench report view=table`."""
    return command_settings("table", root, "resamples=300", *words)


def table_of(root, *words):
    """The one table of a results folder."""
    cfg = settings(root, *words)
    (table,) = tables_of(load_groups(cfg), cfg)
    return table


def rows_of(root, *words):
    """Its rows, by method."""
    return {row.method: row for row in table_of(root, *words).rows}


def spoil(scores, **lost):
    """The scores with the first right answers of some subsets wrong."""
    changed = {name: list(values) for name, values in scores.items()}
    for name, count in lost.items():
        for index in [i for i, value in enumerate(changed[name]) if value == 1][:count]:
            changed[name][index] = 0
    return changed


@pytest.fixture
def bench(tmp_path):
    """LongBench in three subsets: one method is as good as the best within noise in trec and worse in qasper."""
    store(tmp_path, "full", SCORES, task="longbench", ratio=1.0, tiers=(100,), bits=16)
    store(tmp_path, "snapkv", spoil(SCORES, trec=1), task="longbench", ratio=0.25, settings={"budget": 0.25})
    store(tmp_path, "kivi", spoil(SCORES, trec=3, qasper=14), task="longbench", ratio=0.4, settings={"bits": 2})
    return tmp_path


def mcnemar(lost):
    """Exact two-sided p of `lost` answers lost and none gained, in plain arithmetic."""
    return 2 * 0.5**lost


def test_numbers_are_the_means_of_the_samples(bench):
    """Each cell is the mean of its subset, the average the mean of these; bytes are those of all samples."""
    rows = rows_of(bench)
    assert list(rows) == ["full", "kivi", "snapkv"]
    for name, values in spoil(SCORES, trec=3, qasper=14).items():
        assert rows["kivi"].cells[name].value == pytest.approx(sum(values) / len(values))
        assert rows["kivi"].cells[name].num_samples == len(values)
    means = [sum(values) / len(values) for values in SCORES.values()]
    assert rows["full"].cells[AVERAGE].value == pytest.approx(sum(means) / 3)
    assert rows["snapkv"].held(RESIDENT) == pytest.approx(0.25)


def test_the_interval_is_that_of_every_other_table(bench):
    """One estimator for one number: the run's own record has the same ends."""
    row = rows_of(bench)["kivi"]
    whole = row.runs[0].record.metrics["score"]
    assert row.cells[AVERAGE].interval == pytest.approx(whole.ends)
    assert row.cells["lcc"].interval == pytest.approx(whole.subsets["lcc"].ends)


def test_bold_is_the_best_and_those_within_its_interval(bench):
    """Two of 40 lost are chance, 14 are not; the full cache is never bold, and its absence moves nothing. Each column
    is judged by its own samples."""
    assert mcnemar(2) > 0.05 > mcnemar(14)
    store(bench, "last", flips(SCORES, 12, 0), task="longbench", ratio=0.1)
    rows = rows_of(bench)
    bold = {method: [name for name, cell in row.cells.items() if cell.is_best] for method, row in rows.items()}
    columns = ["qasper", "trec", "lcc", AVERAGE]
    assert bold == {"full": [], "snapkv": columns, "kivi": ["trec", "lcc"], "last": ["qasper", "trec"]}


def test_three_rivals_share_the_level(tmp_path):
    """Six lost of six that differ are p = 0.03 alone, and cannot be told among three comparisons with the best."""
    scores = {"a": [1] * 60}
    store(tmp_path, "full", scores)
    store(tmp_path, "best", scores, ratio=0.5)
    store(tmp_path, "six", spoil(scores, a=6), ratio=0.4)
    assert mcnemar(6) < 0.05 < 3 * mcnemar(6)
    assert not rows_of(tmp_path)["six"].cells["a"].is_best
    for name in ("x", "y"):
        store(tmp_path, name, scores, ratio=0.3)
    assert rows_of(tmp_path)["six"].cells["a"].is_best


def test_lower_is_better(tmp_path):
    """With nll the smallest is bold."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "far", SCORES, nll=lambda number: 0.9 + number % 3 / 10)
    store(tmp_path, "near", SCORES, nll=lambda number: 0.3 + number * 7 % 5 / 10)
    rows = rows_of(tmp_path, "metric=nll")
    assert rows["near"].cells["trec"].is_best and not rows["far"].cells["trec"].is_best


def test_longbench_has_its_sixteen_columns(bench):
    """In the order and under the names of the papers, no subset left out or made up; one that was not run is a dash and
    not in the average."""
    assert tuple(name for part in LONGBENCH.values() for name in part) == ENGLISH
    assert list(CATEGORIES.values()) == list(LONGBENCH)
    assert {name.removesuffix("_e") for name in LONGBENCH_E} <= set(ENGLISH)
    table = table_of(bench)
    assert tuple(table.columns) == (*ENGLISH, AVERAGE) and table.columns[AVERAGE] == "Avg (3 of 16)"
    assert any(note.startswith("missing, and not in the average: NrtvQA, MF-en") for note in table.notes)
    assert [count for _, count in table.spans] == [3, 3, 3, 3, 2, 2]


def test_categories_are_means_of_their_subsets(tmp_path):
    """And the average stays the one over subsets."""
    scores = yes_no(0.5, {"trec": 10, "samsum": 30, "lcc": 10}, seed=1)
    store(tmp_path, "full", scores, task="longbench")
    table = table_of(tmp_path, "by=category")
    (row,) = table.rows
    mean = {name: sum(values) / len(values) for name, values in scores.items()}
    assert row.cells["Few-shot learning"].value == pytest.approx((mean["trec"] + mean["samsum"]) / 2)
    assert row.cells[AVERAGE].value == pytest.approx(sum(mean.values()) / 3)
    assert list(table.columns)[:-1] == list(LONGBENCH)


def test_subsets_that_were_run_apart_make_one_table(tmp_path):
    """Runs of the same settings on other subsets are one row; one that lacks a subset has a dash and no average."""
    for name, fingerprint in (("trec", "1" * 64), ("lcc", "2" * 64)):
        part = {name: SCORES[name]}
        store(tmp_path, "full", part, task="longbench", fingerprint=fingerprint)
        store(tmp_path, "kivi", part, task="longbench", fingerprint=fingerprint, settings={"bits": 4}, ratio=0.4)
    store(tmp_path, "int8", {"lcc": SCORES["lcc"]}, task="longbench", fingerprint="2" * 64)
    table = table_of(tmp_path)
    rows = {row.method: row for row in table.rows}
    assert set(rows["kivi"].cells) == {"trec", "lcc", AVERAGE} and set(rows["int8"].cells) == {"lcc"}
    assert "int8 has no average: it lacks TREC" in table.notes


def test_other_questions_are_another_table(tmp_path):
    """The same subset under another protocol is never put into the same column."""
    for length, fingerprint in ((9, "1" * 64), (18, "2" * 64)):
        store(tmp_path, "full", {"a": [1, 0] * 5}, length=length, fingerprint=fingerprint)
    cfg = settings(tmp_path)
    assert len(tables_of(load_groups(cfg), cfg)) == 2
    table = table_of(tmp_path, "by=length")
    assert list(table.columns)[:-1] == ["9", "18"] and len(table.rows) == 1


def test_only_samples_that_all_rows_have_count(tmp_path):
    """No method gains by failing on a hard sample; one that failed on a tenth has a dash."""
    store(tmp_path, "full", {"a": [1] * 20 + [0] * 20})
    store(tmp_path, "some", {"a": [1] * 20 + [0] * 20}, statuses={39: "oom"})
    store(tmp_path, "most", {"a": [1] * 20 + [0] * 20}, statuses=dict.fromkeys(range(20, 40), "oom"))
    table = table_of(tmp_path)
    rows = {row.method: row for row in table.rows}
    assert rows["full"].cells["a"].value == rows["some"].cells["a"].value == pytest.approx(20 / 39)
    assert "most" not in rows or not rows["most"].cells
    assert any("only 20 of 40 samples ended well" in note for note in table.notes)
    assert any("over the 39 of 40 samples" in note for note in table.notes)


def test_two_samples_have_no_interval_and_no_verdict(tmp_path, capsys):
    """Nothing is told apart, and the words say so instead of showing exactness."""
    for method in ("full", "x", "y"):
        store(tmp_path, method, {"a": [0.3, 0.4], "b": [0.5, 0.1]}, ratio={"x": 0.5}.get(method, 1.0))
    assert main(["table", f"results_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "95 %" not in out.split("\n\n")[0] and "n too small" in out and "No brackets" in out


def test_nothing_is_bold_where_no_run_can_be_told_from_the_best(tmp_path, capsys):
    """A column of stars says nothing; one in which a run is worse keeps them."""
    scores = {"a": [1] * 60, "b": [1] * 60}
    store(tmp_path, "full", scores)
    store(tmp_path, "best", scores, ratio=0.5)
    store(tmp_path, "next", spoil(scores, a=1, b=30), ratio=0.4)
    store(tmp_path, "third", spoil(scores, a=2, b=1), ratio=0.3)
    assert main(["table", f"results_dir={tmp_path}"]) == 0
    cells = {line.split()[0]: line.split()[2:4] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert cells["best"] == ["100.0", "100.0*"] and cells["next"] == ["98.3", "50.0"]
    assert cells["third"] == ["96.7", "98.3*"]


def test_latex_has_the_caption_and_the_label_that_were_given(bench, capsys):
    """The caption is LaTeX; a label that LaTeX has no use for is refused."""
    words = ["report", "view=table", f"results_dir={bench}", "format=tex"]
    assert main([*words, "caption='Scores, \\textbf{ours}'", "label=tab:kv"]) == 0
    out = capsys.readouterr().out
    assert "\\caption{Scores, \\textbf{ours}}\n\\label{tab:kv}\n" in out
    assert main([*words, "label='a}b'"]) == 2
    assert "error[setting-value]: label=" in capsys.readouterr().err


def cells(line):
    """The cells of a line of Markdown."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.smoke
def test_markdown_and_latex_hold_the_same_numbers(bench, capsys):
    """Row for row; bold is bold in both, and each LaTeX row has as many cells as the table has columns."""
    assert main(["table", f"results_dir={bench}", "format=md"]) == 0
    head, _, *body = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    md = [cells(line) for line in (head, *body)]
    assert main(["table", f"results_dir={bench}", "format=tex"]) == 0
    tex = capsys.readouterr().out
    spans, *rows = [line.removesuffix(r" \\").split(" & ") for line in tex.splitlines() if line.endswith(r" \\")]
    assert len(set(map(len, rows))) == 1
    bold = [[re.sub(r"\\textbf\{(.*)\}", r"**\1**", cell) for cell in row] for row in rows]
    plain = [[re.sub(r"\\(.)", r"\1", cell) for cell in row] for row in (*bold, *md)]
    assert plain[: len(md)] == plain[len(md) :]
    assert sum(int(count) for count in re.findall(r"\\multicolumn\{(\d+)\}", " ".join(spans))) == 16
    assert tex.count("{") == tex.count("}")
    assert "**" in "".join(md[3]) and "SAMSum" in md[0]


def test_names_cannot_break_a_table(tmp_path, capsys):
    """Whatever a name holds, LaTeX prints it, Markdown keeps its columns, and no terminal obeys it."""
    evil = "a|b_c&d%$#{}\\~^\x1b[31m\n% x"
    store(tmp_path, "full", {evil: [1, 0, 1]})
    for kind in ("txt", "md", "tex"):
        assert main(["table", f"results_dir={tmp_path}", f"format={kind}"]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out and "\n% x" not in out
        if kind == "md":
            assert len({len(cells(line)) for line in out.splitlines() if line.startswith("|")}) == 1
        if kind == "tex":
            assert r"a|b\_c\&d\%\$\#\{\}\textbackslash{}\textasciitilde{}\textasciicircum{}" in out


@pytest.mark.every(2)
@pytest.mark.parametrize("words", [[], ["by=method"], ["intervals=true"], ["by=category"]])
def test_the_terminal_is_never_overrun(bench, words, capsys, monkeypatch):
    """At 80 columns the table goes on below; every heading is still there."""
    monkeypatch.setattr(table, "main", replace(table.main, width=80))
    assert main(["table", f"results_dir={bench}", *words]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert ("RB-P" in out or "Code" in out) and "KV %" in out and "Avg (" in out


def test_csv_is_unrounded_and_whole(bench, tmp_path):
    """A line for each run and column, missing ones too."""
    assert main(["table", f"results_dir={bench}", "format=csv", f"out={tmp_path / 'table.csv'}"]) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert len(rows) == 3 * 17
    by_cell = {(row["method"], row["column"]): row for row in rows}
    assert float(by_cell["kivi", "qasper"]["value"]) == pytest.approx(sum(spoil(SCORES, qasper=14)["qasper"]) / 40)
    assert by_cell["kivi", "narrativeqa"]["value"] == "" and by_cell["kivi", "narrativeqa"]["n"] == "0"
    assert by_cell["snapkv", "average"]["best"] == "1"


def test_incomplete_runs_are_named_or_shown(bench):
    """As in every other table."""
    part = {"trec": SCORES["trec"], "qasper": SCORES["qasper"][:30]}
    store(bench, "tova", part, task="longbench", status="running")
    assert "tova" not in rows_of(bench)
    row = rows_of(bench, "incomplete=true")["tova"]
    assert set(row.cells) == {"trec", "qasper"} and row.cells["qasper"].num_samples == 30


def prompts(groups, tokens, cut=()):
    """The groups with prompts of these tokens before the task's rule, by number of the sample; some were cut."""
    for run in (run for group in groups for run in group.runs):
        run.record.protocol.pop("length", None)
        for number, record in enumerate(run.samples.values()):
            record["num_prompt_tokens_untruncated"], record["truncated"] = tokens[number], number in cut
    return groups


@pytest.mark.parametrize(
    ("by", "wanted"), [("cut", {"whole": 2 / 3, "cut": 0.5}), ("length", {"64": 1.0, "128": 0.5, "1k": 0.5, "2k": 0.5})]
)
def test_scores_by_length_and_of_cut_prompts_apart(tmp_path, by, wanted):
    """Whole and cut prompts have columns of their own, and lengths those of powers of two, short ones too."""
    scores = {"a": [1, 1, 1, 0, 1, 0, 1, 0, 1, 0]}
    tokens, cut = [40, 64, 65, 128, 600, 1024, 1025, 2048, 2000, 1100], (5, 6, 7, 8)
    for method in ("full", "snapkv"):
        store(tmp_path, method, scores)
    cfg = settings(tmp_path, f"by={by}")
    (table,) = tables_of(prompts(load_groups(cfg), tokens, cut), cfg)
    for row in table.rows:
        values = {name: row.cells[name].value for name in table.columns if name != AVERAGE}
        assert list(values) == list(wanted) and values == pytest.approx(wanted)
        assert row.cells[AVERAGE].num_samples == 10


def test_a_benchmark_whose_prompts_are_all_whole_has_one_column(bench):
    """Without a cut prompt there is no column of them."""
    assert list(table_of(bench, "by=cut").columns) == ["whole", AVERAGE]


def test_seeds_of_random_are_separate_rows(tmp_path):
    """Runs that differ in `method.seed` alone answer the same questions: one table, a row for each seed."""
    store(tmp_path, "full", SCORES, task="longbench")
    for seed in (0, 1, 2):
        store(tmp_path, "random", SCORES, task="longbench", settings={"seed": seed, "budget": 0.5})
    assert [row.label for row in table_of(tmp_path).rows if row.method == "random"] == [
        f"random seed={seed}" for seed in (0, 1, 2)
    ]
