"""Reading stored runs and comparing them: what may be mixed, what is named instead, and the numbers in the end."""

import csv
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf
from refusals import refused
from stored import command_settings, flips, store, yes_no

from kvbench.cli.main import main
from kvbench.evidence import compare, samples
from kvbench.evidence.load import load_groups
from kvbench.evidence.report import environment
from kvbench.evidence.view import show
from kvbench.results.lines import read_samples
from kvbench.results.record import RunRecord
from kvbench.show import terminal

SCORES = {"a": [1, 0, 1, 1, 0, 1], "b": [1, 1, 0, 1, 1, 1]}


def settings(root, *words):
    """The settings of `kvbench compare`."""
    return command_settings("compare", root, "resamples=200", *words)


def compared(root, *words):
    """The one group of a results folder, its rows and its notes."""
    cfg = settings(root, *words)
    (group,) = load_groups(cfg, also=[str(cfg.against)])
    return group, *compare.compare_group(group, cfg)


def test_groups_hold_only_what_may_be_compared(tmp_path):
    """Another task, model, data, protocol or seed is another group; another method, batch size or backend is not."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "full", SCORES, batch_size=1)
    others = ({}, {"task": "other"}, {"model": "big"}, {"fingerprint": "0" * 64}, {"length": 99}, {"seed": 5})
    for changes in others:
        store(tmp_path, "half", SCORES, **changes)
    groups = {group.title: [run.label for run in group.runs] for group in load_groups(settings(tmp_path))}
    assert groups.pop("other with tiny") == groups.pop("toy with big") == ["half"]
    main_title = next(title for title, labels in groups.items() if len(labels) == 3)
    assert sorted(groups.pop(main_title)) == ["full", "full batch 1", "half"]
    assert len(groups) == 3 and all(labels == ["half"] for labels in groups.values())
    assert any("length=99" in title for title in groups) and any("seed=5" in title for title in groups)


def test_runs_of_two_graders_are_never_compared(tmp_path):
    """Another grader or another Python that grades is another question, and no other version of the code: groups of
    tasks that are graded by Python and by none may be averaged."""
    store(tmp_path, "full", SCORES)
    for code in ({"task": "c" * 64}, {"task:sympy": "1.13"}, {"python": "3.11"}, {"python": "3.12"}):
        store(tmp_path, "half", SCORES, code=code)
    groups = load_groups(settings(tmp_path))
    assert len(groups) == 5 == len({group.title for group in groups})
    assert len({run.version for group in groups for run in group.runs}) == 1


@pytest.mark.every(2)
@pytest.mark.parametrize(("width", "parts"), [(60, 3), (80, 3), (120, 2), (160, 1)])
def test_what_is_too_wide_for_a_terminal_is_several_tables(tmp_path, width, parts):
    """Nothing is cut and no line is longer: each run's difference and verdict come first, then what they stand on, then
    its answers."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "a_method_with_a_long_name", SCORES, settings={"budget": 0.25})
    cfg, text = settings(tmp_path), io.StringIO()
    tables = [(group, *compare.compare_group(group, cfg)) for group in load_groups(cfg)]
    compare.correct(tables[0][1])
    show(compare.texts(tables, cfg), terminal.console(width, file=text))
    lines = text.getvalue().split("p Holm:")[0].splitlines()
    assert "…" not in text.getvalue() and max(map(len, lines)) <= width
    assert sum(line.startswith("run ") for line in lines) == parts
    assert "".join(line.split(" ")[0] for line in lines).count("a_method") == parts


def test_page_sizes_and_byte_budgets_are_settings(tmp_path):
    """The full cache runs without the byte budget of the others, and is still what they are compared with."""
    store(tmp_path, "full", SCORES, store={"budget_bytes": None})
    store(tmp_path, "snapkv", SCORES, store={"budget_bytes": 1000})
    store(tmp_path, "snapkv", SCORES, store={"budget_bytes": 2000})
    group, rows, notes = compared(tmp_path)
    assert [run.label for run in group.runs] == ["full", "snapkv budget_bytes=1000", "snapkv budget_bytes=2000"]
    assert len(rows) == 2 and not notes


def test_filters(tmp_path):
    """Names, patterns and settings choose runs, the full cache stays; what fits nothing says what there is."""
    store(tmp_path, "full", SCORES)
    for budget in (0.25, 0.5):
        store(tmp_path, "snapkv", SCORES, settings={"budget": budget})
    store(tmp_path, "kivi", SCORES)

    def labels(*words):
        (group,) = load_groups(settings(tmp_path, *words))
        return [run.label for run in group.runs]

    assert labels() == ["full", "kivi", "snapkv budget=0.25", "snapkv budget=0.5"]
    assert labels("methods='snap*'", "where={budget:0.25}") == ["full", "snapkv"]
    assert labels("methods=[kivi,x]") == ["full", "kivi"]
    assert labels("where={budget:[0.25,0.5]}") == ["full", "snapkv budget=0.25", "snapkv budget=0.5"]
    with refused("results-missing", None, "tasks: toy; models: tiny"):
        load_groups(settings(tmp_path, "tasks=nope"))
    with refused("file-missing", "results_dir", "nothing"):
        load_groups(settings(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with refused("results-missing", None, "empty"):
        load_groups(settings(tmp_path / "empty"))
    with refused("setting-value", "where", "where=5"):
        load_groups(settings(tmp_path, "where=5"))


def test_odd_runs_are_named_and_left_out(tmp_path):
    """Failed, empty, unreadable, old-schema, other-version and replaced runs are each said in words; no number of
    theirs is used."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "good", SCORES)
    store(tmp_path, "broken", SCORES, status="failed", message="did not do its work")
    store(tmp_path, "empty", {}, status="running")
    store(tmp_path, "older", SCORES, harness="0" * 64, started="2025-01-01T00:00:00+00:00")
    store(tmp_path, "good", SCORES, method_code="0" * 64, started="2025-01-01T00:00:00+00:00")
    unreadable = store(tmp_path, "torn", SCORES)
    (unreadable / "run.json").write_text("{")
    schema = store(tmp_path, "schema", SCORES)
    content = json.loads((schema / "run.json").read_text())
    (schema / "run.json").write_text(json.dumps(content | {"schema_version": 99}))
    (group,) = load_groups(settings(tmp_path))
    assert [run.label for run in group.runs] == ["full", "good"]
    said = "\n".join(group.notes)
    for part in (
        "FAILED and is left out: did not do its work",
        "has no finished sample yet",
        "1 runs of another version of the code are left out (older; code=00000000",
        "has the same settings and newer code of the method",
        "is not readable as JSON",
        "has schema version 99, this kvbench reads 1",
    ):
        assert part in said, part
    (old,) = load_groups(settings(tmp_path, "code='00000000'"))
    assert [run.label for run in old.runs] == ["older"]


def test_a_run_that_asked_more_is_no_older_code(tmp_path):
    """The same command with a limit, and then without: what is left out differs in that alone, and this is said."""
    for method in ("full", "good"):
        for number, limit in enumerate((6, None), 1):
            store(tmp_path, method, SCORES, limit=limit, started=f"2026-02-0{number}")
    group, _, _ = compared(tmp_path)
    said = "\n".join(group.notes)
    assert "ran later with the same settings of the method (task.limit was 6 and is None)" in said
    assert "newer code" not in said


def test_libraries_of_a_method_part_no_runs(tmp_path):
    """A method that imports numpy is compared with the full cache; of two numpys the newer run counts."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "keydiff", SCORES)
    for number, numpy in enumerate(("2.3", "2.4"), 1):
        store(tmp_path, "mine", SCORES, code={"method:numpy": numpy}, started=f"2026-02-0{number}")
    group, rows, _ = compared(tmp_path)
    assert [row.label for row in rows] == ["keydiff", "mine"]
    assert rows[1].run.record.identity["code"]["method:numpy"] == "2.4"
    assert "and newer code of the method, or of the libraries" in "\n".join(group.notes)
    assert ("libraries of methods", "numpy 2.4") in environment(group)


def test_the_selector_of_a_note_means_one_version(tmp_path):
    """Versions of one harness that differ in a library have names of their own, which the notes give; the digits of the
    harness alone choose the newest of them. Digits that read as a number do, too."""
    for day, torch in zip((3, 2, 1), ("2.1", "2.13", "2.12"), strict=True):
        changes = {"harness": "1234e567", "code": {"torch": torch}, "started": f"2026-02-0{day}"}
        store(tmp_path, f"m{day}", SCORES, **changes)
    (group,) = load_groups(settings(tmp_path))
    assert [run.label for run in group.runs] == ["m3"] and len(group.notes) == 2
    for note in group.notes:
        selector = re.search(r"code=(\S+) shows", note)[1]
        (other,) = load_groups(settings(tmp_path, f"code={selector}"))
        assert [run.label for run in other.runs] == [re.search(r"\((\w+);", note)[1]]
        assert len(other.notes) == 2
    (group,) = load_groups(settings(tmp_path, "code='1234e567'"))
    assert [run.label for run in group.runs] == ["m3"]


@pytest.mark.every(2)
@pytest.mark.parametrize("odd", ["failed", "begun", "memory"])
def test_a_run_without_scores_hides_no_other(tmp_path, capsys, monkeypatch, odd):
    """The newest version of the code is that of the newest run with scores; another is named by each command."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "half", SCORES)
    monkeypatch.setattr("kvbench.evidence.frontier_figure.render", lambda *given, **named: b"")
    for task in ("toy", "other"):  # of the other task there is nothing else
        new = {"task": task, "harness": "0" * 64, "started": "2026-02-02T00:00:00+00:00"}
        if odd == "memory":
            store(tmp_path, "broken", {"a": [0] * 6}, statuses=dict.fromkeys(range(6), "oom"), **new)
        else:
            kind = {"failed": {"status": "failed", "message": "no numpy"}, "begun": {"status": "running"}}[odd]
            store(tmp_path, "broken", {"a": [1]} if odd == "begun" else SCORES, **kind, **new)
    words = [f"results_dir={tmp_path}", "resamples=200"]
    more = {"compare": [], "table": [], "pareto": ["axes=resident", "kinds=[png]"], "report": ["axes=resident"]}
    for command, given in more.items():
        assert main([command, *words, *given]) == 0, capsys.readouterr().err
        shown = " ".join(capsys.readouterr().out.split())
        said = "FAILED and is left out: no numpy" if odd == "failed" else "version of the code are left out (broken"
        assert said in shown and ("half" in shown or command == "report"), (command, shown)


def test_nothing_but_failures_is_said_in_words(tmp_path, capsys):
    """Where no run has scores, each command says of which and why, and not with empty brackets."""
    store(tmp_path, "broken", {}, status="failed", message="no numpy")
    store(tmp_path, "begun", {}, status="running")
    for command in ("compare", "table", "pareto", "report", "ranks", "heatmap", "drift"):
        assert main([command, f"results_dir={tmp_path}"]) == 2
        error = capsys.readouterr().err
        assert "FAILED and is left out: no numpy" in error and "has no finished sample yet" in error, (command, error)
        assert "()" not in error


def test_what_is_compared_with_is_missed_with_a_reason(tmp_path, capsys):
    """The run to compare with failed: the error says that too."""
    store(tmp_path, "full", SCORES, status="failed", message="no numpy")
    store(tmp_path, "half", SCORES)
    assert main(["compare", f"results_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "no run fits against=full" in error and "FAILED and is left out: no numpy" in error


def test_incomplete_run_is_compared_on_what_is_there(tmp_path, capsys):
    """Of a killed run the finished samples are paired, n of N is shown, and its total comes from its neighbours."""
    store(tmp_path, "full", SCORES)
    folder = store(tmp_path, "half", {"a": [0, 0, 1]}, status="running")
    with open(folder / "samples.jsonl", "ab") as file:
        file.write(b'{"sample_id": "b/4", "subs')
    before = (folder / "samples.jsonl").read_bytes()
    assert main(["compare", f"results_dir={tmp_path}", "resamples=200", "regressions=0"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 12" in shown and "is incomplete: 3 of 12 answers" in shown
    assert (folder / "samples.jsonl").read_bytes() == before
    assert read_samples(folder / "samples.jsonl", RunRecord.load(folder).hash)[1] == 1


def test_sets_that_do_not_meet_are_refused(tmp_path, capsys):
    """Two runs without a common sample are not compared, and with nothing left the command fails."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "other", {"z": [1, 0, 1]})
    assert main(["compare", f"results_dir={tmp_path}"]) == 2
    assert "other and full have no sample with exact in common" in capsys.readouterr().err
    store(tmp_path, "good", SCORES)
    assert main(["compare", f"results_dir={tmp_path}"]) == 0
    assert "! not compared: other and full have no sample" in capsys.readouterr().out


def test_numbers_of_a_comparison(tmp_path):
    """Difference, lost, gained, tests and texts are those of the samples; the CSV holds them unrounded."""
    scores = yes_no(0.7, {"a": 40, "b": 40})
    store(tmp_path, "full", scores)
    store(tmp_path, "worse", flips(scores, lost=14, gained=2))
    store(tmp_path, "same", scores)
    cfg = settings(tmp_path, f"out={tmp_path}/deep/table.csv")
    _, (same, worse), _ = compared(tmp_path)
    assert (worse.num_lost, worse.num_gained) == (14, 2) and worse.value == pytest.approx(-12 / 80)
    assert worse.interval[0] < worse.value < worse.interval[1] < 0 and worse.verdict == "worse"
    assert worse.p_holm == pytest.approx(2 * worse.p) and worse.difference.test == "mcnemar"
    assert worse.changes[0].lost and not worse.changes[-1].lost
    assert (worse.changes[0].text, worse.changes[0].other_text) == ("answer 0.0", "answer 1.0")
    assert worse.changes[0].expected == "42"
    assert same.difference.interval[1] == "newcombe" and same.interval[0] < 0 < same.interval[1]
    assert same.verdict == "cannot tell" and same.p_equal == pytest.approx(0.99**80)
    assert compare.main(cfg) == 0
    table = list(csv.DictReader((tmp_path / "deep/table.csv").open()))
    assert [row["run"] for row in table] == ["same", "worse"]
    assert float(table[1]["low"]) == worse.interval[0] and table[1]["verdict"] == "worse"


def test_lengths_and_loops(tmp_path, capsys):
    """Beside a score stand by how much answers are longer, paired, and how many end in a loop; both are metrics, too,
    found in token ids of journals of any age. Longer is not worse."""
    scores = yes_no(0.7, {"a": 20})
    store(tmp_path, "full", scores, token_ids=lambda n: list(range(10 + n % 3)))
    store(tmp_path, "long", scores, token_ids=lambda n: list(range(15 + n % 4)) + [5] * 16 * (n < 5))
    table = tmp_path / "table.csv"
    assert compare.main(settings(tmp_path, f"out={table}")) == 0
    assert re.search(r"answer longer.*\[\+", capsys.readouterr().out, re.S)
    (row,) = csv.DictReader(table.open())
    truth = sum(15 + n % 4 + 16 * (n < 5) - 10 - n % 3 for n in range(20)) / 20
    assert float(row["longer"]) == pytest.approx(truth) and float(row["loops"]) == 0.25
    assert 0 < float(row["longer_low"]) < truth < float(row["longer_high"])
    _, (longer,), _ = compared(tmp_path, "metric=tokens")
    assert longer.value == pytest.approx(truth) and longer.verdict == "longer" and longer.what.unit == "tokens"
    _, (loops,), _ = compared(tmp_path, "metric=loops")
    assert loops.value == 0.25 and loops.verdict == "cannot tell" and loops.difference.test == "mcnemar"


def test_a_measure_that_stored_runs_lack_is_named(tmp_path):
    """A journal from before a measure has none of it, and none is taken for zero."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "half", SCORES)
    with refused("results-missing", None, "half", "KL to the full cache, 99 % of an answer"):
        compare.main(settings(tmp_path, "metric=kl_99"))


def test_changed_conversations_are_shown_whole(tmp_path):
    """A conversation's score is the mean over its answers, so every answer and every right one is shown, in order."""
    scores = yes_no(0.7, {"a": 20})
    store(tmp_path, "full", scores, turns=("Rome", "1492"), gold=lambda n: ("last",))
    store(tmp_path, "worse", flips(scores, lost=3, gained=0), turns=("Paris", "1492"), gold=lambda n: ("last",))
    _, (row,), _ = compared(tmp_path)
    change = row.changes[0]
    assert change.other_text == "[1] Rome\n[2] 1492\n[3] answer 1.0"
    assert change.text == "[1] Paris\n[2] 1492\n[3] answer 0.0"
    assert change.expected.splitlines()[1:] == ["[2] gold of 1492", "[3] last"]


def test_other_metrics_and_other_references(tmp_path):
    """nll is better when lower; a run can be compared with any other, by method, by hash, and never by a name that
    fits two."""
    scores = yes_no(0.7, {"a": 30})
    noise = np.random.default_rng(0).random(30) / 10
    store(tmp_path, "full", scores, nll=lambda number: 0.1 + noise[number])
    for budget, extra in ((0.25, 0.5), (0.5, 0.2)):
        farther = 0.1 + extra + extra * np.roll(noise[::-1], 1)
        store(tmp_path, "snapkv", scores, settings={"budget": budget}, nll=farther.__getitem__)
    group, rows, _ = compared(tmp_path, "metric=nll", "margin=0.05")
    assert [row.verdict for row in rows] == ["worse", "worse"] and rows[0].value == pytest.approx(0.5, abs=0.05)
    assert rows[0].difference.test == "sign flip and studentised bootstrap" and rows[0].num_lost == 30
    with refused("setting-value", "against", "against=snapkv", "2 runs"):
        compared(tmp_path, "against=snapkv")
    digits = next(run.record.hash for run in group.runs if run.label.endswith("0.25"))[:8]
    _, found, notes = compared(tmp_path, "metric=nll", f"against='{digits}'")
    assert len(notes) == 1 and "count as noise" in notes[0]
    assert [row.verdict for row in found] == ["better", "better"]
    _, narrowed, _ = compared(tmp_path, "metric=nll", "against=snapkv", "where={budget:0.25}")
    assert [row.value for row in narrowed] == [row.value for row in found]
    assert compare.find(group, "nothing") is None
    with refused("name-unknown", "metric", "metric=nil"):
        samples.measure("nil", group)


def test_reference_of_the_same_conditions_is_preferred(tmp_path):
    """A run is compared with the full cache of its own batch size; one with another batch size is the same thing
    measured twice, and is compared too."""
    scores = yes_no(0.7, {"a": 30})
    store(tmp_path, "full", scores)
    store(tmp_path, "full", flips(scores, 2, 1), batch_size=8)
    store(tmp_path, "x", scores)
    store(tmp_path, "y", scores)
    store(tmp_path, "x", flips(scores, 2, 1), batch_size=8)
    store(tmp_path, "z", scores, batch_size=2)
    group, rows, notes = compared(tmp_path)
    assert group.reference.label == "full" and [run.label for run in group.repeats] == ["full batch 8"]
    others = {row.label: (row.pairs.theirs.label, row.num_lost) for row in rows}
    assert others["x batch 8"] == ("full batch 8", 0) and others["x"] == ("full", 0)
    assert others["full batch 8"] == ("full", 2)
    assert notes == [
        "full batch 8 and full ran with another batch size or backend, which adds noise",
        "z batch 2 and full ran with another batch size or backend, which adds noise",
    ]


@pytest.mark.parametrize("other", [*({"budget_bytes": size} for size in range(1, 5)), {"rotation": "hadamard"}])
@pytest.mark.parametrize("batch_size", [4, 8])
def test_the_reference_is_a_whole_full_cache(tmp_path, other, batch_size):
    """A full cache that lacks answers, or was kept in another store than a run's own reference, is no reference while
    a whole one is there, nor a repetition of it that shows the noise; in whatever order their folders lie (the budget
    moves them)."""
    store(tmp_path, "full", SCORES, nll=0.1)
    starved = {"store": {"page_bytes": "auto", **other}, "statuses": dict.fromkeys(range(7), "oom")}
    store(tmp_path, "full", SCORES, nll=0.6, batch_size=batch_size, **starved)
    store(tmp_path, "x", SCORES, batch_size=batch_size)
    group, rows, _ = compared(tmp_path)
    assert len(group.reference.answered) == 12 and group.repeats == []
    (row,) = [row for row in rows if row.run.method == "x"]
    assert row.pairs.theirs.run is group.reference and (row.pairs.num_samples, row.pairs.total) == (12, 12)
    assert samples.noise(group, samples.measure("nll", group))[1].startswith("the largest that other batches")


def test_a_repetition_has_every_answer_of_the_reference(tmp_path):
    """A full cache of the run's own batch size that ran out of memory is no better to compare with."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "full", SCORES, batch_size=8, statuses={0: "oom", 3: "nan", 4: "oom"})
    store(tmp_path, "x", SCORES, batch_size=8)
    group, rows, _ = compared(tmp_path)
    assert [(row.pairs.theirs.label, row.pairs.num_samples) for row in rows] == [
        ("full batch 4", 9),
        ("full batch 4", 12),
    ]


def test_out_of_memory_and_repeated_answers(tmp_path):
    """Samples that did not end well are left out and counted in N; several answers to one prompt are one sample."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "oom", SCORES, statuses={0: "oom", 3: "nan"})
    _, (row,), _ = compared(tmp_path)
    assert (row.pairs.num_samples, row.pairs.total) == (10, 12)


def test_categories_and_shares_of_the_full_cache(tmp_path, capsys):
    """A category is its subsets alone; a share is the ratio of the two means, with the p value of the difference."""
    full = yes_no(0.7, {"trec": 30, "lcc": 24, "repobench-p": 24}, seed=3)
    mine = flips(full, 9, 1)
    store(tmp_path, "full", full, task="longbench", ratio=1.0)
    store(tmp_path, "snapkv", mine, task="longbench", ratio=0.25)
    mean = {name: (np.mean(mine[name]), np.mean(full[name])) for name in full}
    for words, names in (("code", ("lcc", "repobench-p")), ("score", tuple(full))):
        (ours, theirs), num = np.mean([mean[name] for name in names], axis=0), sum(len(full[name]) for name in names)
        _, (row,), _ = compared(tmp_path, f"metric={words}")
        _, (share,), _ = compared(tmp_path, f"metric={words}%")
        assert row.pairs.num_samples == row.pairs.total == share.pairs.total == num
        assert row.value == pytest.approx(ours - theirs) and share.value == pytest.approx(ours / theirs - 1)
        assert share.p == row.p and share.interval[0] <= share.value <= share.interval[1]
        assert share.verdict == row.verdict or share.margin * theirs != row.margin
    out = tmp_path / "table.csv"
    assert main(["compare", f"results_dir={tmp_path}", "metric=code%", "resamples=200", f"out={out}"]) == 0
    assert "difference, % of the full cache's" in " ".join(capsys.readouterr().out.split())
    assert next(csv.DictReader(out.open()))["metric"] == "score:code%"
    for command, words, message in (
        ("compare", ["metric=code%", "against=snapkv"], "against=snapkv is another run; leave out one"),
        ("compare", ["metric=nll%"], "take metric=nll"),
        ("table", ["metric=score%"], "in compare, pareto and report; take metric=score"),
    ):
        assert main([command, f"results_dir={tmp_path}", *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    store(tmp_path / "toy", "full", full)
    assert main(["compare", f"results_dir={tmp_path / 'toy'}", "metric=code"]) == 2
    assert "is a category of longbench, and toy with tiny has none" in " ".join(capsys.readouterr().err.split())


def test_nothing_is_a_share_of_nothing(tmp_path):
    """Where the full cache scores 0 there is no share, and the note says so."""
    store(tmp_path, "full", {"a": [0] * 9})
    store(tmp_path, "some", {"a": [0, 1] * 4 + [0]})
    _, rows, notes = compared(tmp_path, "metric=score%")
    assert not rows and any("is 0, of which nothing is a share" in note for note in notes)


def test_settings_are_plain(tmp_path):
    """The command can also be called from Python with its composed settings."""
    store(tmp_path, "full", SCORES)
    cfg = OmegaConf.merge(settings(tmp_path), {"methods": ["full"]})
    with refused("results-missing", None, "one run"):
        compare.main(cfg)


def test_rows_stand_by_verdict_and_effect_with_a_legend_of_a_line(tmp_path, monkeypatch, capsys):
    """Not by the alphabet; every column is explained by `help columns`."""
    scores = {"a": [1] * 20}
    store(tmp_path, "full", scores)
    for method, right in (("alpha", 2), ("beta", 20), ("gamma", 12)):
        store(tmp_path, method, {"a": [1] * right + [0] * (20 - right)})
    monkeypatch.setattr(terminal.PlainConsole, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", f"results_dir={tmp_path}", "resamples=200", "regressions=0"]) == 0
    shown = re.sub("\x1b[^a-zA-Z]*[a-zA-Z]", "", capsys.readouterr().out).rstrip().splitlines()
    names = [line.split()[0] for line in shown if line.startswith(("alpha", "beta", "gamma"))]
    assert names[:3] == ["beta", "gamma", "alpha"]
    assert shown[-1].startswith("[a, b]: ") and "over 3 rows" in shown[-1] and not shown[-2].strip()
    assert main(["help", "columns"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for name in ("difference", "worst case", "verdict", "p Holm", "p equal", "would show", "loops", "standing: open"):
        assert f" {name}: " in said, name


def test_answers_that_were_not_kept_are_not_shown():
    """Packed results have no texts: a line says what was lost, and no empty answer follows."""
    lost = samples.Change(
        sample="a/1", subset="a", mine=0.0, theirs=1.0, lost=True, text="", other_text="", expected=""
    )
    assert len(compare.change_lines(lost, 100.0, ("full", "mine"))) == 1
    assert len(compare.change_lines(replace(lost, text="no"), 100.0, ("full", "mine"))) == 3


def test_several_incomplete_runs_are_one_note(tmp_path):
    """Each is named with its progress."""
    store(tmp_path, "full", SCORES)
    for method in ("half", "part"):
        store(tmp_path, method, {"a": [0, 0, 1]}, status="running")
    (group,) = load_groups(settings(tmp_path))
    (note,) = [note for note in group.notes if "incomplete" in note]
    assert note.startswith("2 runs") and note.count("3 of 12 answers") == 2 and "half/" in note and "part/" in note
