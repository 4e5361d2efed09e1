"""The table of measures: every one finds its number in a record and in run.json, and has words of its own."""

import pytest
from fake_parts import make_parts, run_fake

from kvbench.results import measures, summary
from kvbench.results.lines import read_samples

ALL = [value for value in vars(measures).values() if isinstance(value, measures.Measure)]


@pytest.fixture
def finished(tmp_path):
    """A run of fakes, and its samples."""
    run = run_fake(tmp_path, make_parts(count=3))
    return run.record, list(read_samples(run.folder / "samples.jsonl", run.record.hash)[0].values())


def test_names_and_words_are_unambiguous():
    """No two measures share a name, a title or a place in run.json."""
    for what in ("name", "title"):
        words = [getattr(measure, what) for measure in ALL]
        assert len(set(words)) == len(words), what
    assert all(measure.unit and measure.short and measure.scale > 0 for measure in ALL)
    places = [measure.in_run for measure in ALL if measure.in_run]
    assert len(set(places)) == len(places)


def test_a_measure_is_the_same_in_the_records_and_in_the_run(finished):
    """What a measure reads from the samples, put together, is what it reads from run.json."""
    record, samples = finished
    for measure in (measures.RESIDENT, measures.PEAK, measures.RATE):
        above, below = summary.sums(samples, measure)
        assert measure.of_run(record) == pytest.approx(above / below)
    means, _ = summary.values_by_sample(samples, measures.NLL.above)
    subsets = [sum(values.values()) / len(values) for values in means.values()]
    assert measures.NLL.of_run(record) == pytest.approx(sum(subsets) / len(subsets))
    own = measures.score(record.primary)
    assert own.of_run(record) == record.metrics[record.primary].value
    assert own.above(samples[0]) == samples[0]["scores"][record.primary]


def test_what_a_record_lacks_is_missing_not_zero(finished):
    """A record without the number raises, a run without it gives None, and sums leave it out."""
    record, samples = finished
    without = samples[0] | {"fidelity": None}
    with pytest.raises(TypeError):
        measures.NLL.above(without)
    assert measures.READ.of_run(record) is None
    assert measures.TIME.of_run(record) is None
    assert summary.sums([without], measures.NLL) == (0, 1.0)


def test_items_of_the_ledger_add_up():
    """Sums, the FP16 cache and the page's size are no items."""
    ledger = {"payload_bytes": 3.0, "quant_meta_bytes": 0.0, "resident_bytes": 3.0, "fp16_bytes": 9.0, "ratio": 1 / 3}
    assert measures.ledger_items(ledger) == {"payload_bytes": 3.0, "quant_meta_bytes": 0.0}
    assert measures.item_title("quant_meta_bytes") == "quant meta"


@pytest.mark.parametrize("criterion", measures.LOSSES)
def test_a_loss_has_the_unit_of_its_measure(criterion):
    """The rule of a calibration names the unit that margins are given in."""
    lost = measures.LOSSES[criterion]
    assert lost.measure.name == criterion
    assert lost.unit in lost.rule or lost.measure is measures.SCORE
