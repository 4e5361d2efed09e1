"""What the command line says when it is asked: it fits a terminal of 80 columns, and one screen where it can."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
from places import ROOT

from kvbench.cli import texts
from kvbench.cli.main import main
from kvbench.config import files


def test_no_word_shows_one_screen(capsys, monkeypatch):
    """`kvbench` alone says what there is in 80 x 24, and runs nothing."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    for word in (*texts.commands(), "kvbench help snapkv", "kvbench --help", "method="):
        assert word in "\n".join(lines), word


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width):
    """Help, lists and the help of every command and choice keep to the width, and break no word."""
    from kvbench.cli.choice_help import choice_help

    shown = {"overview": texts.overview(width), "help": texts.help_text(width), "list": texts.list_text([], width)}
    shown |= {name: texts.command_help(name, width) for name in texts.commands() if name != "run"}
    for group in ("task", "model", "protocol", "backend", "experiment", "launcher", "suite"):
        shown |= {f"{group}={name}": choice_help(group, name, width) for name in files.options(group)}
    for what, text in shown.items():
        for line in text.splitlines():
            # A word that is longer than the room stands whole: a command to copy.
            assert len(line) <= width or len(line.split()[-1]) > width - 50, (what, line)
    whole = set(texts.help_text(2000).split())
    assert set(texts.help_text(80).split()) <= whole | {"#"}, "a word was broken"


def test_folded_yaml_is_the_same_yaml():
    """A setting whose comment goes on below keeps its value, and every word of the comment."""
    import yaml

    for path in (path for folder in files.shipped_folders() for path in sorted(folder.rglob("*.yaml"))):
        text = path.read_text()
        folded = texts.settings_text(text, 70, ())
        kept = "\n".join(line for line in text.splitlines() if not line.startswith("_"))
        assert yaml.safe_load(folded) == yaml.safe_load(kept), path
        words = [word for word in folded.replace("#", " ").split() if word]
        wanted = texts.settings_text(text, 10_000, ()).replace("#", " ").split()
        assert words == wanted, path


@pytest.mark.parametrize("word", ["compare", "run", "list", "lm_eval", "help"])
def test_help_of_a_command_in_two_ways(word, capsys):
    """`help compare` and `compare --help` are one text, about that command."""
    assert main(["help", word]) == 0
    first = capsys.readouterr().out
    assert first.startswith(f"usage: kvbench {word}")
    assert main([word, "--help"]) == 0
    second = capsys.readouterr().out
    assert second == first or word in ("run", "help")


def test_help_of_a_task_and_a_model(capsys):
    """A task's and a model's help are its purpose and its settings; a name that two groups have shows both."""
    assert main(["help", "longbench"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("task=longbench\n") and "\n  subsets=en\n" in out
    assert "or a list of different ones en = the 16 English subsets" in " ".join(out.split())
    assert main(["help", "random"]) == 0
    out = capsys.readouterr().out
    assert "method=random\n" in out and "model=random\n" in out
    assert main(["model=random", "--help"]) == 0
    assert capsys.readouterr().out.startswith("model=random\n")
    assert main(["help", "snapvk"]) == 2
    assert "there is no help for snapvk. Did you mean snapkv?" in capsys.readouterr().err


def test_help_of_every_method(monkeypatch):
    """Each setting stands with its default and the rule that is checked; nothing is wider than 80 columns."""
    from kvbench.cli.choice_help import method_help
    from kvbench.cli.method_table import settings_of
    from kvbench.rules import declared

    for name in files.options("method"):
        text = method_help(name, 80)
        listed = settings_of(name)
        for key in listed:
            assert f"\n  {key}=" in text, (name, key)
        assert max(len(line) for line in text.splitlines()[:-2]) <= 80, name
        assert "source: " in text and "differs: " in text and "memory of a KV head" in text
    snapkv = " ".join(method_help("snapkv").split())
    from kvbench.methods.snapkv import SnapKV

    for key, field in declared(SnapKV).items():
        assert field.rule.text in snapkv, key
    assert "window=32 a whole number of tokens from 1 to" in snapkv
    for first, second in pairwise(["budget=0.25", "window=32", "pool=max", "source: FasterDecoding/SnapKV"]):
        assert snapkv.index(first) < snapkv.index(second)


def test_help_of_a_method_fits_two_screens(capsys):
    """What a method keeps, its settings, memory and differences come first, and short; `all=true` has the rest."""
    from kvbench.cli.choice_help import help_for
    from kvbench.cli.method_table import settings_of
    from kvbench.rules import declared
    from kvbench.runs.parts import policy_class

    for name in ("critical", "cake", *list(files.options("method"))[::6]):  # the two longest, and some
        lines = help_for([f"method={name}"], 80).splitlines()
        assert len(lines) <= 70 and max(map(len, lines)) <= max(80, len(str(files.path_of("method", name))) + 10), name
        assert all(any(line.startswith(f"  {key}=") for line in lines) for key in settings_of(name)), name
    assert main(["help", "diffkv"]) == 0
    short = capsys.readouterr().out
    assert short.startswith("method=diffkv\n") and len(short.splitlines()) <= 64
    assert "\npaper=diffkv: " in short and "entries:" not in short
    assert main(["help", "diffkv", "all=true"]) == 0
    assert "\npaper=diffkv\n" in (whole := capsys.readouterr().out) and "entries:" in whole
    assert main(["help", "paper=diffkv"]) == 0
    assert capsys.readouterr().out.startswith("paper=diffkv\n")
    snapkv, whole = (help_for(["snapkv", *words], 80) for words in ([], ["all=true"]))
    inherited = declared(policy_class("kvbench.methods.snapkv.SnapKV")).keys() - settings_of("snapkv").keys()
    assert inherited and all(key in snapkv and f"\n  {key}=" in whole for key in inherited)
    assert not any(f"\n  {key}=" in snapkv for key in inherited)


def test_reader_that_has_seen_enough():
    """`kvbench list | head -1` ends without a word on stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    writer = subprocess.Popen(
        [sys.executable, "-m", "kvbench", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(60) == 128 + 13


def test_make_alone_shows_the_targets():
    """`make` and `make help` name every target with its purpose, in 80 columns, and do nothing."""
    shown = [
        subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for words in ([], ["help"])
    ]
    assert shown[0] == shown[1]
    makefile = (ROOT / "Makefile").read_text()
    for target in makefile.split(".PHONY:")[1].splitlines()[0].split():
        assert f"make {target} " in shown[0], target
    assert max(map(len, shown[0].splitlines())) <= 80
