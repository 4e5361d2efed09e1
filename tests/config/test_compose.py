"""Composing without Hydra's command line, settings as plain values, and folders that survive a power cut."""

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from refusals import refused

from kvbench.config import durable
from kvbench.config.compose import compose
from kvbench.config.settings import as_dict, copy_config, read_config
from kvbench.errors import check_keys


def test_compose_gives_what_the_command_line_gives():
    """Choices and settings apply; the choices are named where they are asked for; Hydra is left as if never started."""
    cfg = compose(["method=snapkv", "method.budget=0.25", "seed=3"])
    assert (cfg.method._target_, cfg.method.budget, cfg.seed) == ("kvbench.methods.snapkv.SnapKV", 0.25, 3)
    assert "_choices_" not in cfg and "hydra" not in cfg
    assert compose(["method=snapkv"], with_choices=True)._choices_.method == "snapkv"
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("method=snapk", ("name-unknown", "method", "method=snapk")),
        ("method.bits=1", ("setting-unknown", "method.bits", "method=snapkv")),
        ("sed=1", ("setting-unknown", "sed")),
        ("a=[1", ("command-line", None, "a=[1")),
    ],
)
def test_compose_says_what_exists(word, message):
    """A wrong choice, key or word is one ValueError that names it."""
    with refused(*message):
        compose(["method=snapkv", word])


def test_settings_as_plain_values(tmp_path):
    """Interpolations are resolved, a copy is a copy, and a file that holds a list is refused."""
    cfg = OmegaConf.create({"a": 1, "b": {"c": "${a}", "d": [1, 2]}})
    assert as_dict(cfg) == as_dict({"a": 1, "b": {"c": 1, "d": [1, 2]}}) == {"a": 1, "b": {"c": 1, "d": [1, 2]}}
    other = copy_config(cfg)
    other.b.c = 5
    assert cfg.b.c == 1 and OmegaConf.is_config(other)
    (tmp_path / "x.yaml").write_text("- 1\n")
    with refused("file-content", None, "x.yaml"):
        read_config(tmp_path / "x.yaml")


def test_unknown_keys_are_named():
    """The first key that does not exist is named with its prefix, those that do, and the nearest."""
    check_keys(["a", "b"], {"a", "b", "c"})
    with refused("setting-unknown", "store.trak", "store.track"):
        check_keys(["track", "trak"], ["track"], prefix="store.")
    with refused("name-unknown", "x", "task key=x"):
        check_keys({"x": 1}, ["name"], what="task key")


def test_folders_are_made_and_synced_from_above(tmp_path, monkeypatch):
    """Each folder that is made has its name on the disk: the one above it is synced."""
    synced = []
    monkeypatch.setattr(durable, "sync", synced.append)
    durable.make_folder(tmp_path / "a" / "b" / "c")
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
