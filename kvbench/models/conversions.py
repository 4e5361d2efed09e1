"""Models that kvbench has converted once: folders in its cache, in the layout of `save_pretrained`, whole or not there.

Each file is checked by the digest that was taken when it was converted; what does not fit is made again, with a note.
Any of these folders may be removed.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvbench.config import durable
from kvbench.errors import KvbenchError
from kvbench.models import cache, fetched
from kvbench.models.cache import NoRoom

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MARKER = "complete.json"
# Fields that define a tokenizer, apart from its class.
_COMPARED = {
    "words or rules": lambda tokenizer: tokenizer.backend_tokenizer.to_str(),
    "special tokens": lambda tokenizer: tokenizer.special_tokens_map,
    "chats": lambda tokenizer: tokenizer.chat_template,
}


class NotAlike(KvbenchError, code="conversion-differs"):
    """A conversion does not read back as the model that was converted."""


def models_folder() -> Path:
    """The folder in which all conversions lie."""
    return cache.cache_root() / "models"


def kept_folder(folder: Path) -> Path:
    """Folder of the inputs of a conversion.

    It survives an interrupted conversion, and is removed by the first complete one. Only the holder of `ensure`'s lock
    may use it.
    """
    return folder.with_name(f"{folder.name}.fetched")


def ensure(
    folder: Path, name: str, needed_bytes: int, make: Callable[[Path, Path], dict[str, str]], by: str = ""
) -> dict[str, str]:
    """Makes sure that a complete conversion is in the cache.

    Of several processes at once one works, and the others wait for it.

    Args:
        folder: Its folder.
        name: The model's name, for messages.
        needed_bytes: Disk space for making it.
        make: Writes the conversion into a folder that it makes, the second one; the first may be used, and goes.
            Files that should survive an interrupted conversion go to `kept_folder`. It gives what is to be known of the
            conversion.
        by: Name of the converter, if that is no part of the folder's name; another one's conversion is made again.

    Returns: Record of the conversion.

    Raises:
        NoRoom: The disk is too full: pip and safetensors would each say it in their own way, and late.
        OSError: The cache cannot be written.
    """
    if not find_damage(folder, by):
        return _known(folder)
    from filelock import FileLock

    durable.make_folder(folder.parent)
    with FileLock(folder.with_name(folder.name + ".lock")):
        damage = find_damage(folder, by)
        if not damage:
            return _known(folder)
        if folder.exists():
            fetched.console().print(f"kvbench: {name}: in {folder} {damage}; it is made again", soft_wrap=True)
        # Under the lock nobody else works here: what a killed process left behind can go.
        for left_over in folder.parent.glob(folder.name + ".tmp-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        free_bytes = shutil.disk_usage(folder.parent).free
        if free_bytes < needed_bytes:
            raise NoRoom(
                f"{name} does not fit into {folder.parent}: converting it takes {needed_bytes / 1e6:.0f} MB and "
                f"{free_bytes / 1e6:.0f} MB are free; free some space, or set KVBENCH_CACHE to a folder on another disk"
            )
        with tempfile.TemporaryDirectory(prefix=folder.name + ".tmp-", dir=folder.parent) as scratch:
            converted = Path(scratch) / "converted"
            _seal(converted, {"by": by, **make(Path(scratch), converted)})
            if (kept := kept_folder(folder)).exists():
                kept.rename(Path(scratch) / "kept")
            if folder.exists():
                folder.rename(Path(scratch) / "replaced")
            converted.rename(folder)
            durable.sync(folder.parent)
    return _known(folder)


def save(source: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Writes a model that came from a GGUF file, and its tokenizer, into a folder.

    Raises NotAlike where the tokenizer would change by that.
    """
    tokenizer.save_pretrained(folder)
    reread = read_tokenizer(folder)
    for name, what in _COMPARED.items():
        if what(reread) != what(tokenizer):
            raise NotAlike(f"its tokenizer has other {name} when it is read from a folder")
    # A model that came from a GGUF file refuses to be saved: a fresh one takes its weights, where they are.
    with torch.device("meta"):
        model = type(source)(source.config)
    model.load_state_dict(source.state_dict(), assign=True)
    model.generation_config = source.generation_config
    with quiet_transformers():
        model.save_pretrained(folder)


def read_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Reads the tokenizer of a conversion unchanged.

    A model's tokenizer class, which `AutoTokenizer` takes, may replace some of its rules.
    """
    import transformers

    tokenizer: PreTrainedTokenizerBase = transformers.PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True
    )
    return tokenizer


def _seal(folder: Path, known: dict[str, str]) -> None:
    """Writes the digests of a conversion and syncs everything to disk, before the folder gets its name.

    After a power cut it is complete, or absent.
    """
    files = sorted(folder.iterdir())
    marker = known | {
        "sizes_bytes": {file.name: file.stat().st_size for file in files},
        "sha256": {file.name: cache.file_digest(file, remember=False) for file in files},
    }
    (folder / _MARKER).write_text(json.dumps(marker, indent=1))
    for file in folder.iterdir():
        durable.sync(file)
    durable.sync(folder)


def _known(folder: Path) -> dict[str, str]:
    marker: dict[str, str] = json.loads((folder / _MARKER).read_text())
    return marker


def find_damage(folder: Path, by: str | None = None) -> str:
    """Describes damage of a converted model, in the words of a message; empty when there is none.

    It is by the converter `by`, None = by any. A large file is read once and then known by its size, times and inode
    (`cache.file_digest`).
    """
    try:
        marker: dict[str, Any] = json.loads((folder / _MARKER).read_text())
        digests = marker["sha256"]
        if by not in (None, marker.get("by", "")):
            return "lies what another version of the converter made"
        names = {file.name for file in folder.iterdir()} - {_MARKER}
        if names != digests.keys():
            return f"{min(names ^ digests.keys())} is missing or does not belong there"
        changed = [name for name, digest in sorted(digests.items()) if cache.file_digest(folder / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{_MARKER}, which has the digests of the converted files, is missing, damaged or too old"
    return f"{', '.join(changed)} is not as it was converted" if changed else ""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides the progress bars that transformers draws while it reads weights."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def progress(name: str, what: str) -> Iterator[None]:
    """Says on stderr what is being done with a model (a spinner on a terminal) and how long it took."""
    shown = fetched.console()
    start_s = time.monotonic()
    if not shown.is_terminal:
        shown.print(f"kvbench: {name}: {what} ...", soft_wrap=True)
    with shown.status(f"{name}: {what} ..."):
        yield
    shown.print(f"kvbench: {name}: {what}: {time.monotonic() - start_s:.0f} s", soft_wrap=True)
