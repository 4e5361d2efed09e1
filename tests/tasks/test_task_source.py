"""Reading rows: line breaks, broken rows, places to look."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from longbench_rows import row, write
from refusals import refused

from kvbench.tasks import files, longbench
from kvbench.tasks.rows import Source


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Points the caches at an empty folder and the hub at nothing."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    """Texts may hold other Unicode line separators, raw in the file."""
    text = "one\u2028two\u0085three\x0bfour"
    write(tmp_path / "qasper.jsonl", row(context=text), row(context="next"))
    rows = longbench.load("qasper", str(tmp_path))["test"]
    assert [item["context"] for item in rows] == [text, "next"]


def test_broken_rows_are_set_aside_by_file_and_line(tmp_path: Path) -> None:
    """Every kind of broken row is named, and the good ones keep their position in the file. A byte-order mark before
    the first row is read over, inside of the file it is a fault."""
    mark, good = b"\xef\xbb\xbf", json.dumps(row()).encode()
    path = write(
        tmp_path / "qasper.jsonl",
        mark + good,
        b"",
        b"not json",
        row(answers=[]),
        b"\xff\xfe{}",
        b"[1, 2]",
        row(context=7),
        {"context": "x", "answers": ["y"]},
        row(length="long"),
        row(),
        good[: len(good) // 2],
        mark + good,
    )
    rows = longbench.load("qasper", str(tmp_path))["test"]
    assert [item["index"] for item in rows] == [0, 9]
    assert {item["file"] for item in rows.quarantined} == {str(path)}
    reasons = {item["line"]: item["reason"] for item in rows.quarantined}
    wanted = {3: "not JSON", 4: "answers", 5: "UTF-8", 6: "JSON object", 7: "context", 8: "input", 9: "length"}
    wanted |= {11: "cut off", 12: "not JSON"}
    assert list(reasons) == list(wanted) and all(words in reasons[line] for line, words in wanted.items())


def test_copies_are_named_and_kept(tmp_path: Path) -> None:
    """The same row, and another row of the same id, are named by line; official scores count them, so they stay."""
    other = row(context="another")
    path = write(
        tmp_path / "qasper.jsonl", row() | {"_id": "a"}, other, row() | {"_id": "a"}, other | {"_id": "a"}, other
    )
    rows = longbench.load("qasper", str(tmp_path))["test"]
    assert len(rows) == 5 and not rows.quarantined
    assert {item["file"] for item in rows.copies} == {str(path)}
    found = [(item["line"], item["reason"]) for item in rows.copies]
    expected = [(3, "the same row as in line 1"), (4, "the same _id as in line 1"), (5, "the same row as in line 2")]
    assert found == expected


@pytest.mark.parametrize(("lines", "value"), [((b"{", b"{"), "line 1: not JSON"), ((b"", b" "), "holds no rows")])
def test_a_file_without_a_good_row_is_an_error(tmp_path: Path, lines, value: str) -> None:
    """It says which file, how many rows and why, instead of giving an empty subset."""
    write(tmp_path / "qasper.jsonl", *lines)
    with refused("file-content", None, "qasper.jsonl", value):
        longbench.load("qasper", str(tmp_path))


def test_subsets_need_their_own_fields() -> None:
    """trec needs its classes, LongBench-E its lengths, passage retrieval a numbered answer. A row says of which data
    set it is; LongBench-E's may name the plain subset. One copy calls the question `question`."""
    other = {key: value for key, value in row().items() if key != "input"} | {"question": "Where?"}
    assert longbench.check_row(other, "qasper")["input"] == "Where?"
    assert longbench.check_row(row(length=None), "qasper")["length"] is None
    for name in ("qasper", "qasper_e"):
        assert longbench.check_row(row(dataset=name, length=3), "qasper_e")["context"]
    for subset, changed, message in (
        ("trec", {}, "all_classes"),
        ("qasper_e", {"length": None}, "length is missing"),
        ("passage_retrieval_en", {"answers": ["the Paragraph x"]}, "Paragraph 1"),
        ("qasper", {"dataset": "trec"}, "^field dataset is 'trec': this row belongs to another subset than qasper"),
    ):
        with pytest.raises(ValueError, match=message):
            longbench.check_row(row(**changed), subset)


def test_missing_data_says_where_and_how(tmp_path: Path) -> None:
    """The error lists the places, the command that fetches, and a task that needs no data."""
    with refused("data-missing") as caught:
        longbench.load("trec", str(tmp_path))
    text = str(caught.value)
    for part in (
        f"task.data_dir={tmp_path} (no trec.jsonl",
        f"hub cache {tmp_path / 'hub'}",
        f"datasets library {tmp_path / 'datasets'}",
        "HF_HUB_OFFLINE is set",
        "kvbench data task=longbench task.subsets=[trec] to=longbench",
        "data.zip of THUDM/LongBench",
        "task=longctx",
    ):
        assert part in text


def test_one_folder_holds_several_tasks(tmp_path: Path) -> None:
    """`task.data_dir` may be the folder above a task's own, which comes after what lies in it directly."""
    (tmp_path / "longbench").mkdir()
    write(tmp_path / "longbench" / "qasper.jsonl", row(context="below"))
    assert longbench.load("qasper", str(tmp_path))["test"][0]["context"] == "below"
    write(tmp_path / "qasper.jsonl", row(context="here"))
    assert longbench.load("qasper", str(tmp_path))["test"][0]["context"] == "here"


def test_a_wrong_data_dir_is_an_error(tmp_path: Path) -> None:
    """A folder that does not exist is the user's mistake: nothing else is searched."""
    with refused("file-missing", "task.data_dir", "nowhere"):
        longbench.load("trec", str(tmp_path / "nowhere"))


def test_rows_from_the_cached_archive(tmp_path: Path) -> None:
    """The official archive in the hub cache is read where it lies, behind data_dir in order."""
    snapshot = tmp_path / "hub" / "datasets--zai-org--LongBench" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    with zipfile.ZipFile(snapshot / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", json.dumps(row(context="from the archive")) + "\nbroken\n")
    rows = longbench.load("qasper")["test"]
    assert rows[0]["context"] == "from the archive"
    assert rows.quarantined[0]["file"].endswith("data.zip:data/qasper.jsonl")
    (tmp_path / "own").mkdir()
    write(tmp_path / "own" / "qasper.jsonl", row(context="own"))
    assert longbench.load("qasper", str(tmp_path / "own"))["test"][0]["context"] == "own"
    with refused("data-missing", None, "lcc"):
        longbench.load("lcc")


def test_the_first_file_of_the_hub_that_holds_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that fails and a file without the rows go on to the next; none left says why; our fault is raised."""
    import huggingface_hub
    from huggingface_hub import constants

    from kvbench.models import files as model_files

    def download(repo: str, name: str, repo_type: str) -> str:
        if repo == "gone":
            raise OSError("no such repository\nand more")
        return str(tmp_path / repo / name)

    def read(path: Path, name: str) -> Source | None:
        if path.parent.name == "bug":
            raise KeyError("ours")
        return Source(path.parent.name, []) if path.parent.name == "good" else None

    def on_hub(*repos: str) -> Source | str:
        file = replace(longbench.data_file("trec"), hub=tuple((repo, "a") for repo in repos))
        return files._on_hub(file, None)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(files, "hub_source", read)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_files, "hub_reachable", lambda: True)
    assert on_hub("gone", "other", "good", "bug").name == "good"
    assert on_hub("gone", "other") == "the hub (gone/a: no such repository; other/a: it has no trec.jsonl)"
    with pytest.raises(KeyError):
        on_hub("bug")
    monkeypatch.setattr(model_files, "hub_reachable", lambda: False)
    assert on_hub("good") == "the hub (it cannot be reached from here)"


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    """A zip file that is none is named, with what to do."""
    path = tmp_path / "data.zip"
    path.write_bytes(b"PK nonsense")
    with refused("file-content", None, "data.zip"):
        files.hub_source(path, "qasper")


def test_rows_from_the_datasets_cache(tmp_path: Path) -> None:
    """A copy that the datasets library prepared is found whatever its owner, by subset."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    folder = tmp_path / "datasets" / "Someone___long_bench" / "qasper" / "1.0.0" / "hash"
    folder.mkdir(parents=True)
    features = datasets.Dataset.from_list([row()]).features
    with ArrowWriter(features=features, path=str(folder / "long_bench-test.arrow")) as writer:
        writer.write(row(context="from arrow"))
        writer.finalize()
    rows = longbench.load("qasper")["test"]
    assert rows[0]["context"] == "from arrow"


def test_length_buckets() -> None:
    """LongBench-E's borders are at 4,000 and 8,000 words."""
    assert [longbench.length_bucket(words) for words in (0, 3999)] == ["0-4k"] * 2
    assert [longbench.length_bucket(words) for words in (4000, 7999, 8000)] == ["4-8k", "4-8k", "8k+"]
