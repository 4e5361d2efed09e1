"""Each line of a journal is bound to its run: what was edited, or belongs elsewhere, does not count."""

import ast
import json

import pytest
from fake_parts import record
from places import ROOT

from kvbench.results.journal import Journal
from kvbench.results.lines import read_samples
from kvbench.results.sample import LONGEST_LINE, answer_facts, read_line, seal_of, write_line
from kvbench.results.writing import encode_line

RUN, OTHER = "5" * 64, "6" * 64


def sealed(content: dict) -> bytes:
    """A line whose seal is right, whatever it holds."""
    return json.dumps(content | {"seal": seal_of(content, RUN)}).encode()


def without(content: dict, key: str) -> dict:
    """A record that lacks a key."""
    return {name: value for name, value in content.items() if name != key}


GOOD = write_line(record(0), RUN)[:-1]
EDITED = GOOD.replace(b'"exact":1.0', b'"exact":0.0')
FOREIGN = write_line(record(0), OTHER)[:-1]
DEEP = b"[" * 200_000
BROKEN = {
    "edited": EDITED,
    "of another run": FOREIGN,
    "without a seal": encode_line(record(0))[:-1],
    "two keys": b'{"sample_id":"a/0","repeat":0}',
    "negative repeat": sealed(record(0, repeat=-1)),
    "true as repeat": sealed(record(0, repeat=True)),
    "text as score": sealed(record(0, scores={"exact": "high"})),
    "no scores": sealed(record(0, scores=None)),
    "unknown status": sealed(record(0, status="great")),
    "list as status": sealed(record(0, status=["ok"])),
    "negative bytes": sealed(record(0, ledger={"resident_bytes": -1.0})),
    "number as text": sealed(record(0, text=3)),
    "score above 1": sealed(record(0, scores={"exact": 1.5})),
    "score below 0": sealed(record(0, scores={"exact": -5})),
    "no full cache": sealed(record(0, ledger={"resident_bytes": 1.0, "fp16_bytes": 0})),
    "share above 1": sealed(record(0, fidelity={"top1_agreement": 2.0})),
    "time before its start": sealed(record(0, timing={"prefill_s": -1.0})),
    "number whose square is none": sealed(record(0, fidelity={"nll": 1e308})),
    "whole number beyond every float": sealed(record(0, num_prompt_tokens=10**400)),
    "bytes beyond every float": sealed(record(0, ledger={"resident_bytes": 10**400})),
    "tiers in words": sealed(record(0, kept={"slots_per_tier": ["a"]})),
    "missing ledger": sealed(without(record(0), "ledger")),
    "deep": DEEP,
    "deep inside": GOOD.replace(b'"meta":{}', b'"meta":{"a":' + b"[" * 90 + b"]" * 90 + b"}"),
    "NaN": GOOD.replace(b'"exact":1.0', b'"exact":NaN'),
    "not ASCII": b"\xff\xfe",
    "huge number": b'{"sample_id":' + b"9" * 5000 + b"}",
}


def test_the_seal_is_of_run_and_content():
    """Another run, another value or no seal gives no record; another order of the keys is the same record."""
    found = read_line(GOOD, RUN)
    assert found.record == record(0) and not found.fault
    reordered = json.dumps(dict(reversed(json.loads(GOOD).items()))).encode()
    assert read_line(reordered, RUN).record == record(0)
    assert read_line(FOREIGN, OTHER).record == record(0)


def read(item):
    """A record as readers get it: with what its tokens say in place of them."""
    return without(item, "token_ids") | {"answer": answer_facts(item)}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_dropped_and_done_again(tmp_path, name):
    """Whatever is wrong with a line, even in front of the true one, it is named in one line and its sample redone."""
    path = tmp_path / "samples.jsonl"
    path.write_bytes(BROKEN[name] + b"\n" + write_line(record(1), RUN))
    told = []
    journal = Journal(path, run=RUN, warn=told.append)
    assert list(journal.records) == [("a/1", 0)] and journal.damaged == len(told) == 1
    assert told[0].startswith(f"{path}:1: ") and told[0].endswith("dropped; its sample is done again")
    assert "\n" not in told[0] and len(told[0]) < len(str(path)) + 200
    assert journal.append(record(0))
    journal.finish([("a/0", 0), ("a/1", 0)])
    journal.close()
    assert path.read_bytes() == write_line(record(0), RUN) + write_line(record(1), RUN)
    path.write_bytes(BROKEN[name] + b"\n" + GOOD + b"\n")
    assert read_samples(path, RUN) == ({("a/0", 0): read(record(0))}, 1)


def test_a_number_that_rounds_is_one():
    """The mean of shares may exceed 1 in its last bits, and what is not finite is null."""
    for score in (1.0 + 1e-12, -1e-12, None, True):
        assert read_line(sealed(record(0, scores={"exact": score})), RUN).record


def test_every_reader_knows_whether_lines_are_sealed():
    """Nobody in the package reads samples without asking the record of their run."""
    calls = [
        call
        for path in (ROOT / "kvbench").rglob("*.py")
        if "tests" not in path.relative_to(ROOT).parts
        if "read_samples(" in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("read_samples")
    ]
    assert len(calls) > 5
    for call in calls:
        assert [ast.unparse(word.value).rpartition(".")[2] for word in call.keywords] == ["sealed"], ast.unparse(call)


def test_many_broken_lines_are_counted(tmp_path):
    """The first five are named, the others are a number."""
    path = tmp_path / "samples.jsonl"
    path.write_bytes((FOREIGN + b"\n") * 30)
    told = []
    assert Journal(path, run=RUN, warn=told.append).damaged == 30
    assert len(told) == 6 and "25 more lines dropped" in told[-1]


def test_a_huge_line_is_damage(monkeypatch):
    """A line longer than every record is not parsed; one that would be so long is not written."""
    assert LONGEST_LINE > 10_000_000
    monkeypatch.setattr("kvbench.results.sample.LONGEST_LINE", 1000)
    assert read_line(b"[" + b"1," * 600 + b"1]", RUN).fault.startswith("line of 1203 bytes or more")
    with pytest.raises(TypeError, match=r"sample 'a/0' has \d+ bytes"):
        write_line(record(0, text="x" * 2000), RUN)
    with pytest.raises(TypeError, match="status is none of ok, nan, oom"):  # nor what its reader would drop
        write_line(record(0, status="great"), RUN)


def test_seals_that_were_taken_off_are_missed(tmp_path):
    """Where the record says that lines are sealed, none without a seal counts; one that is sealed says it for all."""
    path = tmp_path / "samples.jsonl"
    path.write_bytes(encode_line(record(0, scores={"exact": 0.0})))
    assert read_samples(path, RUN, sealed=True) == ({}, 1)
    assert read_samples(path, RUN) == ({("a/0", 0): read(record(0, scores={"exact": 0.0}))}, 0)
    path.write_bytes(path.read_bytes() + write_line(record(1), RUN))
    assert read_samples(path, RUN) == ({("a/1", 0): read(record(1))}, 1)


def test_an_answer_that_nobody_asked_for_is_dropped(tmp_path):
    """Its seal may be right: a journal that knows what its run asks names it and drops it, also a shard's."""
    path, told = tmp_path / "samples.jsonl", []
    path.write_bytes(write_line(record(0), RUN) + write_line(record(9, sample_id="\x1b[31m" + "z" * 500), RUN))
    journal = Journal(path, run=RUN, keys={("a/0", 0)}, warn=told.append)
    assert list(journal.records) == [("a/0", 0)] and journal.damaged == 1
    assert told[0].startswith(f"{path}:2: answer to '\\x1b[31mzzz") and len(told[0]) < len(str(path)) + 200
    assert told[0].endswith(", which the run does not ask, (kept in samples.dropped.jsonl) dropped")
    journal.finish([("a/0", 0)])
    assert path.read_bytes() == write_line(record(0), RUN)


def test_a_journal_from_before_seals_is_read(tmp_path):
    """Without any seal in the file its lines count where runs are compared; a run does not go on with them."""
    path = tmp_path / "samples.jsonl"
    path.write_bytes(encode_line(record(0)) + b'{"sample_id":"a/9","repeat":0}\n')
    assert read_samples(path, RUN) == ({("a/0", 0): read(record(0))}, 1)
    journal = Journal(path, run=RUN)
    assert not journal.records and journal.damaged == 2
