"""Runs that go together read each prompt once; what they leave is what each leaves by itself."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest
from fake_parts import FakeEngine, make_cfg, make_parts, make_requests
from omegaconf import OmegaConf
from refusals import refused
from test_run_real import compose, samples

from kvbench.cli.endings import Stopped
from kvbench.config import files
from kvbench.config.methods import method_settings
from kvbench.engine import cross_run_batch, hf, sessions
from kvbench.results.journal import run_lock
from kvbench.results.record import RunRecord
from kvbench.runs.config import RunConfig
from kvbench.runs.cross_run_batch import RunRequest, groups, run_cross_batch, run_one
from kvbench.runs.experiment import prepare
from kvbench.runs.parts import Loaders
from kvbench.runs.run import run_experiment
from kvbench.runs.sessions import Origin

SEVERAL = ["kivi", "diffkv", "h2o", "quest", "kv_compress", "ada_snapkv", "streaming_llm"]


def asked(cfg, method, told=None):
    """A run as it is asked for."""
    return RunRequest(cfg=cfg, method=method, say=(told if told is not None else []).append, origin=Origin())


def ratios(results, values, **changes):
    """Runs on fakes that keep these shares; None is the full cache."""
    jobs = []
    for value in values:
        cfg = make_cfg(results, method__ratio=value, **changes)
        if value is None:
            cfg.method = method_settings("full")
        jobs.append(asked(cfg, f"r{value}" if value else "full"))
    return jobs


def content(results: Path) -> dict[str, object]:
    """What runs left, without times: the files of each, by its folder."""
    found: dict[str, object] = {}
    for path in sorted(results.glob("*/*/*/*/run.json")):
        record = json.loads(path.read_text())
        kept = {key: record[key] for key in ("hash", "status", "message", "metrics", "fidelity", "ledger", "kept")}
        kept["comparison"], kept["counts"] = record["comparison"], record["counts"]
        config = (path.parent / "config.yaml").read_text().replace(str(results), "")
        found[str(path.parent.relative_to(results))] = samples(path.parent), kept, config
    return found


@pytest.mark.parametrize(
    ("model", "items", "methods"),
    [
        ("tiny", 1, ["snapkv", "diffkv"]),
        ("tiny, rows alone", 1, ["snapkv", "diffkv"]),
        pytest.param("smollm2", 2, ["snapkv", "full", *SEVERAL, "diffkv"], marks=pytest.mark.exhaustive),
        pytest.param("tiny", 2, ["snapkv", "full", *SEVERAL, "diffkv"], marks=pytest.mark.exhaustive),
    ],
)
def test_each_prompt_is_read_once_and_the_records_are_those_of_single_runs(
    tmp_path, monkeypatch, model, items, methods
):
    """Several methods, the last with another budget and store, beside the full cache: a prompt is read when nothing is
    held, once; where rows are alone, one pass makes steps of several; every file is what a single run leaves, to the
    bit."""

    def cfgs(results):
        made = []
        for method in methods:
            cfg = compose(method, results)
            cfg.backend.name = "torch" if model == "tiny" else "auto"
            if model == "smollm2":
                cfg.model = OmegaConf.load(files.conf_folder() / "model" / "smollm2-135m.yaml")
            changes = {"reference": "auto", "task.items": items, "task.length": 400, "task.kinds": ["kv", "recall"]}
            for key, value in changes.items():
                OmegaConf.update(cfg, key, value)
            made.append(cfg)
        for key, value in {"method.alpha_h": 2.0, "store.budget_bytes": 2**28}.items():
            OmegaConf.update(made[-1], key, value)
        return made

    read, held, shared, joint = [], [], [], []
    forward, sharing = hf.forward, Loaders.sharing

    def counted(model, session, *arguments):
        if isinstance(session, sessions.Prefill):
            read.append(session.num_prompt_tokens)
            held.append(shared[0].used_bytes)
        joint.append(isinstance(session, cross_run_batch._Pass))
        return forward(model, session, *arguments)

    def noted(self, prompts):
        shared.append(prompts)
        return sharing(self, prompts)

    together, parts = cfgs(tmp_path / "together"), Loaders()
    assert groups(together) == [list(range(len(methods)))]
    jobs = [asked(cfg, method) for cfg, method in zip(together, methods, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(hf, "forward", counted)
        patch.setattr(Loaders, "sharing", noted)
        ended = dict(run_cross_batch(jobs, parts))
    assert sorted(ended) == list(range(len(methods)))
    assert all(run.record.status == "complete" for run in ended.values())
    assert len(read) == len(ended[0].samples) and not any(held)
    assert any(joint) == (model != "tiny" and parts.load_model(jobs[0].cfg["model"]).rows_are_alone)
    for cfg, method in zip(cfgs(tmp_path / "single"), methods, strict=True):
        run_experiment(cfg, method=method, parts=parts, say=lambda text: None)
    assert content(tmp_path / "together") == content(tmp_path / "single")


@pytest.mark.parametrize("method", ["h2o", pytest.param("kvzip", marks=pytest.mark.every(4)), "think"])
def test_one_run_reads_each_prompt_once_for_itself_and_the_full_cache(tmp_path, monkeypatch, method):
    """Scores of all columns, those of a method's own passes over the prompt, and channels: one command reads a prompt
    once for both caches, and leaves what two runs by themselves leave."""

    def cfg(results):
        made = compose(method, results)
        for key, value in {"reference": "auto", "task.items": 1, "task.length": 400, "task.kinds": ["kv"]}.items():
            OmegaConf.update(made, key, value)
        return made

    read, forward = [], hf.forward

    def counted(model, session, *arguments):
        if isinstance(session, sessions.Prefill):
            read.append(session.num_prompt_tokens)
        return forward(model, session, *arguments)

    parts = Loaders()
    with monkeypatch.context() as patch:
        patch.setattr(hf, "forward", counted)
        done = run_one(asked(cfg(tmp_path / "together"), method), parts)
    assert done.record.status == "complete" and done.record.comparison is not None
    assert len(read) == len(done.samples)
    run_experiment(cfg(tmp_path / "single"), method=method, parts=parts, say=lambda text: None)
    assert content(tmp_path / "together") == content(tmp_path / "single")
    del read[:]
    assert run_one(asked(cfg(tmp_path / "together"), method), parts).record == done.record and not read


def test_one_run_waits_for_a_full_cache_that_another_process_computes(tmp_path):
    """What is locked comes by itself in the end, and a wrong setting is raised."""
    (job,) = ratios(tmp_path, [0.5], reference="auto")
    (full,) = ratios(tmp_path, [None])
    folder, told = prepare(RunConfig.read(full.cfg), "full", make_parts()).folder, []
    waiting = asked(job.cfg, job.method, told)
    with run_lock(folder):
        thread = threading.Thread(target=lambda: told.append(run_one(waiting, make_parts())))
        thread.start()
        while not any("waiting for" in str(each) for each in told):
            thread.join(0.05)
            assert thread.is_alive()
    thread.join(60)
    assert told[-1].record.status == told[-1].reference.status == "complete"
    (wrong,) = ratios(tmp_path, [1.5], reference="auto")
    with refused("setting-value", "method.ratio", "method.ratio=1.5"):
        run_one(wrong, make_parts())


def test_fakes_leave_what_single_runs_leave(tmp_path):
    """Answers of fakes depend on their neighbours in a batch: together, in any order, also where one is asked for twice
    and where another process has one, runs batch and store what each does by itself; the reference is one run."""
    order = [0.5, None, 0.25, 0.5]
    engines, told = [], []
    jobs = ratios(tmp_path / "together", order, reference="auto")
    busy = prepare(RunConfig.read(jobs[2].cfg), "r0.25", make_parts()).folder
    ended = {}
    with run_lock(busy):
        running = run_cross_batch(jobs, make_parts(engines=engines))
        ended.update([next(running) for _ in range(2)])
        assert sorted(ended) == [0, 1], "the full cache, and what nobody else has"
    ended.update(running)
    assert sorted(ended) == [0, 1, 2, 3] and ended[0].record == ended[3].record
    assert sorted(len(engine.seen) for engine in engines if engine.seen) == [10, 10, 10]
    assert ended[1].reference is None and ended[0].reference == ended[2].reference == ended[1].record
    for job in ratios(tmp_path / "single", order[:3], reference="auto"):
        run_experiment(job.cfg, method=job.method, parts=make_parts(), say=told.append)
    assert content(tmp_path / "together") == content(tmp_path / "single")


def test_what_was_graded_is_written_while_others_have_their_turn(tmp_path, monkeypatch):
    """An answer of the first run, graded in the turn of the second, is on disk before the third has its own."""
    jobs, graded, lines, own = ratios(tmp_path, [None, 0.5, 0.25]), threading.Event(), [], FakeEngine.answer
    parts = make_parts(task={"grading_workers": 1, "scorer": lambda asked, text: graded.set() or 1.0})
    first = prepare(RunConfig.read(jobs[0].cfg), "full", parts).folder / "samples.jsonl"

    def answer(self, request, *more):
        if self.policy.ratio == 0.5 and graded.wait(10):
            time.sleep(0.2)  # the grader has returned, and its thread takes what it gave
        if self.policy.ratio == 0.25:
            lines.append(len(first.read_text().splitlines()))
        return own(self, request, *more)

    monkeypatch.setattr(FakeEngine, "answer", answer)
    assert len(dict(run_cross_batch(jobs, parts))) == 3
    assert lines[0] == 1 and len(lines) == 10


def test_runs_that_are_done_to_different_extents_go_on(tmp_path):
    """Whatever is there of each run and of the reference: only what is missing is computed, the one that is furthest
    behind goes first, and the files are those of unbroken runs."""
    values = [0.5, 0.25, 0.75]
    dict(run_cross_batch(ratios(tmp_path / "whole", values, reference="auto"), make_parts()))
    dict(run_cross_batch(ratios(tmp_path / "cut", values, reference="auto"), make_parts()))
    left = {"full": 2, "r0.5": 10, "r0.25": 0, "r0.75": 5}
    for path in (tmp_path / "cut").rglob("samples.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[: left[path.parent.parent.name]]))
    order, real = [], FakeEngine.answer

    def answer(self, request, repeat, neighbours):
        order.append((int(request.meta["answer"]), self.policy.ratio))
        return real(self, request, repeat, neighbours)

    parts = make_parts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "answer", answer)
        dict(run_cross_batch(ratios(tmp_path / "cut", values, reference="auto"), parts))
    assert order == sorted(order, key=lambda item: (item[0], [1.0, 0.5, 0.25, 0.75].index(item[1])))
    assert [ratio for _, ratio in order].count(1.0) == 10 and [ratio for _, ratio in order].count(0.75) == 6
    assert all(ratio != 0.5 for _, ratio in order)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_a_failing_run_ends_alone_and_a_signal_ends_all(tmp_path):
    """A run whose settings are wrong, and one that breaks on the way, end with their errors while the others go on; a
    signal leaves every run stopped, with what it has."""
    jobs = ratios(tmp_path, [0.5, 1.5, 0.25, 0.75])
    answered, error = [], [RuntimeError("kernel fault")]
    real = FakeEngine.answer

    def answer(self, request, repeat, neighbours):
        answered.append(self.policy.ratio)
        if self.policy.ratio == 0.25 and answered.count(0.25) == 5:
            raise error[0]
        return real(self, request, repeat, neighbours)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "answer", answer)
        ended = dict(run_cross_batch(jobs, make_parts()))
        assert isinstance(ended[1], ValueError) and "method.ratio=1.5" in str(ended[1])
        assert ended[2] is error[0]
        assert [ended[number].record.counts.done for number in (0, 3)] == [10, 10]
        assert RunRecord.load(next(tmp_path.glob("*/*/r0.25/*"))).status == "failed"
        answered.clear()
        error[0] = Stopped(signal.SIGTERM)
        running = run_cross_batch(ratios(tmp_path / "cut", [0.5, 0.25, 0.75]), make_parts())
        with pytest.raises(Stopped, match="SIGTERM"):
            dict(running)
    found = {path.parent.parent.name: RunRecord.load(path.parent) for path in (tmp_path / "cut").rglob("run.json")}
    assert {name: (run.status, run.counts.done) for name, run in found.items()} == {
        "r0.5": ("stopped", 5),
        "r0.25": ("stopped", 4),
        "r0.75": ("stopped", 4),
    }
    assert {run.message for run in found.values()} == {"stopped by SIGTERM"}
    assert all(run.sessions[0].ended and run.sessions[0].wall_s >= 0 for run in found.values())
    ended = dict(run_cross_batch(ratios(tmp_path / "cut", [0.5, 0.25, 0.75]), make_parts()))
    assert all(run.record.status == "complete" for run in ended.values())


def test_answers_of_the_full_cache_are_forced_once_they_are_there(tmp_path):
    """With fidelity.on=own, runs wait for the full cache's end and then go together; they leave what single ones do."""
    own = {"reference": "auto", "fidelity__on": "own", "fidelity__max_tokens": None}
    ended = dict(run_cross_batch(ratios(tmp_path / "together", [0.5, 0.25], **own), make_parts()))
    assert sorted(ended) == [0, 1]
    for job in ratios(tmp_path / "single", [0.5, 0.25], **own):
        run_experiment(job.cfg, method=job.method, parts=make_parts(), say=lambda text: None)
    assert content(tmp_path / "together") == content(tmp_path / "single")


def test_only_as_many_go_together_as_memory_holds(tmp_path, monkeypatch):
    """With room for the caches of two runs, three and their reference go in two waves, one behind the other. With
    batch_size=auto all go at once, with half as many rows each, but for engines whose answers depend on the batch."""
    row = max(request.num_prompt_tokens + request.max_new_tokens for request in make_requests(10))
    room = 2 * (2 * (4 * 2 * row) + 4 * row)  # twice two caches of four rows in fp32, and the prompt at hand
    monkeypatch.setattr("kvbench.kernels.bench.machine.available_bytes", lambda device: room)
    order, real = [], FakeEngine.answer

    def answer(self, request, repeat, neighbours):
        order.append(self.policy.ratio)
        return real(self, request, repeat, neighbours)

    monkeypatch.setattr(FakeEngine, "answer", answer)
    ended = dict(run_cross_batch(ratios(tmp_path / "a", [0.5, 0.25, 0.75], reference="auto"), make_parts()))
    assert all(run.reference is not None for run in ended.values())
    assert order == [1.0, 0.5] * 10 + [0.25, 0.75] * 10
    order.clear()
    engines, auto = [], {"reference": "auto", "batch_size": "auto"}
    dict(run_cross_batch(ratios(tmp_path / "b", [0.5, 0.25, 0.75], **auto), make_parts(engines=engines)))
    assert order == [1.0, 0.5, 0.25, 0.75] * 10 and {engine.batch_size for engine in engines if engine.seen} == {2}
    order.clear()
    engines.clear()
    dict(run_cross_batch(ratios(tmp_path / "c", [0.5, 0.25, 0.75], **auto), make_parts(engines=engines, group=4)))
    assert order == [1.0, 0.5] * 10 + [0.25, 0.75] * 10 and {engine.batch_size for engine in engines} == {4}


def test_what_cannot_go_together(tmp_path):
    """Another seed, task, model or batch is another group; a shard, chunked prompts, and settings that are wrong are
    groups of their own."""
    apart = [
        {"seed": 1},
        {"task__kind": "other"},
        {"model__dtype": "bfloat16"},
        {"batch_size": 2},
        {"shard": "1/2"},
        {"shard": "1/2"},
        {"prefill": {"chunk": 64}},
        {"fidelity": {"max_tokens": -1}},
        {"model__tensor_parallel": 2},
    ]
    alike = [{}, {"method__ratio": 0.25}, {"store__page_bytes": 2048}, {"fidelity": {"max_tokens": 0}}]
    cfgs = [make_cfg(tmp_path, **changes) for changes in (*alike, *apart)]
    assert groups(cfgs) == [[0, 1, 2, 3], *([number] for number in range(4, len(cfgs)))]
