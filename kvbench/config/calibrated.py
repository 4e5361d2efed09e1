"""Calibration files that come with kvbench, and the choice among them: `method.calibration=auto`."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config import files
from kvbench.config.settings import read_data

if TYPE_CHECKING:
    from omegaconf import DictConfig

AUTO = "auto"
KEY = "calibration"  # the setting method.calibration
FOLDER = "calibration"  # conf/calibration
SAME_MODEL = ("dtype", "device", "linear", "max_tokens", "tensor_parallel")  # settings that leave a model's weights


def shipped() -> dict[str, Path]:
    """The files, by name."""
    return {path.stem: path for path in sorted((files.conf_folder() / FOLDER).glob("*.yaml"))}


def resolve(composed: "DictConfig", words: Sequence[str]) -> None:
    """Replace `method.calibration=auto` by the name of the shipped file for the method and the model, or by null.

    Null where there is none, where a setting that it has is given, or where others are not as they were for it.

    Args:
        composed: Configuration of a run; changed in place.
        words: `key=value` words that it was composed of.
    """
    method: Any = composed.get("method")
    if isinstance(method, MutableMapping) and method.get(KEY) == AUTO:
        method[KEY] = _fitting(composed, words)


def settled(method: Mapping[str, Any]) -> dict[str, Any]:
    """A method's settings with those of the shipped file that it names, which it then names no more."""
    where = method.get(KEY)
    if where not in shipped():
        return dict(method)
    return {**method, **read_data(shipped()[where], str(where))["settings"], KEY: None}


def of_method(target: object, model: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and content of each shipped file of a method, by its class; of one model where it is named.

    A file is called METHOD_MODEL, so that those of other methods and models are not read.
    """
    method, ending = str(target).rpartition(".")[0].rpartition(".")[2], f"_{model}" if model else ""
    for name, path in shipped().items():
        if name.startswith(f"{method}_") and name.endswith(ending):
            content = read_data(path, str(path))
            if content["target"] == target:
                yield name, content


def _fitting(composed: "DictConfig", words: Sequence[str]) -> str | None:
    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    if any(key.startswith("model.") and key.removeprefix("model.") not in SAME_MODEL for key in keys):
        return None
    method = composed.method
    for name, content in of_method(method.get("_target_"), str(composed.get("model", {}).get("name"))):
        was = content["base"] | content["replaces"]
        if not any(f"method.{key}" in keys for key in content["settings"]) and all(
            method.get(key) == value for key, value in was.items()
        ):
            return name
    return None
