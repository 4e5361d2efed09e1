"""`kvbench.run`, `sweep` and `load`: the runs of the command line, and stored results as a DataFrame."""

import re
import subprocess
import sys
import warnings

import pytest
from places import ROOT
from refusals import refused
from stored import store, yes_no

import kvbench
from kvbench.cli.main import run_command
from kvbench.config import code
from kvbench.config.compose import words_of

# A run of a second: random weights, one short prompt, no reference.
SMALL = {"model.preset": "tiny", "task.items": 1, "task.kinds": ["passkey"], "task.length": 256}
SMALL |= {"protocol.max_new_tokens": 3, "fidelity.max_tokens": 4, "backend": "torch"}


@pytest.fixture(autouse=True)
def nothing_kept():
    """Lets go of the model after each test, and of the hashes of methods."""
    yield
    kvbench.release()
    code._first_read.clear()


def test_it_is_the_run_of_the_command_line(tmp_path, capsys):
    """The same settings give the same run: what the command line made is read, and so the other way round. The table is
    the one that it prints."""
    words = ["model=random", f"results_dir={tmp_path}", *words_of(SMALL), "method=snapkv", "method.budget=0.3"]
    assert run_command(words) == 0
    printed = capsys.readouterr().out
    before = {path: path.read_bytes() for path in tmp_path.rglob("samples.jsonl")}
    found = kvbench.run("snapkv", budget=0.3, model="random", results_dir=tmp_path, settings=SMALL)
    assert {path: path.read_bytes() for path in tmp_path.rglob("samples.jsonl")} == before and len(before) == 2
    assert "already there" in capsys.readouterr().err
    assert all(line.rstrip() in printed for line in found.table.splitlines()) and "vs full" in found.table
    assert found.record.status == "complete" and found.reference.method == "full"
    assert found.folder / "result.png" == found.picture and found.picture.read_bytes()[:4] == b"\x89PNG"
    assert (found.folder / "config.yaml").is_file()
    assert repr(found) == found.table
    shown = found._repr_html_()
    assert "snapkv" in shown and "data:image/png;base64,iVBOR" in shown and "<script" not in shown


def test_a_sweep_is_every_combination(tmp_path):
    """Methods and settings are combined, one table shows them all, and what is fixed is no list to try."""
    asked = {"model": "random", "results_dir": tmp_path, "settings": SMALL | {"reference": "none"}}
    found = kvbench.sweep(["snapkv", "knorm"], budget=[0.5, 0.25], **asked)
    made = [(item.record.method, item.record.identity["method"]["budget"]) for item in found]
    assert made == [("snapkv", 0.5), ("snapkv", 0.25), ("knorm", 0.5), ("knorm", 0.25)]
    assert len(found) == 4 and found[1].record.hash != found[0].record.hash
    assert all(text in repr(found) for text in ("budget=0.5", "budget=0.25", "knorm"))
    assert found.picture.name == "sweep.png" and found.picture.is_file() and "base64" in found._repr_html_()
    assert found.frame["method.budget"].tolist() == [0.5, 0.25, 0.5, 0.25]
    assert found.samples.text.tolist() == [text for item in found for text in item.samples.text]
    stored = kvbench.load(tmp_path)
    assert set(stored.hash) == set(found.frame.hash)
    assert len(kvbench.sweep(["snapkv", "kivi"], budget=0.5, **asked)) == 2, "a setting is of those that have it"
    with refused("setting-value", "budget", "budget=[]"):
        kvbench.sweep("snapkv", budget=[])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"method": "snapvk"}, "Did you mean snapkv"),
        ({"budgte": 0.5}, "method.budgte"),
        ({"task": "longctxt"}, "Did you mean longctx"),
        ({"settings": {"protocl.max_new_tokens": 3}}, "protocl"),
        ({"limit": 0}, "limit=0 is no number of samples"),
        ({"settings": {"batch_size": object()}}, "batch_size=<object"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_runs(tmp_path, asked, words):
    """The messages are the command line's."""
    with pytest.raises(ValueError, match=words):
        kvbench.run(**({"model": "random", "results_dir": tmp_path} | asked))
    assert not list(tmp_path.iterdir())


METHOD = '''"""A method of somebody's own."""

from dataclasses import dataclass

from kvbench.policy import EVICT, Policy, PrefillPlan, PrefillView


@dataclass(kw_only=True)
class Mine(Policy):
    """Keeps the first part of every prompt.

    Source: none, an example.
    Differs: none.
    """

    share: float = 0.5

    def plan_prefill(self, view: PrefillView) -> PrefillPlan:
        tier_of = view.filled(0)
        tier_of[..., max(1, int(self.share * view.num_tokens)) :] = EVICT
        return PrefillPlan(tier_of=tier_of)
'''


def test_a_method_of_ones_own_is_not_run_under_a_wrong_hash(tmp_path, monkeypatch):
    """`config_dir` brings a method; one whose file was edited while Python had it imported is refused, not stored under
    the hash of code that did not run."""
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "mine.yaml").write_text(
        "# Mine.\n# source: none\n_target_: mine_of_ones_own.Mine\nshare: 0.5\n"
    )
    (tmp_path / "mine_of_ones_own.py").write_text(METHOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {"model": "random", "results_dir": tmp_path / "results", "settings": SMALL | {"reference": "none"}}
    first = kvbench.run("mine", share=0.25, config_dir=tmp_path / "conf", **asked)
    assert first.record.status == "complete" and first.record.identity["method"]["share"] == 0.25
    assert first.frame["method.share"].tolist() == [0.25]
    (tmp_path / "mine_of_ones_own.py").write_text(METHOD.replace("max(1,", "max(2,"))
    with pytest.raises(RuntimeError, match="was changed after this Python had imported it"):
        kvbench.run("mine", share=0.25, config_dir=tmp_path / "conf", **asked)
    sys.modules.pop("mine_of_ones_own")


# Stored results.


def test_load_gives_a_row_per_run(tmp_path):
    """Every run is a row; its settings are columns by the names of the command line; the numbers are the record's."""
    scores = yes_no(0.7, {"a": 6, "b": 4})
    store(tmp_path, "full", scores)
    store(tmp_path, "snapkv", scores, settings={"budget": 0.25, "window": 32})
    failed = store(tmp_path, "h2o", scores, settings={"budget": 0.5}, status="failed", message="it broke")
    found = kvbench.load(tmp_path).set_index("method")
    assert found.attrs["left_out"] == {} and len(found) == 3
    assert found.loc["snapkv", "method.budget"] == 0.25 and found.loc["h2o", "method.budget"] == 0.5
    assert found.loc["full", "method.budget"] != found.loc["full", "method.budget"]  # it has none: NaN
    assert found.loc["h2o", "status"] == "failed" and found.loc["h2o", "message"] == "it broke"
    assert found.loc["h2o", "folder"] == str(failed)
    expected = (sum(scores["a"]) / 6 + sum(scores["b"]) / 4) / 2  # the mean of the subsets' means
    assert found.loc["snapkv", "score"] == pytest.approx(expected) and found.loc["snapkv", "metric"] == "exact"
    assert found.loc["snapkv", "num_samples"] == 10
    assert found.loc["snapkv", "score_low"] < expected < found.loc["snapkv", "score_high"]
    for column in ("task.query_aware", "protocol.temperature", "batch_size", "seed", "backend", "resident_ratio"):
        assert column in found and found[column].notna().all()
    assert not [column for column in found if "_target_" in column or column.startswith("code")]


def test_load_gives_a_row_per_answer(tmp_path):
    """`samples=True` has every answer with its run, its score and its bytes."""
    scores = {"a": [1, 0, 1], "b": [0, 1]}
    store(tmp_path, "full", scores)
    store(tmp_path, "snapkv", {"a": [1, 1, 1], "b": [0, 0]}, settings={"budget": 0.25})
    found = kvbench.load(tmp_path, samples=True)
    assert len(found) == 10 and found.groupby("method").score.sum().to_dict() == {"full": 3, "snapkv": 3}
    wide = found.pivot(index="sample_id", columns="method", values="score")
    assert (wide.snapkv - wide.full).abs().sum() == 2  # one gained, one lost, paired by sample
    assert found.resident_bytes.gt(0).all() and set(found.subset) == {"a", "b"}
    assert set(found["hash"]) == set(kvbench.load(tmp_path).hash)


def test_load_names_what_it_cannot_read(tmp_path):
    """A broken run, a damaged line and a stray folder never stop it; each is named with its reason."""
    scores = {"a": [1, 0, 1]}
    store(tmp_path, "full", scores)
    broken = store(tmp_path, "snapkv", scores, settings={"budget": 0.25})
    (broken / "run.json").write_text("{")
    torn = store(tmp_path, "h2o", scores, settings={"budget": 0.5})
    lines = (torn / "samples.jsonl").read_text().splitlines(keepends=True)
    (torn / "samples.jsonl").write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    (tmp_path / "task" / "model" / "m" / "x\x1b[31m").mkdir(parents=True)
    (tmp_path / "task" / "model" / "m" / "x\x1b[31m" / "run.json").write_text("[]")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs, samples = kvbench.load(tmp_path), kvbench.load(tmp_path, samples=True)
    assert sorted(runs.method) == ["full", "h2o"] and samples.method.value_counts().to_dict() == {"full": 3, "h2o": 2}
    name = broken.relative_to(tmp_path).as_posix()
    assert name in runs.attrs["left_out"] and "not readable as JSON" in runs.attrs["left_out"][name]
    assert samples.attrs["left_out"][torn.relative_to(tmp_path).as_posix()].startswith("1 damaged line")
    told = [str(item.message) for item in caught if item.category is UserWarning]
    assert any(name in text for text in told) and not any("\x1b" in text for text in told)
    with pytest.raises(ValueError, match=r"results_dir=.*nothing is not a folder"):
        kvbench.load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert kvbench.load(tmp_path / "empty").empty


def test_what_the_package_offers():
    """Every name of `__all__` is there, documented, and known to type checkers and to completion."""
    for name in kvbench.__all__:
        found = getattr(kvbench, name)
        assert name in dir(kvbench) and (name == "__version__" or found.__doc__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvbench.__version__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvbench.nothing
    script = "import sys, kvbench; dir(kvbench); print({'torch', 'pandas', 'hydra', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"  # the import takes no time; what a name needs comes with the name
