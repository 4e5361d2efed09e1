"""For a process that may mount a disk: a sweep whose results lie on a small disk of its own, which is full.

TARGET/facts.jsonl gets one line of JSON per command: what was free, its exit code, what it said, and what lies in the
results then. The same sweep is first run beside the disk, in TARGET/whole; in the end what the disk holds is copied to
TARGET/cut.
"""

import contextlib
import io
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

DISK_BYTES, PAGE_BYTES = 4 << 20, 4096
SWEEP = "-m method=snapkv model=random model.preset=tiny backend=torch task.length=400 task.items=2 batch_size=2"
SWEEP += " task.kinds=[kv,recall] protocol.max_new_tokens=4"
READERS = {
    "compare": ["out=compare.csv"],
    "pareto": ["out=pareto", "axes=resident", "kinds=[png]"],
    "report": ["out=report.html", "axes=resident"],
}


def leave_free(disk: Path, free_bytes: int) -> None:
    """Fills the disk up with one file, but for so many bytes."""
    (disk / "filler").unlink(missing_ok=True)
    with open(disk / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(disk).free - free_bytes))


def command(words: list[str]) -> dict:
    """One kvbench command in this process: its exit code and what it said on stderr."""
    from kvbench.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    return {"code": code, "said": said.getvalue()}


def journals(results: Path) -> dict:
    """The finished samples by journal, and files that nobody should find."""
    found = {str(path): path.read_bytes() for path in results.rglob("samples.jsonl")}
    whole = all(json.loads(line) for content in found.values() for line in content.splitlines())
    torn = [path for path, content in found.items() if content and not content.endswith(b"}\n")]
    samples = sum(content.count(b"\n") for content in found.values())
    return {"samples": samples, "torn": torn, "whole": whole, "left": [str(path) for path in results.rglob("*.tmp")]}


def read(results: Path, name: str) -> dict:
    """A command that reads results and writes beside them."""
    settings = [word.replace("out=", f"out={results}/") for word in READERS[name]]
    return command([name, f"results_dir={results}", "resamples=100", *settings])


def written(results: Path) -> dict[str, bytes]:
    """What the readers have written."""
    found = [results / "compare.csv", results / "report.html", *(results / "pareto").rglob("*")]
    return {str(path): path.read_bytes() for path in found}


def main(target: Path) -> None:
    """Starts a sweep with one page more each time until a run's picture does not fit, then with room; reads it with
    none."""
    with open(target / "facts.jsonl", "w") as facts:

        def note(**found: object) -> None:
            facts.write(json.dumps(found) + "\n")

        note(**command([*SWEEP.split(), f"results_dir={target / 'whole'}"]))
        disk = target / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True)
        results = disk / "results"
        found: dict = {"said": ""}
        # Sizes depend on the lengths of paths: only by single pages does no file's turn get skipped.
        rooms = (count * PAGE_BYTES for count in range(30) if "result.png" not in found["said"])
        for free in itertools.chain(rooms, [DISK_BYTES]):
            leave_free(disk, free)
            found = command([*SWEEP.split(), f"results_dir={results}"])
            note(free=free, **found, **journals(results))
        for name in READERS:
            assert read(results, name)["code"] == 0
        good = written(results)
        for free in (0, 3 * PAGE_BYTES):  # nothing can be written; a small table can, and a picture cannot
            leave_free(disk, free)
            for name in READERS:
                found = read(results, name)
                note(free=free, reader=name, same=written(results) == good, **found, **journals(results))
        shutil.copytree(results, target / "cut")
