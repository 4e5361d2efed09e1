"""Folders that are not what their names say: runs of others, and data in other formats."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hostile.case import Case, names
from hostile.runs import AGAIN, SMALL, copied, reading


def held_lines(folder: Path) -> set[tuple[Path, bytes]]:
    """Every line of samples below a folder of results, with the folder of its run; links are not followed."""
    found: set[tuple[Path, bytes]] = set()
    for path in folder.rglob("samples*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            lines = (lzma.decompress(content) if path.suffix == ".xz" else content).split(b"\n")
            found |= {(folder.joinpath(*path.relative_to(folder).parts[:4]), line) for line in lines if line}
    return found


def foreign(draw: random.Random, folder: Path, base: Path) -> Case:
    """A run's folder that holds another run, all of it or in part: no line of anybody's samples is lost."""
    run = copied(base, folder)
    other = next(folder.glob("results/ruler/*/full/*"))
    kind = draw.choice(("moved", "link", "copied", "restored", "part", "worker", "lines", "samples", "packed"))
    again = list(AGAIN)
    if kind in ("moved", "link", "copied"):
        shutil.rmtree(run)
        if kind == "link":
            run.symlink_to(os.path.relpath(other, run.parent))
        else:
            (shutil.move if kind == "moved" else shutil.copytree)(str(other), run)
        if draw.random() < 0.3:
            again += ["resume=false"]
    elif kind == "restored":  # samples of its own, and the record of another
        shutil.copy(other / "run.json", run / "run.json")
        if draw.random() < 0.5:
            (run / "samples.jsonl").rename(run / "samples.jsonl.bak")
            shutil.copy(other / "samples.jsonl", run / "samples.jsonl")
    elif kind in ("part", "worker"):
        name = "1-of-2" if kind == "part" else "worker.0123abcd"
        shutil.copytree(other, run / "shards" / name)
        if draw.random() < 0.5:
            for name in ("run.json", "samples.jsonl"):
                (run / name).unlink()
    else:
        mine, theirs = ((one / "samples.jsonl").read_bytes().splitlines(keepends=True) for one in (run, other))
        mixed = [*mine[: draw.randrange(len(mine) + 1)], *theirs, *([theirs[0][:-9]] if draw.random() < 0.5 else [])]
        draw.shuffle(mixed)
        content = b"".join(theirs if kind == "samples" else mixed)
        (run / "samples.jsonl").write_bytes(content)
        if kind == "packed":
            (run / "samples.jsonl").unlink()
            half = content.index(b"\n") + 1
            packed = draw.choice(
                (lzma.compress(content), lzma.compress(content[:half]) + lzma.compress(content[half:]))
            )
            (run / "samples.jsonl.xz").write_bytes(packed)
    before = held_lines(folder / "results")
    where = run.relative_to(folder).as_posix()
    commands = [again, *draw.sample([AGAIN, ["rerun", where], *reading(draw, folder, run)], k=2)]

    def check(ended: list[tuple[str, str]]) -> list[str]:
        lost = before - held_lines(folder / "results")
        return [f"{len(lost)} lines of samples are lost, such as {min(lost)[1][:80]!r}"] if lost else []

    return Case(f"{kind}{', from the beginning' if again != AGAIN else ''}", commands, check=check)


TEXT = "one\u2028two\u2029three\x85four\x0bfive\x1csix"  # line breaks to Python, and none in JSON lines
NUM_ROWS = 3
CUSTOM = [{"context": TEXT, "question": f"Which {at}?", "answers": ["it"]} for at in range(NUM_ROWS)]
GSM8K = [{"question": f"{TEXT} {at}?", "answer": f"{TEXT} #### {at}"} for at in range(NUM_ROWS)]
ESSAY = [{"text": f"An essay {TEXT} about nothing. " * 40}, {"text": "It ends here. " * 300}]
# Of each: its rows, the name without an ending, and the words of a command that reads the folder `there`.
TASKS: dict[str, tuple[list[dict], str, list[str]]] = {
    "custom": (CUSTOM, "rows", ["method=snapkv", "task=custom", *SMALL]),
    "gsm8k": (GSM8K, "test", ["method=snapkv", "task=gsm8k", "task.form=zeroshot", "task.data_dir=there", *SMALL]),
    "ruler": (
        ESSAY,
        "PaulGrahamEssays",
        ["method=snapkv", "task=ruler", "task.data_dir=there", "task.lengths=[600]", "task.items=1"]
        + ["task.tasks=[niah_single_2]", "task.answer_prefix=false", *SMALL],
    ),
}


def _json_lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _listed(rows: list[dict]) -> bytes:
    return json.dumps(rows, ensure_ascii=False, indent=1).encode()


def _parquet(rows: list[dict]) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), sink := pa.BufferOutputStream())
    return sink.getvalue().to_pybytes()


def _zipped(name: str) -> Callable[[list[dict]], bytes]:
    def write(rows: list[dict]) -> bytes:
        with zipfile.ZipFile(content := io.BytesIO(), "w") as archive:
            archive.writestr(name.replace("STEM", _stem_of(rows)), _json_lines(rows))
        return content.getvalue()

    return write


def _stem_of(rows: list[dict]) -> str:
    return next(stem for held, stem, _ in TASKS.values() if held is rows)


# Formats of `datasets` and of the hub, and some that nobody reads.
FORMATS: dict[str, Callable[[list[dict]], bytes]] = {
    ".jsonl": _json_lines,
    ".json": _listed,
    ".parquet": _parquet,
    ".jsonl.gz": lambda rows: gzip.compress(_json_lines(rows)),
    ".json.gz": lambda rows: gzip.compress(_listed(rows)),
    ".jsonl.bz2": lambda rows: bz2.compress(_json_lines(rows)),
    ".jsonl.xz": lambda rows: lzma.compress(_json_lines(rows)) + lzma.compress(b"\n"),
    ".zip": _zipped("a/STEM.jsonl"),
    ".up.zip": _zipped("../../outside/STEM.jsonl"),
    ".csv": lambda rows: b"question,answer\na,b\n",
    ".txt": lambda rows: b"some text",
    ".tar.gz": lambda rows: gzip.compress(b"tar"),
    ".7z": lambda rows: b"7z\xbc\xaf",
    ".jsonl.zst": lambda rows: b"(\xb5/\xfd",
    ".bomb.jsonl.gz": lambda rows: gzip.compress(b" " * (1 << 28), 1),
}


def formats(draw: random.Random, folder: Path, base: Path) -> Case:
    """Data in whatever format: the run is that of plain JSON lines, or the file at hand is named."""
    task = draw.choice(sorted(TASKS))
    rows, stem, words = TASKS[task]
    ending = draw.choice(sorted(FORMATS))
    content, torn = FORMATS[ending](rows), draw.random() < 0.2
    name = f"{stem}{ending.replace('.up', '').replace('.bomb', '')}"
    inner = draw.choice(("", "data/", f"{task}/")) if task != "custom" else ""
    path = folder / "there" / inner / name
    path.parent.mkdir(parents=True)
    path.write_bytes(content[: len(content) * 2 // 3] if torn else content)
    (folder / "plain").mkdir()
    (folder / "plain" / f"{stem}.jsonl").write_bytes(_json_lines(rows))
    words = [*words, *([f"task.file=there/{name}"] if task == "custom" else []), "reference=none"]
    plain = [word.replace("there", "plain").replace(name, f"{stem}.jsonl") for word in words]

    def check(ended: list[tuple[str, str]]) -> list[str]:
        (code, text), (plainly, _) = ended
        faults = [] if plainly == "0" else ["JSON lines are not read"]
        if code == "0" and not torn and len(found := list(_asked(folder))) != 1:
            faults.append(f"other questions are asked than those of JSON lines: {found}")
        if code == "0" and torn and not names(text, name):
            faults.append(f"a torn {name} is taken without a word")
        if code != "0" and not names(text, name):
            faults.append(f"{inner}{name} is there and not named: {text[-500:]}")
        return faults

    return Case(f"{task}: {'torn ' * torn}{inner}{stem}{ending}", [words, plain], check=check)


def _asked(folder: Path) -> Iterator[str]:
    """The different questions that the runs asked, by the hash of their prompts."""
    records = (json.loads(path.read_text()) for path in folder.glob("results/*/*/*/*/run.json"))
    yield from {json.dumps(record["identity"]["task"]["fingerprint"]) for record in records}
