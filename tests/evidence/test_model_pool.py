"""Models together: whose samples are paired, what the bytes are, and which run is better at equal bytes."""

import csv

import pytest
from refusals import refused
from stored import command_settings, flips, store, yes_no

from kvbench.cli.main import main
from kvbench.evidence import compare, pareto, report
from kvbench.evidence.dominance import standing
from kvbench.evidence.load import load_groups
from kvbench.evidence.model_pool import Total, pool_models
from kvbench.evidence.view import frame_of
from kvbench.results.measures import TOTAL

tables_of = pytest.importorskip("kvbench.extensions.views.table_content").tables_of

SCORES = yes_no(0.9, {"a": 40, "b": 40}, seed=3)
BIG, SMALL = 8_000_000, 2_000_000  # bytes of weights; a sample's FP16 cache has about 100,000


def gold(number):
    """The right answer to a sample."""
    return (f"the {number}",)


@pytest.fixture
def two(tmp_path):
    """A large model with a full and a compressed cache, and a small one that is much worse; both were asked the same,
    in a chat and not."""
    big = {"model": "big", "weights_bytes": BIG, "gold": gold, "fingerprint": "1" * 64}
    small = {"model": "small", "weights_bytes": SMALL, "gold": gold, "fingerprint": "2" * 64, "asked": {"chat": True}}
    store(tmp_path, "full", SCORES, ratio=1.0, tiers=(100,), bits=16, **big)
    store(tmp_path, "half", flips(SCORES, 2, 1), ratio=0.5, settings={"budget": 0.5}, **big)
    store(tmp_path, "half", flips(SCORES, 12, 0), ratio=0.1, settings={"budget": 0.1}, **big)
    store(tmp_path, "full", flips(SCORES, 25, 0), ratio=1.0, tiers=(100,), bits=16, **small)
    store(tmp_path, "half", flips(SCORES, 26, 0), ratio=0.5, settings={"budget": 0.5}, **small)
    return tmp_path


def joined(root, command="compare", *words):
    """The settings of a command, and its one group."""
    words = [word for word in words if not word.startswith("together")] + [
        next((word for word in words if word.startswith("together")), "together={}")
    ]
    cfg = command_settings(command, root, "resamples=200", *words)
    (group,) = pool_models(load_groups(cfg), cfg)
    return cfg, group


def test_bytes_are_weights_and_caches(two) -> None:
    """One copy of the weights and so many caches, of the samples' own length or of another; where the setting or the
    model's name says what the weights are, that counts."""
    _, group = joined(two)
    assert group.largest == "big" and group.title == "toy with big and small"
    for words, weights, each in (
        ("together={}", BIG, 1.0),
        ("together={sequences:3,context:1000}", BIG, 3 * 1000 / 100),  # a sample has seen 100 tokens
        ("together={weights:{big:1MiB}}", 2**20, 1.0),
    ):
        for run in joined(two, "compare", words)[1].runs:
            record = run.samples["a/0", 0]
            size = weights if run.record.model == "big" else SMALL
            assert TOTAL.above(record) == pytest.approx(size + each * record["ledger"]["resident_bytes"])


def test_a_comparison_across_models(two, capsys) -> None:
    """Every run of both models is paired with the largest model's full cache, under a name that has the model."""
    cfg, group = joined(two, "compare", f"out={two}/table.csv")
    rows, _ = compare.compare_group(group, cfg)
    assert group.reference.record.model == "big" and not group.repeats
    assert {row.label: row.verdict for row in rows} == {
        "big half budget=0.5": "cannot tell",
        "big half budget=0.1": "worse",
        "small full": "worse",
        "small half": "worse",
    }
    assert {row.pairs.theirs.label for row in rows} == {"big full"}
    assert compare.main(cfg) == 0
    said = capsys.readouterr().out
    assert "weights + cache" in said and "weights and cache: big 8.00 MB, small 2.00 MB, and 1 times" in said
    table = {row["run"]: row for row in csv.DictReader((two / "table.csv").open())}
    assert SMALL < float(table["small half"]["total_bytes"]) < float(table["small full"]["total_bytes"]) < BIG


def test_a_smaller_model_at_equal_bytes(two) -> None:
    """The frontier is over bytes of weights and cache alone: with short caches the small model is cheaper; with many
    long ones the large model's small cache beats it at fewer bytes."""
    cfg, _ = joined(two, "pareto")
    (panel,) = pareto.panels_of(pool_models(load_groups(cfg), cfg), cfg)
    assert pareto.axes_of(panel, cfg) == ["total"] and len(panel.points) == 5
    places = {panel.find(key).label: place for key, place in standing(panel, "total").items()}
    assert places["small half"] == "best estimate" and "dominated" not in places["small full"]
    cfg, _ = joined(two, "pareto", "together={sequences:200}")
    (panel,) = pareto.panels_of(pool_models(load_groups(cfg), cfg), cfg)
    places = {panel.find(key).label: place for key, place in standing(panel, "total").items()}
    assert places["small full"] == "dominated" and places["big half budget=0.1"] == "best estimate"
    frame = frame_of(pareto.records([panel]))
    assert set(frame[frame["run"] == "small full"]["total_standing"]) == {"dominated"}


def test_curves_are_read_at_equal_bytes(two) -> None:
    """`at_bytes` is in MiB of weights and cache then, and each model has a curve of its own."""
    cfg, group = joined(two, "compare", "at_bytes=7.66")
    rows, notes = compare.compare_group(group, cfg)
    assert [row.label for row in rows] == ["big half at 7.66 MiB"]
    assert any("small half has no two runs" in note for note in notes)


def test_tables_and_reports_have_both(two, capsys) -> None:
    """Rows have the model's name; a paper's table has total bytes in place of a share of one model's cache."""
    cfg, group = joined(two, "table")
    (table,) = tables_of([group], cfg)
    assert table.held is TOTAL and len(table.rows) == 5
    assert {row.label.split()[0] for row in table.rows} == {"big", "small"}
    assert main(["table", f"results_dir={two}", "together={}"]) == 0
    assert "weights + cache, MiB" in capsys.readouterr().out
    cfg, _ = joined(two, "report")
    ((item,), _) = report.gather(pool_models(load_groups(cfg), cfg), cfg)
    assert [row["label"] for row in item["table"]["rows"]][0] == "big full" and len(item["table"]["rows"]) == 5
    assert len(item["pictures"]) == 1 and item["pictures"][0]["name"] == TOTAL.title


def test_samples_that_differ_are_left_out(two) -> None:
    """A sample with other right answers was another question; without one that is the same, nothing is compared."""
    store(two, "full", SCORES, model="other", weights_bytes=1, gold=lambda n: (f"the {n + (n < 3)}",), ratio=1.0)
    _, group = joined(two, "compare", "models=[big,other]")
    assert all(len(run.samples) == 77 for run in group.runs)
    assert "3 of 80 samples are not the same for all models, and left out" in group.notes
    store(two, "full", SCORES, model="odd", weights_bytes=1, gold=("never",), ratio=1.0)
    with refused("results-missing", "together", "big and odd"):
        joined(two, "compare", "models=[big,odd]")


def test_what_cannot_stand_together(two) -> None:
    """Each is refused with its remedy: unknown weights, one model alone, measures of a model against itself, and wrong
    settings."""
    with refused("setting-value", "metric", "metric=kl"):
        compare.compare_group(*joined(two, "compare", "metric=kl")[::-1])
    with refused("results-missing", "together", "with big"):
        joined(two, "compare", "models=big")
    store(two, "full", SCORES, model="unsaid", gold=gold)
    with refused("setting-missing", "together.weights", "weights:{unsaid:4.5GiB}"):
        joined(two)
    for value, code, setting, shown in (
        ({"tokens": 1}, "name-unknown", "together", "tokens"),
        ({"sequences": 0}, "setting-value", "together.sequences", "together.sequences=0"),
        ({"weights": {"big": "much"}}, "setting-value", "together.weights", "big='much'"),
        (3, "setting-value", "together", "together=3"),
    ):
        with refused(code, setting, shown):
            Total.read(value)
