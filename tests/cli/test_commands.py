"""The commands that are one YAML and one function: help, settings, errors."""

import pytest

from kvbench.cli import commands
from kvbench.cli.main import main
from kvbench.config import files as listing

YAML = """# @package _global_
# Counts things. A second sentence.
_target_: tests_command_target.main
what: attention # which thing
deep:
  rounds: 3 # how often
"""


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """A configuration folder with one command, and the module that it names."""
    folder = tmp_path / "conf"
    (folder / "command").mkdir(parents=True)
    (folder / "command" / "count.yaml").write_text(YAML)
    (folder / "config.yaml").write_text("# all\nseed: 0\n")
    (tmp_path / "tests_command_target.py").write_text(
        "def main(cfg):\n    print('got', cfg.what, cfg.deep.rounds, '_target_' in cfg)\n    return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(listing, "conf_folder", lambda: folder)
    return folder


def test_command_runs_with_its_settings(conf, capsys):
    """A command's function gets the YAML's settings with the command line's changes, and its value is the exit code."""
    assert main(["count", "deep.rounds=5"]) == 7
    assert capsys.readouterr().out.split() == ["got", "attention", "5", "False"]


def test_command_help_shows_every_setting(conf, capsys):
    """`<command> --help` prints the purpose and each setting, and runs nothing."""
    assert main(["count", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Counts things." in shown and "rounds: 3 # how often" in shown
    assert "_target_" not in shown and "@package" not in shown and "got" not in shown
    assert main(["--help"]) == 0
    assert "Counts things." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("wat=1", "there is no setting wat. Did you mean what"),
        ("deep.round=1", "deep.round"),
        ("attention", "attention is no setting of count"),
        ("_target_=x.y", "_target_"),
    ],
)
def test_command_names_the_word_that_is_wrong(conf, capsys, word, message):
    """An unknown key, a bare word and a change of the function itself are refused in one line."""
    assert main(["count", word]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_every_command_names_a_function():
    """The commands that kvbench ships can be composed, and their functions exist."""
    from hydra.utils import get_method

    for name, purpose in listing.command_files().items():
        assert purpose, name
        assert callable(get_method(commands.compose_command(name, [])["_target_"])), name


def test_a_command_of_an_engine_is_said_and_run(tmp_path, capsys):
    """The setting, its bytes and its known loss are printed; with words of a run it runs, and those words win."""
    command = "llama-server --model=model.gguf -ctk q8_0 -ctv q4_0 -fa on"
    assert main(["engine", command]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "kvbench method=engine_format method.tier=q8_0-q4_0 model=gguf model.path=model.gguf"
    assert said[1].startswith("Bytes: ") and "%" in said[1]
    words = f"task=longctx task.items=1 limit=1 model=random model.preset=tiny results_dir={tmp_path}"
    assert main(["engine", command, f"run={words}"]) == 0
    assert list(tmp_path.glob("longctx/*/engine_format/*/run.json"))
    capsys.readouterr()
    assert main(["engine"]) == 2 and "in quotes" in capsys.readouterr().err
    assert main(["engine", "vllm serve m --kv-cache-dtype fp8_inc"]) == 2
    assert "fp8_inc of vllm has no counterpart" in capsys.readouterr().err


def test_value_longer_than_a_file_name_is_a_value():
    """A setting is composed whose word is longer than any file's name: it was looked up as one, and that failed."""
    methods = ["method=" + "h2o," * 100 + "full", "method=kivi"]
    composed = commands.compose_command("suite", ["suite=quick", f"methods={methods}".replace("'", '"')])
    assert list(composed.methods) == methods
