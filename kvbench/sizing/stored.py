"""Parts of a stored run that a projection needs: its method, and the shares of its tiers where data decide them."""

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config import files
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.results.sample import SampleRecord
from kvbench.rules import TABLE_OR_PATH, declared
from kvbench.sizing.projection import Projection, is_one_number
from kvbench.sizing.shapes import NamedShape

if TYPE_CHECKING:
    from kvbench.policy import Policy

# Results of `project`, once for each method and length: the seeds and tasks of a study share it.
_projected: dict[str, tuple[Projection, Projection]] = {}


def policy_of(identity: Mapping[str, Any]) -> "Policy | None":
    """The method of a stored run, made again; None where the code no longer fits its settings.

    Classes named in a results folder are loaded from kvbench's methods and from nowhere else, and no file that it names
    is opened: a run's identity holds the numbers of a table, never its path.
    """
    settings = dict(identity.get("method") or {})
    module, _, name = str(settings.pop("_target_", "")).rpartition(".")
    if not module.startswith("kvbench.methods."):
        return None
    from kvbench.policy import Policy

    try:
        kind = getattr(importlib.import_module(module), name)
        if not issubclass(kind, Policy):
            return None
        tables = [key for key, known in declared(kind).items() if known.rule is TABLE_OR_PATH]
        return None if any(isinstance(settings.get(key), str) for key in tables) else kind(**settings)
    except Exception:  # of settings that are not ours a method may make anything
        return None


def usual_settings(method: str) -> dict[str, Any]:
    """Settings of a method's configuration; none of a method that is not here."""
    return _usual(method, files.conf_folder(), *files.config_dirs())


@cache
def _usual(method: str, *folders: Path) -> dict[str, Any]:
    """Usual settings by folders.

    Folders of the user's come and go within a process, and may have a method of the same name.
    """
    return as_dict(method_settings(method)) if method in files.options("method") else {}


def changed_settings(method: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a stored method that are not those of its configuration today.

    Settings that today's code lacks are left out, so that runs of two versions of the code match each other.
    """
    usual = usual_settings(method)
    return {name: value for name, value in stored.items() if name in usual and value != usual[name]}


def tier_shares(records: Iterable[SampleRecord]) -> list[float]:
    """Slots of each tier at the end of the answers, as a share of tokens x lists; empty where no record says."""
    slots: list[float] = []
    tokens = 0.0
    for record in records:
        per_tier, ratio = record["kept"].get("slots_per_tier"), record["kept"].get("slot_ratio")
        if record["status"] != "ok" or not per_tier or not ratio or None in per_tier:
            continue
        if slots and len(slots) != len(per_tier):  # a method has the same tiers in all its samples
            continue
        slots = [a + b for a, b in zip(slots or [0.0] * len(per_tier), per_tier, strict=True)]
        tokens += sum(per_tier) / ratio
    return [count / tokens for count in slots] if tokens else []


def projected(
    identity: Mapping[str, Any], records: Iterable[SampleRecord], shape: NamedShape, prompt_tokens: int, new_tokens: int
) -> Projection | None:
    """Bytes that one sequence of another model would hold under the method of a stored run.

    At the shares that the run measured where data decide; None where the method no longer fits the other model or
    today's code, or where nothing was measured.
    """
    policy = policy_of(identity)
    if policy is None:
        return None
    from kvbench.sizing.project import project

    shares = tier_shares(records)
    # The text of dataclasses is their settings.
    key = f"{policy!r} {shape!r} {shape.store_shape!r} {prompt_tokens} {new_tokens} {shares}"
    try:
        if key not in _projected:
            _projected[key] = project(policy, shape.store_shape, prompt_tokens, new_tokens, shares=shares)
    except ValueError:  # a table of heads, a window or a group that is for another shape
        return None
    least, most = _projected[key]
    return most if is_one_number(least, most) else None
