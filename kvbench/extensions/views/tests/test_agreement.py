"""`kvbench report view=ranks`: the orders of two measures, over one group, several, and at equal bytes."""

import csv
import re

import numpy as np
import pytest
from stored import command_settings, store

from kvbench.cli.main import main
from kvbench.evidence.load import load_groups
from kvbench.extensions.views.ranks import rankings

NAMES = ("h2o", "knorm", "random", "snapkv", "tova")


def column(rng, level, count=40):
    """Graded scores around a level."""
    return np.clip(level + 0.1 * rng.normal(size=count), 0, 1).tolist()


def study(root, nll_of, score_of, **changes):
    """Five methods and the full cache; a function gives each one's level by its place."""
    rng = np.random.default_rng(changes.get("seed", 0))
    store(root, "full", {"a": column(rng, 1.0), "b": column(rng, 1.0)}, nll=0.1, ratio=1.0, **changes)
    for index, name in enumerate(NAMES):
        spread = 0.01 * rng.normal(size=100)
        scores = {subset: column(rng, score_of(index)) for subset in "ab"}
        store(root, name, scores, nll=lambda n, p=index, s=spread: nll_of(p) + s[n], **changes)


def rankings_in(root, *words):
    """The orders and the notes of a results folder."""
    cfg = command_settings("ranks", root, "resamples=500", *words)
    return rankings(load_groups(cfg), cfg)


@pytest.mark.parametrize(("sign", "expected"), [(-1, 1.0), (1, -1.0)])
def test_order_and_direction(tmp_path, sign, expected):
    """A low NLL is good and so is a high score: the correlation is +1 where they go together. The full cache is none of
    the runs, and the ranks count from the best."""
    study(tmp_path, lambda index: 1 + index, lambda index: 0.5 + sign * 0.1 * index)
    (ranking,), notes = rankings_in(tmp_path)
    assert ranking.runs["run"].tolist() == list(NAMES) and not notes and ranking.num_questions == 80
    assert ranking.runs["rank"].tolist() == [1, 2, 3, 4, 5]
    assert ranking.runs["other_rank"].tolist() == ([1, 2, 3, 4, 5] if sign < 0 else [5, 4, 3, 2, 1])
    assert ranking.agreement.value == pytest.approx(expected)
    assert ranking.runs["value"].tolist() == pytest.approx([1, 2, 3, 4, 5], abs=0.01)
    assert min(ranking.agreement.halves) > 0.9


def test_the_mean_over_groups(tmp_path):
    """Two lengths of the same questions are one set of questions; with other right answers they are two."""
    levels = {"nll_of": lambda index: 1 + index, "score_of": lambda index: 0.9 - 0.1 * index}
    study(tmp_path, **levels, gold=["7"])
    study(tmp_path, **levels, gold=["7"], length=18, fingerprint="e" * 64)
    orders, _ = rankings_in(tmp_path)
    assert [ranking.num_questions for ranking in orders] == [80, 80, 80]
    assert orders[-1].title == "mean over 2 groups with tiny"
    study(tmp_path, **levels, gold=["8"], length=27, fingerprint="d" * 64, seed=1)
    orders, _ = rankings_in(tmp_path)
    assert [ranking.num_questions for ranking in orders] == [80, 80, 80, 160]


def test_at_equal_bytes(tmp_path):
    """Each method is read between its two runs; one that was not run around these bytes is named."""
    rng = np.random.default_rng(0)
    for index, name in enumerate(NAMES):
        for ratio in (0.2, 0.4) if name != "tova" else (0.3, 0.4):
            level = 0.2 + 0.1 * index + ratio
            store(tmp_path, name, {"a": column(rng, level)}, settings={"budget": ratio}, ratio=ratio, nll=3 - level)
    (ranking,), notes = rankings_in(tmp_path, "at_bytes=28.284271")  # half way, in the logarithm
    assert ranking.runs["run"].tolist() == list(NAMES[:-1])
    assert ranking.runs["value"].tolist() == pytest.approx([3 - (0.5 + 0.1 * index) for index in range(4)])
    assert ranking.agreement.value == pytest.approx(1)
    assert len(notes) == 1 and notes[0].startswith("tova was run from 30.0 to 40.0 % of the bytes only")


@pytest.mark.smoke
def test_the_command(tmp_path, capsys):
    """It prints and writes the orders, and refuses what it cannot rank."""
    study(tmp_path, lambda index: 1 + index, lambda index: 0.9 - 0.1 * index)
    where = f"results_dir={tmp_path}"
    assert main(["ranks", where, "resamples=200", f"out={tmp_path}/x.csv"]) == 0
    said = capsys.readouterr().out
    assert "Spearman's rank correlation of 5 runs over 80 questions: +1.00" in said
    assert re.search(r"between two halves of the questions: .*NLL \+1.00, ", said)
    rows = list(csv.DictReader((tmp_path / "x.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == list(NAMES) and {row["correlation"] for row in rows} == {"1.0"}
    for words, message in (
        (["metrics=[nll,kl,top1]"], "metrics=['nll', 'kl', 'top1'] are not two measures; write metrics=[nll,score]"),
        (["metrics=nll"], "nothing to rank: no two of 1 groups share 3 complete runs"),
        (["metrics=[nll,nll]"], "are not two measures"),
        (["at_bytes=0"], "at_bytes=0 is neither a percentage"),
        (["methods=[h2o,tova]"], "nothing to rank. toy with tiny: 2 runs with 80 questions in common have no order"),
    ):
        assert main(["ranks", where, *words]) != 0
        assert message in " ".join(capsys.readouterr().err.split())
