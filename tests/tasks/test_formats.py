"""Data in every format that they come in: read, or named with the step that is missing; never passed over."""

import bz2
import gzip
import json
import lzma
import zipfile
from pathlib import Path

import pytest
from longbench_rows import row as long_row
from refusals import refused

from kvbench.tasks import check_task, gsm8k, load_task, longbench
from kvbench.tasks.fetch import check_file
from kvbench.tasks.formats import lines_of, source_of
from kvbench.tasks.ruler import words

# Line breaks for `str.splitlines` that are none for JSON lines.
TEXT = "one\u2028two\u2029three\x85four\x0bfive\x0csix\x1cseven"
ROWS = [{"question": f"What is {n}?", "answer": f"{TEXT} #### {n}"} for n in range(3)]
RAW = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)
LISTED = json.dumps(ROWS, ensure_ascii=False, indent=1).encode()


def parquet(rows) -> bytes:
    """A Parquet file of some rows."""
    import pyarrow as pa
    from pyarrow import parquet as writer

    sink = pa.BufferOutputStream()
    writer.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def zipped(**members: bytes) -> bytes:
    """A zip archive; `__` in a name is `/`, and `_dot_` a dot."""
    from io import BytesIO

    with zipfile.ZipFile(content := BytesIO(), "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/").replace("_dot_", "."), data)
    return content.getvalue()


READABLE = {
    "test.jsonl": lambda: RAW,
    "test.json": lambda: LISTED,
    "test.parquet": lambda: parquet(ROWS),
    "test.jsonl.gz": lambda: gzip.compress(RAW[:90]) + gzip.compress(RAW[90:]),
    "test.json.gz": lambda: gzip.compress(LISTED),
    "test.jsonl.bz2": lambda: bz2.compress(RAW),
    "test.jsonl.xz": lambda: lzma.compress(RAW),
    "data/test.json": lambda: RAW,
    "gsm8k/test.parquet": lambda: parquet(ROWS),
    "main/test-00000-of-00001.parquet": lambda: parquet(ROWS),
    "test-00000-of-00001.parquet": lambda: parquet(ROWS),
    "gsm8k.zip": lambda: zipped(a__test_dot_jsonl=RAW, a__train_dot_jsonl=b"{}"),
    "other.zip": lambda: zipped(test_dot_parquet=parquet(ROWS), README_dot_md=b"x"),
    "packed.zip": lambda: zipped(test_dot_jsonl_dot_gz=gzip.compress(RAW)),
}
UNREAD = {
    "test.csv": (b"question,answer\n", "write its rows as JSON lines"),
    "test.tar.gz": (gzip.compress(b"tar"), "unpack it"),
    "grade-school-math.tar.gz": (gzip.compress(b"tar"), "unpack it"),
    "gsm8k.7z": (b"7z", "unpack it"),
    "test.jsonl.zst": (b"zst", "unpack it"),
    "gsm8k.zip": (zipped(train_dot_jsonl=RAW), "it holds no test.jsonl"),
}
BROKEN = {
    "test.parquet": parquet(ROWS)[:-9],
    "test.jsonl.gz": gzip.compress(RAW)[:-20],
    "test.jsonl.xz": lzma.compress(RAW)[:-20],
    "test.json.bz2": b"no bzip2",
    "test.json": LISTED[:-20],
    "data.zip": zipped(test_dot_jsonl=RAW)[:-9],
}


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Points the caches at an empty folder and the hub at nothing."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def put(folder, name: str, content: bytes):
    """Write a file below a folder of data; gives that folder."""
    path = folder / "dir" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(folder / "dir")


@pytest.mark.parametrize("name", READABLE)
def test_a_folders_file_is_read_whatever_it_is_in(tmp_path, name: str) -> None:
    """The rows of JSON lines, text for text, which hold every kind of line break."""
    rows = gsm8k.load("zeroshot", put(tmp_path, name, READABLE[name]()))["test"]
    assert [(row["question"], row["index"]) for row in rows] == [(f"What is {n}?", n) for n in range(3)]
    assert not rows.quarantined and rows[0]["solution"] == TEXT
    assert rows.file.startswith(str(tmp_path / "dir" / name))


@pytest.mark.parametrize("name", UNREAD)
def test_what_cannot_be_read_is_named_with_the_missing_step(tmp_path, name: str) -> None:
    """Neither the caches nor the hub stand in for it."""
    content, step = UNREAD[name]
    code = "file-content" if name.startswith("test.") else "data-missing"  # one of the file's own name is meant
    with refused(code, None, "task.data_dir=", name, step):
        gsm8k.load("zeroshot", put(tmp_path, name, content))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(tmp_path, name: str) -> None:
    """Torn, or not what its name says."""
    with refused("file-content", None, name):
        gsm8k.load("zeroshot", put(tmp_path, name, BROKEN[name]))


def test_parts_of_a_parquet_file_belong_together(tmp_path) -> None:
    """All of them are read in order; one that is missing is missed."""
    folder = put(tmp_path, "test-00001-of-00002.parquet", parquet(ROWS[2:]))
    with refused("file-content", None, "1 of the 2", "test-00001-of-00002.parquet"):
        gsm8k.load("zeroshot", folder)
    put(tmp_path, "test-00000-of-00002.parquet", parquet(ROWS[:2]))
    assert [row["question"][-2] for row in gsm8k.load("zeroshot", folder)["test"]] == ["0", "1", "2"]


def test_json_lines_come_first(tmp_path) -> None:
    """A file that older versions read, in whatever folder of the places, is read where others lie in front of it."""
    put(tmp_path, "test.parquet", parquet([{"question": "new", "answer": "#### 1"}]))
    folder = put(tmp_path, "gsm8k/test.jsonl", RAW)
    assert gsm8k.load("zeroshot", folder)["test"][0]["question"] == "What is 0?"


def test_the_tasks_own_folder_comes_before_archives_above_it(tmp_path) -> None:
    """They may be other benchmarks', whose files have the same names."""
    put(tmp_path, "other.zip", zipped(test_dot_jsonl=b'{"question": "theirs", "answer": "#### 1"}'))
    folder = put(tmp_path, "gsm8k/test.parquet", parquet(ROWS))
    assert gsm8k.load("zeroshot", folder)["test"][0]["question"] == "What is 0?"


@pytest.mark.parametrize("name", ["test.jsonl.gz", "main/test-00000-of-00001.parquet", "gsm8k.zip"])
def test_a_check_counts_what_a_run_reads(tmp_path, name: str) -> None:
    """Rows and hash of the file at hand, whatever it is in; one that is not read is a fault with its step."""
    file = gsm8k.data_file("test")
    folder = Path(put(tmp_path, name, READABLE[name]()))
    report = check_file(file, folder, {}, partial_data=True)
    assert (report.rows, report.path, report.good) == (3, folder / name, True) and len(report.sha256) == 64
    (folder / name).unlink()
    (folder / "test.csv").write_bytes(b"x")
    report = check_file(file, folder, {})
    assert not report.good and "write its rows as JSON lines" in report.faults[0]


def test_a_folder_without_the_benchmark_is_refused(tmp_path, monkeypatch) -> None:
    """Also where a cache has all of it; one of several subsets may lie there."""
    snapshot = tmp_path / "hub" / "datasets--zai-org--LongBench" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    line = json.dumps(long_row()).encode()
    (snapshot / "data.zip").write_bytes(zipped(data__qasper_dot_jsonl=line, data__multifieldqa_en_dot_jsonl=line))
    folder = put(tmp_path, "notes.txt", b"x")
    cfg = {"name": "longbench", "subsets": ["qasper", "multifieldqa_en"], "data_dir": folder}
    with refused("data-missing", None, "qasper", "task.data_dir=", "qasper.jsonl"):
        check_task(cfg, limit=None, seed=0)
    put(tmp_path, "qasper.jsonl.gz", gzip.compress(line))
    check_task(cfg, limit=None, seed=0)
    assert longbench.load("qasper", folder)["test"].file.endswith("qasper.jsonl.gz")
    with refused("data-missing", None, "task.data_dir=", "test.jsonl"):
        check_task({"name": "gsm8k", "form": "zeroshot", "data_dir": folder}, limit=None, seed=0)


CUSTOM = [{"context": TEXT, "question": f"Which {n}?", "answers": ["it"]} for n in range(2)]
CUSTOM_RAW = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in CUSTOM)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.json", json.dumps(CUSTOM).encode()),
        ("rows.json", json.dumps(CUSTOM, indent=2).encode()),
        ("rows.json", CUSTOM_RAW),
        ("rows.txt", CUSTOM_RAW),
        ("rows.JSONL", CUSTOM_RAW),
        ("rows.parquet", parquet(CUSTOM)),
        ("rows.jsonl.gz", gzip.compress(CUSTOM_RAW)),
        ("rows.zip", zipped(rows_dot_jsonl=CUSTOM_RAW, README_dot_md=b"x")),
    ],
)
def test_a_file_of_the_users_own_is_read_whatever_it_is_in(tmp_path, model, name: str, content: bytes) -> None:
    """The prompts and ids of the same rows as JSON lines."""

    def load(path):
        return load_task({"name": "custom", "file": path}, model, limit=None, seed=0)

    (tmp_path / "plain.jsonl").write_bytes(CUSTOM_RAW)
    plain, task = load(str(tmp_path / "plain.jsonl")), load(f"{put(tmp_path, name, content)}/{name}")
    assert task.fingerprint == plain.fingerprint and task.requests == plain.requests and not task.quarantined


@pytest.mark.parametrize("content", [json.dumps(CUSTOM[0]).encode(), json.dumps(CUSTOM[0], indent=1).encode()])
def test_one_object_is_one_row_of_the_users(tmp_path, model, content: bytes) -> None:
    """On a line or on several."""
    file = f"{put(tmp_path, 'row.json', content)}/row.json"
    (request,) = load_task({"name": "custom", "file": file}, model, limit=None, seed=0).requests
    assert request.sample_id == "all/0"


def test_an_archive_with_several_files_is_a_question(tmp_path) -> None:
    """Which one is meant is not guessed; one without any is named."""
    path = tmp_path / "a.zip"
    path.write_bytes(zipped(a_dot_jsonl=RAW, b_dot_json=LISTED))
    with refused("file-content", None, "a.zip", "2 files", "(a.jsonl, b.json)"):
        source_of(path)
    path.write_bytes(zipped(README_dot_md=b"x"))
    with refused("file-content", "task.file", "a.zip"):
        check_task({"name": "custom", "file": str(path)}, limit=None, seed=0)


def test_values_that_json_has_no_word_for_are_named(tmp_path) -> None:
    """A date or bytes in a table."""
    path = tmp_path / "x.parquet"
    path.write_bytes(parquet([{"a": b"\xff"}]))
    with refused("file-content", None, "x.parquet", "bytes"):
        list(lines_of(path))


ESSAY = [{"text": f"An essay{TEXT}"}, {"text": "begins here."}]
ESSAY_RAW = b"".join(json.dumps(part, ensure_ascii=False).encode() + b"\n" for part in ESSAY)
ESSAYS = {
    "PaulGrahamEssays.jsonl": ESSAY_RAW,
    "paul_graham_essays.jsonl": ESSAY_RAW,
    "PaulGrahamEssays.json": json.dumps({"text": f"An essay{TEXT} begins here."}, indent=1).encode(),
    "ruler/PaulGrahamEssays.json": json.dumps(ESSAY).encode(),
    "data/PaulGrahamEssays.json.gz": gzip.compress(json.dumps(ESSAY).encode()),
    "PaulGrahamEssays.parquet": parquet(ESSAY),
    "needle/essays.zip": zipped(x__PaulGrahamEssays_dot_json=json.dumps(ESSAY[::1]).encode()),
}


@pytest.mark.parametrize("name", ESSAYS)
def test_essays_are_read_whatever_they_are_in(tmp_path, name: str) -> None:
    """All their words, by the file's name."""
    found = words.essays(put(tmp_path, name, ESSAYS[name]))
    assert found.words == tuple(f"An essay{TEXT} begins here.".split())
    assert found.origin.startswith(name.rpartition("/")[2])


@pytest.mark.parametrize("task", [{"name": "ruler"}, {"name": "needle"}, {"name": "instructions"}])
@pytest.mark.parametrize(
    ("name", "said"),
    [("notes.txt", "leave task.data_dir out"), ("PaulGrahamEssays.txt", "PaulGrahamEssays.txt: write its rows as")],
)
def test_a_folder_that_no_essay_comes_from_is_refused(tmp_path, task: dict, name: str, said: str) -> None:
    """Text of kvbench's own does not stand in for what the user named."""
    folder = put(tmp_path, name, b"x")
    with refused("data-missing", None, "task.data_dir=", said):
        check_task(task | {"data_dir": folder}, limit=None, seed=0)


def test_questions_may_be_packed_and_essays_may_lack_beside_them(tmp_path) -> None:
    """A folder whose questions are read is used; what lies there of them in another format is named."""
    data = {"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"text": "a"}]}]}]}]}
    folder = put(tmp_path, "dev-v2.0.json.gz", gzip.compress(json.dumps(data).encode()))
    check_task({"name": "ruler", "tasks": ["qa_1"], "data_dir": folder}, limit=None, seed=0)
    put(tmp_path, "hotpotqa.csv", b"x")
    with refused("data-missing", None, "qa_2", "hotpotqa.csv"):
        check_task({"name": "ruler", "tasks": ["qa_2"], "data_dir": folder}, limit=None, seed=0)
