"""Counts of bytes kept in the cache folder, so that a question that was answered before is answered without torch.

A count follows from plain settings and from the code alone. It is kept under the digest of both, and a change of either
is another question.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvbench.config.files import package_folder
from kvbench.models.cache import cache_root
from kvbench.results.writing import JournalError, write_atomic

FOLDER = "counts"
VERSIONS = 3  # of the code, whose counts are kept
SUFFIXES = (".py", ".yaml", ".cpp", ".h", ".cu")
_METHODS = "kvbench.methods."  # where the code of a method counts by the digest


def remembered(question: Mapping[str, Any], answer: Callable[[], Any]) -> Any:
    """Answer a question from the cache folder, or by a function whose answer is kept there.

    Not kept are questions whose answer is not theirs alone: of methods outside kvbench, and with a setting that names
    a file.

    Args:
        question: Plain values, all that the answer depends on apart from the code.
        answer: Computes it, in plain values; its errors are raised, and not kept.
    """
    try:
        text = json.dumps(question, sort_keys=True)
    except TypeError:  # a value that is none of JSON's
        return answer()
    if any(map(_varies, _texts(question))):
        return answer()
    try:
        file = cache_root() / FOLDER / _code_digest()[:16] / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    except ValueError:  # no cache folder
        return answer()
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and kept.keys() == {"question", "answer"} and kept["question"] == json.loads(text):
            return kept["answer"]
    result = answer()
    try:
        text = json.dumps({"question": question, "answer": result})
    except TypeError:
        return result
    with contextlib.suppress(OSError, JournalError):  # a folder that cannot be written
        _keep(file, text)
    return json.loads(text)["answer"]  # as it will be found


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in plain values, behind the key that it has."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, key)


def _varies(item: tuple[str, str]) -> bool:
    """True for the path of something that is there, and for a class outside kvbench."""
    key, text = item
    if key == "_target_":
        return not text.startswith(_METHODS)
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # no path at all
        return False


def _keep(file: Path, text: str) -> None:
    """Write a file whole, and take away what was kept for old versions of the code."""
    if not file.parent.is_dir():
        file.parent.mkdir(parents=True)
        versions = sorted(file.parent.parent.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in versions[VERSIONS:]:
            shutil.rmtree(folder, ignore_errors=True)
    write_atomic(file, text.encode())


@cache
def _code_digest() -> str:
    """SHA-256 of kvbench's source, apart from tests, and of the version of torch."""
    digest = hashlib.sha256()
    folder = package_folder()
    for where, below, names in os.walk(folder, followlinks=True):
        below[:] = sorted(name for name in below if name not in ("__pycache__", "tests"))
        for name in sorted(names):
            if name.endswith(SUFFIXES):
                content = Path(where, name).read_bytes()
                digest.update(f"{os.path.relpath(Path(where, name), folder)}\0{len(content)}\0".encode())
                digest.update(content)
    spec = find_spec("torch")  # found, not imported
    for root in spec.submodule_search_locations or () if spec else ():
        digest.update(Path(root, "version.py").read_bytes())
    return digest.hexdigest()
