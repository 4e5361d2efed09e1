"""The cache folder: digests of whole files, what is remembered of them, and folders that are made."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from refusals import refused

from kvbench.models import cache


@pytest.fixture
def large(tmp_path, monkeypatch) -> Path:
    """Gives a file above the size from which digests are remembered, a cache folder, and clocks that need no wait."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_SETTLED_NS", -1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 << 20))
    return file


def flip(file: Path, place: int) -> None:
    """Changes one byte of a file and puts its time of change back."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_large_file_is_read_once(large, monkeypatch):
    """The second digest comes from the cache folder; the file under another name and a copy are read again."""
    reads, read = [], cache._read_whole
    monkeypatch.setattr(cache, "_read_whole", lambda file: (reads.append(file), read(file))[1])
    expected = hashlib.sha256(bytes(3 << 20)).hexdigest()
    assert [cache.file_digest(large) for _ in range(3)] == [expected] * 3
    link = large.with_name("link")
    link.symlink_to(large)
    assert cache.file_digest(link) == expected and len(reads) == 1
    copy = large.with_name("copy")
    copy.write_bytes(large.read_bytes())
    assert cache.file_digest(copy) == expected and len(reads) == 2


@pytest.mark.parametrize("place", [0, 1 << 20, (3 << 20) - 1])
def test_a_byte_changed_anywhere_is_noticed(large, place):
    """The first, the last and a byte in between, with the same size and the old time put back."""
    before = cache.file_digest(large)
    flip(large, place)
    assert cache.file_digest(large) == hashlib.sha256(large.read_bytes()).hexdigest() != before


def test_a_file_that_was_just_changed_is_not_remembered(large, monkeypatch):
    """Two changes within one tick of the clock have the same times, so a fresh file is read every time."""
    monkeypatch.setattr(cache, "_SETTLED_NS", 60_000_000_000)
    cache.file_digest(large)
    assert not (cache.cache_root() / "digests").exists()


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b'{"state": 1}', b"[" * 100_000, b"\xff\x00"])
def test_a_damaged_record_is_not_believed(large, content):
    """What cannot be read, or says nothing, leads to reading the file."""
    expected = cache.file_digest(large)
    (record,) = (cache.cache_root() / "digests").iterdir()
    record.write_bytes(content)
    assert cache.file_digest(large) == expected
    assert json.loads(record.read_bytes())["sha256"] == expected


def test_a_cache_that_cannot_be_written_costs_time_only(large, tmp_path, monkeypatch):
    """Where nothing can be remembered the digest is the same."""
    (tmp_path / "blocked").write_text("")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "blocked"))
    assert cache.file_digest(large) == hashlib.sha256(large.read_bytes()).hexdigest()


def test_a_file_that_is_written_meanwhile_is_refused(large, monkeypatch):
    """A digest of half the old and half the new content names neither."""
    read = cache._read_whole
    monkeypatch.setattr(cache, "_read_whole", lambda file: (read(file), flip(file, 5))[0])
    with refused("file-content", None, "model.safetensors"):
        cache.file_digest(large)
