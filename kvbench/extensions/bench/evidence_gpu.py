"""Gathers the evidence of a GPU, stage by stage: `make gpu`, or `python -m kvbench.extensions.bench.evidence_gpu`.

Every stage is a separate process with a time limit. A stage that ended well is not repeated; one that failed is tried
once more in a later call. A call ends before its minutes are over, so that it fits where a machine is lent by the call;
the next one goes on, also on another machine of the same kind. Everything lies in one folder, results/gpu/<device>/:
the output of each stage, the documents of the benches, and `state.json`. With --archive it comes as one file too,
packed after every stage. A call that is killed loses the cell under way, and leaves no process. Needs torch, triton and
transformers alone.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from kvbench.extensions.bench.evidence_stages import STAGES, Stage
from kvbench.kernels.bench import machine
from kvbench.kernels.bench.bench import REFUSED, write
from kvbench.kernels.dispatch import gpu_backend

TRIES = 2  # of a stage, before it is given up
LEAST_SHARE = 0.5  # of a stage's limit, or all that it took before, must be left of a call, or it is not begun
CACHE_BYTES = 40 << 20  # of compiled kernels that go into the archive
# Runs a command next to a shell that waits for the collector to let go of a pipe, as it does however it ends, and then
# ends the command's whole process group: what the command has started, too.
GUARDED = 'exec 3<&0 </dev/null; (read -r _ <&3; kill -9 0) & exec "$@" 3<&-'


def words_of(stage: Stage, folder: Path, dry: bool) -> list[str]:
    """A stage's command line."""
    module, *words = shlex.split(stage.dry if dry else stage.module)
    return [sys.executable, "-m", module, *(word.format(out=folder / f"{stage.name}.json") for word in words)]


def describe(device: str) -> dict:
    """The machine and its libraries, for the record."""
    description = machine.describe(device, gpu_backend(device))
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        description |= {"memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count}
        description["l2_bytes"] = getattr(properties, "L2_cache_size", None)
    return description


def _commit() -> str:
    """Commit that is measured: KVBENCH_COMMIT, for a copy without history, else that of git."""
    if commit := os.environ.get("KVBENCH_COMMIT"):
        return commit
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def read_state(folder: Path) -> dict[str, dict]:
    """The outcome of each stage so far."""
    path = folder / "state.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def left_over(stages: tuple[Stage, ...], state: dict[str, dict]) -> list[Stage]:
    """Remaining stages, in order: neither complete nor given up.

    A stage whose variants could not be timed is complete: a repetition would give the same.
    """
    known = {stage.name: state.get(stage.name, {}) for stage in stages}
    return [
        stage
        for stage in stages
        if known[stage.name].get("rc") not in (0, REFUSED) and known[stage.name].get("tries", 0) < TRIES
    ]


def run_stage(stage: Stage, folder: Path, limit_s: float, dry: bool) -> int:
    """Runs a stage and stores its output; returns its exit status, 124 when its time ran out.

    None of its processes is left, however it or this one ends.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ({"TRITON_INTERPRET": "1"} if dry else {})
    environment.setdefault("TRITON_CACHE_DIR", str((folder / "triton").absolute()))
    command = words_of(stage, folder, dry)
    with open(folder / f"{stage.name}.txt", "w", encoding="utf-8") as log:
        print(" ".join(command[1:]), file=log, flush=True)
        guarded = ["sh", "-c", GUARDED, "sh", *command]
        with subprocess.Popen(
            guarded,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return 124
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _without_places(log: Path) -> str:
    """Output of a stage with paths relative to the repository's root and the libraries' folder.

    So it discloses no paths of the machine.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    for folder in (os.getcwd(), *map(sysconfig.get_path, ("purelib", "platlib", "stdlib"))):
        text = text.replace(f"{folder}{os.sep}", "")
    log.write_text(text, encoding="utf-8")
    return text


def go_on(
    folder: Path,
    seconds: float,
    stages: tuple[Stage, ...] = STAGES,
    dry: bool = False,
    keep: Callable[[], object] = lambda: None,
) -> list[Stage]:
    """Run stages until all are done or the time is over, with `keep` called after each; returns the remaining ones.

    `state.json` in the folder records the state of each. A stage that the end of a call cut short is resumed in the
    next one, if its bench writes cells.
    """
    begin = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    state = read_state(folder)
    for stage in left_over(stages, state):
        left_s = seconds - (time.monotonic() - begin)
        before = state.get(stage.name, {})
        if left_s < max(LEAST_SHARE * stage.limit_s, before.get("seconds", 0.0) if before.get("rc") != 124 else 0.0):
            break
        limit_s, began = min(stage.limit_s, left_s), time.monotonic()
        rc = run_stage(stage, folder, limit_s, dry)
        # A stage that the end of the call cut short has not failed.
        was_cut = rc == 124 and limit_s < stage.limit_s
        took_s, tries = round(time.monotonic() - began, 1), before.get("tries", 0) + (not was_cut)
        state[stage.name] = {"rc": rc, "seconds": took_s, "tries": tries, "commit": _commit()}
        write(state, folder / "state.json")
        last = _without_places(folder / f"{stage.name}.txt").strip().splitlines()[-1:]
        print(f"{stage.name:20} status {rc:3} {took_s:7.1f} s  {''.join(last)[:120]}", flush=True)
        keep()
        if was_cut:
            break
    return left_over(stages, state)


def unpack(archive: Path, results: Path) -> None:
    """Unpack the archive of an earlier call on a new machine."""
    with tarfile.open(archive) as packed:
        packed.extractall(results, filter="data")


def pack(folder: Path, archive: Path) -> None:
    """Packs a device's folder; compiled kernels only where they are few."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    kernels = folder / "triton"
    size = sum(path.stat().st_size for path in kernels.rglob("*") if path.is_file())

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if size > CACHE_BYTES and f"{folder.name}/triton" in member.name else member

    new = archive.with_name(f".{archive.name}.new")
    with tarfile.open(new, "w:gz", compresslevel=1) as packed:  # it is packed after every stage
        packed.add(folder, arcname=folder.name, filter=wanted)
    new.replace(archive)


def main(argv: list[str] | None = None) -> int:
    """Continue the evidence; returns 0 when nothing is left and all ended well, 1 otherwise, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="what this call may take")
    parser.add_argument("--results", type=Path, default=Path("results/gpu"), help="folder; a device has its own in it")
    parser.add_argument("--archive", type=Path, help=".tar.gz of the device's folder: unpacked, then packed")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, interpreted: tries the stages out")
    parser.add_argument("--describe", action="store_true", help="print the machine as JSON and do nothing else")
    parser.add_argument("--device", default="cuda", help="what --describe describes: cuda or cpu")
    chosen = parser.parse_args(argv)
    if not (chosen.dry or chosen.device == "cpu") and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees none here; --dry tries the stages out", file=sys.stderr)
        return 2
    if chosen.describe:
        print(json.dumps(describe(chosen.device), indent=1, default=str))
        return 0
    name = "interpreter" if chosen.dry else torch.cuda.get_device_name()
    folder = chosen.results / re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
    if chosen.archive is not None and chosen.archive.exists() and not (folder / "state.json").exists():
        unpack(chosen.archive, chosen.results)
    keep = partial(pack, folder, chosen.archive) if chosen.archive is not None else lambda: None
    left = go_on(folder, 60 * chosen.minutes, dry=chosen.dry, keep=keep)
    keep()
    state = read_state(folder)
    failed = [name for name, entry in state.items() if entry["rc"] not in (0, REFUSED)]
    refused = [name for name, entry in state.items() if entry["rc"] == REFUSED]
    print(f"{folder}: {len(state) - len(failed)} stages done, {len(left)} left", end="")
    print(f"; with refusals: {', '.join(refused)}" if refused else "", end="")
    print(f"; not well: {', '.join(failed)}" if failed else "")
    return int(bool(left or failed))


if __name__ == "__main__":
    raise SystemExit(main())
