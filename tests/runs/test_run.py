"""The run loop on small fakes: resume, kill, reference, guard, hash, table and picture."""

import errno
import json
import operator
import os
import random
import re
import signal
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from threading import Thread

import pytest
from fake_parts import FakePolicy, FakeTask, altered, make_cfg, make_parts, make_requests, run_fake
from omegaconf import OmegaConf

import kvbench.runs.run
from kvbench.cli.endings import Stopped
from kvbench.engine.requests import Outcome
from kvbench.results.journal import Journal
from kvbench.results.record import RunRecord
from kvbench.results.sample import journal_record, write_line
from kvbench.results.writing import JournalError
from kvbench.runs.answers import unfinished_groups
from kvbench.runs.config import RunConfig
from kvbench.runs.experiment import prepare
from kvbench.runs.run import run_experiment
from kvbench.show.pace import Pace

QUIET = {"say": lambda text: None}


def samples(folder: Path) -> list[dict]:
    """The records of a run without their timing and their seal, which covers it."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert all(row.pop("timing") or row["status"] != "ok" for row in rows)
    assert all(row.pop("seal") for row in rows)
    return rows


@pytest.mark.parametrize(("more", "steps"), [({}, 32), ({"max_new_tokens": 0, "gold": (1,) * 300}, 300)])
def test_time_left_is_told_from_the_longest_row_of_a_request(tmp_path, monkeypatch, more, steps):
    """Where only a text is forced, its tokens are the steps, not the answers' limit."""
    told = []
    monkeypatch.setattr("kvbench.runs.answers.Pace", lambda **fields: told.append(fields) or Pace(**fields))
    task = FakeTask([replace(each, **more) for each in make_requests(10)])
    run_fake(tmp_path, altered(make_parts(), load_task=lambda *args, **named: task))
    assert [fields["most_steps"] for fields in told] == [steps]


def test_one_run_leaves_everything(tmp_path):
    """A run writes its configuration, its samples in request order and a record whose numbers follow from the
    samples."""
    finished = run_fake(tmp_path)
    folder, record = finished.folder, finished.record
    assert folder == tmp_path / "fake" / "tiny" / "half" / record.hash[:12]
    assert sorted(item.name for item in folder.iterdir()) == [".lock", "config.yaml", "run.json", "samples.jsonl"]
    assert RunRecord.load(folder) == record
    assert OmegaConf.load(folder / "config.yaml").method.ratio == 0.5
    rows = samples(folder)
    assert [row["sample_id"] for row in rows] == [request.sample_id for request in make_requests(10)]
    right = [row["scores"]["exact"] for row in rows]
    assert record.metrics["exact"].value == pytest.approx(sum(right) / 10)
    assert 0 < sum(right) < 10
    assert (record.status, record.counts.done, record.counts.total, record.counts.truncated) == ("complete", 10, 10, 1)
    assert record.ledger["resident_bytes"] == 524
    assert record.ledger["resident_ratio"] == pytest.approx(0.524)
    assert record.timing.decode_tokens_per_s == pytest.approx(50 / (10 * 0.25))
    assert record.versions.python.count(".") == 2
    assert len(record.sessions) == 1
    assert record.sessions[0].num_done == 10
    assert rows[3]["truncated"] and not rows[2]["truncated"]
    assert rows[0]["protocol"] == {"query_aware": True}


def test_what_the_backend_had_no_kernel_for_is_on_record(tmp_path):
    """Operations that plain torch did are in `run.json`, in order and once, also after a resume that needed others."""
    cfg, parts = make_cfg(tmp_path), make_parts(count=3)
    make_engine = parts.make_engine

    def with_fallbacks(names):
        def made(*arguments, **named):
            engine = make_engine(*arguments, **named)
            engine.backend.fallbacks.update(names)
            engine.backend.decodes.add(f"triton: {len(names)}")
            return engine

        return altered(parts, make_engine=made)

    assert run_experiment(cfg, method="half", parts=parts, **QUIET).record.backend_fallbacks == []
    (tmp_path / "fake" / "tiny" / "half").rename(tmp_path / "other")
    first = run_experiment(cfg, method="half", parts=with_fallbacks(["widen_bounds", "choose_pages"]), **QUIET)
    assert first.record.backend_fallbacks == ["choose_pages", "widen_bounds"]
    assert first.record.backend_decode == ["triton: 2"]
    lines = (first.folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (first.folder / "samples.jsonl").write_text("".join(lines[:-1]))
    again = run_experiment(cfg, method="half", parts=with_fallbacks(["paged_decode"]), **QUIET)
    assert again.record.backend_fallbacks == ["choose_pages", "paged_decode", "widen_bounds"]
    assert RunRecord.load(again.folder) == again.record


def test_what_could_not_be_had_of_the_model_is_on_record(tmp_path):
    """The sentence of the loader is in `run.json`, and how the matrices lay is part of which run it is."""
    why = "model.linear=packed was not done, because this processor is a potato"
    plain, parts = run_fake(tmp_path / "plain"), make_parts()
    remarked = altered(parts, load_model=lambda cfg: parts.load_model({**cfg, "remark": why}))
    done = run_experiment(make_cfg(tmp_path, reference="auto"), method="half", parts=remarked, **QUIET)
    assert done.record.model_remark == RunRecord.load(done.folder).model_remark == why
    assert plain.record.model_remark == "" and done.record.hash == plain.record.hash
    assert done.record.identity["model"]["linear"] == "plain"


def test_complete_run_is_reused(tmp_path):
    """The same command again computes nothing and changes no file; resume=false computes all of it again."""
    first = run_fake(tmp_path)
    before = {item.name: item.read_bytes() for item in first.folder.iterdir()}
    engines, told = [], []
    again = run_fake(tmp_path, make_parts(engines=engines), say=told.append)
    assert engines[0].seen == []
    assert again.record == first.record
    assert {item.name: item.read_bytes() for item in first.folder.iterdir()} == before
    assert told == [f"already there: {first.folder} (resume=false runs it again)"]
    fresh = run_fake(tmp_path, make_parts(engines=engines), resume=False)
    assert len(engines[1].seen) == 10
    assert fresh.folder == first.folder


def test_reference_is_run_once_and_paired(tmp_path):
    """method=full is run first, shared by other methods, never by itself, and the difference is over the same
    samples."""
    engines = []
    parts = make_parts(engines=engines)
    half = run_fake(tmp_path, parts, reference="auto", store__budget_bytes=9)
    assert [(engine.policy.ratio, len(engine.seen)) for engine in engines] == [(0.5, 10), (1.0, 10)]
    assert engines[0].cfg.store.budget_bytes == 9
    assert engines[1].cfg.store.budget_bytes is None
    assert half.reference.method == "full"
    assert half.reference.metrics["exact"].value >= half.record.metrics["exact"].value
    quarter = make_cfg(tmp_path, reference="auto", method__ratio=0.25)
    other = run_experiment(quarter, method="quarter", parts=make_parts(), **QUIET)
    assert other.reference == half.reference
    difference = half.record.comparison.difference
    mine, full = half.record.metrics["exact"].value, half.reference.metrics["exact"].value
    assert difference.value == pytest.approx(mine - full)
    assert half.record.comparison.reference == f"fake/tiny/full/{half.reference.hash[:12]}"
    assert (tmp_path / half.record.comparison.reference / "run.json").exists()
    alone = run_fake(tmp_path, method="full", reference="auto", method__ratio=1.0)
    assert alone.reference is None


def test_equal_runs_at_once_share_the_work(tmp_path):
    """The same run and its reference twice at once: one waits and says for whom, and no answer is computed twice."""
    said, ended = [], []

    def work():
        parts = make_parts(count=30, pause_s=0.02)
        ended.append(run_fake(tmp_path, parts, say=said.append, reference="auto"))

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 2 and all(record.status == "complete" for done in ended for record in done.records)
    waits = [text for text in said if f"waiting for process {os.getpid()}, which is computing {tmp_path}" in text]
    assert 1 <= len(waits) <= 3, "one line for each wait"
    assert any(text.startswith("already there: ") for text in said)
    assert all([session.num_done for session in record.sessions] == [30] for record in ended[0].records)


def test_groups_stay_fixed(tmp_path):
    """A resumed run gives the engine whole original groups, and only those with something missing."""
    requests = make_requests(10, repeats=2)
    journal = Journal(tmp_path / "samples.jsonl", run="5" * 64)

    def finish(request, repeat):
        outcome = Outcome(sample_id=request.sample_id, repeat=repeat, text="x", token_ids=[1], finish="eos")
        journal.append(journal_record(request, outcome, {}, {}))

    for request in requests[:5]:
        for repeat in range(2):
            finish(request, repeat)
    for repeat in range(2):
        finish(requests[9], repeat)
    finish(requests[8], 1)
    assert unfinished_groups(requests, 4, journal) == requests[4:10]
    finish(requests[8], 0)
    assert unfinished_groups(requests, 4, journal) == requests[4:8]
    assert unfinished_groups(requests, 3, journal) == requests[3:9]


def test_resume_from_any_subset(tmp_path):
    """Whatever samples a broken run had finished, in whatever order, resuming gives the uninterrupted records."""
    parts = make_parts(count=11, repeats=2)
    whole = run_fake(tmp_path / "whole", parts)
    expected = (whole.folder / "samples.jsonl").read_text().splitlines(keepends=True)
    rng = random.Random(5)
    for trial in range(10):
        results = tmp_path / str(trial)
        folder = results / whole.folder.relative_to(tmp_path / "whole")
        folder.mkdir(parents=True)
        some = rng.sample(expected, rng.randrange(len(expected)))
        (folder / "samples.jsonl").write_text("".join(some) + expected[0][: rng.randrange(5)])
        engines = []
        resuming = make_parts(count=11, repeats=2, engines=engines)
        resumed = run_fake(results, resuming)
        assert engines[0].sizing == 11
        assert resumed.folder == folder
        assert samples(folder) == samples(whole.folder)
        assert resumed.record.metrics == whole.record.metrics


def test_a_forged_answer_does_not_stop_its_run(tmp_path):
    """A sealed line that the run does not ask for is dropped by name, and the run is what it was; it says that its
    lines are sealed."""
    run = run_fake(tmp_path)
    path, before = run.folder / "samples.jsonl", (run.folder / "samples.jsonl").read_bytes()
    path.write_bytes(before + write_line(run.samples[0] | {"sample_id": "zzz/9"}, run.record.hash))
    told = []
    again = run_fake(tmp_path, say=told.append)
    assert "answer to 'zzz/9', which the run does not ask, (kept in samples.dropped.jsonl) dropped" in told[0]
    assert path.read_bytes() == before and again.record.status == "complete" and again.record.counts.damaged == 1
    assert run.record.sealed and again.record.metrics == run.record.metrics


def test_interrupt_and_error_keep_the_samples(tmp_path):
    """A signal leaves the status stopped, an error leaves it failed, with the reason; both keep samples and can be
    resumed."""
    told = {"stopped": "stopped by SIGINT", "cut": "stopped by SIGTERM", "failed": ""}
    told["failed"] = r"broken raised RuntimeError: kernel fault \(test_run.py:\d+\)"
    ends = {"stopped": KeyboardInterrupt(), "cut": Stopped(signal.SIGTERM), "failed": RuntimeError("kernel fault")}
    for status, error in ends.items():
        results = tmp_path / status
        parts = make_parts()
        made = prepare(RunConfig.read(make_cfg(results)), "half", parts)

        def make_engine(*args, error=error, **kwargs):
            engine = make_parts().make_engine(*args, **kwargs)
            running, count = engine.running, []

            def broken(requests, *, on_outcome, **more):
                def five(outcome):
                    if len(count) == 5:
                        raise error
                    count.append(outcome)
                    on_outcome(outcome)

                yield from running(requests, on_outcome=five, **more)

            engine.running = broken
            return engine

        with pytest.raises(type(error)):
            run_fake(results, altered(parts, make_engine=make_engine))
        record = RunRecord.load(made.folder)
        assert (record.status, record.counts.done) == ("failed" if status == "failed" else "stopped", 5)
        assert re.fullmatch(told[status], record.message) and record.counts.total == 10
        assert record.sessions[0].ended and record.primary and record.metrics[record.primary].value is None
        again = run_fake(results, parts).record
        assert (again.status, again.message, again.counts.done) == ("complete", "", 10)
        assert [session.num_done for session in again.sessions] == [5, 5]


def test_full_disk_ends_with_a_message(tmp_path, monkeypatch):
    """When the disk fills, the error names the file and the remedy, and the run can go on later."""
    made = prepare(RunConfig.read(make_cfg(tmp_path)), "half", make_parts())
    real, written = os.write, []

    def limited(descriptor, data):
        written.append(len(data))
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(JournalError, match=r"samples.jsonl: the disk is full"):
        run_fake(tmp_path)
    monkeypatch.setattr(os, "write", real)
    assert len(samples(made.folder)) == 3
    record = RunRecord.load(made.folder)
    assert (record.status, record.counts.done) == ("running", 3)  # incomplete, and nothing is wrong with it
    assert run_fake(tmp_path).record.counts.done == 10


@pytest.mark.parametrize("place", ["Journal.finish", "summarise", "RunRecord.save"])
def test_stopped_after_the_last_sample(tmp_path, monkeypatch, place):
    """A signal between the last sample and the end leaves `stopped` or the end itself, and the next start ends."""
    made = prepare(RunConfig.read(make_cfg(tmp_path)), "half", make_parts())
    owner, _, name = f"kvbench.runs.run.{place}".rpartition(".")
    calls = []

    def stop(*arguments, **named):
        calls.append(place)
        if len(calls) == (3 if place == "RunRecord.save" else 1):  # saved at the start, after the samples, at the end
            raise Stopped(signal.SIGHUP)
        return real(*arguments, **named)

    real = operator.attrgetter(place)(kvbench.runs.run)
    monkeypatch.setattr(f"{owner}.{name}", stop)
    with pytest.raises(Stopped, match="SIGHUP"):
        run_fake(tmp_path)
    record = RunRecord.load(made.folder)
    if place == "RunRecord.save":
        assert (record.status, record.message) == ("complete", "")
    else:
        assert (record.status, record.message) == ("stopped", "stopped by SIGHUP")
    monkeypatch.setattr(f"{owner}.{name}", real)
    again = run_fake(tmp_path).record
    assert (again.status, again.message, again.counts.done) == ("complete", "", 10)


def test_stop_of_a_complete_run_changes_nothing(tmp_path, monkeypatch):
    """A signal while a complete run is read again leaves its record as it was."""
    whole = run_fake(tmp_path)
    before = (whole.folder / "run.json").read_bytes()

    def stop(*arguments):
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(Journal, "finish", stop)
    with pytest.raises(Stopped):
        run_fake(tmp_path)
    assert (whole.folder / "run.json").read_bytes() == before


def test_method_that_did_nothing_fails(tmp_path):
    """A policy's complaint about its own outcome fails the run, keeps the results, and does so again the next time."""

    def idle_parts():
        parts = make_parts()

        def make_policy(cfg):
            return FakePolicy(ratio=cfg["ratio"], does_nothing=True)

        return altered(parts, make_policy=make_policy)

    for _ in range(2):
        finished = run_fake(tmp_path, idle_parts())
        assert finished.record.status == "failed"
        assert "did not do its work in 10 of 10 samples: a head kept 5 of 5 prompt tokens" in finished.record.message
        assert RunRecord.load(finished.folder).status == "failed"
        assert len(samples(finished.folder)) == 10


def test_nan_and_oom_are_outcomes(tmp_path):
    """Samples that gave NaN or did not fit are recorded with their reason, counted, and left out of the score."""
    parts = make_parts(statuses={"a/0": "nan", "b/1": "oom"})
    finished = run_fake(tmp_path, parts)
    counts = finished.record.counts
    assert (counts.nan, counts.oom, counts.ok, counts.done) == (1, 1, 8, 10)
    rows = samples(finished.folder)
    assert (rows[0]["status"], rows[0]["nan_layer"], rows[0]["scores"]) == ("nan", 7, {})
    assert finished.record.metrics["exact"].num_samples == 8
    assert finished.record.status == "complete"
    none = make_parts(statuses={request.sample_id: "oom" for request in make_requests(10)})
    failed = run_fake(tmp_path, none, seed=3)
    assert failed.record.status == "failed"
    assert "no sample ended well; the first, a/0, ended as oom: too big" in failed.record.message


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_leaves_the_run_readable(tmp_path, score):
    """A metric that once gives no number counts as not finite; the run ends, and ends again when it is repeated."""

    class Mean(FakeTask):
        """Asks for the mean, which takes a number of each answer that ended well."""

        def aggregate(self, records):
            """As most tasks do."""
            return {"mean": fmean(r["scores"]["exact"] for r in records if r["status"] == "ok")}

    right = FakeTask.scorer
    odd = Mean(make_requests(10), scorer=lambda asked, text: score if asked.sample_id == "a/0" else right(asked, text))
    parts = altered(make_parts(), load_task=lambda *args, **kwargs: odd)
    records = [run_fake(tmp_path, parts).record for _ in range(2)]
    assert records[0] == records[1] and records[0].status == "complete"
    assert records[0].metrics["exact"].num_nonfinite == 1 and records[0].metrics["exact"].num_samples == 9


def test_a_damaged_line_is_done_again(tmp_path):
    """A finished run finds an edited line and redoes its sample; test_seal.py has what else may be wrong."""
    whole, cut, told = run_fake(tmp_path / "whole"), run_fake(tmp_path / "cut"), []
    lines = (cut.folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"text":"', b'"text":"not ')
    (cut.folder / "samples.jsonl").write_bytes(b"".join(lines))
    again = run_fake(tmp_path / "cut", say=told.append)
    assert samples(again.folder) == samples(whole.folder)
    assert again.record.counts.damaged == 1 and again.record.metrics == whole.record.metrics
    assert sum("samples.jsonl:4: " in text and "its sample is done again" in text for text in told) == 1


def test_a_results_folder_that_cannot_be_written_comes_first(tmp_path):
    """It is found before policy, model and task are loaded, and nothing is made."""
    (tmp_path / "file").write_text("x")

    def fail(*args, **kwargs):
        raise AssertionError("loaded too early")

    parts = altered(make_parts(), make_policy=fail, load_model=fail, load_task=fail)
    with pytest.raises(ValueError, match=r"^results_dir=.*file/results cannot be written: Not a directory; give ano"):
        run_fake(tmp_path / "file" / "results", parts)
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_answers_in_another_order_are_counted(tmp_path):
    """Where rows come and go and an answer hangs on its neighbours, the identity says so, and the record how many
    answers another order of the requests changes; answers are stored once. Groups have neither."""
    engines = []
    parts = make_parts(count=10, engines=engines, is_free=True)
    finished = run_fake(tmp_path / "free", parts, batch_size="auto", reference="none")
    assert finished.record.identity["batch"] == "free" and "batch_size" not in finished.record.identity
    (session,) = finished.record.sessions
    assert engines[0].seen[10:] == engines[0].seen[9::-1] and len(engines[0].seen) == 20
    assert (session.asked_again, session.differing, session.num_done) == (10, 10, 10)  # they name their neighbours
    assert len(samples(finished.folder)) == 10
    again = run_fake(tmp_path / "free", parts, batch_size="auto", reference="none")
    assert again.record.sessions[0].asked_again == 10 and sum(s.asked_again for s in again.record.sessions) == 10
    groups = run_fake(tmp_path / "groups", make_parts(count=10), batch_size=4, reference="none")
    assert "batch" not in groups.record.identity and groups.record.identity["batch_size"] == 4
    assert groups.record.sessions[0].asked_again == 0


def test_few_of_many_answers_are_asked_for_again(tmp_path):
    """As many as tell a share, spread over the run."""
    engines = []
    finished = run_fake(
        tmp_path, make_parts(count=100, engines=engines, is_free=True), batch_size="auto", reference="none"
    )
    (session,) = finished.record.sessions
    assert session.asked_again == 32
    again = [int(name.partition("/")[2]) for name in engines[0].seen[100:]]
    assert again == sorted(again, reverse=True) and len(again) == 32 and again[0] == 99 and again[-1] < 10
