"""The run loop with the real engine, task and methods on a tiny random model: a resumed run is bit for bit the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_parts import altered
from omegaconf import OmegaConf
from open_settings import open_settings
from selection import few

from kvbench.config import files as listing
from kvbench.config.methods import method_settings
from kvbench.runs.parts import Loaders
from kvbench.runs.run import run_experiment

QUIET = {"say": lambda text: None}


def compose(method: str, results_dir: Path) -> OmegaConf:
    """The shipped configuration with a tiny model and short prompts."""
    conf = listing.conf_folder()
    cfg = OmegaConf.load(conf / "config.yaml")
    del cfg["defaults"], cfg["hydra"]
    cfg.method = method_settings(method)
    for group, name in {"task": "longctx", "model": "random", "protocol": "default"}.items():
        cfg[group] = OmegaConf.load(conf / group / f"{name}.yaml")
    cfg.backend = {"name": "torch"}
    changes = {"model.preset": "tiny", "task.length": 600, "task.items": 2, "task.kinds": ["kv", "passkey", "recall"]}
    changes |= {"results_dir": str(results_dir), "batch_size": 2, "reference": "none", "protocol.max_new_tokens": 6}
    changes |= {f"method.{key}": value for key, value in open_settings(method).items()}
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    return cfg


class StopAfter:
    """These loaders, with a task that is interrupted when its n-th answer is scored."""

    def __init__(self, count: int, own: Loaders) -> None:
        self.left, self.own = count, own
        self.parts = altered(own, load_task=self.load_task)

    def load_task(self, *arguments, **named):
        """The task with a scorer that counts down."""
        task = self.own.load_task(*arguments, **named)

        def scorer(sample_id, text):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return task.scorer(sample_id, text)

        return replace(task, scorer=scorer)


def samples(folder: Path) -> list[dict]:
    """The records without their timing and their seal, which covers it."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("timing", "seal")} for row in rows]


@pytest.fixture(scope="module")
def shared() -> Loaders:
    """Loaders that make the model and the questions once for all methods, which takes as long as the answers do."""
    return Loaders()


# Resuming asks no method anything: this one has a second tier; rings are in test_run_shards.py, and a method's own dice
# in test_request_alone.py.
@pytest.mark.parametrize("method", few(listing.options("method"), "diffkv"))
def test_interrupted_run_equals_a_whole_one(tmp_path, shared, method):
    """Stopped twice inside a batch and resumed, every method leaves the tokens and bytes of an unbroken run."""
    whole = run_experiment(compose(method, tmp_path / "whole"), method=method, parts=shared, **QUIET)
    assert whole.record.counts.ok == whole.record.counts.total == 6
    assert all(row["fidelity"] and row["ledger"]["resident_bytes"] > 0 for row in samples(whole.folder))
    cut = compose(method, tmp_path / "cut")
    for count in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run_experiment(cut, method=method, parts=StopAfter(count, shared).parts, **QUIET)
    # One method's run goes on with a model and questions of its own, as a new process has.
    again = Loaders() if method == "diffkv" else shared
    resumed = run_experiment(cut, method=method, parts=again, **QUIET)
    assert [session.num_done for session in resumed.record.sessions] == [1, 2, 3]
    assert samples(resumed.folder) == samples(whole.folder)
    assert resumed.record.metrics == whole.record.metrics
    assert resumed.record.ledger == whole.record.ledger


def test_kept_prompts_change_no_answer(tmp_path):
    """Jobs that replay each other's prompts leave the records of fresh runs, but for the prefill time."""
    loaders = Loaders()
    for budget in (0.5, 0.25):
        fresh, kept = compose("snapkv", tmp_path / "fresh"), compose("snapkv", tmp_path / "kept")
        kept.prompt_cache_bytes = "1GiB"
        for cfg in (fresh, kept):
            cfg.method.budget = budget
        one = run_experiment(fresh, method="snapkv", parts=loaders, **QUIET)
        other = run_experiment(kept, method="snapkv", parts=loaders, **QUIET)
        assert one.record.hash == other.record.hash
        assert samples(one.folder) == samples(other.folder)
        assert one.record.timing.prefill_s > 0
        assert other.record.timing.prefill_s is None
    assert loaders.prompts(2**30).num_reused >= 6
