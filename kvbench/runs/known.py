"""Lookup of a command's finished run before anything is loaded.

The run of a command follows from its settings, code, libraries, files and machine, but its hash needs the loaded model
and task (`runs/experiment.py`). The finished run is therefore noted in the folder of results under a digest of all that
could change the answer. With an unknown digest, or a run that changed since, everything is loaded.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config import files
from kvbench.config.durable import make_folder
from kvbench.results.record import RunRecord
from kvbench.results.writing import write_atomic

FOLDER = ".known"  # in the folder of results
# Beginnings of the names of variables that can change how something is computed or found.
VARIABLES = (
    *("ATEN", "CUBLAS", "CUDA_", "DNNL", "HF_HOME", "HF_HUB", "KVBENCH", "MKL"),
    *("NVIDIA_", "ONEDNN", "PYTORCH_", "TORCH_"),
)
APART = ("resume", "prompt_cache_bytes")  # settings that do not say which run it is
MOST_FILES = 5000  # below a folder that a setting names
_Stat = tuple[str, int, int]  # path, bytes, time of change in nanoseconds


@dataclass(frozen=True, kw_only=True)
class Known:
    """A finished run and the full cache's that it is compared with.

    Args:
        folder: Folder of the run.
        record: Its run.json.
        reference: The full cache's run.json; None without one.
        reference_folder: Folder of the full cache's run.
    """

    folder: Path
    record: RunRecord
    reference: RunRecord | None
    reference_folder: Path | None


def find(digest: str | None, cfg: DictConfig) -> Known | None:
    """Find the noted run of a configuration by its digest, if it is unchanged."""
    if digest is None:
        return None
    root = Path(str(cfg.results_dir))
    try:
        noted = json.loads((root / FOLDER / f"{digest}.json").read_text(encoding="utf-8"))
        folders = [root / name for name in noted["folders"]]
        if [_state(folder) for folder in folders] != noted["states"]:
            return None
        records = [RunRecord.load(folder) for folder in folders]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not records or any(record is None or record.status != "complete" for record in records):
        return None
    record, *others = records
    assert record is not None, "checked above"
    return Known(
        folder=folders[0],
        record=record,
        reference=others[0] if others else None,
        reference_folder=folders[1] if others else None,
    )


def keep(digest: str | None, cfg: DictConfig, folder: Path, record: RunRecord) -> None:
    """Note the finished run of a command.

    Args:
        digest: That of its configuration before it ran: libraries set variables of their own.
    """
    root = Path(str(cfg.results_dir))
    if digest is None or record.status != "complete":
        return
    names = [folder.relative_to(root).as_posix()]
    if record.comparison is not None and record.comparison.reference:
        names.append(record.comparison.reference)
    content = {"folders": names, "states": [_state(root / name) for name in names]}
    with suppress(OSError, ValueError):  # without it the next command takes its time, and nothing is lost
        make_folder(root / FOLDER)
        write_atomic(root / FOLDER / f"{digest}.json", json.dumps(content).encode())


def digest_of(cfg: DictConfig, method: str) -> str | None:
    """Digest over everything that can change the run of a command; None where computing it takes long.

    That is for user code and tasks, models of the hub, shards, trackers, and `resume=false`.
    """
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    target, model, task = settings["method"].get("_target_"), settings["model"], settings["task"]
    if not (settings["resume"] is True and settings["tracker"] == "none" and settings["shard"] is None):
        return None
    is_custom = (
        not str(target).startswith("kvbench.methods.") or task.get("include_path") or task.get("name") == "lm_eval"
    )
    path = model.get("path")
    if is_custom or (path is not None and not Path(str(path)).expanduser().exists()):
        return None
    named = list(_named_files({name: value for name, value in settings.items() if name != "results_dir"}))
    if len(named) > MOST_FILES:
        return None
    parts = [
        method,
        {name: value for name, value in settings.items() if name not in APART},
        named,
        sorted(_stats(files.package_folder())),
        [sys.version, sys.prefix, platform.node(), platform.machine(), _processor(), sorted(map(str, _devices()))],
        [_stat(Path(folder)) for folder in sys.path if folder.endswith("-packages") and os.path.isdir(folder)],
        sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES)),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _named_files(value: object) -> Iterator[_Stat]:
    """The files, and those in the folders, that settings name."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _named_files(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _named_files(inner)
    elif isinstance(value, str) and value and len(value) < 1000 and "\0" not in value:
        path = Path(value).expanduser()
        if path.is_file():
            yield _stat(path)
        elif path.is_dir():
            yield from _stats(path)


def _stats(folder: Path) -> Iterator[_Stat]:
    """Every file below a folder, links to folders followed, except bytecode."""
    for parent, inner, names in os.walk(folder, followlinks=True):
        inner[:] = [name for name in inner if name != "__pycache__" and name != "tests"]
        for number, name in enumerate(names):
            if number > MOST_FILES:
                break
            yield _stat(Path(parent, name))


def _stat(path: Path) -> _Stat:
    try:
        status = path.stat()
    except OSError:
        return str(path), -1, -1
    return str(path), status.st_size, status.st_mtime_ns


def _state(folder: Path) -> list[list[int]]:
    """The sizes and times of a run's record and journal."""
    return [list(_stat(folder / name)[1:]) for name in ("run.json", "samples.jsonl", "config.yaml")]


def _processor() -> list[str]:
    """Name and instruction sets of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [platform.processor()]
    return [next((line for line in lines if line.startswith(name)), "") for name in ("model name", "flags", "Features")]


def _devices() -> Iterator[Path]:
    """Graphics cards, which `device=auto` would take."""
    for pattern in ("nvidia[0-9]*", "kfd", "dri/card*"):
        yield from Path("/dev").glob(pattern)
