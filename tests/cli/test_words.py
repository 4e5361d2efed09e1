"""The words of a command line: commands, flags, and what people write who come from other tools."""

import pytest
from places import ROOT

from kvbench.cli import words
from kvbench.cli.main import main
from kvbench.config import files


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--method snapkv", "method=snapkv"),
        ("--method=snapkv --limit 10", "method=snapkv limit=10"),
        ("--model hf --pretrained Qwen/Qwen3-8B --tasks gsm8k", "model=hf model.path=Qwen/Qwen3-8B task=gsm8k"),
        ("method=kivi --batch-size 2 --press x", "batch_size=2 method=x"),
        ("--method.budget 0.5", "method.budget=0.5"),
        ("-m --method snapkv,kivi", "method=snapkv,kivi"),
    ],
)
def test_habits_of_others(line, meant, capsys):
    """A flag of lm-eval's or kvpress's is answered with the settings as kvbench writes them; nothing is run."""
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert f"settings are key=value. Did you mean `{meant}`?" in said, said
    assert "usage:" not in said


def test_habits_name_settings_that_exist():
    """Every key that a habit is translated to is a setting of some configuration."""
    text = (ROOT / "conf" / "config.yaml").read_text()
    for key in words.HABITS.values():
        group, dot, name = key.partition(".")
        if not dot:
            assert group in files.GROUPS or f"\n{group}:" in text, key
            continue
        found = [files.path_of(group, choice).read_text() for choice in files.options(group)]
        assert any(f"\n{name}:" in part or f"\n# {name}:" in part for part in found), key


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--foo",
            "--foo is no flag of kvbench. Did you mean --info? Settings are key=value, without dashes; flags are",
        ),
        ("--multrun method=kivi", "--multrun is no flag of kvbench. Did you mean --multirun?"),
        ("--foo 3 --bar", "--foo and --bar are no flags of kvbench."),
        ("compare --metric nll", "--metric is no flag"),
        ("method snapkv", "method is no command. Did you mean method=snapkv?"),
        ("methods", "methods is no command. Did you mean method=NAME?"),
        ("delete", "delete is no command. Did you mean status delete=?"),
        ("task longbench limit=3", "Did you mean task=longbench?"),
        ("metod=snapkv", "there is no setting metod. Did you mean method?"),
        ("list metod", "metod is none of the lists. Did you mean methods?"),
        ("--config-dir", "--config-dir needs a folder"),
        ("--config-dir nowhere list", "--config-dir nowhere is no folder"),
        ("hydra/launcher=jobilb -m", "hydra/launcher=jobilb does not exist. Did you mean joblib?"),
    ],
)
def test_wrong_words(line, message, capsys):
    """A word that is nothing is named with the nearest that is something."""
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_a_link_to_itself_is_none(tmp_path, monkeypatch, capsys):
    """`Path.resolve` raises a RuntimeError there, wherever a command asks which folder is meant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert main(["--config-dir", "loop", "list"]) == 2
    assert "--config-dir loop is no folder" in capsys.readouterr().err
    shipped = pytest.importorskip("kvbench.extensions.advise.shipped")
    assert not shipped.is_study("loop")


def test_flags_of_hydra_pass():
    """Hydra's own flags, with their values, and negative numbers are left alone."""
    words.check_flags(["-m", "--cfg", "job", "-p", "method", "method=kivi", "--resolve"])
    assert words.parted(["a=1", "--cfg", "job", "b=2"]) == (["--cfg", "job"], ["a=1", "b=2"])
    assert words.take_config_dir(["x=1", "--config-dir=here", "y=2"])[1] == ["x=1", "y=2"]
