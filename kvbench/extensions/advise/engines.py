"""Translation between flags of serving engines and settings of kvbench, in both directions.

`engines.yaml` has every engine's words, with sources.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import NameUnknown, SettingValue, Unsupported
from kvbench.extensions.advise.named import NamedMethod

if TYPE_CHECKING:  # the command `engine` reads words alone, without torch
    from kvbench.policy import ByLayer, HeadScales, Policy, Tier

METHOD = "engine_format"  # the method of any format
FULL_TIER = "f16"
SCALED = "fp8"  # the tier that takes scales of a calibration
SCALES = "scales.tsv"  # which `kvbench calibrate what=scales` writes


@dataclass
class Reading:
    """Translation of an engine's command: words of a run, and notes on them."""

    engine: str
    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    context_tokens: int | None = None
    """Most tokens of a sequence, where the command says so."""


@cache
def engines() -> dict[str, dict[str, Any]]:
    """Every engine's words, by its name."""
    return as_dict(read_config(Path(__file__).with_name("engines.yaml")))


def read_command(command: str) -> Reading:
    """Reads a command line of an engine.

    Raises:
        ValueError: It is none of an engine that is known, or a part of it has no counterpart in kvbench; the message
            names the part.
    """
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise SettingValue(f"{command!r} is no command line: {error}", setting="command") from None
    env = {}
    while words and (variable := re.fullmatch(r"([A-Z_][A-Z0-9_]*)=(.*)", words[0])):
        env[variable[1]] = variable[2]
        del words[0]
    engine = next((name for name, known in engines().items() if _is_of(known["programs"], words)), None)
    if engine is None:
        programs = ", ".join(program for known in engines().values() for program in known["programs"])
        raise NameUnknown(
            f"{' '.join(words[:3]) or command!r} starts no engine that kvbench knows: {programs}", setting="command"
        )
    known = engines()[engine]
    flags = _flags(words) | {name: [value] for name, value in env.items()}
    for flag, why in known["missing"].items():
        if flag in flags:
            raise Unsupported(f"{flag} of {engine} has no counterpart in kvbench: {why}", setting="command")
    reading = Reading(engine)
    _read_format(reading, known, flags)
    _read_model(reading, known, flags, words)
    return reading


def flags_of(policy: "Policy", num_layers: int | None = None) -> list[str]:
    """The flags that turn a method on in every engine that ships it, each with the version since when.

    Args:
        policy: Any method.
        num_layers: Layers of the model, if known: layers that are counted from the end need it.
    """
    from kvbench.policy import ByLayer

    if type(policy).__module__ != "kvbench.methods.uniform" or not isinstance(policy, ByLayer):
        return []
    kept = _kept_layers(policy, num_layers)
    if kept is None:
        return []
    if policy.head_scales is not None:
        return [_scaled_line(engine, policy.head_scales, kept) for engine in engines() if "scaled" in engines()[engine]]
    return [line for engine in engines() for line in _lines(engine, policy.tiers[0], kept, num_layers)]


def known_flags(known: NamedMethod, num_layers: int) -> list[str]:
    """`flags_of` a method by its settings, on a model of so many layers."""
    return known.remember("flags", lambda: flags_of(known.policy, num_layers), {"layers": num_layers})


def help_lines(policy: "Policy") -> dict[str, str]:
    """The line of `kvbench help METHOD` on engines."""
    return {"in engines": "; ".join(flags_of(policy)) or "no flag that kvbench knows of"}


def _lines(engine: str, tier: "Tier", kept: Sequence[int], num_layers: int | None) -> list[str]:
    from kvbench.policy import Tier

    known, lines = engines()[engine], list[str]()
    flags = known["flags"]
    if "keys" in flags:
        sides = [code or FULL_TIER for code in (tier.k_code, tier.v_code)]
        formats = [known["formats"].get(side) for side in sides]
        listed = [side == FULL_TIER or entry is not None for side, entry in zip(sides, formats, strict=True)]
        if not all(listed) or sides == [FULL_TIER, FULL_TIER] or kept:
            return []
        words = [known["example"], flags["keys"][-1], sides[0], flags["values"][-1], sides[1], known["always"]]
        return [f"{engine}: {' '.join(words)} ({_since(known, next(s for s in sides if s != FULL_TIER))})"]
    for name, entry in known["formats"].items():
        leaves = entry.get("leaves", [])
        skipped = [layer for layer in kept if layer not in _counted(leaves, num_layers)]
        if Tier.parse(entry["tier"]) != tier or entry.get("alias") or (skipped and "skip" not in flags):
            continue
        words = [known["example"], flags["types"][0], name]
        words += [flags["skip"][0], *map(str, skipped)] if skipped else []
        said = _since(known, name)
        if leaves:
            said += f"; it leaves layers {', '.join(map(str, leaves))} in 16 bits: method.protect_layers={leaves}"
        lines.append(f"{engine}: {' '.join(words)} ({said})")
    return lines


def _scaled_line(engine: str, scales: "HeadScales", kept: Sequence[int]) -> str:
    """The flags of fp8 with scales of a calibration."""
    known = engines()[engine]
    skip = " ".join([known["flags"]["skip"][0], *map(str, kept)]) + " " if kept else ""
    return f"{engine}: {known['example']} {skip}{known['scaled']['head' if len(scales.keys[0]) > 1 else 'tensor']}"


def _since(known: Mapping[str, Any], name: str) -> str:
    since = str(known["formats"][name]["since"])
    return _since(known, since.removeprefix("as ")) if since.startswith("as ") else since


def _kept_layers(policy: "ByLayer", num_layers: int | None) -> list[int] | None:
    """The layers that are left in 16 bits; None where some have another precision, or heads differ."""
    from kvbench.policy import Tier

    table = policy.by_layer
    if table is None:
        return []
    if table.rows or any(tier != Tier() for tier in policy.tiers[1:]):
        return None
    return sorted(_counted([*table.named, *table.protected], num_layers))


def _counted(layers: Sequence[int], num_layers: int | None) -> set[int]:
    """Layers, those from the end counted from the first one where it is known how many there are."""
    return {layer % num_layers if num_layers else layer for layer in layers}


def _is_of(programs: Sequence[str], words: Sequence[str]) -> bool:
    """The words start one of the programs: by its name, or as a module of Python."""
    names = [word.rpartition("/")[2].removesuffix(".exe") for word in words[:1]]
    if names and re.fullmatch(r"python[0-9.]*", names[0]) and len(words) > 2 and words[1] == "-m":
        names = [words[2]]
    return any(name in programs for name in names)


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    """Flag -> the words after it, up to the next one; vLLM's and SGLang's may have underscores."""
    flags: dict[str, list[str]] = {}
    last: list[str] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, has_value, value = word.partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            last = flags[name] = [value] if has_value else []
        else:
            last.append(word)
    return flags


def _value(flags: Mapping[str, list[str]], names: Sequence[str], default: str = "") -> str:
    """The value of the last of some flags that was given."""
    return next((flags[name][0] if flags[name] else "on" for name in reversed([*flags]) if name in names), default)


def _read_format(reading: Reading, known: Mapping[str, Any], values: Mapping[str, list[str]]) -> None:
    """Words of the method."""
    flags = known["flags"]
    if "keys" in flags:
        sides = [
            _type(reading, known, _value(values, flags[side], FULL_TIER), flags[side][0]) for side in ("keys", "values")
        ]
        if sides == ["", ""]:
            reading.words.append(f"method={FULL}")
            return
        if sides[1] and _value(values, flags["flash"], "auto") in ("off", "0", "disabled"):
            raise Unsupported(
                f"{reading.engine} stores values as {sides[1]} with flash attention alone; leave out -fa off",
                setting="command",
            )
        names = [side or FULL_TIER for side in sides]
        reading.words += [f"method={METHOD}", f"method.tier={'-'.join(dict.fromkeys(names))}"]
        if _value(values, flags["unturned"], "0") not in ("0", ""):
            reading.words.append("store.rotation=off")
        return
    name = _value(values, flags["types"], "auto")
    tier = _type(reading, known, name, flags["types"][0])
    if not tier:
        reading.words.append(f"method={FULL}")
        return
    reading.words += [f"method={METHOD}", f"method.tier={tier}"]
    if tier == SCALED and _value(values, flags.get("scales", ()), "off") != "off":
        reading.words.append(f"method.scales={SCALES}")
        reading.notes.append(
            f"{reading.engine} finds scales of its own from random tokens; find yours first: "
            f"kvbench calibrate what=scales scales.tokens=random scales.out={SCALES}, with the words of the model"
        )
    if leaves := known["formats"][name].get("leaves"):
        reading.words.append(f"method.protect_layers=[{','.join(map(str, leaves))}]")
        reading.notes.append(f"{reading.engine} leaves layers {', '.join(map(str, leaves))} in 16 bits with {name}")
    layers = [layer for word in _all(values, flags.get("skip", ())) for layer in word.split(",") if layer]
    if odd := [layer for layer in layers if not re.fullmatch("[0-9]+", layer)]:
        raise Unsupported(
            f"{flags['skip'][0]} {odd[0]} has no counterpart in kvbench; name the layers by their numbers instead",
            setting="command",
        )
    if layers:
        reading.words.append(f"method.tiers_by_layer={' '.join(f'{int(layer)}:fp16' for layer in layers)}")


def _type(reading: Reading, known: Mapping[str, Any], name: str, flag: str) -> str:
    """The tier of an engine's word; empty for elements that are not coded."""
    if name in known["plain"]:
        return ""
    if name not in known["formats"]:
        there = ", ".join([*known["plain"], *known["formats"]])
        raise Unsupported(
            f"{flag} {name} of {reading.engine} has no counterpart in kvbench; there are {there}", setting="command"
        )
    return known["formats"][name]["tier"]


def _all(flags: Mapping[str, list[str]], names: Sequence[str]) -> list[str]:
    return [word for name in names for word in flags.get(name, [])]


def _read_model(
    reading: Reading, known: Mapping[str, Any], values: Mapping[str, list[str]], words: Sequence[str]
) -> None:
    """Words of the model, where the command names one."""
    flags = known["flags"]
    if match := re.fullmatch(r"([0-9]{1,9})([kK]?)", _value(values, flags["context"])):
        reading.context_tokens = int(match[1]) * (1024 if match[2] else 1) or None
    path = _value(values, flags["model"])
    if not path and "serve" in words[1:2] and len(words) > 2 and not words[2].startswith("-"):
        path = words[2]
    if path:
        kind = "gguf" if path.endswith(".gguf") else "hf"
        reading.words += [f"model={kind}", f"model.path={path}"]
    elif repository := _value(values, flags.get("hub", ())):
        reading.notes.append(f"fetch the GGUF file of {repository} and give it as model=gguf model.path=FILE")
