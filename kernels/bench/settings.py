"""Settings of the kernel benches: plain dataclasses that are read from `key=value` words without any library."""

import ast
import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

S = TypeVar("S", bound="Common")


@dataclass(kw_only=True)
class Common:
    """What every kernel bench can be told.

    Args:
        kernels: auto, or a backend's name.
        device: auto, cpu, cuda or cuda:N.
        threads: CPU thread counts, each measured apart; 0 = all cores of this process.
        rounds: Timed rounds.
        seed: Of data and orders.
        clock: wall, or cpu = CPU time of the calling thread (one thread only).
        working_set_mb: MB of buffers per variant that a timing goes through; 0 = 64 in main memory and 512 on a GPU,
            beyond its second-level cache.
        graph: Replay CUDA graphs on a GPU, so that kernels are timed and not Python, where a bench calls only kernels.
        max_buffers: Buffers per variant at most.
    """

    kernels: str = "auto"
    device: str = "auto"
    threads: list[int] = field(default_factory=lambda: [1, 0])
    rounds: int = 11
    seed: int = 0
    clock: str = "wall"
    working_set_mb: int = 0
    graph: bool = True
    max_buffers: int = 256

    def check(self) -> None:
        """Raises ValueError for a value out of range, with the rule."""
        for name, least in (("rounds", 1), ("seed", 0), ("working_set_mb", 0), ("max_buffers", 1)):
            check_whole(name, getattr(self, name), least)
        if not isinstance(self.graph, bool):
            raise ValueError(f"graph={self.graph} is neither true nor false")
        check_list("threads", self.threads, 0)
        if self.clock not in ("wall", "cpu"):
            raise ValueError(f"clock={self.clock} does not exist; choose wall or cpu")
        if self.clock == "cpu" and self.threads != [1]:
            raise ValueError(f"clock=cpu counts one thread, but threads={self.threads}; set threads=[1]")

    def working_set(self, device: str) -> int:
        """MB of buffers per variant on a device."""
        return self.working_set_mb or (64 if device == "cpu" else 512)


def check_whole(name: str, value: object, least: int) -> None:
    """Raises ValueError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value} must be a whole number of at least {least}")


def check_list(name: str, values: object, least: int) -> None:
    """Raises ValueError unless `values` are one or more whole numbers of at least `least`."""
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name}={values} must be a list with at least one number, for example {name}=[{least + 1}]")
    for value in values:
        check_whole(name, value, least)


def parse_shape(text: str) -> tuple[int, int, int]:
    """`QxKxD`: query heads, KV heads, head dim.

    Raises:
        ValueError: It is not of that form, or the KV heads do not divide the query heads.
    """
    parts = str(text).split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"shapes={text} is not query heads x KV heads x head dim, for example 32x8x128")
    queries, heads, dim = (int(part) for part in parts)
    if queries % heads:
        raise ValueError(f"shapes={text}: {heads} KV heads do not divide {queries} query heads")
    return queries, heads, dim


def read_words(kind: type[S], words: list[str], quick: dict[str, Any]) -> S:
    """A settings object from `key=value` words; `quick=true` puts small values in place of the defaults.

    Args:
        kind: A settings dataclass.
        words: For example `lengths=[1024,4096]` or `clock=cpu`.
        quick: The small values.

    Raises:
        ValueError: An unknown key, or a value that cannot be read.
    """
    known = {item.name: item for item in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or key not in {*known, "quick", "out"}:
            raise ValueError(
                f"{word} is no setting; there are {', '.join([*known, 'quick', 'out'])}, given as key=value"
            )
        if key not in ("quick", "out"):
            values[key] = _read(text, isinstance(getattr(kind(), key), list))
    if any(word.lower() == "quick=true" for word in words):
        values = {key: value for key, value in quick.items() if key in known} | values
    settings = kind(**values)
    settings.check()
    return settings


def _read(text: str, is_list: bool) -> Any:
    parts = [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    if is_list:
        return [_literal(part) for part in parts]
    return _literal(text)


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):  # as YAML writes them; Python's own words are capitalised
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def out_path(words: list[str]) -> str | None:
    """The file that `out=` names."""
    return next((word.partition("=")[2] for word in words if word.startswith("out=")), None)


def help_text(module: str, kind: type[Common], purpose: str) -> str:
    """The answer to `--help`, from the dataclass and its docstrings."""
    lines = [f"usage: python -m {module} [key=value ...]", "", purpose, ""]
    defaults = kind()
    meanings = _meanings(kind)
    for item in dataclasses.fields(kind):
        value = getattr(defaults, item.name)
        shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
        lines.append(f"  {item.name}={shown}\n      {meanings.get(item.name, '')}")
    lines.append("  quick=false\n      true = small settings, about a minute\n  out=FILE\n      JSON of all numbers")
    return "\n".join(lines)


def _meanings(kind: type) -> dict[str, str]:
    """Setting -> its line in the `Args:` of the class or of its bases."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        key = ""
        for line in (cls.__doc__ or "").partition("Args:")[2].splitlines():
            name, colon, text = line.strip().partition(": ")
            if colon and name.isidentifier():
                key = name
                found[key] = text
            elif key and line.strip():
                found[key] += f" {line.strip()}"
    return found
