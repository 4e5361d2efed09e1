"""What a command ended with is found again before anything is loaded, and only while nothing has changed."""

import json
import os
import subprocess
import sys

import pytest
from places import ROOT

from kvbench.config.compose import compose
from kvbench.results.identity import hash_identity
from kvbench.results.record import RunRecord
from kvbench.runs import known

WORDS = ["method=snapkv", "model=random", "model.preset=tiny"]


@pytest.fixture
def noted(tmp_path):
    """A configuration whose run is noted, its digest, and the folder of the run."""
    cfg = compose([*WORDS, f"results_dir={tmp_path}"])
    folder = tmp_path / "longctx" / "random-tiny" / "snapkv" / "abc"
    folder.mkdir(parents=True)
    for name in ("samples.jsonl", "config.yaml"):
        (folder / name).write_text("x")
    RunRecord(status="complete", hash=hash_identity({}), method="snapkv").save(folder)
    digest = known.digest_of(cfg, "snapkv")
    known.keep(digest, cfg, folder, RunRecord.load(folder))
    return cfg, digest, folder


def test_a_noted_run_is_found(noted):
    """As long as its files are as they were; a run that is not complete is not noted."""
    cfg, digest, folder = noted
    assert known.find(digest, cfg).record.hash == hash_identity({})
    os.utime(folder / "samples.jsonl", ns=(1, 1))
    assert known.find(digest, cfg) is None
    known.keep("other", cfg, folder, RunRecord(status="failed"))
    assert known.find("other", cfg) is None and known.find(None, cfg) is None


def test_a_damaged_note_is_none(noted):
    """Whatever lies there, the long way answers."""
    cfg, digest, folder = noted
    path = folder.parents[3] / known.FOLDER / f"{digest}.json"
    for text in ("", "[]", json.dumps({"folders": ["../.."], "states": [[]]})):
        path.write_text(text)
        assert known.find(digest, cfg) is None


@pytest.mark.parametrize("word", ["seed=1", "method.budget=0.5", "limit=3", "task.length=600", "model.seed=1"])
def test_another_setting_is_another_digest(noted, word):
    """Every setting of the run counts."""
    cfg, digest, folder = noted
    assert known.digest_of(compose([*WORDS, f"results_dir={folder.parents[3]}", word]), "snapkv") not in (None, digest)


def test_a_file_that_a_setting_names_counts(tmp_path, monkeypatch):
    """A changed row of the user's own file, and a changed variable of a library, are another digest."""
    path = tmp_path / "my.jsonl"
    path.write_text("{}")
    words = [*WORDS, "task=custom", f"task.file={path}"]
    first = known.digest_of(compose(words), "snapkv")
    path.write_text("{} ")
    second = known.digest_of(compose(words), "snapkv")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert len({first, second, known.digest_of(compose(words), "snapkv"), None}) == 4


@pytest.mark.parametrize(
    "word", ["resume=false", "shard=1/2", "tracker=wandb", "model=Org/Name", "method._target_=mine.Toy"]
)
def test_what_cannot_be_told_has_no_digest(word):
    """Code of the user's own, models of the hub, shards, trackers, and runs that begin again."""
    cfg = compose(["method=snapkv", word])
    assert known.digest_of(cfg, "snapkv") is None


def test_it_is_told_without_torch(tmp_path):
    """The module and its digest need neither torch nor transformers."""
    code = (
        "import sys; from kvbench.config.compose import compose; from kvbench.runs import known;"
        f"known.find(known.digest_of(compose({WORDS!r}), 'snapkv'), compose({WORDS!r}));"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
