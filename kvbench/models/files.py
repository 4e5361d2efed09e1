"""Finds model files in a folder, in the local hub cache or on the hub, and gives them a stable fingerprint."""

import hashlib
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from kvbench.errors import FileContent, MissingWeightsError
from kvbench.models import cache, fields

# Files that transformers looks for, best first; an index lists its shards.
_WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
_TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
# Other files that transformers reads, besides configuration and weights; a tokenizer may have several of each.
_FINGERPRINT_PATTERNS = (
    "tokenizer*.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)
# Where transformers writes its own version or the place a file came from: no part of the model.
_VOLATILE_CONFIG_KEYS = ("transformers_version", "_name_or_path", "is_local", "local_files_only", "_from_model_config")
# The format allows no longer header.
_MAX_HEADER_BYTES = 100_000_000
# Layers of a model whose tensors cannot be counted; the deepest that is known has 126.
_MAX_LAYERS = 1024


def find_model_folder(path: str, revision: str | None = None) -> Path:
    """Turns a folder or a hub id such as `org/name` into a folder with a config, complete weights and a tokenizer.

    A folder wins over a hub id, and the local hub cache over the network. The network is tried only after a short
    probe, because the hub client itself retries for half a minute on a machine without one. Missing files raise a
    `MissingWeightsError`, which names the searched folders and the command that fetches them.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        _check_folder(folder, f"folder {folder}")
        return folder
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path):
        raise MissingWeightsError(
            f"model.path={path}: there is no such folder (looked for {folder.absolute()}), and it is no hub id "
            "(org/name) either. Give a folder that holds config.json, the weights and the tokenizer, or a .gguf file.",
            setting="model.path",
        )
    return _find_hub_snapshot(path, revision)


def weight_files(folder: Path) -> list[Path]:
    """Lists the weight files that transformers would load from a folder, by name; empty when it has none.

    Refuses an index of a sharded model that names missing files.
    """
    for name in _WEIGHT_NAMES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = [folder / shard for shard in _shards(index)]
            absent = [shard.name for shard in shards if not shard.is_file()]
            if absent:
                raise MissingWeightsError(
                    f"{index} lists {len(shards)} weight files, but these are missing: {', '.join(absent)}. "
                    "Fetch or copy the folder again."
                )
            return shards
    return []


def _shards(index: Path) -> list[str]:
    """Names of the weight files that the index of a sharded model lists, sorted; refuses an index that is none."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a name is no text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise FileContent(f"{index} lists no weight files ({what}); fetch or copy the folder again") from error
    return sorted(names)


def folder_fingerprint(folder: Path) -> str:
    """Hashes everything that decides a model's answers; 64 hex digits, the same wherever the folder is.

    Configuration, tokenizer, chat template and whole weights.
    """
    config = json.loads((folder / "config.json").read_text())
    parts = [json.dumps({key: config[key] for key in sorted(config) if key not in _VOLATILE_CONFIG_KEYS})]
    for file in _auxiliary_files(folder):
        content = file.read_bytes()
        if file.name in ("tokenizer_config.json", "generation_config.json"):
            settings = json.loads(content)
            content = json.dumps({k: settings[k] for k in sorted(settings) if k not in _VOLATILE_CONFIG_KEYS}).encode()
        parts.append(f"{file.relative_to(folder).as_posix()}:{hashlib.sha256(content).hexdigest()}")
    parts += [f"{file.name}:{cache.file_digest(file)}" for file in weight_files(folder)]
    return combine_fingerprints(parts)


def folder_state(folder: Path) -> list[cache.State]:
    """The state of the files that decide a model's answers; to be compared before and after a load."""
    files = [folder / "config.json", *_auxiliary_files(folder), *weight_files(folder)]
    return [cache.file_state(file) for file in files]


def check_config(folder: Path, *, has_weights: bool = True) -> None:
    """Checks config.json and the files next to it before transformers builds a model of them.

    They are JSON objects, the fields that kvbench reads have their types, they name no other weights than
    `weight_files` lists, and at least one layer and no more than there are tensors, which transformers would build one
    by one without an end. Of a folder that need not hold weights (`has_weights`), and of one with pickled ones, 1024
    layers are the most.
    """
    file = folder / "config.json"
    there = {name: fields.read_object(folder / name) for name in fields.FILES if (folder / name).is_file()}
    for name, settings in there.items():
        fields.check_fields(folder / name, settings, fields.FILES[name])
    config = there[file.name]
    if "transformers_weights" in config:
        raise FileContent(
            f"{file} names its weights itself (transformers_weights={config['transformers_weights']!r}), which kvbench "
            "does not follow; load the model with transformers and save it with save_pretrained()"
        )
    num_tensors = _count_tensors(folder) if has_weights else None
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        num_layers = part.get("num_hidden_layers", 1)
        most = _MAX_LAYERS if num_tensors is None else num_tensors
        if not isinstance(num_layers, int) or not 1 <= num_layers <= most:
            known = "no model has more than" if num_tensors is None else "the weights beside it have"
            raise FileContent(
                f"{file} says num_hidden_layers={num_layers!r}, and {known} {most} "
                f"{'layers' if num_tensors is None else 'tensors'}; a model has at least one layer, and a layer at "
                "least one tensor: fetch the folder again"
            )


def _auxiliary_files(folder: Path) -> list[Path]:
    """The files of a tokenizer, its chat templates and the settings of generation, sorted."""
    files = {file for pattern in _FINGERPRINT_PATTERNS for file in folder.glob(pattern) if file.is_file()}
    return sorted(files)


def _count_tensors(folder: Path) -> int | None:
    """Counts the tensors that the weights' headers list.

    None for weights without a header, and for damaged ones, which the loader refuses with its own message.
    """
    names = 0
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            return None
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            try:
                header = json.loads(stream.read(length)) if length <= _MAX_HEADER_BYTES else None
            except (ValueError, RecursionError):
                return None
        if not isinstance(header, dict):
            return None
        names += len(header.keys() - {"__metadata__"})
    return names


def combine_fingerprints(parts: Iterable[str]) -> str:
    """Hashes a sequence of strings into one fingerprint of 64 hex digits."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def hub_reachable(timeout_s: float = 2.0) -> bool:
    """True if the hub answers once, even with an error status, through the proxy if one is set.

    False when offline mode is set.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def probe() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=timeout_s).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError):
            return
        answers.append(True)

    # In a thread, because the time-out of urlopen does not cover the name look-up.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return bool(answers)


def _check_folder(folder: Path, what: str) -> None:
    """Raises MissingWeightsError when a folder lacks its configuration, weights or tokenizer."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not weight_files(folder):
        missing.append("weights (" + " or ".join(_WEIGHT_NAMES) + ", or their index and shards)")
    if not any((folder / name).is_file() for name in _TOKENIZER_NAMES):
        missing.append("a tokenizer (" + " or ".join(_TOKENIZER_NAMES) + ")")
    if (folder / "adapter_config.json").is_file():
        raise FileContent(
            f"The {what} holds an adapter (adapter_config.json), whose weights would come from elsewhere. Merge it "
            "into its model and save that with save_pretrained(); if the weights there are merged, remove that file."
        )
    if missing:
        held = sorted(os.listdir(folder))
        listing = ", ".join(held[:8]) + (", ..." if len(held) > 8 else "") if held else "nothing"
        raise MissingWeightsError(
            f"The {what} lacks {'; '.join(missing)}; it holds {listing}. Save the model and its tokenizer there with "
            "save_pretrained(), or give the path of a .gguf file."
        )


def _find_hub_snapshot(repo_id: str, revision: str | None) -> Path:
    """Returns the cached snapshot of a hub id, downloading it when it is not complete and the hub answers."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
        _check_folder(cached, f"cached snapshot {cached} of {repo_id}")
        return cached
    except LocalEntryNotFoundError:
        state = "it is not in the local hub cache"
    except MissingWeightsError as error:
        state = f"the local hub cache holds only a part of it ({error})"

    command = f"hf download {repo_id}" + (f" --revision {revision}" if revision else "")
    looked = f"model.path={repo_id}: there is no folder of that name, and {state} (looked in {constants.HF_HUB_CACHE})."
    if not hub_reachable():
        raise MissingWeightsError(
            f"{looked} The hub cannot be reached from here. On a machine that reaches it run `{command} --local-dir "
            f"FOLDER`, copy FOLDER here and set model.path=FOLDER; or run `{command}` here once there is a network. "
            "Without weights, model=smollm2-135m and model=random work."
        )
    try:
        # Settings and tokenizer with safetensors; the `consolidated` copies that some repositories add are left out.
        patterns = ["*.json", "*.model", "*.txt", "*.jinja", "model*.safetensors"]
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
        if not weight_files(folder):
            snapshot_download(repo_id, revision=revision, allow_patterns=["pytorch_model*.bin"])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MissingWeightsError(
            f"{looked} The download failed: {reason} Check the name on the hub; for a gated model accept its licence "
            f"there and run `hf auth login`; then `{command}`."
        ) from error
    _check_folder(folder, f"snapshot {folder} of {repo_id}")
    return folder
