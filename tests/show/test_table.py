"""The table, the picture and the progress lines."""

import dataclasses
import io
import re
from itertools import combinations

import pytest
from fake_parts import make_cfg, make_parts
from matplotlib.text import Text
from rich.console import Console

from kvbench.results.record import Counts, Metric, RunRecord
from kvbench.runs.run import run_experiment
from kvbench.show import figure, table
from kvbench.show.columns import LEGEND
from kvbench.show.labels import label_runs
from kvbench.show.picture import picture_bytes
from kvbench.show.progress import Progress, format_bytes, format_seconds
from kvbench.show.table import long_tables


def run_of(cfg, method="half", **parts):
    """A finished run of a made-up method."""
    return run_experiment(cfg, method=method, parts=make_parts(**parts), say=lambda text: None)


def shown(records, width=80):
    """The tables of some runs as text."""
    console = Console(width=width, record=True, file=io.StringIO())
    table.show(records, console=console)
    return console.export_text()


def test_table_shows_the_numbers(tmp_path):
    """The table fits 80 columns and shows score, n, paired difference, bytes, speed, and the warning about the
    reference backend."""
    task = {"quarantined": [{"file": "f", "line": 3, "reason": "bad"}], "unused": ["f: source, meta"]}
    task["missing"] = ["lcc", "trec"]
    finished = run_of(make_cfg(tmp_path, reference="auto"), statuses={"a/0": "nan"}, count=24, task=task)
    text = shown([finished.reference, finished.record, finished.record])
    metric = finished.record.metrics["exact"]
    assert f"{100 * metric.value:.1f} [{100 * metric.low:.1f}, {100 * metric.high:.1f}]" in text
    comparison = finished.record.comparison
    assert f"{100 * comparison.difference.value:+.1f} [" in text
    assert f"{comparison.num_worse} worse, {comparison.num_better} better" in text
    for part in ("23 of 24", "524 B", "52.4 %", "45.0 %", "120.0 %", "Speed is no claim for full, half", "1 gave NaN"):
        assert part in text, part
    assert "were set aside (listed in run.json): 1." in text
    assert "Fields of the data that nothing reads: f: source, meta." in text
    assert "Subsets that were left out, as their data was not at hand: lcc, trec." in text
    assert "..." not in text and "\u2026" not in text
    rows = [line for line in text.splitlines() if line.startswith(("full", "half")) and ":" not in line]
    assert [line.split()[0] for line in rows] == ["full", "half"] * 2


@pytest.mark.parametrize("each", [1, 8])
@pytest.mark.parametrize("scored", [67, 50, 49, 33, 10, 1])
@pytest.mark.parametrize("is_old", [False, True])
def test_n_is_of_the_samples_that_were_asked(scored, each, is_old):
    """However many of 100 samples are missing, with one or several answers each; a record of before has the number of
    answers to each in its protocol, and one that does not say it shows no number."""
    counts = Counts(total=100 * each, done=100 * each, ok=scored * each, samples=None if is_old else 100)
    metrics = {"score": Metric(value=0.5, num_samples=scored, primary=True)}
    record = RunRecord(metrics=metrics, counts=counts, protocol={"num_samples": each} if is_old else {})
    assert table._num(record) == f"{scored} of 100"
    if is_old:
        assert table._num(dataclasses.replace(record, protocol={})) == f"{scored} of ?"


def test_the_record_has_the_samples_asked(tmp_path):
    """Of a run with two answers to a prompt, more than half of which ran out of memory."""
    record = run_of(
        make_cfg(tmp_path), count=11, repeats=2, statuses={f"{'ab'[i % 2]}/{i}": "oom" for i in range(7)}
    ).record
    assert (record.counts.total, record.counts.samples, record.counts.ok) == (22, 11, 8)
    assert table._num(record) == "4 of 11"


def test_table_says_what_ran_without_a_kernel(tmp_path):
    """A run whose backend fell back on plain torch is named with the operations; another one is not."""
    finished = run_of(make_cfg(tmp_path))
    slow = dataclasses.replace(finished.record, backend="triton", backend_fallbacks=["choose_pages", "paged_decode"])
    fast = dataclasses.replace(slow, method="other", backend_fallbacks=[])
    said = " ".join(shown([slow, fast], 120).split())
    assert "Speed is no claim for half: backend triton did choose_pages, paged_decode in plain torch." in said
    assert "no claim for other" not in said


def test_table_says_once_what_could_not_be_had_of_the_model(tmp_path):
    """Runs of one model share the sentence."""
    finished = run_of(make_cfg(tmp_path))
    one = dataclasses.replace(finished.record, model_remark="model.linear=packed was not done, because of the weather")
    said = " ".join(shown([one, dataclasses.replace(one, method="other")], 120).split())
    assert said.count("packed was not done, because of the weather.") == 1


def test_table_shows_the_peak_beside_that_of_a_prompt_read_at_once(tmp_path):
    """The row and a note say that prompts were read in chunks, and nowhere else."""
    finished = run_of(make_cfg(tmp_path))
    ledger = finished.record.ledger | {"one_shot_peak_bytes": 4567.0, "one_shot_peak_ratio": 4.567}
    chunked = dataclasses.replace(finished.record, hash="f" * 64, protocol={"prefill_chunk": 64}, ledger=ledger)
    alone, both = (" ".join(shown([finished.record, *more], 120).split()) for more in ([], [chunked]))
    assert "peak at once" not in alone and "prefill.chunk" not in alone
    for part in ("prefill.chunk=64", "4.57 kB", "456.7 %", "later tokens saw a compressed past"):
        assert part in both, part


def of_lengths(record, *, method, answer, **ledger):
    """A record of a method that keeps a quarter of 100 tokens, and an answer of some length whole."""
    kept = {"prompt_tokens": 100.0, "tokens_seen": 100.0 + answer, "prompt_slots": 50.0, "lists": 2.0}
    changes = {"kept": kept, "ledger": record.ledger | ledger, "prompt_only": True, "method": method}
    return dataclasses.replace(record, hash=method * 8, **changes)


def test_table_says_where_answers_differ_in_length(tmp_path):
    """Bytes of other texts stand beside their tokens, a budget of the prompt beside what the answer adds to it; where
    answers are short and alike, the table has none of this."""
    record = run_of(make_cfg(tmp_path)).record
    full = dataclasses.replace(of_lengths(record, method="full", answer=128), prompt_only=False)
    said = " ".join(shown([full, of_lengths(record, method="snapkv", answer=65)], 80).split())
    for part in (
        "100 + 128",
        "100 + 65",
        "Answers differ in length here, so bytes are of different texts",
        "snapkv: 25 % of a prompt's 100 tokens stay, and all 65 that follow: 55 % of the 165.",
    ):
        assert part in said, part
    assert "full: 25 %" not in said
    alike = [of_lengths(record, method=name, answer=answer) for name, answer in (("a", 3), ("b", 4))]
    said = " ".join(shown(alike).split())
    assert "tokens:" not in said and "100 + 3" not in said and "that follow" not in said


def test_table_says_why_fewer_samples_have_a_gold_nll(tmp_path):
    """A gold answer of one token has nothing to predict from a compressed cache."""
    record = run_of(make_cfg(tmp_path)).record
    held = record.fidelity["nll"].num_samples
    said = " ".join(shown([record]).split())
    assert "gold NLL n=" not in said and "has one token" not in said
    few = {name: dataclasses.replace(one, num_samples=4) for name, one in record.fidelity.items()}
    said = " ".join(shown([dataclasses.replace(record, fidelity=few)]).split())
    assert f"gold NLL n=4 of {held}, " in said and "the others' answer to force has one token, or none" in said


def test_table_names_a_method_that_saves_nothing(tmp_path):
    """A method that holds as much as the full cache is pointed out, one that holds less is not."""
    for ratio, expected in ((1.0, True), (0.5, False)):
        cfg = make_cfg(tmp_path, reference="auto", method__ratio=ratio, method__hidden=4)
        finished = run_of(cfg, "lazy")
        text = shown([finished.reference, finished.record])
        assert ("lazy holds as much as the full cache" in text) == expected


def test_table_names_a_method_that_loses_to_random(tmp_path):
    """A method that scores less than `random` beside it is pointed out, unless it holds less."""
    finished = run_of(make_cfg(tmp_path, reference="auto", method__ratio=0.5), "clever")
    record = finished.record
    worse, best = (
        {record.primary: dataclasses.replace(record.metrics[record.primary], value=value)} for value in (0.1, 0.9)
    )
    for mine, others, ratio, expected in (
        (worse, best, 0.5, True),
        (best, worse, 0.5, False),
        (worse, best, 0.8, False),
    ):
        chance = dataclasses.replace(record, method="random", metrics=others)
        chance.ledger = dict(record.ledger) | {"resident_ratio": ratio}
        one = dataclasses.replace(record, metrics=mine)
        one.ledger = dict(record.ledger) | {"resident_ratio": 0.5}
        said = " ".join(shown([finished.reference, chance, one]).split())
        assert ("clever scores less than `random` beside it" in said) == expected
        assert "random scores less" not in said and "full scores less" not in said


def test_table_shows_two_names_of_one_method(tmp_path):
    """Runs with the same hash and another name are rows of their own, and the same run given twice is one."""
    runs = [run_of(make_cfg(tmp_path), name).record for name in ("b", "a")]
    assert runs[0].hash == runs[1].hash
    rows = [line.split()[0] for line in shown([*runs, runs[0]]).splitlines() if line.startswith(("a ", "b "))]
    assert rows == ["b", "a"] * 2
    sizes = [len(figure.draw(some, tmp_path / "x.png").read_bytes()) for some in ([runs[0]], runs, [*runs, runs[0]])]
    assert sizes[0] != sizes[1] == sizes[2]


def test_table_shows_what_is_read_where_a_method_chooses(tmp_path):
    """The column of bytes read is there as soon as one run reads a part of what it keeps, and not before."""
    runs = [run_of(make_cfg(tmp_path), name).record for name in ("b", "a")]
    for ratio, is_there in ((1.0, False), (1.05, False), (0.2512, True)):
        runs[1].kept["read_ratio"] = ratio
        text = shown(runs)
        assert ("read, %" in text) == is_there
    cost = text.split("Cost:")[1]
    cells = {line.split()[0]: line for line in cost.splitlines() if line.startswith(("a ", "b "))}
    assert " 25.1 " in cells["a"] and " 100.0 " in cells["b"]


def test_the_legend_is_one_line_and_help_has_the_rest(tmp_path):
    """A line points to `help columns`, which explains every heading of the tables, in every width."""
    from kvbench.cli.choice_help import help_for

    record = run_of(make_cfg(tmp_path)).record
    assert LEGEND in shown([record], 80).splitlines()
    for width in (80, 100, 140):
        text = help_for(["columns"], width)
        assert all(len(line) <= width for line in text.splitlines())
        said = " ".join(text.split())
        for name in ("[a, b]", "vs full", "gold NLL", "KL to full", "resident", "average", "peak", "read", "prefill"):
            assert f" {name}" in f" {said}", name


def test_picture_is_the_same_twice(tmp_path):
    """The picture is a PNG whose bytes depend on the records only, and draws records without scores too."""
    finished = run_of(make_cfg(tmp_path, reference="auto"))
    rows = [finished.reference, finished.record]
    first = figure.draw(rows, tmp_path / "a.png").read_bytes()
    assert first == figure.draw(rows, tmp_path / "b.png").read_bytes()
    assert first.startswith(b"\x89PNG") and len(first) > 20_000
    assert first != figure.draw(rows[:1], tmp_path / "c.png").read_bytes()
    figure.draw([RunRecord(task="t", model="m", method="x")], tmp_path / "d.png")


def test_a_title_promises_intervals_where_there_are_some(tmp_path, monkeypatch):
    """Of too few samples there are none."""
    made = []
    monkeypatch.setattr(figure, "picture_bytes", lambda one, kind: made.append(one) or picture_bytes(one, kind))
    record = run_of(make_cfg(tmp_path)).record
    for high in (0.9, None):
        metric = dataclasses.replace(record.metrics[record.primary], value=0.5, low=high and 0.1, high=high)
        figure.draw([dataclasses.replace(record, metrics={record.primary: metric})], tmp_path / "a.png")
    assert [("95 %" in one.get_suptitle()) for one in made] == [True, False]


def test_picture_names_tied_points_apart_and_labels_bars_by_their_length(tmp_path, monkeypatch):
    """No name lies on another though all scores tie, and the percentage at a bar is the bar's length; a row of another
    length says its tokens."""
    made = []
    monkeypatch.setattr(figure, "picture_bytes", lambda one, kind: made.append(one) or picture_bytes(one, kind))
    record = run_of(make_cfg(tmp_path)).record
    metric = dataclasses.replace(record.metrics[record.primary], value=0.0, low=0.0, high=0.2)
    record = dataclasses.replace(record, metrics={record.primary: metric})
    sizes = {"snapkv": (65, 1.28, 0.56), "diffkv": (128, 1.67, 0.546), "kivi": (128, 1.67, 0.546)}
    sizes |= {"full": (128, 6191.5, 1.032)}
    rows = []
    for method, (answer, size_mb, ratio) in sizes.items():
        size = 1e6 * size_mb
        items = {"payload_bytes": size, "slack_bytes": 0.0, "resident_bytes": size, "resident_ratio": ratio}
        rows.append(of_lengths(record, method=method, answer=answer, fp16_bytes=size / ratio, **items))
    figure.draw(rows, tmp_path / "a.png")
    quality, held = made[0].axes
    assert sorted(text.get_text() for text in quality.texts) == ["diffkv 0.0", "full 0.0", "kivi 0.0", "snapkv 0.0"]
    boxes = [Text.get_window_extent(text) for text in quality.texts]  # without the lines to their points
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(quality.bbox.x1 < box.x0 and box.x1 < made[0].bbox.x1 for box in boxes)
    lengths = [bar.get_x() + bar.get_width() for bar in held.patches]
    assert [float(text.get_text().split(" ")[0]) for text in held.texts] == pytest.approx(lengths)
    assert held.texts[-1].get_text() == "56.0 %, 1.28 MB"
    (line,) = held.lines  # at 100 %
    at, boxes = line.get_window_extent().x1, [text.get_window_extent() for text in held.texts]
    assert all(at < box.x0 and box.x1 < held.bbox.x1 for box in boxes), "within the frame, right of the line"
    assert [tick.get_text() for tick in held.get_yticklabels()][-1] == "snapkv\n165 tokens"


def test_progress_lines(tmp_path, monkeypatch):
    """Without a terminal, progress is plain lines: what was done before, rate, cache bytes, time left."""
    for name in ("PLAIN_EVERY_S", "PATIENCE_S"):
        monkeypatch.setattr(f"kvbench.show.progress.{name}", 0.0)
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        with Progress("kivi on longctx", 8, 2, stream=log) as progress:
            progress.step({"decode_tokens_per_s": 12.34, "cache_bytes": 45.6e6})
            progress.advance()
        log.seek(0)
        lines = log.read().splitlines()
    assert lines[0] == "kivi on longctx: 8 samples, 2 of them done before"
    assert lines[1] == "kivi on longctx: 2/8 samples, 12.3 tokens/s, cache 45.6 MB"
    assert lines[2] == "kivi on longctx: 3/8 samples, 12.3 tokens/s, cache 45.6 MB"  # no pace, no time left


def test_units():
    """Bytes and durations are written with sensible digits at every size."""
    sizes = [0, 999, 1000, 9994, 99_940, 999_600, 12_345_678, 3e9, 5e12, None]
    expected = ["0 B", "999 B", "1.00 kB", "9.99 kB", "99.9 kB", "1.00 MB", "12.3 MB", "3.00 GB", "5 TB", "-"]
    assert [format_bytes(size) for size in sizes] == expected
    expected = ["0 s", "1 min 00 s", "59 min 59 s", "2 h 05 min", "?"]
    assert [format_seconds(seconds) for seconds in (0.4, 59.6, 3599, 7500, None)] == expected


def test_table_by_what_a_task_tells_apart(tmp_path):
    """One table for each thing that a task tells its samples apart by, and none where there is one group; a run that
    lacks a group has a gap."""
    runs = [run_of(make_cfg(tmp_path), name).record for name in ("b", "a")]
    primary = runs[1].primary
    for record, values in zip(runs, ((0.5, None), (0.25, 1.0)), strict=True):
        groups = {name: {"num_samples": 3, primary: value} for name, value in zip(("512", "1024"), values, strict=True)}
        record.task_aggregate["by"] = {"length": groups, "task": {"vt": {"num_samples": 6, primary: 0.5}}}
    text = shown(runs)
    assert f"{primary} by length, %" in text and "by task" not in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("512", "1024"))]
    assert rows == [["512", "50.0", "25.0", "3"], ["1024", "-", "100.0", "3"]]


def run(method, hash_, seed=0, **settings):
    """A record with the parts that a label looks at."""
    return RunRecord(method=method, hash=hash_, identity={"method": settings, "seed": seed})


def test_labels_say_what_differs():
    """One run of a method is the method; several are told apart by the settings that differ, and only by those, by
    seeds when the method does not, and by the hash when nothing does; the same run twice is one run."""
    runs = [run("full", "f"), run("snapkv", "a", budget=0.5, window=32), run("snapkv", "b", budget=0.25, window=32)]
    assert label_runs(runs) == ["full", "snapkv budget=0.5", "snapkv budget=0.25"]
    assert label_runs(runs[:2]) == ["full", "snapkv"]
    assert label_runs(runs, "\n")[1] == "snapkv\nbudget=0.5"
    assert label_runs([run("h2o", "a", 0, budget=1), run("h2o", "b", 1, budget=1)]) == ["h2o seed=0", "h2o seed=1"]
    assert label_runs([run("h2o", "abcdefgh"), run("h2o", "12345678")]) == ["h2o abcdef", "h2o 123456"]
    assert label_runs([run("h2o", "a"), run("h2o", "a")]) == ["h2o", "h2o"]


def test_prompts_in_chunks_always_show():
    """Later tokens saw a compressed past, so the label says so beside any run and alone."""
    whole, chunked = run("snapkv", "a", budget=0.5), run("snapkv", "b", budget=0.5)
    chunked.protocol = {"prefill_chunk": 512}
    assert label_runs([whole, chunked]) == ["snapkv", "snapkv prefill.chunk=512"]
    assert label_runs([chunked]) == ["snapkv prefill.chunk=512"]


def test_long_settings_are_cut():
    """A table of numbers does not fill the line, and two that begin alike are told apart by the hash."""
    first, second = [[0.25] * 9, [0.5]], [[0.25] * 9, [0.75]]
    labels = label_runs([run("duo", "aaaaaaaa", table=first), run("duo", "bbbbbbbb", table=second)])
    assert labels == ["duo table=[[0.25, 0.25, 0.25, 0... aaaaaa", "duo table=[[0.25, 0.25, 0.25, 0... bbbbbb"]


def estimate(value, low=None, high=None):
    """As `run.json` has it."""
    return {"value": value, "low": low, "high": high, "num_samples": 9, "interval": "", "num_nonfinite": 0}


def test_tables_of_tokens_and_of_free_answers() -> None:
    """A column for each run, a dash for what a run lacks; runs of other tasks have no such table."""
    tokens = {"perplexity": estimate(12.345, 11.0, 13.0), "kl_max": estimate(2.5), "same_first_choice": estimate(0.9)}
    free = {"repetition": estimate(0.25, 0.2, 0.3), "early_stop": estimate(None)}
    full = RunRecord(method="full", hash="a", task_aggregate={"tokens": tokens, "free": free})
    other = RunRecord(method="h2o", hash="b", task_aggregate={"tokens": {}, "free": {}})
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(*long_tables([full, other]))
    lines = [re.split(r"\s{2,}", line.strip()) for line in console.export_text().splitlines()]
    cells = {line[0]: line[1:] for line in lines}
    assert cells["perplexity"] == ["12.3 [11, 13]", "-"] and cells["KL max"] == ["2.5", "-"]
    assert cells["same first choice, %"] == ["90.0", "-"]
    assert cells["4-grams said before, %"] == ["25.0 [20.0, 30.0]", "-"]
    assert cells["would have ended before, %"] == ["-", "-"]
    assert long_tables([RunRecord(method="full"), other]) == []


def test_table_shows_the_layers_on_which_a_method_acts_where_there_are_others(tmp_path):
    """Their bytes and their share stand beside the whole cache's, and nowhere else; a picture has a colour for each of
    the items, however large."""
    finished = run_of(make_cfg(tmp_path))
    ledger = finished.record.ledger | {"full_layers_bytes": 4567.0, "full_layers_ratio": 0.4321}
    ledger |= dict.fromkeys(("book_bytes", "window_bytes", "state_bytes"), ledger["fp16_bytes"])
    mixed = dataclasses.replace(finished.record, hash="f" * 64, ledger=ledger)
    alone, both = (" ".join(shown([finished.record, *more], 120).split()) for more in ([], [mixed]))
    assert "full layers" not in alone
    for part in ("full layers", "4.57 kB", "43.2 %"):
        assert part in both, part
    assert figure.draw([mixed], tmp_path / "picture.png").stat().st_size > 0
