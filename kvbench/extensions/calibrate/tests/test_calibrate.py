"""Calibration on a method whose loss and bytes are known: the order of the stages, the rule, the verdict, resuming."""

import os
import signal

import pytest
import yaml
from fake_parts import altered
from graded import Bench, content_of, file_of, gentle, make_cfg, smaller
from omegaconf import OmegaConf
from refusals import refused
from selection import few

from kvbench.cli import main as cli
from kvbench.cli.endings import SIGNALS
from kvbench.extensions.calibrate.command import main
from kvbench.extensions.calibrate.plan import read_plan, split
from kvbench.runs.calibration import load


@pytest.mark.smoke
def test_alpha_h_is_tuned_with_nothing_pruned_then_alpha_l(tmp_path, capsys):
    """The stages follow the paper's order, the cheapest good values win, and files, verdict and exit code say so. Only
    chosen, uncalibrated and full settings ever see a held-out sample."""
    bench = Bench(gentle, smaller)
    assert main(make_cfg(tmp_path), bench.parts()) == 0
    text = file_of(tmp_path, "yaml").read_text()
    assert "method.calibration=calibration.yaml\n" in text and str(tmp_path) not in text
    content = yaml.safe_load(text)
    assert content["settings"] == {"alpha_h": 3.0, "alpha_l": 0.01} and content["confirmed"] is True
    first, second = content["tuning"]
    assert [point["alpha_l"] for point in first["grid"]] == [0, 0, 0, 0]
    assert [point["alpha_h"] for point in second["grid"]] == [3, 3, 3]
    assert [point["within"] for point in second["grid"]] == [True, True, False]
    assert content["replaces"] == {"alpha_h": 1.0, "alpha_l": 0.02} and content["base"]["window"] == 64
    assert content["held_out"]["calibrated"]["loss"]["nll"][0] == pytest.approx(0.03, abs=0.003)
    assert content["held_out"]["uncalibrated"]["loss"]["nll"][0] == pytest.approx(0.51, abs=0.003)
    against = content["held_out"]["calibrated_against_uncalibrated"]["loss"]["nll"]
    assert against[0] == pytest.approx(-0.48) and against[2] < 0
    assert content["held_out"]["calibrated"]["bytes_ratio"] == [0.34, 0.34, 0.34]
    files = {path.name for path in file_of(tmp_path, "yaml").parent.iterdir()}
    assert files == {f"calibration.{suffix}" for suffix in ("yaml", "json", "png", "svg")}
    shown = capsys.readouterr().out
    assert "alpha_h=3 alpha_l=0.01: confirmed on 24 held-out samples" in shown and "method.calibration=" in shown
    everything = content_of(tmp_path, "json")
    rows = everything["stages"][0]["points"][3]["samples"]
    assert len(rows) == 12 and {"sample_id", "nll", "kl", "score", "resident_bytes"} <= rows[0].keys()
    tuning, held_out = (
        {sample for names in everything["sets"][name]["samples"].values() for sample in names}
        for name in ("tuning", "held_out")
    )
    assert not tuning & held_out and (len(tuning), len(held_out)) == (12, 24)
    seen = {(high, low) for high, low, sample in bench.answered if sample in held_out}
    assert seen == {(3.0, 0.01), (1.0, 0.02), (None, None)}


def test_thresholds_stay_in_order(tmp_path, undrawn):
    """If every alpha_h above 0 loses too much, pruning is tuned with alpha_h = alpha_l, as for Qwen2.5-7B; with
    alpha_h alone, a value below the method's own alpha_l means no low tier, not a refused setting."""
    bench = Bench(lambda h, low: 1.0 if h > 0.5 else 0.0, smaller)
    assert main(make_cfg(tmp_path / "both"), bench.parts()) == 0
    content = content_of(tmp_path / "both", "yaml")
    assert [(p["alpha_h"], p["alpha_l"]) for p in content["tuning"][1]["grid"]] == [(0, 0), (0.01, 0.01), (0.02, 0.02)]
    assert content["settings"] == {"alpha_h": 0.02, "alpha_l": 0.02}
    cfg = make_cfg(tmp_path / "one", calibrate__parameters=["alpha_h"], calibrate__margin__nll=1.0)
    assert main(cfg, Bench(gentle, smaller).parts()) == 0
    content = content_of(tmp_path / "one", "yaml")
    assert [point["alpha_h"] for point in content["tuning"][0]["grid"]] == [0.02, 1, 2, 3]
    assert content["settings"] == {"alpha_h": 3.0} and content["base"]["alpha_l"] == 0.02


def test_nothing_is_written_where_nothing_is_good_enough(tmp_path, capsys):
    """No calibration file, but the measurements and their picture, a message that says what to do, and exit code 1."""
    assert main(make_cfg(tmp_path), Bench(lambda h, low: 0.3, smaller).parts()) == 1
    assert not list(tmp_path.rglob("calibration.yaml"))
    assert file_of(tmp_path, "json") and file_of(tmp_path, "png")
    assert "No value of alpha_h is good enough" in capsys.readouterr().out


def test_choice_that_fails_on_held_out_samples_is_not_confirmed(tmp_path, capsys, undrawn):
    """A choice whose loss on the held-out samples exceeds the margin says so in file, text and exit code."""
    bench = Bench(gentle, smaller, held_out_penalty=0.4)
    cfg = make_cfg(tmp_path)
    task = bench.load_task(cfg.task, None, limit=18, seed=0, protocol=None)
    plan = read_plan(cfg.calibrate, "graded", bench.parts().make_policy(cfg.method))
    bench.penalised = {request.sample_id for request in split(task, plan, 0)[1].requests}
    assert main(cfg, bench.parts()) == 1
    assert load(str(file_of(tmp_path, "yaml"))).content["confirmed"] is False
    assert "NOT confirmed" in capsys.readouterr().out


@pytest.mark.parametrize("stop_after", few([3, 41, 130], 41))
def test_stopped_calibration_goes_on(tmp_path, stop_after, undrawn):
    """Stopped anywhere and started again: finished groups are kept, and all numbers equal an uninterrupted run's."""
    whole = Bench(gentle, smaller)
    assert main(make_cfg(tmp_path / "whole"), whole.parts()) == 0
    first, second = Bench(gentle, smaller, stop_after=stop_after), Bench(gentle, smaller)
    with pytest.raises(KeyboardInterrupt):
        main(make_cfg(tmp_path / "parts"), first.parts())
    assert main(make_cfg(tmp_path / "parts"), second.parts()) == 0
    repeated = len(first.answered) + len(second.answered) - len(whole.answered)
    assert 0 <= repeated < 4

    def numbers(folder):
        content = content_of(folder, "json")
        return {key: content[key] for key in ("stages", "chosen", "held_out", "against_default", "confirmed", "sets")}

    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")


def test_signal_ends_it_as_it_ends_a_run(tmp_path, undrawn, monkeypatch, capsys):
    """SIGTERM closes the progress, says how to go on, and gives 128 + 15; the next start goes on where it was."""
    bench = Bench(gentle, smaller)
    parts, config = (
        bench.parts(),
        OmegaConf.merge({"_target_": "kvbench.extensions.calibrate.command.main"}, make_cfg(tmp_path)),
    )

    def make_engine(cfg, model, policy, **named):
        if len(bench.answered) >= 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return parts.make_engine(cfg, model, policy, **named)

    monkeypatch.setattr("kvbench.cli.commands.compose_command", lambda name, words: config)
    monkeypatch.setattr("kvbench.extensions.calibrate.command.Loaders", lambda: altered(parts, make_engine=make_engine))
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        assert cli.main(["calibrate", "method=graded"]) == 128 + signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    hint = "every finished sample is kept. To go on: python -m kvbench calibrate method=graded"
    assert said.endswith(f"\nstopped by SIGTERM; {hint}\n") and "Traceback" not in said
    done = len(bench.answered)
    assert 8 <= done < 12 and f"graded: alpha_h: {done}/" in said, "the progress was not closed"
    second = Bench(gentle, smaller)
    assert main(make_cfg(tmp_path), second.parts()) == 0
    assert not set(second.answered) & set(bench.answered)


def test_points_are_taken_as_they_are(tmp_path, capsys, undrawn):
    """Another margin measures nothing, since points belong to no single calibration; a torn last line costs its sample;
    with resume=false everything is measured again, and each point only once, though two stages share one."""
    first, margin, torn, anew = (Bench(gentle, smaller) for _ in range(4))
    assert main(make_cfg(tmp_path), first.parts()) == 0
    main(make_cfg(tmp_path, calibrate__margin__nll=0.04), margin.parts())
    assert margin.answered == [] and len(list(tmp_path.rglob("calibration.yaml"))) == 2
    path = sorted(tmp_path.rglob("points/*.jsonl"))[0]
    path.write_bytes(path.read_bytes()[:-9])
    assert main(make_cfg(tmp_path), torn.parts()) == 0
    assert 1 <= len(torn.answered) <= 4 and "torn line" in capsys.readouterr().err
    main(make_cfg(tmp_path, resume=False), anew.parts())
    assert anew.answered == first.answered and len(set(first.answered)) == len(first.answered)


def test_picture_is_reproducible(tmp_path):
    """The same measurements give the same bytes, PNG and SVG."""
    for name in ("one", "two"):
        cfg = make_cfg(tmp_path / name, calibrate__parameters=["alpha_h"], calibrate__grid__alpha_h=[0, 1])
        main(cfg, Bench(gentle, smaller).parts())
    for suffix in ("png", "svg"):
        first, second = (file_of(tmp_path / name, suffix).read_bytes() for name in ("one", "two"))
        assert first == second and len(first) > 5000


@pytest.mark.parametrize("words", [["method=diffkv"], ["method=diffkv", "model=gemma-3-270m"], ["method=snapkv"]])
def test_a_shipped_file_is_no_reason_to_refuse_another_calibration(words):
    """`calibration: auto`, which every method has, is dropped; a file that is named is refused."""
    from kvbench.cli import commands
    from kvbench.extensions.calibrate.command import _parted

    def parted(*more: str):
        composed = commands.compose_command("calibrate", [*words, *more])
        return _parted(OmegaConf.masked_copy(composed, [key for key in composed if key != "_target_"]))

    experiment, *_ = parted()
    assert experiment.method.calibration is None
    with refused("settings-conflict", "method.calibration"):
        parted("method.calibration=diffkv_smollm2-135m")


def test_settings_of_the_command_compose():
    """Task, model, method and the command's own settings come together, and the choice of groups is known."""
    from kvbench.cli import commands

    words = ["method=snapkv", "calibrate.parameters=[budget]", "task.length=512", "+calibrate.grid.window=[32,16]"]
    cfg = commands.compose_command("calibrate", words)
    assert cfg._choices_.method == "snapkv" and cfg.method._target_.endswith("SnapKV") and cfg.task.length == 512
    assert "hydra" not in cfg and OmegaConf.to_container(cfg.calibrate.grid)["window"] == [32, 16]
    with refused("setting-unknown", "calibrate.margins", "mean calibrate.margin?"):
        commands.compose_command("calibrate", ["calibrate.margins=1"])
    with refused("setting-unknown", "method.budgt"):
        commands.compose_command("calibrate", ["method=snapkv", "method.budgt=1"])
