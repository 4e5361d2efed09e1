"""Reading rows: line breaks, broken rows, places to look."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from longbench_rows import row, write

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
    """Every kind of broken row is named, and the good ones keep their position in the file."""
    good = json.dumps(row()).encode()
    path = write(
        tmp_path / "qasper.jsonl",
        row(),
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
    )
    rows = longbench.load("qasper", str(tmp_path))["test"]
    assert [item["index"] for item in rows] == [0, 9]
    assert {item["file"] for item in rows.quarantined} == {str(path)}
    reasons = {item["line"]: item["reason"] for item in rows.quarantined}
    assert sorted(reasons) == [3, 4, 5, 6, 7, 8, 9, 11]
    for line, words in {
        3: "not JSON",
        4: "answers",
        5: "UTF-8",
        6: "JSON object",
        7: "context",
        8: "input",
        9: "length",
        11: "cut off",
    }.items():
        assert words in reasons[line]


def test_a_byte_order_mark_costs_no_row(tmp_path: Path) -> None:
    """The mark that some editors put before the first row is read over; inside of the file it stays a fault."""
    mark, line = b"\xef\xbb\xbf", json.dumps(row()).encode()
    write(tmp_path / "qasper.jsonl", mark + line, row(context="other"), mark + line)
    rows = longbench.load("qasper", str(tmp_path))["test"]
    assert [item["index"] for item in rows] == [0, 1]
    assert [item["line"] for item in rows.quarantined] == [3]


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


def test_a_row_of_another_subset_is_set_aside(tmp_path: Path) -> None:
    """A row says which data set it is of; LongBench-E's rows bear the name of the plain subset, or their own."""
    write(tmp_path / "qasper.jsonl", row(dataset="qasper"), row(dataset="trec"))
    rows = longbench.load("qasper", str(tmp_path))["test"]
    assert len(rows) == 1
    assert rows.quarantined[0]["reason"] == "field dataset is 'trec': this row belongs to another subset than qasper"
    for name in ("qasper", "qasper_e"):
        assert longbench.check_row(row(dataset=name, length=3), "qasper_e")["context"]


def test_all_rows_broken_is_an_error(tmp_path: Path) -> None:
    """A file without one good row fails and says which file, how many rows and why."""
    write(tmp_path / "qasper.jsonl", b"{", b"{")
    with pytest.raises(ValueError, match=r"all 2 rows of .*qasper\.jsonl are broken; the first, line 1: not JSON"):
        longbench.load("qasper", str(tmp_path))


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    """A file without any row fails instead of giving an empty subset."""
    write(tmp_path / "qasper.jsonl", b"", b" ")
    with pytest.raises(ValueError, match="holds no rows"):
        longbench.load("qasper", str(tmp_path))


def test_the_hub_copys_field_name_is_accepted(tmp_path: Path) -> None:
    """One copy of the data calls the question `question`."""
    other = row()
    other["question"] = other.pop("input") + "!"
    write(tmp_path / "qasper.jsonl", other)
    assert longbench.load("qasper", str(tmp_path))["test"][0]["input"] == "Where is it?!"


def test_subsets_need_their_own_fields() -> None:
    """trec needs its classes, LongBench-E its lengths, passage retrieval a numbered answer."""
    with pytest.raises(ValueError, match="all_classes"):
        longbench.check_row(row(), "trec")
    with pytest.raises(ValueError, match="length is missing"):
        longbench.check_row(row(length=None), "qasper_e")
    with pytest.raises(ValueError, match="Paragraph 1"):
        longbench.check_row(row(answers=["the Paragraph x"]), "passage_retrieval_en")
    assert longbench.check_row(row(length=None), "qasper")["length"] is None


def test_missing_data_says_where_and_how(tmp_path: Path) -> None:
    """The error lists the places, the command that fetches, and a task that needs no data."""
    with pytest.raises(files.MissingDataError) as caught:
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


def test_a_wrong_data_dir_is_an_error(tmp_path: Path) -> None:
    """A folder that does not exist is the user's mistake: nothing else is searched."""
    with pytest.raises(ValueError, match=r"task\.data_dir=.*nowhere is not a folder"):
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
    with pytest.raises(files.MissingDataError):
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
    with pytest.raises(ValueError, match="delete it and fetch it again"):
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


@pytest.mark.parametrize(
    ("words", "bucket"), [(0, "0-4k"), (3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+")]
)
def test_length_buckets(words: int, bucket: str) -> None:
    """LongBench-E's borders are at 4,000 and 8,000 words."""
    assert longbench.length_bucket(words) == bucket
