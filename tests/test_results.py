"""The journal, the lock, the hash and the statistics."""

import ast
import errno
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import scipy.stats

from kvbench import identity, provenance, summary
from kvbench.journal import Journal, JournalError, RunLocked, dump_line, plain, run_lock, write_atomic
from kvbench.results import Comparison, Counts, Estimate, Metric, RunRecord, Session


def record(number: int, **changes) -> dict:
    """A journal record of sample `number`."""
    base = {"sample_id": f"a/{number}", "repeat": 0, "subset": "a", "status": "ok", "scores": {"exact": 1.0}}
    return base | {"text": 'a "quoted"\nline \u00e4', "ledger": {}, "timing": {}} | changes


def test_journal_cut_at_every_byte(tmp_path, monkeypatch):
    """Whatever byte a crash stops at, reading keeps every whole line, redoes the torn one, and ends with the same
    file."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands of them, and no power is cut here
    records = [record(i) for i in range(3)]
    whole = b"".join(map(dump_line, records))
    ends = [len(b"".join(map(dump_line, records[:i]))) for i in range(4)]
    path = tmp_path / "samples.jsonl"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        journal = Journal(path)
        kept = max(i for i in range(4) if ends[i] <= cut)
        assert len(journal.records) == kept, cut
        assert journal.damaged == (cut not in ends), cut
        assert path.stat().st_size == ends[kept], cut
        added = [journal.append(item) for item in records]
        assert added == [False] * kept + [True] * (3 - kept)
        journal.close()
        assert path.read_bytes() == whole, cut


def test_journal_drops_unreadable_and_double_lines(tmp_path):
    """Zeros left by a power cut, a foreign line and a doubled record go; everything else stays and each loss is
    told."""
    path = tmp_path / "samples.jsonl"
    lines = [dump_line(record(0)), b"\0\0\0\n", dump_line(record(0)), b'{"no": "id"}\n', dump_line(record(1)), b"[1]\n"]
    path.write_bytes(b"".join(lines))
    told = []
    journal = Journal(path, warn=told.append)
    assert list(journal.records) == [("a/0", 0), ("a/1", 0)]
    assert journal.damaged == len(told) == 3
    assert "samples.jsonl:2: unreadable line" in told[0]
    assert path.read_bytes() == lines[0] + lines[4]


def test_journal_finish_sorts_and_refuses_gaps(tmp_path):
    """A finished journal is in request order, stays open for appending, and a run with a gap is not called finished."""
    path = tmp_path / "samples.jsonl"
    journal = Journal(path)
    for number in (2, 0, 1):
        journal.append(record(number))
    with pytest.raises(ValueError, match="1 samples missing or unknown"):
        journal.finish([("a/0", 0), ("a/1", 0)])
    journal.finish([(f"a/{i}", 0) for i in range(3)])
    assert path.read_bytes() == b"".join(dump_line(record(i)) for i in range(3))
    journal.append(record(3))
    assert path.read_bytes().endswith(dump_line(record(3)))
    assert [item.name for item in tmp_path.iterdir()] == ["samples.jsonl"]


def test_journal_survives_a_full_disk(tmp_path, monkeypatch):
    """A disk that fills in the middle of a record leaves whole records only, says so, and can go on afterwards."""
    path = tmp_path / "samples.jsonl"
    journal = Journal(path)
    journal.append(record(0))
    real = os.write
    calls = []

    def full(descriptor, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(descriptor, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(JournalError, match="the disk is full; free some space, then give the same command again"):
        journal.append(record(1))
    monkeypatch.setattr(os, "write", real)
    assert path.read_bytes() == dump_line(record(0))
    assert journal.append(record(1))
    assert path.read_bytes() == dump_line(record(0)) + dump_line(record(1))


def test_atomic_write_keeps_the_old_file(tmp_path, monkeypatch):
    """A write that fails half way leaves the old content and no litter."""
    path = tmp_path / "run.json"
    write_atomic(path, b"old")

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(JournalError, match=r"run.json: Input/output error"):
        write_atomic(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["run.json"]


def test_plain_is_strict():
    """NaN and infinity become null, numpy scalars become numbers, and an unknown type is refused."""
    np = pytest.importorskip("numpy")
    value = {"a": [float("nan"), -math.inf, 1.5], 3: (np.float32(0.5), np.int64(2), np.bool_(True))}
    assert plain(value) == {"a": [None, None, 1.5], "3": [0.5, 2, True]}
    with pytest.raises(TypeError, match="cannot write set to JSON"):
        plain({"a": {1}})


LOCKER = "import sys; from pathlib import Path; from kvbench.journal import run_lock\n"
LOCKER += "with run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_lock_between_processes(tmp_path):
    """A second process is refused by the holder's number, one that waits gets its turn, and a killed holder lets go."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", LOCKER, str(tmp_path / "run")]
    holder = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunLocked, match=f"is being worked on by process {holder.pid}"), run_lock(tmp_path / "run"):
            pass
        told = []

        def tell(text):
            told.append(text)
            holder.kill()

        with run_lock(tmp_path / "run", wait=True, say=tell):
            assert told == [f"waiting for process {holder.pid}, which is computing {tmp_path / 'run'}"]
    finally:
        holder.kill()
        holder.communicate()
    with run_lock(tmp_path / "run"):
        pass


def test_run_record_round_trip(tmp_path):
    """run.json holds every field and reads back equal; another schema version or a broken file is refused."""
    metric = Metric(value=0.5, num_samples=4, low=0.1, high=0.9, primary=True, subsets={"a": Estimate(value=0.5)})
    made = RunRecord(
        method="kivi",
        metrics={"exact": metric},
        counts=Counts(total=4, done=4),
        comparison=Comparison(difference=Estimate(value=-0.1), num_worse=1),
        versions=provenance.versions(),
        git=provenance.git_state(),
        machine=provenance.machine("cpu"),
        sessions=[Session(started="then", num_done=4)],
        ledger={"resident_bytes": 5.0},
    )
    assert RunRecord.load(tmp_path) is None
    made.save(tmp_path)
    assert RunRecord.load(tmp_path) == made
    assert made.primary == "exact"
    content = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(content | {"schema_version": 99}))
    with pytest.raises(ValueError, match="schema version 99, this kvbench reads 1"):
        RunRecord.load(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(content | {"surprise": 1}))
    with pytest.raises(ValueError, match="fields this kvbench does not know"):
        RunRecord.load(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="not readable as JSON"):
        RunRecord.load(tmp_path)


def test_every_result_field_is_described():
    """Each field of run.json has a sentence under it in the source."""
    for module in ("results.py", "provenance.py"):
        tree = ast.parse((provenance.package_folder() / module).read_text())
        bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
        fields = [(item, after) for body in bodies for item, after in zip(body, body[1:] + [None], strict=True)]
        fields = [(item, after) for item, after in fields if isinstance(item, ast.AnnAssign)]
        assert len(fields) > 10
        for item, after in fields:
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert is_text and isinstance(after.value.value, str), f"{module}:{item.lineno}: {item.target.id}"


@dataclass
class Settings:
    """Settings as a policy holds them."""

    budget: float = 0.5
    names: tuple = ("a", "b")


def test_canonical_settings():
    """Equal settings give equal JSON whatever holds them; a share of 1.0 and a budget of 1 token differ; objects are
    refused."""
    torch = pytest.importorskip("torch")
    assert identity.canonical(Settings()) == {"budget": 0.5, "names": ["a", "b"]}
    assert identity.canonical({"b": {2, 1}, "a": torch.float16}) == {"a": "torch.float16", "b": [1, 2]}
    one, whole = identity.canonical(Settings(budget=1)), identity.canonical(Settings(budget=1.0))
    assert identity.hash_identity(one) != identity.hash_identity(whole)
    with pytest.raises(TypeError, match="two settings of type object"):
        identity.canonical({"a": object()})


def test_folder_names():
    """A name cannot leave the results folder, and a usual name stays as it is."""
    assert identity.folder_name("smollm2-135m_v1.2+x") == "smollm2-135m_v1.2+x"
    assert identity.folder_name("../../etc/passwd") == "etc-passwd"
    assert identity.folder_name("..") == "unnamed"
    made = identity.run_folder(Path("results"), "t", "org/model", "kivi", "0123456789abcdef")
    assert made == Path("results/t/org-model/kivi/0123456789ab")


def test_code_hash_follows_content(tmp_path):
    """The hash of sources changes with a name, a byte, or a moved boundary between two files, and with nothing else."""
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    a.write_text("x = 1\n"), b.write_text("y = 2\n")
    first = provenance.hash_files({"a": a, "b": b})
    assert first == provenance.hash_files({"b": b, "a": a})
    assert first != provenance.hash_files({"a": a, "c": b})
    a.write_text("x = 1\ny"), b.write_text(" = 2\n")
    assert first != provenance.hash_files({"a": a, "b": b})


def test_presentation_files_exist():
    """The list of files that cannot change an answer names files that are there, so a renamed one is noticed."""
    for name in provenance.PRESENTATION:
        assert (provenance.package_folder() / name).exists(), name
    assert "run.py" not in provenance.PRESENTATION


def test_wilson_and_t_agree_with_scipy():
    """The intervals equal those of scipy, over all small counts and a handful of random samples."""
    for n in (1, 2, 7, 64):
        for k in range(n + 1):
            expected = scipy.stats.binomtest(k, n).proportion_ci(method="wilson")
            assert summary.wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)
    rng = random.Random(1)
    for n in (2, 5, 40):
        values = [rng.random() for _ in range(n)]
        made = summary.estimate({"a": values})
        expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (made.low, made.high) == pytest.approx((expected.low, expected.high))
        assert made.interval == "t"


def test_estimate_over_subsets():
    """The mean is over subsets, the interval that of Welch for two of them, and what cannot be told is left open."""
    a, b = [0.1, 0.4, 0.3, 0.9], [0.5, 0.7]
    made = summary.estimate({"a": a, "b": b})
    assert made.value == pytest.approx((sum(a) / 4 + sum(b) / 2) / 2)
    assert made.num_samples == 6
    welch = scipy.stats.ttest_ind(a, [-x for x in b], equal_var=False).confidence_interval(0.95)  # mean(a) + mean(b)
    assert (made.low, made.high) == pytest.approx((welch.low / 2, welch.high / 2))
    assert summary.estimate({"a": [0.0, 1.0], "b": [1.0, 1.0]}).interval == "wilson"
    assert summary.estimate({"a": [0.0, 1.0], "b": [1.0]}).low is None
    assert summary.estimate({"a": [0.3, 0.3]}).low is None
    assert summary.estimate({}).value is None


def test_newcombe_published_example():
    """The paired interval reproduces the worked example of the paper (36, 12, 2, 0), and has a width when nothing
    differs."""
    assert summary.newcombe(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    low, high = summary.newcombe(20, 0, 0, 4)
    assert low < 0 < high


def scored(values: dict[str, float], **changes) -> list[dict]:
    """Records of one subset with a score each."""
    return [record(0, sample_id=name, scores={"exact": value}, **changes) for name, value in values.items()]


def test_comparison_is_paired():
    """Only samples that ended well in both count; worse and better follow the metric's direction."""
    mine = scored({"a/0": 1.0, "a/1": 0.0, "a/2": 0.0, "a/3": 1.0}) + scored({"a/9": 1.0}, status="nan")
    full = scored({"a/0": 1.0, "a/1": 1.0, "a/2": 1.0, "a/9": 0.0, "a/3": 0.0})
    made = summary.compare(mine, full, "exact", "there")
    assert made.difference.value == pytest.approx(-0.25)
    assert (made.difference.num_samples, made.num_worse, made.num_better) == (4, 2, 1)
    assert made.difference.interval == "newcombe"
    assert (made.difference.low, made.difference.high) == pytest.approx(summary.newcombe(1, 1, 2, 0))
    flipped = summary.compare(mine, full, "exact", "there", higher_is_better=False)
    assert (flipped.num_worse, flipped.num_better) == (1, 2)
    graded = summary.compare(scored({"x": 0.5, "y": 0.75}), scored({"x": 0.5, "y": 0.5}), "exact", "there")
    assert graded.difference.interval == "t"
    steps = summary.compare(scored({"x": 1.5, "y": 0.5}), scored({"x": 0.5, "y": 0.5}), "exact", "there")
    assert steps.difference.interval == "t"


def test_repeats_count_as_one_sample():
    """Several answers to one prompt are averaged first, so they do not make the interval narrower than the prompts
    allow."""
    rows = [
        record(i, repeat=k, scores={"exact": float(k < i)}, fidelity={"nll": None if i == 0 else 2.0})
        for i in range(3)
        for k in range(2)
    ]
    made = summary.metrics(rows, {"exact": SimpleNamespace(higher_is_better=True, description="")}, "exact")["exact"]
    assert (made.value, made.num_samples, made.interval) == (pytest.approx(0.5), 3, "t")
    nll = summary.fidelity(rows)["nll"]
    assert (nll.value, nll.num_samples, nll.num_nonfinite) == (2.0, 2, 2)


def test_ledger_and_timing_sums():
    """Ratios are sums over sums, failed samples are left out, and decode speed counts the rows that shared a step
    once."""
    rows = [
        record(0, ledger={"resident_bytes": 10, "peak_bytes": 40, "fp16_bytes": 100, "average_ratio": 0.1}),
        record(1, ledger={"resident_bytes": 90, "peak_bytes": 110, "fp16_bytes": 200, "average_ratio": 0.3}),
        record(2, status="oom"),
    ]
    made = summary.ledger(rows)
    assert made["resident_ratio"] == pytest.approx(100 / 300)
    assert made["peak_ratio"] == pytest.approx(150 / 300)
    assert made["average_ratio"] == pytest.approx(0.2)
    timed = {"prefill_s": 1.0, "decode_s": 2.0, "decode_share_s": 0.5, "decode_tokens": 8, "batch_rows": 4}
    speed = summary.timing([record(i, timing=timed) for i in range(4)] + [record(9, status="nan")], 5.0)
    assert (speed.prefill_s, speed.decode_tokens_per_s, speed.decode_tokens) == (1.0, 16.0, 32)
