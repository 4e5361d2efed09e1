"""Shares of precisions: counted by hand, subsets alike, with what is pruned as the rest."""

import csv

import pytest
from stored import store

from kvbench.cli.main import main


@pytest.mark.smoke
def test_shares_of_each_precision(tmp_path, capsys):
    """Of 100 tokens in one list, 40 and 25 slots: 35 % is pruned; two subsets of unlike sizes count alike."""
    scores = {"a": [1.0] * 10, "b": [1.0] * 30}
    store(tmp_path, "full", scores, ratio=1.0, tiers=(100,))
    store(tmp_path, "diffkv", scores, tiers=lambda n: (40, 25) if n < 10 else (60, 40))
    assert main(["tiers", f"results_dir={tmp_path}", f"out={tmp_path / 'out'}", "kinds=[png]"]) == 0
    assert "toy, tiny: diffkv" in capsys.readouterr().out
    with (tmp_path / "out" / "tiers.csv").open(newline="") as file:
        rows = {row["part"]: row for row in csv.DictReader(file)}
    shares = {part: float(row["share"]) for part, row in rows.items()}
    assert shares == pytest.approx({"tier 0": 0.5, "tier 1": 0.325, "pruned": 0.175})
    assert [row["n"] for row in rows.values()] == ["40"] * 3
    assert (tmp_path / "out" / "tiers.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path, capsys):
    """The full cache alone has no precisions to tell apart."""
    store(tmp_path, "full", {"": [1.0] * 3}, ratio=1.0, tiers=(100,))
    assert main(["tiers", f"results_dir={tmp_path}"]) == 2
    assert "says what it holds; run a method beside full" in capsys.readouterr().err
