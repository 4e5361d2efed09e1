"""Calibrated settings of a method: the file that `kvbench calibrate` writes and `method.calibration=` reads.

The file holds the chosen settings, their conditions (model, data, code, the method's other settings),
every measurement of the grid, and the verdict on samples that took no part in the choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config.algorithm import algorithm_hash
from kvbench.config.calibrated import AUTO, KEY, of_method, shipped
from kvbench.config.files import BY_LAYER
from kvbench.config.settings import as_dict, read_data
from kvbench.errors import FileContent, FileMissing, SettingsConflict, unknown_name
from kvbench.results import provenance
from kvbench.rules import declared, shown

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel
    from kvbench.policy import Policy

SCHEMA_VERSION = 1
NEEDED = ("target", "method", "settings", "replaces", "base", "model", "code", "confirmed")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The content of a calibration file, and where it lies."""

    path: Path
    content: dict[str, Any]
    """The file as it is: `settings`, `replaces` and `base` map settings of the method to values, `model` and `code` say
    what it was made with."""

    @property
    def settings(self) -> dict[str, Any]:
        """Setting of the method -> calibrated value."""
        return self.content["settings"]


def load(where: str) -> Calibration:
    """Read a calibration file, by its path or by the name of one that comes with kvbench."""
    path, setting = shipped().get(where, Path(where).expanduser()), f"method.calibration={where}"
    if not path.is_file():
        if path.suffix in (".yaml", ".yml") or "/" in where or not shipped():
            raise FileMissing(
                f"{setting} does not exist; `kvbench calibrate method=...` writes one", setting=f"method.{KEY}"
            )
        raise unknown_name("method.calibration", where, shipped())
    content = read_data(path, setting)
    if missing := ", ".join(key for key in NEEDED if key not in content):
        remedy = "`kvbench calibrate method=...` writes one"
        raise FileContent(f"{setting} is no calibration file: it lacks {missing}; {remedy}", setting=f"method.{KEY}")
    if (version := content.get("schema_version")) != SCHEMA_VERSION:
        reads = f"this kvbench reads {SCHEMA_VERSION}; calibrate again"
        raise FileContent(f"{setting} has schema version {version!r}, {reads}", setting=f"method.{KEY}")
    _check_content(setting, content)
    return Calibration(path=path, content=content)


def _check_content(setting: str, content: Mapping[str, Any]) -> None:
    """Refuse anything but data: the file is untrusted."""
    for part in ("settings", "replaces", "base"):
        values = content[part]
        if not isinstance(values, dict):
            raise FileContent(f"{setting}: {part}={shown(values)} is no list of settings", setting=f"method.{KEY}")
        for name, value in values.items():
            depth = 1 if part == "settings" else 2  # what is only compared may be a table of gates
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name == KEY:
                raise FileContent(
                    f"{setting}: {part} has {shown(name)}, which is no setting's name", setting=f"method.{KEY}"
                )
            if not is_plain(value, depth):
                raise FileContent(
                    f"{setting}: {part}.{name}={shown(value)} is neither a number, text, true, false or null, nor a "
                    "list of these; a calibration file holds nothing else",
                    setting=f"method.{KEY}",
                )
    for part, keys in (("model", ("name", "fingerprint", "dtype")), ("code", ("method",))):
        held = content[part]
        if not isinstance(held, dict) or not all(isinstance(held.get(key), str) for key in keys):
            raise FileContent(
                f"{setting}: {part} must give {', '.join(keys)} as text; calibrate again", setting=f"method.{KEY}"
            )
    if not isinstance(content["confirmed"], bool):
        raise FileContent(
            f"{setting}: confirmed={shown(content['confirmed'])} is neither true nor false; calibrate again",
            setting=f"method.{KEY}",
        )


def is_plain(value: object, depth: int = 99) -> bool:
    """True for a scalar, or for lists of scalars at most `depth` deep."""
    if isinstance(value, list):
        return depth > 0 and all(is_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def apply(method: Mapping[str, Any]) -> tuple[dict[str, Any], Calibration | None]:
    """Put the calibrated settings into a method's configuration, whose key `calibration` stays in place.

    Returns:
        The group with the file's settings, and the file; the same group and None when it names no file.

    Raises:
        ValueError: The file is for another method, or a setting is given by hand as well.
    """
    changed = as_dict(method)
    where = changed.get(KEY)
    if where is None or where == AUTO:  # resolved when a run is composed
        return changed, None
    calibration, setting = load(str(where)), f"method.calibration={where}"
    if calibration.content["target"] != changed["_target_"]:
        raise SettingsConflict(
            f"{setting} is for method={calibration.content['method']}; choose that method", setting=f"method.{KEY}"
        )
    for name, value in calibration.settings.items():
        if name not in changed and name not in BY_LAYER:  # which no YAML has to list
            raise FileContent(
                f"{setting} sets {name}, which this method does not have; calibrate again", setting=f"method.{KEY}"
            )
        if changed.get(name) not in (value, calibration.content["replaces"].get(name)):
            raise SettingsConflict(
                f"method.{name}={changed[name]} and {setting}, which says {value}, contradict each other; leave one "
                "out",
                setting=f"method.{name}",
            )
        changed[name] = value
    return changed, calibration


def said(calibration: Calibration) -> str:
    """One line with the settings of a calibration file."""
    values = " ".join(f"{name}={value}" for name, value in calibration.settings.items())
    content = calibration.content
    return f"{content['method']}: {values}, calibrated for {content['model']['name']} ({calibration.path.name})"


def lacks(method: Mapping[str, Any], model: str) -> str:
    """Note that a method runs with its paper's settings where files exist for other models only; empty otherwise."""
    for _, content in of_method(method.get("_target_")):
        replaced = content["replaces"]
        if all(method.get(key) == replaced[key] for key in replaced):
            values = " ".join(f"{name}={value}" for name, value in replaced.items())
            remedy = f"kvbench calibrate method={content['method']} model={model}"
            return f"{content['method']}: {values}, its paper's for another model; `{remedy}` finds this one's"
    return ""


def notes(method: Mapping[str, Any], model: "LoadedModel", policy: "Policy") -> list[str]:
    """Compare the conditions of a calibration with those of its use.

    Returns a sentence for each difference that leaves the file usable.

    Raises:
        ValueError: It was made for another model: thresholds do not carry over.
    """
    method, calibration = apply(method)
    if calibration is None:
        return []
    content, path = calibration.content, calibration.path
    made_for = content["model"]
    if made_for["fingerprint"] != model.fingerprint:
        words = " ".join(f"method.{name}={value}" for name, value in calibration.settings.items())
        raise SettingsConflict(
            f"{path} was calibrated on the model {made_for['name']} ({made_for['fingerprint'][:12]}), and this is "
            f"{model.name} ({model.fingerprint[:12]}); calibrate this one, or give the settings by hand: {words}",
            setting=f"method.{KEY}",
        )
    remarks = []
    if not content["confirmed"]:
        remarks.append(f"{path}: its settings were not confirmed on held-out samples")
    if made_for["dtype"] != str(model.dtype):
        remarks.append(f"{path} was calibrated in {made_for['dtype']}, and this model runs in {model.dtype}")
    if content["code"]["method"] != method_hash(policy):
        remarks.append(f"{path} was calibrated with another version of this method's code; calibrate again to be sure")
    base = content["base"].items()
    changed = [f"{name}={method[name]} (then {was})" for name, was in base if name in method and method[name] != was]
    if changed:
        remarks.append(f"{path} was calibrated with other settings beside it: now {', '.join(changed)}")
    return remarks


def check_values(calibration: Calibration, policy: "Policy") -> None:
    """Refuse a file with a value out of the range of its setting; nothing is built."""
    known = declared(type(policy))
    for name, value in calibration.settings.items():
        try:
            known[name].check(value)
        except ValueError as error:
            raise FileContent(f"{calibration.path}: {error}", setting=f"method.{KEY}") from None


def method_hash(policy: "Policy") -> str:
    """Hash of what a policy computes: another one means that its calibrated settings may no longer fit."""
    return algorithm_hash(provenance.method_files(type(policy)))
