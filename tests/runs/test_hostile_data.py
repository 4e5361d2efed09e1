"""Data never executes: no calibration file, setting or composed file gets anything called that is not the method."""

from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf
from refusals import refused
from test_calibration import content

from kvbench.config.compose import compose
from kvbench.errors import NameUnknown, SettingValue
from kvbench.evidence import report_bars
from kvbench.runs import experiment
from kvbench.runs.config import RunConfig
from kvbench.runs.parts import make_policy, policy_class

TARGET = "kvbench.methods.diffkv.DiffKV"


def payloads(mark):
    """Values of the shapes that ran programs: a call, one with a shell, one in a list, one that is partial."""
    write = {"_target_": "pathlib.Path.write_text", "_args_": [{"_target_": "pathlib.Path", "_args_": [mark]}, "x"]}
    shell = {"_target_": "subprocess.run", "args": ["/bin/sh", "-c", f"echo x > {mark}"]}
    return [
        write,
        shell,
        {"_target_": "os.system", "_args_": [f"touch {mark}"]},
        [shell],
        [[write]],
        {"_target_": "functools.partial", "_args_": [shell], "_partial_": True},
        {"a": {"b": write}},
    ]


NUM_PAYLOADS = len(payloads(""))


@pytest.fixture
def mark(tmp_path):
    """A file that is there only after a payload ran."""
    path = tmp_path / "ran"
    yield str(path)
    assert not path.exists(), "the payload ran"


def method_cfg(path):
    """The group `method` of diffkv with a calibration file."""
    return OmegaConf.create({"_target_": TARGET, "alpha_h": 1.0, "alpha_l": 0.0, "calibration": str(path)})


class WithoutAliases(yaml.SafeDumper):
    """Writes what stands in two places twice: an alias is refused before anything is looked at."""

    def ignore_aliases(self, data):
        return True


def not_loaded(tmp_path, message, **changes):
    """Refuses a method with a calibration file of such content."""
    (tmp_path / "c.yaml").write_text(yaml.dump(content(**changes), Dumper=WithoutAliases))
    with pytest.raises(ValueError, match=message):
        make_policy(method_cfg(tmp_path / "c.yaml"))


@pytest.mark.parametrize("which", range(NUM_PAYLOADS))
@pytest.mark.parametrize("part", ["settings", "replaces", "base"])
def test_a_calibration_file_runs_nothing(tmp_path, mark, part, which):
    """Wherever a payload stands in a calibration file, the file is refused and nothing was called."""
    value = payloads(mark)[which]
    held = {name: {"alpha_h": value} for name in {part, "settings"}}  # `replaces` disarmed the check of contradictions
    not_loaded(tmp_path, r"alpha_h=.* is neither a number, text, true, false", **held)


@pytest.mark.parametrize("name", ["_target_", "_args_", "_recursive_", "calibration", "a.b", "__class__"])
def test_a_calibration_file_sets_only_settings(tmp_path, mark, name):
    """It names no class, no other file and nothing with an underscore in front, and reads no environment."""
    not_loaded(tmp_path, "which is no setting's name", settings={name: "pathlib.Path"})
    not_loaded(tmp_path, "line [0-9]+ has an interpolation", settings={"alpha_h": "${oc.env:HOME}"})


def test_a_calibration_file_for_another_class_imports_nothing(tmp_path, monkeypatch):
    """Its `target` is compared, never imported."""
    module = tmp_path / "hostile_module.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    not_loaded(tmp_path, "is for method=diffkv", target="hostile_module.Class")
    assert not (tmp_path / "ran").exists()


def test_another_models_file_is_refused_before_a_policy_is_made_of_it(tmp_path):
    """The policy is made of the user's own settings, the model is compared, and only then the file's are used; a value
    out of range does not even wait for the model."""
    made = []

    def note_policy(cfg):
        made.append(dict(cfg))
        return make_policy(cfg)

    loaded = []

    def load_model(cfg):
        loaded.append(cfg)
        return SimpleNamespace(name="other", fingerprint="cd" * 32, dtype="torch.float32")

    passes = {"check_task": lambda cfg: None, "check_fit": lambda cfg, policy: None, "check_chat": lambda cfg: None}
    parts = SimpleNamespace(make_policy=note_policy, load_model=load_model, **passes)
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(content(settings={"alpha_h": 2.0})))
    cfg = OmegaConf.create({"method": method_cfg(path), "model": {}})
    with refused("settings-conflict", "method.calibration", "tiny"):
        experiment.load_method(RunConfig.read(cfg), parts, print)
    assert [item["alpha_h"] for item in made] == [1.0] and len(loaded) == 1
    path.write_text(yaml.safe_dump(content(settings={"alpha_h": float("nan")})))
    with refused("file-content", "method.calibration", "alpha_h=nan"):
        experiment.load_method(RunConfig.read(cfg), parts, print)
    assert len(loaded) == 1


@pytest.mark.parametrize("which", range(NUM_PAYLOADS))
def test_a_setting_runs_nothing(mark, which):
    """The same values as a setting, from whatever file or command line: refused as no plain value."""
    cfg = OmegaConf.create({"_target_": TARGET, "alpha_h": payloads(mark)[which]})
    with refused("setting-value", "method.alpha_h"):
        make_policy(cfg)


@pytest.mark.parametrize("name", ["_args_", "_partial_", "_recursive_", "_convert_"])
def test_no_setting_begins_with_an_underscore(name):
    """The configuration library's own words are no settings."""
    with refused("setting-unknown", None, f"method.{name}"):
        make_policy(OmegaConf.create({"_target_": TARGET, name: True}))


def test_the_command_line_runs_nothing(mark):
    """A payload in a word of the command line."""
    word = f"method.alpha_h={{_target_:pathlib.Path,_args_:['{mark}']}}"
    with refused("setting-value", "method.alpha_h", "method.alpha_h={'_target_'"):
        make_policy(compose(["method=diffkv", word]).method)


@pytest.mark.parametrize(
    "target",
    [
        *("os.system", "pathlib.Path", "builtins.eval", "kvbench.methods.diffkv.ALL_QUERIES", "kvbench.policy.Tier"),
        *("diffkv", "", None, 5, "kvbench..x", "a b.c", "kvbench.methods.diffkv.__class__", "kvbench.methods.diffkv.X"),
        "kvbench.policy.base.Tier",
    ],
)
def test_only_a_policy_is_a_method(target):
    """What a configuration names must be a dataclass derived from Policy; nothing else is called."""
    with pytest.raises((SettingValue, NameUnknown)) as caught:
        policy_class(target)
    assert caught.value.setting == "method._target_" and f"method._target_={target}" in str(caught.value)


def test_a_users_own_module_may_hold_a_method(tmp_path, monkeypatch):
    """A module that the user's own YAML names, outside of kvbench, gives its policy with plain settings."""
    (tmp_path / "my_methods.py").write_text(
        "from dataclasses import dataclass\nfrom kvbench.policy import Policy\n\n\n"
        "@dataclass(kw_only=True)\nclass Mine(Policy):\n    size: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_policy(OmegaConf.create({"_target_": "my_methods.Mine", "size": 3})).size == 3
    with refused("setting-value", "method.size", "size=3.0"):
        make_policy(OmegaConf.create({"_target_": "my_methods.Mine", "size": 3.0}))
    with refused("setting-missing", "method.size"):
        make_policy(OmegaConf.create({"_target_": "my_methods.Mine"}))


def test_a_stored_run_names_no_class_to_load(mark):
    """The report names tiers by the method's code only for methods of kvbench, and with plain settings."""
    for settings in ({"_target_": "os.system", "command": f"touch {mark}"}, {"_target_": TARGET, "high": {"a": mark}}):
        run = SimpleNamespace(record=SimpleNamespace(identity={"method": settings}))
        assert report_bars.tier_names(run, 2) == ["tier 0", "tier 1"]
