"""The run loop on small fakes: resume, kill, reference, guard, hash, table and picture."""

import errno
import io
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_parts import FakePolicy, make_cfg, make_parts, make_requests
from omegaconf import OmegaConf
from rich.console import Console

from kvbench import figure, provenance, table
from kvbench.errors import unknown_name
from kvbench.experiment import check_config, prepare
from kvbench.journal import Journal, JournalError, RunLocked, dump_line, run_lock
from kvbench.progress import Progress, format_bytes, format_seconds
from kvbench.results import RunRecord
from kvbench.run import run_experiment, unfinished_groups

QUIET = {"say": lambda text: None}


def samples(folder: Path) -> list[dict]:
    """The records of a run without their timing."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert all(row.pop("timing") for row in rows if row["status"] == "ok")
    return rows


def test_one_run_leaves_everything(tmp_path):
    """A run writes its configuration, its samples in request order and a record whose numbers follow from the
    samples."""
    finished = run_experiment(make_cfg(tmp_path), method="half", parts=make_parts(), **QUIET)
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


def test_complete_run_is_reused(tmp_path):
    """The same command again computes nothing and changes no file; resume=false computes all of it again."""
    first = run_experiment(make_cfg(tmp_path), method="half", parts=make_parts(), **QUIET)
    before = {item.name: item.read_bytes() for item in first.folder.iterdir()}
    engines, told = [], []
    again = run_experiment(make_cfg(tmp_path), method="half", parts=make_parts(engines=engines), say=told.append)
    assert engines[0].seen == []
    assert again.record == first.record
    assert {item.name: item.read_bytes() for item in first.folder.iterdir()} == before
    assert told == [f"already there: {first.folder} (resume=false runs it again)"]
    fresh = run_experiment(make_cfg(tmp_path, resume=False), method="half", parts=make_parts(engines=engines), **QUIET)
    assert len(engines[1].seen) == 10
    assert fresh.folder == first.folder


def test_reference_is_run_once_and_paired(tmp_path):
    """method=full is run first, shared by other methods, never by itself, and the difference is over the same
    samples."""
    engines = []
    parts = make_parts(engines=engines)
    half = run_experiment(
        make_cfg(tmp_path, reference="auto", store__budget_bytes=9), method="half", parts=parts, **QUIET
    )
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
    alone = run_experiment(
        make_cfg(tmp_path, reference="auto", method__ratio=1.0), method="full", parts=make_parts(), **QUIET
    )
    assert alone.reference is None


def test_groups_stay_fixed(tmp_path):
    """A resumed run gives the engine whole original groups, and only those with something missing."""
    requests = make_requests(10, repeats=2)
    journal = Journal(tmp_path / "samples.jsonl")
    for request in requests[:5]:
        for repeat in range(2):
            journal.append({"sample_id": request.sample_id, "repeat": repeat})
    for repeat in range(2):
        journal.append({"sample_id": requests[9].sample_id, "repeat": repeat})
    journal.append({"sample_id": requests[8].sample_id, "repeat": 1})
    assert unfinished_groups(requests, 4, journal) == requests[4:10]
    journal.append({"sample_id": requests[8].sample_id, "repeat": 0})
    assert unfinished_groups(requests, 4, journal) == requests[4:8]
    assert unfinished_groups(requests, 3, journal) == requests[3:9]


def test_resume_from_any_subset(tmp_path):
    """Whatever samples a broken run had finished, in whatever order, resuming gives the uninterrupted records."""
    parts = make_parts(count=11, repeats=2)
    whole = run_experiment(make_cfg(tmp_path / "whole"), method="half", parts=parts, **QUIET)
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
        resumed = run_experiment(make_cfg(results), method="half", parts=resuming, **QUIET)
        assert engines[0].sizing == 11
        assert resumed.folder == folder
        assert samples(folder) == samples(whole.folder)
        assert resumed.record.metrics == whole.record.metrics


@pytest.mark.timeout(240)
def test_killed_twenty_times(tmp_path):
    """SIGKILL at 20 random moments, then a last start, leaves the records of an uninterrupted run, each exactly
    once."""
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    command = [sys.executable, str(tests / "fake_parts.py")]
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = []
    for _ in range(20):
        with subprocess.Popen([*command, str(tmp_path / "cut")], env=environment, stdout=subprocess.PIPE) as child:
            assert child.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.15))
            child.kill()
        files = list((tmp_path / "cut").rglob("samples.jsonl"))
        sizes.append(files[0].read_bytes().count(b"\n") if files else 0)
    assert sizes == sorted(sizes), "a finished sample was lost"
    assert len(set(sizes)) > 3, "the kills all hit the same moment, so this test shows nothing"
    for name in ("cut", "whole"):
        subprocess.run([*command, str(tmp_path / name)], env=environment, check=True, capture_output=True)
    cut, whole = (next((tmp_path / name).rglob("samples.jsonl")).parent for name in ("cut", "whole"))
    assert len(samples(whole)) == 120
    assert samples(cut) == samples(whole)
    mine, theirs = RunRecord.load(cut), RunRecord.load(whole)
    assert mine.metrics == theirs.metrics
    assert mine.status == "complete"
    assert len(mine.sessions) > 3


def test_interrupt_and_error_keep_the_samples(tmp_path):
    """Ctrl-C leaves the status running, an error leaves it failed with the reason; both keep samples and can be
    resumed."""
    for error, status in ((KeyboardInterrupt(), "running"), (RuntimeError("kernel fault"), "failed")):
        results = tmp_path / status
        parts = make_parts()
        made = prepare(make_cfg(results), "half", parts)
        score, calls = type(made.task).score, []

        def broken(self, request, text, error=error, score=score, calls=calls):
            calls.append(text)
            if len(calls) == 6:
                raise error
            return score(self, request, text)

        type(made.task).score = broken
        try:
            with pytest.raises(type(error)):
                run_experiment(make_cfg(results), method="half", parts=parts, **QUIET)
        finally:
            type(made.task).score = score
        record = RunRecord.load(made.folder)
        assert (record.status, record.counts.done, record.counts.total) == (status, 5, 10)
        assert ("kernel fault" in record.message) == (status == "failed")
        assert record.sessions[0].ended
        again = run_experiment(make_cfg(results), method="half", parts=parts, **QUIET).record
        assert (again.status, again.message, again.counts.done) == ("complete", "", 10)
        assert [session.num_done for session in again.sessions] == [5, 5]


def test_full_disk_ends_with_a_message(tmp_path, monkeypatch):
    """When the disk fills, the error names the file and the remedy, and the run can go on later."""
    made = prepare(make_cfg(tmp_path), "half", make_parts())
    real, written = os.write, []

    def limited(descriptor, data):
        written.append(len(data))
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(JournalError, match=r"samples.jsonl: the disk is full"):
        run_experiment(make_cfg(tmp_path), method="half", parts=make_parts(), **QUIET)
    monkeypatch.setattr(os, "write", real)
    assert len(samples(made.folder)) == 3
    assert run_experiment(make_cfg(tmp_path), method="half", parts=make_parts(), **QUIET).record.counts.done == 10


def test_second_process_is_refused(tmp_path):
    """Two processes cannot work on one run."""
    made = prepare(make_cfg(tmp_path), "half", make_parts())
    with run_lock(made.folder), pytest.raises(RunLocked, match="is being worked on by process"):
        run_experiment(make_cfg(tmp_path), method="half", parts=make_parts(), **QUIET)


def test_method_that_did_nothing_fails(tmp_path):
    """A policy's complaint about its own outcome fails the run, keeps the results, and does so again the next time."""

    def idle_parts():
        parts = make_parts()

        def make_policy(cfg):
            return FakePolicy(ratio=cfg.ratio, does_nothing=True)

        return type(parts)(**(vars(parts) | {"make_policy": make_policy}))

    for _ in range(2):
        finished = run_experiment(make_cfg(tmp_path), method="half", parts=idle_parts(), **QUIET)
        assert finished.record.status == "failed"
        assert "did not do its work in 10 of 10 samples: kept 1.0 instead of 0.5" in finished.record.message
        assert RunRecord.load(finished.folder).status == "failed"
        assert len(samples(finished.folder)) == 10


def test_nan_and_oom_are_outcomes(tmp_path):
    """Samples that gave NaN or did not fit are recorded with their reason, counted, and left out of the score."""
    parts = make_parts(statuses={"a/0": "nan", "b/1": "oom"})
    finished = run_experiment(make_cfg(tmp_path), method="half", parts=parts, **QUIET)
    counts = finished.record.counts
    assert (counts.nan, counts.oom, counts.ok, counts.done) == (1, 1, 8, 10)
    rows = samples(finished.folder)
    assert (rows[0]["status"], rows[0]["nan_layer"], rows[0]["scores"]) == ("nan", 7, {})
    assert finished.record.metrics["exact"].num_samples == 8
    assert finished.record.status == "complete"
    none = make_parts(statuses={request.sample_id: "oom" for request in make_requests(10)})
    failed = run_experiment(make_cfg(tmp_path, seed=3), method="half", parts=none, **QUIET)
    assert failed.record.status == "failed"
    assert "no sample ended well; the first, a/0, ended as oom: too big" in failed.record.message


CHANGES = {
    "method__ratio": 0.25,
    "protocol__temperature": 0.5,
    "store__page_bytes": 4096,
    "store__budget_bytes": 10**6,
    "store__track": ["pos"],
    "batch_size": 5,
    "seed": 1,
    "limit": 7,
    "fidelity__max_tokens": 3,
    "model__fingerprint": "weights-2",
    "model__dtype": "bfloat16",
    "model__device": "cuda",
}


@pytest.mark.parametrize("key", CHANGES)
def test_hash_sees_each_setting(tmp_path, key):
    """Changing one thing that can change an answer gives another run."""
    base = prepare(make_cfg(tmp_path), "half", make_parts()).hash
    assert prepare(make_cfg(tmp_path, **{key: CHANGES[key]}), "half", make_parts()).hash != base


def test_hash_ignores_what_changes_no_answer(tmp_path):
    """Where results go, whether to resume, and the comparison are not part of the identity."""
    base = prepare(make_cfg(tmp_path), "half", make_parts()).hash
    other = make_cfg(tmp_path / "elsewhere", resume=False, reference="auto")
    assert prepare(other, "half", make_parts()).hash == base


def test_hash_sees_code_data_and_hidden_defaults(tmp_path, monkeypatch):
    """The data, the task's protocol, the code, the libraries, the backend, and a default that no YAML names all
    count."""

    def digest(**parts):
        return prepare(make_cfg(tmp_path), "half", make_parts(**parts)).hash

    base = digest()
    found = {base, digest(task={"fingerprint": "data-2"}), digest(task={"protocol": {"query_aware": False}})}
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "harness_hash", lambda: "other code")
        found.add(digest())
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "hash_files", lambda files: "other method")
        found.add(digest())
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "_version", lambda name: "9.9")
        found.add(digest())
    with monkeypatch.context() as patch:
        patch.setattr(FakePolicy.__init__, "__kwdefaults__", {"ratio": 1.0, "hidden": 4, "does_nothing": False})
        found.add(digest())
    parts = make_parts()

    def cpu_engine(cfg, model, policy):
        engine = parts.make_engine(cfg, model, policy)
        engine.backend = "cpu"
        return engine

    changed = type(parts)(**(vars(parts) | {"make_engine": cpu_engine}))
    found.add(prepare(make_cfg(tmp_path), "half", changed).hash)
    assert len(found) == 8
    assert digest() == base


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("batch_size", 0, "batch_size=0 is not a whole number of at least 1"),
        ("batch_size", "four", "batch_size=four is not a whole number"),
        ("limit", 0, "limit=0 is not a whole number of at least 1; leave it out"),
        ("limit", True, "limit=True is not a whole number"),
        ("seed", -1, "seed=-1"),
        ("fidelity__max_tokens", -1, "fidelity.max_tokens=-1"),
        ("reference", "atuo", "reference=atuo does not exist. Did you mean auto?"),
        ("resume", "maybe", "resume=maybe is neither true nor false"),
        ("results_dir", None, "results_dir=None is not a folder"),
        ("method__ratio", 1.5, r"method.ratio=1.5 is outside \(0, 1\]"),
    ],
)
def test_bad_settings(tmp_path, key, value, message):
    """A setting out of range is refused before anything is loaded, with value, rule and remedy."""

    def never(*arguments):
        raise AssertionError("the model was loaded first")

    parts = make_parts()
    parts = type(parts)(**(vars(parts) | {"load_model": never}))
    with pytest.raises(ValueError, match=message):
        run_experiment(make_cfg(tmp_path, **{key: value}), method="half", parts=parts, **QUIET)
    assert list(tmp_path.iterdir()) == []


def test_empty_and_doubled_tasks(tmp_path):
    """A task without samples, or with two of one id, is refused."""
    with pytest.raises(ValueError, match="task fake has no samples; 2 rows could not be read"):
        prepare(make_cfg(tmp_path), "half", make_parts(count=0, task={"quarantined": [{}, {}]}))
    parts = make_parts()
    task = parts.load_task({}, None, limit=None, seed=0, protocol={})
    task.requests.append(task.requests[0])
    doubled = type(parts)(**(vars(parts) | {"load_task": lambda *a, **k: task}))
    with pytest.raises(ValueError, match="two samples with the id a/0"):
        prepare(make_cfg(tmp_path), "half", doubled)


def test_table_shows_the_numbers(tmp_path):
    """The table fits 80 columns and shows score, n, paired difference, bytes, speed, and the warning about the
    reference backend."""
    parts = make_parts(
        statuses={"a/0": "nan"}, count=24, task={"quarantined": [{"file": "f", "line": 3, "reason": "bad"}]}
    )
    finished = run_experiment(make_cfg(tmp_path, reference="auto"), method="half", parts=parts, **QUIET)
    console = Console(width=80, record=True, file=io.StringIO())
    table.show([finished.reference, finished.record, finished.record], console=console)
    text = console.export_text()
    metric = finished.record.metrics["exact"]
    assert f"{100 * metric.value:.1f} [{100 * metric.low:.1f}, {100 * metric.high:.1f}]" in text
    comparison = finished.record.comparison
    assert f"{100 * comparison.difference.value:+.1f} [" in text
    assert f"{comparison.num_worse} worse, {comparison.num_better} better" in text
    for part in ("23 of 24", "524 B", "52.4 %", "45.0 %", "120.0 %", "Speed is no claim for full, half", "1 gave NaN"):
        assert part in text, part
    assert "1 rows of the data could not be read" in text
    assert "..." not in text and "\u2026" not in text
    rows = [line for line in text.splitlines() if line.startswith(("full", "half")) and ":" not in line]
    assert [line.split()[0] for line in rows] == ["full", "half"] * 2


def test_picture_is_the_same_twice(tmp_path):
    """The picture is a PNG whose bytes depend on the records only, and draws records without scores too."""
    finished = run_experiment(make_cfg(tmp_path, reference="auto"), method="half", parts=make_parts(), **QUIET)
    rows = [finished.reference, finished.record]
    first = figure.draw(rows, tmp_path / "a.png").read_bytes()
    assert first == figure.draw(rows, tmp_path / "b.png").read_bytes()
    assert first.startswith(b"\x89PNG") and len(first) > 20_000
    assert first != figure.draw(rows[:1], tmp_path / "c.png").read_bytes()
    figure.draw([RunRecord(task="t", model="m", method="x")], tmp_path / "d.png")


def test_progress_lines(tmp_path, monkeypatch):
    """Without a terminal, progress is plain lines: what was done before, rate, cache bytes, time left."""
    monkeypatch.setattr("kvbench.progress.PLAIN_EVERY_S", 0.0)
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        with Progress("kivi on longctx", 8, 2, stream=log) as progress:
            progress.step({"decode_tokens_per_s": 12.34, "cache_bytes": 45.6e6})
            progress.advance()
        log.seek(0)
        lines = log.read().splitlines()
    assert lines[0] == "kivi on longctx: 8 samples, 2 of them done before"
    assert lines[1] == "kivi on longctx: 2/8 samples, 12.3 tokens/s, cache 45.6 MB"
    assert lines[2] == "kivi on longctx: 3/8 samples, 12.3 tokens/s, cache 45.6 MB, 0 s left"


def test_units():
    """Bytes and durations are written with sensible digits at every size."""
    sizes = [0, 999, 1000, 9994, 99_940, 999_600, 12_345_678, 3e9, 5e12, None]
    expected = ["0 B", "999 B", "1.00 kB", "9.99 kB", "99.9 kB", "1.00 MB", "12.3 MB", "3.00 GB", "5 TB", "-"]
    assert [format_bytes(size) for size in sizes] == expected
    assert [format_seconds(s) for s in (0.4, 59.6, 3599, 7500, None)] == [
        "0 s",
        "1 min 00 s",
        "59 min 59 s",
        "2 h 05 min",
        "?",
    ]


def test_check_config_accepts_the_defaults(tmp_path):
    """The shipped top-level settings pass their own check."""
    shipped = OmegaConf.load(Path(__file__).parent.parent / "conf" / "config.yaml")
    del shipped["defaults"], shipped["hydra"]
    check_config(shipped)
    assert dump_line({"a": 1}) == b'{"a":1}\n'
    assert isinstance(unknown_name("a", "b", ["c"]), ValueError)
