"""A setting of an evidence command that makes no sense is refused in one line: value, rule, and what there is."""

import pytest
from omegaconf import OmegaConf
from places import ROOT
from stored import store

from kvbench.cli.main import main
from kvbench.results.summary import flat

CASES = [
    ("compare", "margin=0", "margin=0 is not a number above 0"),
    ("compare", "resamples=3", "resamples=3 must be a whole number of at least 100"),
    ("compare", "metric=wat", "metric=wat does not exist"),
    ("compare", "against=nobody", "no run fits against=nobody"),
    ("pareto", "axes=[resident,speed]", "axes=speed does not exist"),
    ("pareto", "kinds=eps", "kinds=eps does not exist"),
    ("pareto", "quality=good", "quality=good does not exist"),
    ("pareto", "incomplete=3", "incomplete=3 is neither true nor false"),
    ("pareto", "resamples=1", "resamples=1 must be a whole number of at least 100"),
    ("pareto", "metric=top2", "metric=top2 does not exist. Did you mean top1"),
    ("table", "by=row", "by=row does not exist"),
    ("table", "format=pdf", "format=pdf does not exist"),
    ("table", "digits=9", "digits=9 is more than 6"),
    ("table", "intervals=maybe", "intervals=maybe is neither true nor false"),
    ("table", "metric=bleu", "metric=bleu does not exist"),
    ("report", "answers=0", "answers=0 must be a whole number of at least 1"),
    ("report", "margin=-1", "margin=-1 is not a number above 0"),
    ("report", "axes=[size]", "axes=size does not exist"),
    ("report", "tasks=nope", "fits tasks, models, methods and where"),
]


# Settings of commands that are numbers, whole or not, as the shipped files have them.
NUMBERS = {
    "advise": ["margin"],
    "attention": ["attention.share"],
    "board": ["margin"],
    "books": ["books.outside"],
    "calibrate": ["calibrate.margin.score", "calibrate.margin.nll", "calibrate.margin.kl", "calibrate.tie"],
    "compare": ["margin", "at_bytes"],
    "pareto": ["margin"],
    "ranks": ["at_bytes"],
    "report": ["margin"],
    "search": ["search.margin", "search.most"],
    "suite": ["margin"],
}
CASES += [
    (command, f"{name}={value}", f"{name}=")
    for command in ("compare", "pareto", "ranks", "report")
    for name in NUMBERS[command]
    for value in ("nan", "inf", "-inf")
]


def test_every_setting_that_is_a_number_is_known_here():
    """A command with a new one is added above, and to a test that it refuses what is none."""
    for path in sorted((ROOT / "conf" / "command").glob("*.yaml")):
        held = flat(OmegaConf.to_container(OmegaConf.load(path), resolve=False))
        odd = {"margin", "at_bytes", "most"}
        numbers = {name for name, value in held.items() if isinstance(value, float) or name.split(".")[-1] in odd}
        assert numbers == set(NUMBERS.get(path.stem, ())), path.stem


@pytest.mark.parametrize(("command", "word", "message"), CASES)
def test_bad_settings(tmp_path, capsys, command, word, message):
    """Every command, and nothing is written."""
    for method in ("full", "half"):
        store(tmp_path, method, {"a": [1, 0, 1, 1, 0, 1], "b": [1, 1, 0, 1, 1, 1]})
    before = sorted(tmp_path.iterdir())
    assert main([command, f"results_dir={tmp_path}", word]) == 2
    assert message in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before
