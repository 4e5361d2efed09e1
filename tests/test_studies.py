"""The studies of results/example: what their scripts run, the tables that they make of it, and that the tables of
the documents are those of the committed files, and these those of the samples."""

import csv
import importlib.util
import json
import re
import sys
from collections import Counter
from functools import cache
from statistics import fmean

import pandas as pd
import pytest
from places import ROOT, need_extension
from stored import flips, store, yes_no

from kvbench.cache.options import ROTATIONS
from kvbench.cli.commands import compose_command
from kvbench.config.compose import compose
from kvbench.config.settings import as_dict
from kvbench.evidence.compare import compare_group
from kvbench.evidence.load import load_groups
from kvbench.evidence.pareto import panels_of
from kvbench.results.lines import read_samples
from kvbench.results.record import RunRecord
from kvbench.rules import declared
from kvbench.runs.parts import make_policy, policy_class

engines = pytest.importorskip("kvbench.extensions.advise.engines").engines

EXAMPLE = ROOT / "results" / "example"
STUDY = EXAMPLE / "study"
BENCHMARKS = EXAMPLE / "benchmarks"
MOST_BYTES = 8_000_000
RUN = "snapkv budget=0.25 tier=fp16"


@cache
def script(name):
    """A script of results/example, as a module; one imports another."""
    sys.path[:0] = [str(EXAMPLE)] if str(EXAMPLE) not in sys.path else []
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("formats", "item=3", "there is no setting item; there are items, length"),
        ("shipped", "item=3", "there is no setting item; there are chunks"),
        ("composition", "item=3", "there is no setting item; there are items"),
        ("composition", "scores=[snap]", "scores has no snap; there are snapkv"),
        ("composition", "allocations=[table]", "allocations has no table; there are uniform"),
    ],
)
def test_wrong_settings_are_named(name, word, message):
    """With those that there are."""
    with pytest.raises(SystemExit, match=message):
        script(name).settings_of([word])


def test_every_format_can_be_run_and_none_comes_twice():
    """Methods and tiers have the names that kvbench knows them by; the full cache is first, for the comparisons."""
    found = list(script("formats").runs(script("formats").settings_of([])))
    assert found[0] == ("full", {}, {})
    assert len({repr(run) for run in found}) == len(found) >= 25
    settings = {method: as_dict(compose([f"method={method}"]).method) for method in {method for method, *_ in found}}
    for method, own, more in found:
        assert set(own) <= set(settings[method]) and set(more.values()) <= set(ROTATIONS)
        make_policy(settings[method] | own)


def test_the_table_of_formats_has_a_row_for_every_run(tmp_path):
    """On random weights: bytes fall with the bits, and the differences are those to the full cache."""
    words = "model=tiny items=1 rows=4 memory=64MiB".split()
    asked = script("formats").settings_of([*words, "methods=[full]", "formats=[int4]", "rotated=[k2v2]"])
    script("formats").study(tmp_path, asked)
    script("formats").table(tmp_path)
    with (tmp_path / "formats.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    four, two = (next(name for name in rows if tier in name) for tier in ("int4 tier=int4", "tier=k2v2"))
    assert set(rows) == {"full", four, two}
    assert "rotation=hadamard" in two
    resident = {name: float(row["resident"]) for name, row in rows.items()}
    assert resident["full"] > 2 * resident[four] > 2 * resident[two]
    assert float(rows["full"]["quality"]) == 0.0


def test_every_format_that_engines_ship_has_a_row(tmp_path):
    """On random weights: the full cache first and whole, and a command of llama.cpp as its own table of bytes says;
    every format of `kvbench engine` but other words for one is asked for."""
    study = script("shipped")
    asked = study.settings_of("model=tiny chunks=2 tokens=16 rows=2 only=2".split())
    full, first = study.study(tmp_path, asked)
    assert (full["engine"], full["bytes_per_token"]) == ("", full["bytes_full"]) and full["kl_max"] < 1e-4
    assert first["flags"] == "-ctk q8_0 -ctv q8_0" and first["bytes_per_token"] / first["bytes_full"] == 34 / 64
    assert first["n"] == full["n"] > 0 and 0 < first["kl_mean"] <= first["kl_max"]
    study.table(tmp_path, [full, first])
    assert (tmp_path / "shipped.csv").read_text().startswith("engine,flags,bytes_per_token,bytes_full,n,perplexity,")
    found = {(method, settings.get("method.tier")) for _, _, method, settings in study.runs(tmp_path)}
    shipped = [entry for engine in engines().values() for entry in engine["formats"].values()]
    assert {("engine_format", entry["tier"]) for entry in shipped if not entry.get("alias")} <= found


def test_what_an_engine_should_switch_on_stands_first_and_is_measured():
    """The first ten lines of the findings name flags of llama.cpp and of vLLM, which have a row, and lose little."""
    first = " ".join((ROOT / "docs" / "findings.md").read_text().splitlines()[:10])
    rows = {row["flags"]: row for row in csv.DictReader((ROOT / "results/example/shipped.csv").open())}
    named = re.findall(r"`(-[^`]+)`", first)
    assert {rows[flags]["engine"] for flags in named} == {"llama-server", "vllm serve"}
    assert all(float(rows[flags]["kl_mean"]) < 0.01 for flags in named)


def test_every_score_meets_every_allocation_at_the_same_bytes():
    """At three budgets, which are half, a quarter and an eighth of the full cache of prompt and answer, `random` beside
    them; and every method takes its settings."""
    study = script("composition")
    found = list(study.runs(study.settings_of([])))
    whole = 2 * 2 * 30 * 3 * 64 * (512 + study.NEW_TOKENS)
    amounts = {f"{whole // part}B" for part in (2, 4, 8)}
    assert {settings["budget"] for _, settings in found} == amounts
    assert Counter(method for method, _ in found) == {"random": 3} | {m: 15 for m, _ in study.SCORES.values()}
    assert len({(method, *map(str, settings.values())) for method, settings in found}) == len(found)
    targets = {method: compose([f"method={method}"]).method._target_ for method in {method for method, _ in found}}
    for method, settings in found:
        assert set(settings) <= set(declared(policy_class(targets[method])))
        make_policy({"_target_": targets[method], **settings})


def test_a_study_goes_on_past_what_cannot_be_run(tmp_path, monkeypatch, capsys):
    """Refused runs are named, and the others are run."""
    ran = []

    def run(method, **settings):
        if method == "random":
            raise ValueError("too small")
        ran.append((method, settings["allocation"], settings["model"], settings["settings"]["model.preset"]))

    monkeypatch.setattr(script("composition").kvbench, "run", run)
    words = ["model=tiny", "scores=[kvzip]", "allocations=[ada,global]", "parts=[0.5]"]
    script("composition").study(tmp_path, script("composition").settings_of(words))
    assert ran == [("kvzip", "ada", "random", "tiny"), ("kvzip", "global", "random", "tiny")]
    assert "not run: too small" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    ["findings", *(pytest.param(name, marks=need_extension("papers")) for name in ("benchmarks", "mission_report"))],
)
def test_the_tables_are_those_of_the_files(name):
    """`make findings` would leave the documents as they are."""
    texts, made = [path.read_text() for path in script("findings").DOCUMENTS], dict(script(name).tables())
    assert made and script("findings").put(texts, made.items()) == texts


@need_extension("papers")
def test_rows_of_the_mission_are_those_of_the_samples(tmp_path):
    """Answers, scores and bytes of each setting, computed again from the packed samples; those that were stopped are as
    the ledger has them."""
    with (EXAMPLE / "mission.csv").open(newline="") as file:
        rows = {row["hash"]: row for row in csv.DictReader(file) if row["metric"] == "score"}
    script("mission_report").parted(EXAMPLE / "mission", tmp_path)
    folders = sorted(tmp_path.glob("*/*/*/*/*"))
    assert len(folders) == len(rows)
    for folder in folders[::5]:
        run = RunRecord.load(folder)
        samples, damaged = read_samples(folder / "samples.jsonl", run.hash)
        good = [record for record in samples.values() if record["status"] == "ok"]
        row, name = rows[run.hash], script("mission").MEASURES[run.task]
        assert not damaged and int(row["answers"]) == len(good)
        subsets = {subset: [] for subset in sorted({record["subset"] for record in good})}
        for record in good:
            subsets[record["subset"]].append(record["scores"][name])
        assert float(row["value"]) == pytest.approx(fmean(map(fmean, subsets.values())))
        held, whole = (sum(record["ledger"][key] for record in good) for key in ("resident_bytes", "fp16_bytes"))
        assert float(row["bytes"]) == pytest.approx(held / whole)


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


@need_extension("papers")
def test_the_benchmarks_are_those_of_the_samples():
    """Score, difference, interval, corrected p, bytes and lengths of a method, computed again from the packed samples;
    every run is complete, and each task has the same problems in all of its runs."""
    with (EXAMPLE / "benchmarks.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "score"]
    asked = {}
    for path in BENCHMARKS.glob("*/*/*/*/run.json"):
        run = RunRecord.load(path.parent)
        assert run.status == "complete" and run.counts.done == run.counts.total, path
        asked.setdefault((run.task, run.model), []).append(run.counts.total)
    assert {key: len(counts) for key, counts in asked.items()} == Counter((r["task"], r["model"]) for r in rows)
    assert all(len(set(counts)) == 1 for counts in asked.values())
    cfg = compose_command("compare", [f"results_dir={BENCHMARKS}", "methods=diffkv"])
    for group in load_groups(cfg):
        mine = {row["run"]: row for row in rows if (row["task"], row["model"]) == (group.task, group.model)}
        found, _ = compare_group(group, cfg)
        assert found
        for row in found:
            stored = mine[script("benchmarks").words(row.run)]
            assert [float(stored[key]) for key in ("difference", "low", "high")] == pytest.approx(
                [row.value, *row.interval], abs=1e-9
            )
            assert (int(stored["lost"]), int(stored["gained"])) == (row.num_lost, row.num_gained)
            assert float(stored["p_holm"]) >= row.p - 1e-12 and int(stored["n"]) == row.pairs.num_samples
            assert float(stored["longer"]) == pytest.approx(row.longer.value)


@need_extension("papers")
def test_the_table_of_benchmarks_is_made_again(tmp_path, monkeypatch):
    """`make findings` makes the committed rows of a model again, of every metric."""
    module, model = script("benchmarks"), "qwen2.5-coder-1.5b"
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "models", lambda: [model])
    module.runs(tmp_path)
    stored = pd.read_csv(EXAMPLE / "benchmarks.csv")
    stored = stored[stored["model"] == model].reset_index(drop=True)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "benchmarks.csv"), stored, rtol=1e-9)


@need_extension("papers")
def test_nothing_of_the_benchmarks_is_stored():
    """No right answer, no end of a prompt, no fact of a problem but its number, and no path of a machine."""
    for path in BENCHMARKS.glob("*/*/*/*/run.json"):
        settings = path.read_text() + path.with_name("config.yaml").read_text()
        assert not re.search(r"[=:] ?['\"]*/[a-z]+/", settings), path
    for path in BENCHMARKS.glob("*/*/full/*/run.json"):
        run = RunRecord.load(path.parent)
        samples, damaged = read_samples(path.with_name("samples.jsonl"), run.hash, sealed=True)
        assert samples and not damaged
        for sample in samples.values():
            assert "gold" not in sample and sample["prompt"]["tail"] == "" and len(sample["prompt"]["sha256"]) == 64
            assert sample["text"] == ""
            assert set(sample["meta"]) <= set(script("benchmarks").OWN)


@need_extension("papers")
def test_packing_leaves_out_what_is_not_ours(tmp_path):
    """A packed run compares as it did, and its lines are sealed; answers, ends of prompts and paths are gone, and a run
    that did not end is left out."""
    scores, gold = yes_no(0.5, {"a": 40}), ["the right answer"]
    for method, status in (("full", "complete"), ("int4", "complete"), ("fp8", "stopped")):
        folder = store(tmp_path / "runs", method, scores, status=status, gold=gold)
        (folder / "config.yaml").write_text(f"model: {{path: {tmp_path}}}\nresults_dir: {tmp_path}\nseed: 0\n")
        record = json.loads((folder / "run.json").read_text())
        record["sessions"] = [{"command": ["--config-dir", str(tmp_path), f"data_dir={tmp_path}", "seed=0"]}]
        (folder / "run.json").write_text(json.dumps(record))
    script("benchmarks").pack(tmp_path / "runs", tmp_path / "packed")
    (group,) = load_groups(compose_command("compare", [f"results_dir={tmp_path / 'packed'}"]))
    assert [run.method for run in group.runs] == ["full", "int4"]
    for run in group.runs:
        assert len(run.samples) == 40 and {sample["scores"]["exact"] for sample in run.samples.values()} == {0.0, 1.0}
        told = [(sample.get("gold"), sample["prompt"]["tail"], sample["text"]) for sample in run.samples.values()]
        assert set(told) == {(None, "", "")}
        assert {sample["answer"]["tokens"] for sample in run.samples.values()} != {0.0}
        assert [session.command for session in run.record.sessions] == [["seed=0"]]
        assert (tmp_path / "packed" / run.name / "config.yaml").read_text() == "model:\n  path: null\nseed: 0\n"


def test_a_stranger_computes_the_same():
    """By numpy and scipy alone: n and scores of the committed tables exactly, intervals within half a point."""
    recompute = script("recompute")
    first = {tuple(cells[:3]): cells[4:] for cells in recompute.rows(BENCHMARKS) if cells[2] != "kivi"}
    found = {cells[3]: cells[4:] for cells in recompute.rows(EXAMPLE / "mission")}
    pairs = []
    for name in ("benchmarks", "mission"):
        with (EXAMPLE / f"{name}.csv").open(newline="") as file:
            for row in (row for row in csv.DictReader(file) if row["metric"] == "score"):
                if "hash" in row and row["task"] != "longctx":  # of suite=mission-offsets no table has scores
                    pairs.append((row, row["answers"], found[row["hash"][:12]]))
                elif row.get("method", "kivi") != "kivi":  # two settings, and no hash to tell them
                    pairs.append((row, row["n"], first[row["task"], row["model"], row["method"]]))
    assert sum("hash" not in row for row, *_ in pairs) == len(first) > 20 and len(pairs) > 90
    names = "value value_low value_high difference low high".split()
    for row, answers, (n, *values) in pairs:
        assert n == int(answers)
        for name, value in zip(names, values, strict=True):
            if row.get(name):  # the full cache is compared with nothing
                exact = "_" not in name if "hash" not in row else name in ("value", "difference")
                assert value == pytest.approx(100 * float(row[name]), abs=0.006 if exact else 0.5), (row, name)


@pytest.mark.long
@need_extension("suite")
def test_a_study_stops_what_is_worse_and_goes_on_with_the_rest(tmp_path):
    """At a look a method that lost 20 of 40 answers is left out, and one that lost 3 is not; where the full cache is at
    the floor, the benchmark is. What was found is kept, and read again."""
    mission = script("mission")
    every = ["method=full", "method=int4 store.key_offset=none", "method=kivi method.bits=2"]
    for rate, expected in ((0.6, [every[1]]), (0.02, ["method=full"])):
        folder = tmp_path / str(rate)
        scores = yes_no(rate, {"humaneval_plus": 40})
        known = {"task": "humaneval_plus", "total": 120, "status": "stopped"}
        store(folder, "full", scores, **known)
        store(folder, "int4", flips(scores, 20, 0), **known)
        store(folder, "kivi", flips(scores, 3, 1), settings={"bits": 2}, **known)
        for path in folder.glob("*/*/*/*/run.json"):  # a run that was stopped names no measure
            path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": {}}))
        assert mission._fewest(folder, "humaneval_plus", every) == 40
        ledger = folder / "stopped.csv"
        mission._decide(folder, "humaneval_plus", every, every, 40, ledger)
        assert [row["setting"] for row in mission._read(ledger)] == expected


@need_extension("suite")
def test_slow_settings_of_the_mission_go_by_themselves(tmp_path, monkeypatch):
    """Up to each look and to the end, behind the others, and all of them are judged at the look."""
    mission = script("mission")
    every, went, judged = ["method=full", f"method=int4 {mission.SLOW}", "method=h2o"], [], []
    monkeypatch.setattr(mission, "settings", lambda suite: every)
    monkeypatch.setattr(mission, "_command", lambda suite, task, data, folder, part, words: part)
    monkeypatch.setattr(mission, "_reach", lambda command, folder, task, part, look: went.append((part, look)) or True)
    monkeypatch.setattr(mission, "_decide", lambda folder, task, all_, left, *more: judged.append(left))
    assert mission.run("humaneval_plus", "data", tmp_path, []) == 0
    fast, slow = [every[0], every[2]], [every[1]]
    assert went == [(part, look) for look in (*mission.LOOKS["humaneval_plus"], None) for part in (fast, slow)]
    assert judged == [every] * 2


def test_a_look_is_made_once(tmp_path, monkeypatch):
    """A study that goes on looks no second time where it has looked: each look is one more chance of a false stop."""
    mission, judged = script("mission"), []
    monkeypatch.setattr(mission, "settings", lambda suite: ["method=full", "method=h2o"])
    monkeypatch.setattr(mission, "_reach", lambda *given: True)
    monkeypatch.setattr(mission, "_decide", lambda folder, task, all_, left, look, ledger: judged.append(look))
    (tmp_path / "look_40_stopped_mission_humaneval_plus.csv").touch()
    assert mission.run("humaneval_plus", "data", tmp_path, []) == 0
    assert judged == [80]


def test_settings_of_the_mission_are_composed_and_told_apart():
    """Each line of a suite is as many settings as its commas say, all of them different."""
    mission = script("mission")
    found = mission.settings("mission")
    assert len(set(found)) == len(found) == 29
    for words in found:
        make_policy(as_dict(compose(words.split()).method))


@need_extension("suite")
def test_a_study_that_was_packed_goes_on(tmp_path, monkeypatch):
    """Runs that did not end are packed too, and their samples are there when they are unpacked."""
    mission = script("mission")
    monkeypatch.setattr(mission, "PACKED", tmp_path / "packed")
    folder = store(tmp_path / "runs", "int4", yes_no(0.5, {"a": 40}), total=80, status="stopped", gold=["right"])
    (folder / "config.yaml").write_text("seed: 0\n")
    mission.pack(tmp_path / "runs")
    mission.unpack(tmp_path / "again")
    (back,) = (tmp_path / "again").glob("*/*/*/*")
    record = RunRecord.load(back)
    samples, damaged = read_samples(back / "samples.jsonl", record.hash, sealed=record.sealed)
    assert back.name == folder.name and len(samples) == 40 and not damaged


def test_the_example_is_small():
    """The committed part of the study stays a small part of a checkout."""
    files = (path for path in EXAMPLE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
