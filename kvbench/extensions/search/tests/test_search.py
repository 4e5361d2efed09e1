"""A search on a method whose loss and bytes are known: what it finds, what it says, and that it goes on."""

import json
import random
import re
from types import SimpleNamespace

import pytest
from graded import Bench
from omegaconf import OmegaConf
from stored import store, yes_no

from kvbench.cli.commands import compose_command
from kvbench.cli.main import main as cli
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.extensions.search import search as searching
from kvbench.extensions.search.search import main
from kvbench.extensions.search.space import by_hand

optuna = pytest.importorskip("optuna")


def settings(folder, *words):
    """The settings of the command, as the command line composes them, with the graded task."""
    fixed = ["search.trials=12", "search.tuning_samples=4", "search.held_out_samples=14", "search.resamples=199"]
    cfg = compose_command("search", [f"results_dir={folder}", "search.methods=diffkv", *fixed, *words])
    OmegaConf.set_struct(cfg, False)
    cfg.pop("_target_")
    cfg.task = {"name": "graded"}
    return cfg


def document(folder):
    """The file of the search."""
    (path,) = folder.rglob("search.json")
    return json.loads(path.read_text())


def gentle(alpha_h, alpha_l):
    """Only pruning costs something: the shipped alpha_h = 1 and alpha_l = 0.02 lose 0.1 and can be beaten."""
    return 5 * alpha_l


def smaller(alpha_h, alpha_l):
    """Bytes shrink with alpha_h."""
    return 800.0 - 100 * alpha_h


@pytest.mark.smoke
def test_a_better_point_is_chosen_and_proven_on_other_samples(tmp_path, capsys):
    """Settings that beat the shipped ones are named; the verdict's samples took no part in the search."""
    rng = random.Random(0)
    bench = Bench(lambda *alphas: gentle(*alphas) * rng.uniform(0.5, 1.5), smaller)
    assert main(settings(tmp_path), bench.parts()) == 0
    out = capsys.readouterr().out
    assert "found points beyond the shipped settings (no run of this task is stored), on 28 held-out samples" in (
        " ".join(out.split())
    )
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("/"))
    content = document(tmp_path)
    assert len(content["tried"]) <= 12 and content["by_hand"] == "shipped settings"
    assert any(re.match("beyond: .* where diffkv holds 70.0 %; it loses ", line) for line in content["verdict"])
    full = [name for alpha_h, _, name in bench.answered if alpha_h is None]
    assert len(full) == len(set(full)) == 8 + 28, "the two sets of samples have none in common"
    for point in content["tried"]:
        alpha_h, alpha_l = (point["settings"][name] for name in ("alpha_h", "alpha_l"))
        assert point["bytes_ratio"] == pytest.approx(smaller(alpha_h, alpha_l) / 1000)
        assert point["loss"]["value"] == pytest.approx(gentle(alpha_h, alpha_l), rel=0.4, abs=0.005)


def test_where_nothing_is_better_it_says_so(tmp_path, capsys):
    """Every setting holds the same and loses the same: no point is beyond, for the other sampler."""
    main(settings(tmp_path, "search.sampler=nsga2"), Bench(lambda *_: 0.1, lambda *_: 500.0).parts())
    assert document(tmp_path)["verdict"] == [
        "found no point that is proven beyond the shipped settings (no run of this task is stored), on 28 held-out "
        "samples"
    ]
    assert "found no point" in capsys.readouterr().out


@pytest.mark.long
def test_a_search_that_was_stopped_goes_on(tmp_path, capsys):
    """Stopped in the middle of a setting, it goes on to as many trials as one that was not; given again it measures
    nothing, and more trials add to what is there."""
    bench = Bench(gentle, smaller, stop_after=30)
    with pytest.raises(KeyboardInterrupt):
        main(settings(tmp_path), bench.parts())
    bench.stop_after = None
    main(settings(tmp_path), bench.parts())
    (log,) = tmp_path.rglob("study.log")
    study = optuna.load_study(
        study_name="search",
        storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(log))),
    )
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    assert len(complete) == 12 and not [trial for trial in study.trials if trial.state.name == "RUNNING"]
    before, answered = document(tmp_path), len(bench.answered)
    main(settings(tmp_path), bench.parts())
    assert len(bench.answered) == answered and document(tmp_path) == before
    main(settings(tmp_path, "search.trials=16"), bench.parts())
    assert {item["hash"] for item in before["tried"]} <= {item["hash"] for item in document(tmp_path)["tried"]}
    assert len(list(tmp_path.rglob("study.log"))) == 1
    capsys.readouterr()


def test_settings_made_by_hand_are_those_of_the_stored_runs(tmp_path):
    """The frontier of the stored runs comes first; failed runs, the full cache, and a class that is not the method's
    are no settings to beat."""
    usual = as_dict(method_settings("snapkv"))
    scores = yes_no(0.7, {"a": 12})
    for budget, ratio, nll in ((0.5, 0.5, 0.2), (0.25, 0.25, 0.4), (0.3, 0.6, 0.5)):
        folder = store(tmp_path, "snapkv", scores, settings=usual | {"budget": budget}, ratio=ratio, nll=nll)
        record = json.loads((folder / "run.json").read_text())
        record["fidelity"] = {"nll": {"value": nll}}
        (folder / "run.json").write_text(json.dumps(record))
    store(tmp_path, "full", scores)
    store(tmp_path, "h2o", scores, settings={"_target_": "os.system"})

    def wanted(most):
        rule = SimpleNamespace(criterion="nll")
        return SimpleNamespace(plan=SimpleNamespace(rule=rule), cfg=SimpleNamespace(by_hand=most), space=[])

    by_hand_settings, origin = by_hand(tmp_path, "toy", "tiny", wanted(2))
    assert origin == "stored runs"
    assert [(item.method, item.settings.get("budget", 0.25)) for item in by_hand_settings] == [
        ("snapkv", 0.25),
        ("snapkv", 0.5),
    ]
    assert len(by_hand(tmp_path, "toy", "tiny", wanted(9))[0]) == 3


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("search.sampler=grid", "search.sampler=grid does not exist"),
        ("search.criterion=bleu", "search.criterion=bleu does not exist"),
        ("search.trials=0", "search.trials=0"),
        ("search.held_out_samples=1", "search.held_out_samples=1"),
        ("search.most=0.01", "search.most=0.01 must be a loss above the margin of 0.05"),
        ("search.margin=-1", "margin=-1 is not a number above 0"),
        ("limit=3", "limit=3 has no meaning here"),
        ("shard=1/2", "shard=1/2 has no meaning here"),
    ],
)
def test_wrong_settings_are_named(tmp_path, capsys, word, message):
    """One message with the setting, its value and the rule, before a model is loaded."""
    assert cli(["search", f"results_dir={tmp_path}", word]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_optuna_the_install_line_is_said(tmp_path, capsys, monkeypatch):
    """The extra is optional; who lacks it is told what to type."""
    monkeypatch.setattr(searching, "find_spec", lambda name: None)
    assert cli(["search", f"results_dir={tmp_path}"]) == 2
    assert "search needs the package optuna" in capsys.readouterr().err
