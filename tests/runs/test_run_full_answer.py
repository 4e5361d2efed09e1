"""Fidelity on the full cache's own answers, from the settings to the record."""

from fake_parts import FakeEngine, make_parts, run_fake
from omegaconf import OmegaConf
from refusals import refused

from kvbench.config.compose import compose
from kvbench.config.settings import read_config
from kvbench.results import summary
from kvbench.results.record import RunRecord
from kvbench.runs import run as runs
from kvbench.runs.config import RunConfig

QUIET = {"say": lambda text: None}
OWN = {"fidelity__on": "own", "fidelity__max_tokens": None}


def test_a_method_is_forced_to_give_the_full_caches_answers(tmp_path, monkeypatch):
    """The full cache's run is asked to force its own answers; the method's requests have its token ids as gold, sample
    by sample, and which run it is says the setting alone."""
    engines, asked = [], {}
    real = FakeEngine.running

    def running(self, requests, *, sizing=None, force_generated=False, **named):
        asked[self.policy.ratio] = force_generated, {item.sample_id: item.gold for item in requests}, sizing
        yield from real(self, requests, sizing=sizing, force_generated=force_generated, **named)

    monkeypatch.setattr(FakeEngine, "running", running)
    parts = make_parts(engines=engines, repeats=2)
    half = run_fake(tmp_path, parts, reference="auto", **OWN)
    own, golds, _ = asked[1.0]
    assert own and set(golds.values()) == {()}
    own, golds, sizing = asked[0.5]
    assert not own and {item.sample_id: item.gold for item in sizing} == golds
    full = runs.Journal(tmp_path / half.record.comparison.reference / "samples.jsonl", run=half.reference.hash)
    answers = {record["sample_id"]: tuple(record["token_ids"]) for key, record in full.records.items() if key[1] == 0}
    full.close()
    assert golds == answers and all(answers.values())
    gold = run_fake(tmp_path, make_parts(repeats=2), reference="auto")
    assert gold.record.hash != half.record.hash


def test_without_a_full_cache_there_is_nothing_to_force(tmp_path):
    """reference=none is refused before anything runs; so are words that name no answer."""
    with refused("settings-conflict", "reference", "fidelity.on=own", "reference=auto"):
        run_fake(tmp_path, **OWN)
    with refused("setting-value", "fidelity.on", "fidelity.on='mine'"):
        run_fake(tmp_path, fidelity__on="mine")


def drifting(tokens, kl, status="ok", repeat=0):
    """A record with a drift."""
    sums = {"tokens": tokens, "kl": kl, "nll": kl, "nll_full": [0.0] * len(kl), "same_first_choice": tokens}
    return {"status": status, "repeat": repeat, "drift": sums}


def test_the_drift_of_a_run_is_over_tokens(tmp_path):
    """Bins add up over answers of any length, with the answers that reach them; a bin without a token is left out."""
    records = [
        drifting([0.0, 15.0, 4.0], [0.0, 3.0, 2.0]),
        drifting([0.0, 5.0], [0.0, 7.0]),
        drifting([0.0, 5.0], [0.0, 900.0], status="nan"),
        drifting([0.0, 5.0], [0.0, 900.0], repeat=1),  # the same forced answer once more
        {"status": "ok", "repeat": 0},  # a record of before
    ]
    second, third = summary.drift(records)
    assert (second.first, second.last, second.num_tokens, second.num_samples) == (1, 15, 20, 2)
    assert second.kl == 10.0 / 20 and second.top1 == 1.0
    assert (third.first, third.last, third.num_tokens, third.num_samples, third.kl) == (16, 31, 4, 1, 0.5)
    record = RunRecord(drift=[second, third])
    record.save(tmp_path)
    assert RunRecord.load(tmp_path) == record


def test_each_measure_has_its_own_number_of_samples():
    """An answer of one token has neither an NLL nor a KL, is in neither n, and is no number that was not finite."""
    base = {"status": "ok", "subset": "a", "repeat": 0}
    fidelity = [{"nll": 2.0, "kl_mean": 1.0, "num_measured": 4}, {"nll": None, "kl_mean": None, "num_measured": 0}]
    records = [base | {"sample_id": str(place), "fidelity": one} for place, one in enumerate(fidelity)]
    found = summary.fidelity(records)
    assert [found[name].num_samples for name in ("nll", "kl_mean")] == [1, 1]
    assert [found[name].num_nonfinite for name in ("nll", "kl_mean")] == [0, 0]


def test_the_setting_is_called_on_wherever_it_is_read(tmp_path):
    """YAML takes a bare `on` for true: the shipped file, a run's config.yaml and the command line have the same key."""
    shipped = compose(["fidelity.on=own"])
    assert set(shipped.fidelity) == {"on", "max_tokens", "per_token"} and shipped.fidelity.on == "own"
    RunConfig.read(compose([f"results_dir={tmp_path}"]))
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(shipped, resolve=True))
    assert read_config(tmp_path / "config.yaml").fidelity.on == "own"
