"""The record of a sample: made in one place, read by one reader."""

import hashlib
import json
import lzma
import struct
from contextlib import closing
from dataclasses import replace
from typing import get_type_hints

import pytest

from kvbench.engine.requests import Outcome, Request, Turn
from kvbench.results.journal import Journal
from kvbench.results.lines import read_lines, read_samples
from kvbench.results.sample import SampleRecord, journal_record, key_of, write_line
from kvbench.results.typed import Misfit, parse

RUN = "5" * 64
REQUEST = Request(sample_id="a/0", subset="a", segments=((1, 2, 3),), num_prompt_tokens_untruncated=5)
OUTCOME = Outcome(sample_id="a/0", repeat=1, text="x", token_ids=[7], finish="eos", timing={"prefill_s": 1.0})


def test_a_record_has_every_documented_key():
    """The keys and their order are those of the class; `choices` is there only where the task asked about some,
    `turns` in conversations, and `flags` where one is set."""
    plain = journal_record(REQUEST, OUTCOME, {"exact": 1.0}, {"seed": 0})
    asked = Request(sample_id="a/0", subset="a", segments=((1, 2, 3),), choices=((4,), (5,)))
    documented = [
        name for name in get_type_hints(SampleRecord) if name not in ("seal", "answer")
    ]  # on the line only; for readers only
    talk = replace(asked, turns=(Turn(tokens=(4,), answers=("x",)),))
    flagged = replace(OUTCOME, flags=["fallback"])
    assert set(journal_record(talk, replace(flagged, turns=[{"text": "y"}]), {}, {})) == set(documented)
    assert list(journal_record(asked, flagged, {}, {})) == [name for name in documented if name != "turns"]
    assert list(plain) == [name for name in documented if name not in ("choices", "turns", "flags")]
    assert plain["truncated"] and plain["scores"] == {"exact": 1.0} and key_of(plain) == ("a/0", 1)


def test_a_record_says_what_was_asked_and_what_is_right():
    """The right answers, a hash of the prompt's tokens whatever its segments, and the end of its text."""
    numbers = [1, 300, 70_000]
    digest = hashlib.sha256(b"".join(struct.pack("<I", number) for number in numbers)).hexdigest()
    for segments in ((tuple(numbers),), ((1,), (300, 70_000))):
        request = Request(sample_id="a/0", subset="a", segments=segments, answers=("x", "y"))
        record = journal_record(request, OUTCOME, {}, {}, "0123456789" * 30)
        assert record["gold"] == ["x", "y"] and record["prompt"] == {"sha256": digest, "tail": "0123456789" * 20}


def test_a_journal_of_before_still_reads(tmp_path):
    """Its records have neither right answer nor prompt, and none is made up; a run that has only begun has no file."""
    assert read_samples(tmp_path / "samples.jsonl", RUN) == ({}, 0)
    old = journal_record(REQUEST, OUTCOME, {"exact": 1.0}, {})
    del old["gold"], old["prompt"]
    (tmp_path / "samples.jsonl").write_bytes(write_line(old, RUN))
    found, damaged = read_samples(tmp_path / "samples.jsonl", RUN)
    assert damaged == 0 and "gold" not in found["a/0", 1] and "prompt" not in found["a/0", 1]


def test_both_readers_count_the_same_lines(tmp_path):
    """What the journal keeps when it is opened is what a reader sees that changes nothing."""
    first, second = (journal_record(REQUEST, OUTCOME, {"exact": score}, {}) for score in (1.0, 0.0))
    second["sample_id"] = "a/1"
    whole = write_line(first, RUN)
    broken = [b"\n", b"[1]\n", b'{"sample_id":3,"repeat":0}\n', b'{"sample_id":"a/2","repeat":"0"}\n', b"\xff\n"]
    path = tmp_path / "samples.jsonl"
    path.write_bytes(whole + b"".join(broken) + whole + write_line(second, RUN) + whole[:-1])
    content = path.read_bytes()
    found, damaged = read_samples(path, RUN)
    assert path.read_bytes() == content
    assert list(found) == [("a/0", 1), ("a/1", 1)] and damaged == len(broken) + 1
    assert all("token_ids" not in record for record in found.values())
    journal = Journal(path, run=RUN)
    journal.close()
    assert list(journal.records) == list(found) and journal.damaged == damaged
    assert path.read_bytes() == whole + write_line(second, RUN)


@pytest.mark.parametrize("content", [b"", b"\n", b"x", b"{}\nx", b"ab\n\ncde\nf"])
def test_every_line_is_seen_once(content):
    """Put together again, the lines are the content, wherever it is cut; none of these is a record."""
    for size in (1, 2, 100):
        lines = list(read_lines([content[at : at + size] for at in range(0, len(content), size)], RUN))
        assert b"\n".join(line.content for line in lines) == content.removesuffix(b"\n")
        assert all(line.record is None and line.fault for line in lines)


def test_no_file_takes_the_memory(tmp_path, monkeypatch):
    """A journal of newlines alone, packed small, ends at so many lines; a line without an end is held as far as a
    record may be long, and ends the reading. What is read at a time stays small."""
    path = tmp_path / "samples.jsonl"
    monkeypatch.setattr("kvbench.results.lines.PIECE_BYTES", 4096)
    packed = tmp_path / "samples.jsonl.xz"
    packed.write_bytes(lzma.compress(b"\n" * 100_000, preset=0))
    for read in (lambda: read_samples(path, RUN), lambda: Journal(path, run=RUN)):
        with pytest.raises(
            (OSError, ValueError), match=r"jsonl.xz holds more than 16384 lines that are no records of its run"
        ):
            read()
    packed.unlink()
    monkeypatch.setattr("kvbench.results.lines.MOST_LINES", 3)
    whole = write_line(journal_record(REQUEST, OUTCOME, {"exact": 1.0}, {}), RUN)
    path.write_bytes(whole * 4)
    with pytest.raises(OSError, match=r"samples.jsonl holds more than 3 lines, so it is no journal of kvbench"):
        read_samples(path, RUN)
    with path.open("wb") as file:
        file.truncate(1 << 20)  # zeros that lie nowhere
    assert read_samples(path, RUN) == ({}, 1)
    monkeypatch.setattr("kvbench.results.lines.LONGEST_LINE", 10_000)
    (line,) = read_lines([b"x" * 4096] * 1000, RUN)
    assert len(line.content) <= 10_000 + 4096
    monkeypatch.setattr("kvbench.results.lines.MOST_BYTES", 1 << 19)
    with pytest.raises(OSError, match=r"samples.jsonl has a line of more than 524288 bytes, so it is no journal"):
        read_samples(path, RUN)
    packed.write_bytes(
        lzma.compress(b"", format=lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 29}])
    )
    path.unlink()
    with pytest.raises(OSError, match=r"cannot be unpacked \(Memory usage limit exceeded\); remove it"):
        read_samples(path, RUN)


def test_a_line_is_strict_json():
    """What is not finite is null, and the keys keep their order."""
    record = journal_record(REQUEST, OUTCOME, {"exact": float("nan")}, {})
    line = write_line(record, RUN)
    assert line.endswith(b"\n") and json.loads(line)["scores"] == {"exact": None}
    assert list(json.loads(line)) == [*record, "seal"]
    assert next(read_lines([line], RUN)).record["scores"] == {"exact": None}


def packed_run(folder, *scores):
    """A journal of some samples, packed; returns the path of the plain one, and its content."""
    records = [journal_record(REQUEST, OUTCOME, {"exact": score}, {}) for score in scores]
    for number, item in enumerate(records):
        item["sample_id"] = f"a/{number}"
    content = b"".join(write_line(item, RUN) for item in records)
    (folder / "samples.jsonl.xz").write_bytes(lzma.compress(content))
    return folder / "samples.jsonl", content


def test_a_packed_journal_reads_as_the_plain_one(tmp_path):
    """Readers see the same records, a journal goes on from it, and the plain one counts where both are there."""
    path, content = packed_run(tmp_path, 1.0, 0.0)
    found = read_samples(path, RUN)
    assert not path.exists() and [record["scores"]["exact"] for record in found[0].values()] == [1.0, 0.0]
    journal = Journal(path, run=RUN)
    journal.close()
    assert path.read_bytes() == content and read_samples(path, RUN) == found
    path.write_bytes(content.partition(b"\n")[0] + b"\n")
    assert list(read_samples(path, RUN)[0]) == [("a/0", 1)]


def test_a_broken_pack_is_no_journal(tmp_path, monkeypatch):
    """A torn pack, a file that is none, and one that would fill the memory are refused by name."""
    path, _ = packed_run(tmp_path, 1.0)
    packed = tmp_path / "samples.jsonl.xz"
    whole = packed.read_bytes()
    monkeypatch.setattr("kvbench.results.lines.MOST_BYTES", 100)
    with pytest.raises(OSError, match=r"samples.jsonl.xz holds more than 100 bytes"):
        read_samples(path, RUN)
    monkeypatch.undo()
    packed.write_bytes(whole[:-9])
    with pytest.raises(OSError, match=r"samples.jsonl.xz lacks its end, so it is no journal"):
        read_samples(path, RUN)
    packed.write_bytes(b"{}\n")
    with pytest.raises(OSError, match=r"samples.jsonl.xz cannot be unpacked .*; remove it"):
        read_samples(path, RUN)


def test_a_pack_of_several_streams_is_read_to_its_end(tmp_path, monkeypatch):
    """`cat a.xz b.xz` is one pack, with or without padding, wherever its pieces are cut; so `xz -d` reads it."""
    path, content = packed_run(tmp_path, 1.0, 0.0, 1.0)
    packed, lines = tmp_path / "samples.jsonl.xz", content.splitlines(keepends=True)
    for padding in (b"", b"\0" * 4, b"\0" * 4096):
        streams = [lzma.compress(part) for part in (lines[0], b"", lines[1] + lines[2][:9], lines[2][9:])]
        packed.write_bytes(padding.join(streams) + padding)
        for piece in (1 << 20, 64, 7):
            monkeypatch.setattr("kvbench.results.lines.PIECE_BYTES", piece)
            found, damaged = read_samples(path, RUN)
            assert [key for key, _ in found] == ["a/0", "a/1", "a/2"] and not damaged
    with closing(Journal(path, run=RUN)):
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lzma.compress(b"{}" * 99)[:-9], "lacks its end"),
        (lzma.compress(b"x")[:3], "lacks its end"),
        (b"garbage that is no stream", "cannot be unpacked"),
        (b"\0\0\0", "has 3 zeros behind a packed stream"),
        (b"\0" + lzma.compress(b"x"), "has 1 zeros behind a packed stream"),
        (lzma.compress(bytes(9000)), "holds more than [0-9]+ bytes"),
        (lzma.compress(b"") * 9, "holds more than 8 packed streams"),
    ],
    ids=["torn", "begun", "garbage", "three zeros", "one zero", "too long", "too many"],
)
def test_what_is_wrong_behind_the_first_stream_is_named(tmp_path, monkeypatch, end, message):
    """A torn stream, garbage, odd padding, and more than any journal holds: none of it is passed over."""
    path, content = packed_run(tmp_path, 1.0)
    monkeypatch.setattr("kvbench.results.lines.MOST_STREAMS", 8)
    monkeypatch.setattr("kvbench.results.lines.MOST_BYTES", len(content) + 1000)
    packed = tmp_path / "samples.jsonl.xz"
    packed.write_bytes(packed.read_bytes() + end)
    with pytest.raises(OSError, match=rf"samples\.jsonl\.xz {message}"):
        read_samples(path, RUN)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("ledger", "resident_bytes"), "1", "ledger.resident_bytes is no float"),
        (("kept", "slots_per_tier", 1), "x", r"kept.slots_per_tier\[1\] is no float"),
        (("repeat",), True, "repeat is no int"),
        (("status",), "fine", "status is none of ok, nan, oom, ungraded"),
        (("scores", "exact"), 2.0**65, "scores.exact is too large"),
    ],
)
def test_what_does_not_fit_is_named_by_its_place(place, value, message):
    """Keys and numbers of lists, from the outside in."""
    record = json.loads(write_line(journal_record(REQUEST, OUTCOME, {"exact": 1.0}, {}), RUN))
    record["kept"] = {"slots_per_tier": [1.0, 2.0]}
    *way, last = place
    within = record
    for key in way:
        within = within[key]
    within[last] = value
    with pytest.raises(Misfit, match=f"^{message}"):
        parse(record, SampleRecord)
