"""Drift: bins of positions, the noise band, where a method leaves it, samples that a run lacks, pictures and CSV."""

import csv
import shutil

import pytest
from refusals import refused
from stored import store

from kvbench.cli.commands import compose_command, run
from kvbench.cli.main import main
from kvbench.evidence.load import load_groups
from kvbench.extensions.views import drift
from kvbench.extensions.views.drift import drawing_of
from kvbench.results.lines import read_samples
from kvbench.results.record import RunRecord
from kvbench.results.sample import write_line

LENGTH, ITEMS = 130, 9


def put(root, method, kl, *, length=LENGTH, meta=None, statuses=None, items=ITEMS, **options):
    """A run whose samples have these KL at each (sample, token); the first token is the prompt's own."""
    folder = store(root, method, {"text": [0.0] * items}, task="drift", statuses=statuses or {}, **options)
    digest = RunRecord.load(folder).hash
    records, _ = read_samples(folder / "samples.jsonl", digest)
    for number, record in enumerate(records.values()):
        values = [float(kl(number, token)) for token in range(length)]
        tokens = {"kl": values, "nll": [1.0 + one for one in values], "nll_full": [1.0] * length, "exact": [1.0]}
        tokens |= {name: [1.0] * length for name in ("same_first_choice", "right_first_choice")}
        if record["status"] == "ok":
            record.update(per_token=tokens, meta=meta or {"index": number})
    (folder / "samples.jsonl").write_bytes(b"".join(write_line(record, digest) for record in records.values()))


def noise(sample, token):
    """Distance of the full cache from itself; large where the prompt's own pass predicts, which must not count."""
    return 50.0 if token == 0 else 1e-5 * (1 + sample)


@pytest.fixture
def runs(tmp_path):
    """One method strays from token 64 on; one strays in the middle and comes back; one is noise to the end."""
    put(tmp_path, "full", noise, ratio=1.0, tiers=(100,))
    put(tmp_path, "h2o", lambda s, t: noise(s, t) if t < 64 else 0.4 + 0.01 * s)
    put(tmp_path, "kivi", lambda s, t: 0.4 + 0.01 * s if 32 <= t < 96 else noise(s, t))
    put(tmp_path, "tova", lambda s, t: (s == 3) * 2.0 if t >= 64 else noise(s, t))  # one sample of nine strays
    return tmp_path


def test_a_run_that_cannot_be_drawn_takes_no_other_with_it(runs):
    """Sealed lines with torn columns are no curve, and a run with other samples is named; the rest is as it was."""
    before = leaving(drawing(runs))
    changes = {
        "short": lambda record: record["per_token"]["kl"].pop(),
        "blind": lambda record: record["per_token"].pop("exact"),
        "empty": lambda record: record["per_token"]["nll"].__setitem__(0, None),
        "elsewhere": lambda record: record.update(subset="other"),
    }
    for method, change in changes.items():
        put(runs, method, noise)
        (path,) = runs.glob(f"drift/tiny/{method}/*/samples.jsonl")
        run = RunRecord.load(path.parent).hash
        records = list(read_samples(path, run)[0].values())
        for record in records:
            change(record)
        path.write_bytes(b"".join(write_line(record, run) for record in records))
    drawn = drawing(runs)
    assert leaving(drawn) == before
    assert "elsewhere is not drawn: it has no sample of the others'" in drawn.notes


def drawing(root, *words, width=None):
    """The curves of the one group."""
    (group,) = load_groups(compose_command("drift", [f"results_dir={root}", *words]))
    return drawing_of(group, width)


def leaving(drawn):
    """Label -> where the run leaves the noise."""
    return {curve.run.label: curve.leaves for curve in drawn.curves}


def test_bins_and_where_methods_leave_the_noise(runs) -> None:
    """Bins are a power of two, at most sixteen; a method that comes back does not leave for good, and neither does one
    whose interval reaches down to the noise."""
    drawn = drawing(runs)
    assert (drawn.width, drawn.num_samples, drawn.axis, drawn.judged) == (16, ITEMS, "tokens of the answer", True)
    assert leaving(drawn) == {"full": None, "h2o": 64, "kivi": None, "tova": None}
    full, h2o, *_ = drawn.curves
    assert list(full.bins) == list(range(0, LENGTH, 16))
    assert full.bins[0]["kl"].value == pytest.approx(5e-5)  # the first token is no part of it
    assert h2o.bins[64]["kl"].value == pytest.approx(0.44)
    assert set(drawn.band.values()) == {0.0025}


def test_the_band_is_what_the_full_cache_does(runs) -> None:
    """The band is the full cache's own upper end, if that is above the tolerance."""
    shutil.rmtree(runs / "drift" / "tiny" / "full")
    put(runs, "full", lambda s, t: 0.4 + 0.02 * s if t >= 64 else noise(s, t), ratio=1.0, tiers=(100,))
    drawn = drawing(runs, "methods=h2o")
    assert drawn.band[0] == 0.0025 and 0.48 < drawn.band[64] < 0.56
    assert leaving(drawn)["h2o"] is None  # it has the same 0.44


def test_too_few_samples_are_not_judged(tmp_path) -> None:
    """Seven answers have no interval, so nothing is said of where a method leaves."""
    put(tmp_path, "full", noise, items=7)
    put(tmp_path, "h2o", lambda s, t: 1.0 + s, items=7)
    drawn = drawing(tmp_path)
    assert not drawn.judged and leaving(drawn)["h2o"] is None


def test_streams_count_tokens_seen(tmp_path) -> None:
    """The prompt's tokens come before the first forced one; bins begin at multiples of their width."""
    for method in ("full", "h2o"):
        put(tmp_path, method, noise, meta={"index": 0, "seen": 40})
    drawn = drawing(tmp_path, width=64)
    assert drawn.axis == "tokens seen"
    assert list(drawn.band) == list(drawn.curves[0].bins) == [0, 64, 128]


def test_a_sample_that_one_run_lacks_is_drawn_for_none(runs) -> None:
    """Curves are compared by eye, so all are over the same samples; a run without numbers of tokens is not drawn."""
    put(runs, "snapkv", noise, statuses={2: "oom"})
    store(runs, "int4", {"text": [0.0] * ITEMS}, task="drift")
    drawn = drawing(runs)
    assert drawn.num_samples == ITEMS - 1 and "int4" not in leaving(drawn)
    assert any("drawn from the 8 of 9 samples" in note for note in drawn.notes)


@pytest.mark.smoke
def test_command_writes_pictures_and_csv(runs, capsys) -> None:
    """A picture of each kind, the same bytes twice, and three rows for each bin; in words where each method leaves."""
    assert main(["drift", f"results_dir={runs}"]) == 0
    said = capsys.readouterr().out
    assert "h2o leaves it at 65" in said and "tova does not leave the noise for good" in said
    before = {path.name: path.read_bytes() for path in (runs / "drift").glob("drift*.*")}
    assert {name.rpartition(".")[2] for name in before} == {"csv", "png", "svg"}
    rows = list(csv.DictReader((runs / "drift" / "drift.csv").read_text().splitlines()))
    assert len(rows) == 4 * 9 * 3 and {row["leaves_at"] for row in rows if row["run"] == "h2o"} == {"65"}
    (row_65,) = (row for row in rows if (row["run"], row["metric"], row["first_token"]) == ("h2o", "nll", "65"))
    assert float(row_65["value"]) == pytest.approx(1.44) and float(row_65["low"]) < 1.44 < float(row_65["high"])
    assert main(["drift", f"results_dir={runs}", "kinds=[svg]"]) == 0
    assert before == {path.name: path.read_bytes() for path in (runs / "drift").glob("drift*.*")}
    assert not any(b"mathdefault" in content for name, content in before.items() if name.endswith(".svg"))


def test_wide_intervals_do_not_press_the_curves_flat(tmp_path) -> None:
    """One answer of nine that is lost gives intervals over hundreds of decades; the curves keep most of the picture."""
    put(tmp_path, "full", noise, ratio=1.0, tiers=(100,))
    put(tmp_path, "tova", lambda s, t: 40.0 if s == 3 and t >= 96 else 0.1 + 0.01 * s)
    drawn = drawing(tmp_path)
    ends = [values["nll"].ends for curve in drawn.curves for values in curve.bins.values()]
    assert max(high for low, high in filter(None, ends)) > 10
    kl, _, perplexity = drift.figure(drawn).axes
    for axes in (kl, perplexity):
        tallest = max(max(line.get_ydata()) for line in axes.lines)
        assert tallest < axes.get_ylim()[1] <= 1e2 * tallest
        assert axes.get_title(loc="left") == "intervals are cut"
    assert drift._perplexity(1e4) > 1e300  # no float is that large


def test_command_says_what_is_wrong(runs, tmp_path) -> None:
    """Nothing to draw, a kind of picture that does not exist, a width of no tokens."""
    for words, error in (
        (["kinds=gif"], ("name-unknown", "kinds", "kinds=gif")),
        (["width=0"], ("setting-value", "width", "width=0")),
    ):
        with refused(*error):
            run("drift", [f"results_dir={runs}", *words])
    store(tmp_path / "other", "full", {"a": [1.0]})
    with refused("results-missing", None, "fidelity.per_token=true"):
        run("drift", [f"results_dir={tmp_path / 'other'}"])
