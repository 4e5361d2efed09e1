"""AIME with several answers per problem through the real engine, interrupted and resumed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_parts import altered
from omegaconf import OmegaConf
from problem_rows import AIME, folder_of

from kvbench.config.files import conf_folder
from kvbench.runs.parts import Loaders
from kvbench.runs.run import run_experiment


class Interrupted:
    """The real loaders, with a task that is interrupted when its n-th answer is scored; remembers what was scored."""

    def __init__(self, count: int) -> None:
        self.left, self.scored = count, []
        self.parts = altered(Loaders(), load_task=self.load_task)

    def load_task(self, *arguments, **named):
        """The task with a scorer that counts down."""
        task = Loaders().load_task(*arguments, **named)

        def scorer(sample_id, text):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            self.scored.append((sample_id, text))
            return task.scorer(sample_id, text)

        return replace(task, scorer=scorer)


def aime_config(folder: Path, results_dir: Path):
    """AIME with eight sampled answers per problem on a tiny random model."""
    conf = conf_folder()
    cfg = OmegaConf.load(conf / "config.yaml")
    del cfg["defaults"], cfg["hydra"]
    for group, name in {"method": "snapkv", "task": "aime24", "model": "random", "protocol": "default"}.items():
        cfg[group] = OmegaConf.load(conf / group / f"{name}.yaml")
    cfg.backend = {"name": "torch"}
    changes = {"model.preset": "tiny", "task.data_dir": str(folder), "results_dir": str(results_dir), "batch_size": 2}
    changes |= {
        "reference": "none",
        "protocol.max_new_tokens": 5,
        "protocol.temperature": 0.8,
        "protocol.num_samples": 8,
    }
    changes |= {"method.budget": 16, "method.window": 4}
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    return cfg


def test_an_interrupted_aime_run_repeats_no_finished_answer(tmp_path: Path) -> None:
    """Eight answers each to three problems, stopped after 5 and 9 more: every answer is scored once, every line that
    was written stays byte for byte, and nothing differs from a run that was left alone."""
    folder = folder_of(tmp_path, "aime24", *(AIME | {"problem": f"Find $6\\cdot {n}$. " * 5} for n in range(3)))
    quiet = {"method": "snapkv", "say": lambda text: None}

    def samples(run) -> list[dict]:
        rows = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if key not in ("timing", "seal")} for row in rows]

    whole = run_experiment(aime_config(folder, tmp_path / "whole"), **quiet)
    cfg = aime_config(folder, tmp_path / "cut")
    scored, lines = [], []
    for count in (5, 9, -1):
        stop = Interrupted(count)
        if count > 0:
            with pytest.raises(KeyboardInterrupt):
                run_experiment(cfg, parts=stop.parts, **quiet)
        else:
            resumed = run_experiment(cfg, parts=stop.parts, **quiet)
        scored.append(len(stop.scored))
        (journal,) = (tmp_path / "cut").rglob("samples.jsonl")
        before, lines = lines, journal.read_bytes().splitlines()
        assert set(before) <= set(lines)
    assert scored == [5, 9, 10]
    rows = samples(resumed)
    assert [(row["sample_id"], row["repeat"]) for row in rows] == [
        (f"aime24/{i}", r) for i in range(3) for r in range(8)
    ]
    assert rows == samples(whole)
    assert len({tuple(row["token_ids"]) for row in rows[:8]}) > 1
    assert resumed.record.sessions[-1].num_done == 10
    sampling = resumed.record.task_aggregate["sampling"]
    assert sampling["num_samples"] == 8
    assert sampling["num_problems"] == 3
    assert set(sampling) >= {"avg@8", "pass@1", "pass@2", "pass@4", "pass@8"}
    assert resumed.record.task_aggregate["answers"]["cut_share"] == 1.0
