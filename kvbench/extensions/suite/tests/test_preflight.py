"""Preflight of runs on a tiny model: counted from the task, timed by a clock, less once answers are there."""

import pytest
from test_run_real import QUIET, compose

from kvbench.config.compose import compose as compose_words
from kvbench.extensions.suite.preflight import run_preflight
from kvbench.runs.parts import Loaders
from kvbench.runs.run import run_experiment


def test_preflight_of_two_runs_of_which_one_is_done(tmp_path):
    """Prompts are counted once and answers for each run; nothing is written, a run that is done takes no time, and one
    that cannot be made is left out."""
    parts, full, snapkv = Loaders(), compose("full", tmp_path), compose("snapkv", tmp_path)
    task = parts.load_task(full.task, parts.load_model(full.model), limit=None, seed=full.seed, protocol=full.protocol)
    tokens = [request.num_prompt_tokens for request in task.requests]
    preflight = run_preflight([(full, "full"), (snapkv, "snapkv")], parts)
    assert (preflight.task, preflight.runs, preflight.samples, preflight.answers, preflight.there) == (
        "longctx",
        2,
        6,
        12,
        0,
    )
    assert preflight.prompt_tokens == pytest.approx(sum(tokens) / 6)
    assert 0 < preflight.usual_s <= preflight.most_s < 600
    model, row = parts.load_model(full.model), full_bytes(parts, max(tokens) + 6)
    assert preflight.memory_bytes - model.weights_bytes - row == pytest.approx(prompt_bytes(parts, row), rel=1e-3)
    # A record holds prompt tail, text, token ids and a ledger: about a kilobyte.
    assert 12 * 300 < preflight.disk_bytes < 12 * 20_000
    assert not list(tmp_path.rglob("*"))
    run_experiment(full, method="full", parts=parts, **QUIET)
    after = run_preflight([(full, "full"), (snapkv, "snapkv")], parts)
    assert (after.there, after.answers) == (6, 12) and after.disk_bytes == pytest.approx(
        preflight.disk_bytes / 2, rel=0.1
    )
    run_experiment(snapkv, method="snapkv", parts=parts, **QUIET)
    done = run_preflight([(full, "full"), (snapkv, "snapkv")], parts)
    assert (done.there, done.usual_s, done.most_s, done.disk_bytes) == (12, 0.0, 0.0, 0)
    snapkv.method.budget = -1
    assert run_preflight([(full, "full"), (snapkv, "snapkv")], parts).runs == 1
    assert run_preflight([(snapkv, "snapkv")], parts) is None


def test_a_task_that_only_forces_a_text_has_a_time_too(tmp_path):
    """It asks for no answer, and its tokens are read one by one all the same."""
    words = ["task=stream", "task.prompt_tokens=30", "task.tokens=50", "task.items=3", "method=full", "model=random"]
    cfg = compose_words([*words, "model.preset=tiny", "backend=torch", f"results_dir={tmp_path}"])
    preflight = run_preflight([(cfg, "full")], Loaders())
    assert preflight.samples == 3 and 0 < preflight.usual_s < 600


def full_bytes(parts, tokens):
    """Bytes of an fp32 model's keys and values for so many tokens."""
    config = parts._held["model"][1].model.config
    return tokens * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def prompt_bytes(parts, row):
    """Those of a prompt while it is replayed: its keys and values, and its queries."""
    config = parts._held["model"][1].model.config
    return row + row / 2 * config.num_attention_heads / config.num_key_value_heads
