"""Stored runs in the formats of others, read back by those others where they are at hand."""

import csv
import io
import json
from pathlib import Path

import pytest
import yaml
from stored import flips, store, yes_no

import kvbench as kb
from kvbench.cli.main import main
from kvbench.stats.strata import standard_error, weighed

SCORES = yes_no(0.7, {"a": 20, "b": 12}, seed=2)


@pytest.fixture
def results(tmp_path):
    """Two complete runs, one of two samples that ran out of memory, one that failed and one that is not done."""
    root = tmp_path / "results"
    gold = lambda number: ("right", f"n {number}")  # noqa: E731
    store(root, "full", SCORES, ratio=1.0, tiers=(100,), bits=16, gold=gold)
    store(root, "snapkv", flips(SCORES, 3, 0), settings={"budget": 0.25}, gold=gold, statuses={1: "oom", 2: "oom"})
    store(root, "broken", SCORES, status="failed", message="no")
    store(root, "part", SCORES, status="running")
    return root


def export(results, kind, *words):
    """Give the command; the folder that it wrote."""
    to = results.parent / f"out-{kind}"
    assert main(["export", f"results_dir={results}", f"format={kind}", f"to={to}", *words]) == 0
    return to


def test_lm_eval_reads_the_results(results, capsys):
    """Its table prints the scores that the run has, with a standard error; its names of files are found."""
    from lm_eval import utils

    to = export(results, "lm_eval")
    files = [str(path) for path in sorted(to.rglob("*")) if path.is_file() and "snapkv" in str(path)]
    (path,) = utils.get_results_filenames(files)
    names = [name.rsplit("/", 1)[1] for name in utils.get_sample_results_filenames(files)]
    assert {utils.get_file_task_name(name) for name in names} == {"toy_a", "toy_b"}
    content = json.loads(Path(path).read_text())
    table = utils.make_table(content)
    kept = {"a": [SCORES["a"][0], *SCORES["a"][3:]], "b": flips(SCORES, 3, 0)["b"]}
    for name, values in kept.items():
        mean = sum(values) / len(values)
        assert content["results"][f"toy_{name}"]["exact,none"] == pytest.approx(mean) and f"{mean:.4f}" in table
    error = standard_error(weighed(list(kept.values())))[0]
    assert content["groups"]["toy"]["exact_stderr,none"] == pytest.approx(error)
    assert content["groups"]["toy"]["exact,none"] == pytest.approx(kb.load(results).set_index("method").score["snapkv"])
    assert content["kvbench"]["method"] == "snapkv" and content["config"]["model_args"]["method.budget"] == 0.25
    assert "failed" in capsys.readouterr().err


@pytest.mark.smoke
def test_samples_have_lm_evals_keys(results):
    """The keys of lm-eval's sample, the right answers, and no answer that is not in the journal."""
    to = export(results, "lm_eval", "methods=full")
    (path,) = to.rglob("samples_toy_b_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 12 and [line["exact"] for line in lines] == SCORES["b"]
    keys = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
    keys |= {"doc_hash", "prompt_hash", "target_hash"}
    for index, line in enumerate(lines):
        assert keys <= set(line) and line["target"] == str(["right", f"n {20 + index}"])
        assert line["arguments"] == {"gen_args_0": {"arg_0": "What is it?"}}
        assert line["resps"] == [[line["filtered_resps"][0]]]


@pytest.mark.smoke
def test_parquet_has_a_row_for_each_run_and_each_answer(results):
    """As `kb.load` has them, with settings as columns; right answers and the end of the prompt beside each answer."""
    import pandas as pd

    to = export(results, "parquet")
    runs, samples = pd.read_parquet(to / "runs.parquet"), pd.read_parquet(to / "samples.parquet")
    expected = kb.load(results).set_index("hash")
    assert set(runs.method) == {"full", "snapkv"} and len(samples) == 2 * 32
    for _, row in runs.iterrows():
        assert row.score == pytest.approx(expected.score[row.hash])
        assert row.resident_ratio == expected.resident_ratio[row.hash]
    assert runs.set_index("method")["method.budget"]["snapkv"] == 0.25
    mine = samples[samples.method == "full"].set_index("sample_id")
    assert list(mine.gold["a/3"]) == ["right", "n 3"] and mine.prompt_tail["a/3"] == "What is it?"
    assert samples[samples.status == "oom"].score.isna().all()


def test_conversations_leave_whole(tmp_path):
    """Every answer of a conversation is exported, in lm-eval's samples and in parquet."""
    import pandas as pd

    root = tmp_path / "results"
    store(root, "full", {"a": [1.0, 0.0]}, turns=("first", "second"))
    (path,) = export(root, "lm_eval").rglob("samples_*.jsonl")
    lines = [json.loads(line)["resps"] for line in path.read_text().splitlines()]
    assert lines == [[["first"], ["second"], [f"answer {score}"]] for score in (1.0, 0.0)]
    samples = pd.read_parquet(export(root, "parquet") / "samples.parquet")
    assert [list(row) for row in samples.answers] == [["first", "second", f"answer {score}"] for score in (1.0, 0.0)]


def test_columns_of_several_types_become_text(tmp_path):
    """A column that is a number in one task and a text in another is kept as text."""
    import pandas as pd

    from kvbench.extensions.export.export import parquet_bytes

    frame = pd.read_parquet(io.BytesIO(parquet_bytes([{"x": 1, "y": [1]}, {"x": "two"}, {"x": None, "y": "z"}])))
    assert list(frame.x[:2]) == ["1", "two"] and frame.x.isna()[2] and list(frame.y)[0] == "[1]"


def ruler(root, method, scores, **more):
    """A run of task=ruler in the form that kvbench's own has."""
    known = {"task": "ruler", "gold": ("alpha", "beta"), **more}
    return store(root, method, scores, **known)


def test_kvpress_folders(tmp_path):
    """The three files of kvpress's evaluation under its name of the folder."""
    root = tmp_path / "results"
    scores = {"niah_single_1": [1, 1, 0, 1], "vt": [0.5, 0.25]}
    ruler(root, "full", scores, ratio=1.0)
    ruler(root, "snapkv", scores, settings={"budget": 0.125}, ratio=0.2)
    ruler(root, "int8", scores, ratio=0.53)
    to = export(root, "leaderboard")
    assert sorted(path.name for path in to.iterdir()) == [
        "ruler__tiny__int8__0.47__query_aware",
        "ruler__tiny__no_press__0.00__query_aware",
        "ruler__tiny__snapkv__0.88__query_aware",
    ]
    folder = to / "ruler__tiny__snapkv__0.88__query_aware"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.json", "predictions.csv"]
    assert json.loads((folder / "metrics.json").read_text()) == {
        "niah_single_1": {"string_match": 75.0},
        "vt": {"string_match": 37.5},
    }
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["dataset"], config["press_name"], config["compression_ratio"]) == ("ruler", "snapkv", 0.875)
    assert config["kvbench"]["resident_ratio"] == pytest.approx(0.2)
    rows = list(csv.DictReader(io.StringIO((folder / "predictions.csv").read_text())))
    assert len(rows) == 6 and rows[0]["answer"] == "['alpha', 'beta']" and rows[0]["task"] == "niah_single_1"
    assert {float(row["compression_ratio"]) for row in rows} == {0.875}


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["lm_eval", "parquet", "leaderboard"])
@pytest.mark.parametrize("text", ["x/../../../../victim", "/victim", "..", "a\\b"])
def test_what_a_stored_run_says_never_leaves_the_folder(tmp_path, kind, text):
    """Whatever stands where a file's name comes from, of the record or of a sample, files lie below `to`."""
    root = tmp_path / "deep" / "er" / "results"
    folder = ruler(root, "snapkv", {"a": [1.0]}, meta={"length": text, "task": text}, settings={"budget": 0.5})
    record = json.loads((folder / "run.json").read_text())
    record |= dict.fromkeys(("model", "method", "ended", "started"), text)
    (folder / "run.json").write_text(json.dumps(record))
    before = set(tmp_path.rglob("*"))
    to = export(root, kind)
    made = set(tmp_path.rglob("*")) - before
    assert made and all(path == to or to in path.parents for path in made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["format=leaderboard", "to=x"], "takes runs of task=ruler alone, and these are of toy"),
        (["format=xml", "to=x"], "format=xml does not exist"),
        ([], "export needs a folder"),
        (["to=x", "methods=nothing"], "no complete run"),
        (["to=x", "results_dir=nowhere"], "results_dir=nowhere is not a folder"),
    ],
)
def test_what_cannot_be_written_is_named(results, words, said, capsys, monkeypatch):
    """The setting, the rule and the remedy; nothing is left behind."""
    monkeypatch.chdir(results.parent)
    assert main(["export", f"results_dir={results}", *words]) == 2
    assert said in capsys.readouterr().err and not (results.parent / "x").exists()
