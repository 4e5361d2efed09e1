"""The calibration file: loaded by `method.calibration=`, refused for another model or method, never silent."""

import re
import shutil

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from refusals import refused

from kvbench.config import files as listing
from kvbench.config.calibrated import shipped
from kvbench.config.methods import method_settings
from kvbench.methods.diffkv import DiffKV
from kvbench.runs import calibration
from kvbench.runs.config import RunConfig
from kvbench.runs.experiment import prepare
from kvbench.runs.parts import Loaders, make_policy

MODEL = type("Model", (), {"name": "tiny", "fingerprint": "ab" * 32, "dtype": torch.float32})()


def method_cfg(**changes):
    """DiffKV's group as a run composes it."""
    cfg = method_settings("diffkv")
    return OmegaConf.merge(cfg, {"calibration": None} | changes)


def content(**changes):
    """A calibration file's content, as `calibrate` writes it."""
    whole = {
        "schema_version": 1,
        "method": "diffkv",
        "target": "kvbench.methods.diffkv.DiffKV",
        "settings": {"alpha_h": 2.0, "alpha_l": 0.001},
        "replaces": {"alpha_h": 1.0, "alpha_l": 0.02},
        "base": {"window": 64, "high": "k8v4"},
        "confirmed": True,
        "model": {"name": "tiny", "fingerprint": "ab" * 32, "dtype": "torch.float32"},
        "code": {"method": calibration.method_hash(DiffKV())},
    }
    return {key: value for key, value in (whole | changes).items() if value is not None}


@pytest.fixture
def write(tmp_path):
    """Gives a writer of calibration files, whose fields can be changed."""

    def make(name="thresholds.yaml", **changes):
        (tmp_path / name).write_text(yaml.safe_dump(content(**changes)))
        return str(tmp_path / name)

    return make


def test_settings_come_from_the_file(write):
    """The policy is built with the file's thresholds; the method's other settings stay."""
    policy = make_policy(method_cfg(calibration=write(), window=32))
    assert (policy.alpha_h, policy.alpha_l, policy.window) == (2.0, 0.001, 32)
    assert make_policy(method_cfg()).alpha_l == 0.02


def test_same_settings_are_the_same_run(write, tmp_path):
    """A run with the file and a run with its numbers given by hand are one run, and the configuration shows them."""
    cfg = OmegaConf.create(
        {
            "method": method_cfg(calibration=write(model={"name": "m", "fingerprint": "0" * 64, "dtype": "x"})),
            "task": {"name": "longctx", "kinds": ["kv"], "length": 300, "items": 1},
            "model": {"kind": "random", "preset": "tiny", "num_layers": 1, "device": "cpu"},
            "backend": {"name": "torch"},
            "results_dir": str(tmp_path),
        }
    )
    parts = Loaders()
    model = parts.load_model(cfg.model)
    with refused("settings-conflict", "method.calibration", "model m"):
        prepare(RunConfig.read(cfg), "diffkv", parts)
    made_for = {"name": model.name, "fingerprint": model.fingerprint, "dtype": str(model.dtype)}
    cfg.method.calibration = write(model=made_for)
    with_file = prepare(RunConfig.read(cfg), "diffkv", parts)
    assert with_file.config.method["alpha_l"] == 0.001 and cfg.method.alpha_l == 0.02
    cfg.method = method_cfg(alpha_h=2.0, alpha_l=0.001)
    assert prepare(RunConfig.read(cfg), "diffkv", parts).hash == with_file.hash
    cfg.method = method_cfg(alpha_h=2.0, alpha_l=0.002)
    assert prepare(RunConfig.read(cfg), "diffkv", parts).hash != with_file.hash


@pytest.mark.parametrize("name", shipped())
def test_shipped_files_are_of_the_code_as_it_is(name):
    """The newcomer's first command warns of no other code.

    Where a method has changed, show on prompts that it keeps the same tokens, and issue the file again (`reissued`), or
    calibrate again.
    """
    made = calibration.load(name).content
    method = method_cfg(calibration=name)
    of = type("Model", (), made["model"])()
    assert not [line for line in calibration.notes(method, of, make_policy(method)) if "this method's code" in line]


@pytest.mark.parametrize(
    ("file", "changes", "remark"),
    [
        ({"confirmed": False}, {}, "not confirmed on held-out samples"),
        ({"code": {"method": "0"}}, {}, "another version of this method's code"),
        ({}, {"window": 32}, r"now window=32 \(then 64\)"),
        (
            {"model": {"name": "t", "fingerprint": "ab" * 32, "dtype": "torch.bfloat16"}},
            {},
            "calibrated in torch.bfloat16",
        ),
    ],
)
def test_differences_are_told(write, file, changes, remark):
    """What leaves the file usable but may matter is one sentence each; the same model, code and settings give none."""
    same = method_cfg(calibration=write())
    assert calibration.notes(same, MODEL, make_policy(same)) == calibration.notes(method_cfg(), MODEL, DiffKV()) == []
    cfg = method_cfg(calibration=write(**file), **changes)
    (line,) = calibration.notes(cfg, MODEL, make_policy(cfg))
    assert re.search(remark, line)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            {},
            {"alpha_l": 0.5},
            ("settings-conflict", "method.alpha_l", "method.alpha_l=0.5", "method.calibration", "0.001"),
        ),
        (
            {"target": "kvbench.methods.snapkv.SnapKV", "method": "snapkv"},
            {},
            ("settings-conflict", "method.calibration", "method=snapkv"),
        ),
        ({"settings": {"alpha_x": 1}}, {}, ("file-content", "method.calibration", "alpha_x")),
        ({"schema_version": 7}, {}, ("file-content", "method.calibration", "7")),
        ({"settings": None, "model": None}, {}, ("file-content", "method.calibration", "settings, model")),
        ({"confirmed": "certainly"}, {}, ("file-content", "method.calibration", "confirmed='certainly'")),
        ({"base": {"high": "${oc.env:HOME}"}}, {}, ("file-content", "method.calibration", "${...}")),
    ],
)
def test_files_that_do_not_fit_are_refused(write, file, changes, message):
    """Another method, contradicting settings and broken files are refused by name."""
    with refused(*message):
        make_policy(method_cfg(calibration=write(**file), **changes))


def test_settings_given_twice_may_agree(write):
    """A stored configuration names the file and its numbers; it can be run again."""
    cfg, found = calibration.apply(method_cfg(calibration=write()))
    again, _ = calibration.apply(cfg)
    assert again == cfg and found.settings["alpha_h"] == 2.0


def test_missing_and_unreadable_files(tmp_path):
    """What is no file, no YAML or no mapping is told apart."""
    with refused("file-missing", "method.calibration", "nowhere.yaml"):
        calibration.load("nowhere.yaml")
    (tmp_path / "a.yaml").write_text("a: [1\n")
    with refused("file-content", "method.calibration", "a.yaml", "YAML"):
        calibration.load(str(tmp_path / "a.yaml"))
    (tmp_path / "b.yaml").write_text("- 1\n")
    with refused("file-content", "method.calibration", "b.yaml", "list"):
        calibration.load(str(tmp_path / "b.yaml"))
    (tmp_path / "c.yaml").write_text("a: &x [*x]\n")
    with refused("file-content", "method.calibration", "c.yaml", "alias"):
        calibration.load(str(tmp_path / "c.yaml"))


def test_shipped_files_are_found_by_name(write, monkeypatch, tmp_path):
    """Files of conf/calibration are named without path; a wrong name shows what there is."""
    folder = tmp_path / "conf" / "calibration"
    folder.mkdir(parents=True)
    monkeypatch.setattr(listing, "conf_folder", lambda: tmp_path / "conf")
    source = write("x.yaml")
    shutil.copy(source, folder / "diffkv_tiny.yaml")
    assert calibration.load("diffkv_tiny").settings == {"alpha_h": 2.0, "alpha_l": 0.001}
    with refused("name-unknown", "method.calibration", "diffkv_tiny"):
        calibration.load("diffkv_tyni")


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_file_builds_its_method(name):
    """A file that comes with kvbench fits the method it names, at that method's YAML settings."""
    found = calibration.load(name)
    cfg = method_settings(found.content["method"])
    policy = make_policy(OmegaConf.merge(cfg, {"calibration": name}))
    assert {key: getattr(policy, key) for key in found.settings} == found.settings
    assert found.content["confirmed"] or found.content["refuted"] is False  # held-out samples showed no loss


def test_a_run_says_where_its_thresholds_are_from():
    """The shipped file's values and model, or that they are the paper's for another one and what finds this one's."""
    name = sorted(shipped())[0]
    found = calibration.load(name)
    assert all(
        text in calibration.said(found) for text in (found.path.name, found.content["model"]["name"], "alpha_h=")
    )
    assert "calibrate method=diffkv model=gemma-3-270m" in calibration.lacks(method_cfg(), "gemma-3-270m")
    assert calibration.lacks(method_cfg(alpha_h=3.0), "gemma-3-270m") == ""
    assert calibration.lacks(method_settings("kivi"), "gemma-3-270m") == ""
