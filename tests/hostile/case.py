"""What a hostile case consists of, and the words that all families share."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

OUTSIDE = "../outside/made"  # from the folder in which commands run
HOSTILE_TEXTS = (
    *("", "x", "[/red]", "a\nb", "\x00", "\x1b]0;title\x07\x1b[31m", "\ud800", "\u202eabc", "9" * 5000, "m" * 70_000),
    *(OUTSIDE, "/proc/kmsg", "${oc.env:SECRET}", "${seed}", "<script>alert(1)</script>", "=cmd|' /C calc'!A0", "a/b"),
)
HOSTILE_VALUES = (
    *(None, True, -1, 0, 2.5, 1e308, -1e308, 10**19, 10**400, float("nan"), float("inf"), [], {}, [1], {"a": "b"}),
    *([[[[]]]], *HOSTILE_TEXTS),
)


@dataclass
class Case:
    """Commands over hostile input, and what may become of them."""

    what: str
    """The input, for people."""
    commands: list[list[str]]
    """In order; all of them run in the folder `in` of the case."""
    named: list[str] = field(default_factory=lambda: ["in/results", "in/results-rerun", "in/out"])
    """Files and folders that the commands name and may write, relative to the case's folder."""
    wants: str = "end"
    """`end`: any ending in words will do. `refused`: the first command refuses, in one of the words of `says`, where
    there are any. `named`: where the first command does not do it, it says one of these words. `seen`: each command
    says what it says over the untouched results, or says that something is odd. `once`: all commands are one and the
    same run."""
    says: tuple[str, ...] = ()
    """Texts of which a refusal has one."""
    guest: bool = False
    """Code of one's own is at work: its author is shown the way to what it raised, and told that it is not kvbench."""
    between: Callable[[], object] | None = None
    """Changes the input before the last command, which then runs in a process of its own, as tomorrow's would."""
    check: Callable[[list[tuple[str, str]]], list[str]] | None = None
    """Says what is wrong with what is there afterwards, by the exit code of each command and what it said."""


def spots(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to everything inside a JSON value, the first two of each list."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from spots(item, (*path, key))


def edit(value: Any, draw: Any, *, within: tuple[str, ...] = ()) -> str:
    """Change a JSON value in one place, drawn, below one of the keys `within` where there are any; says how."""
    path = draw.choice([spot for spot in spots(value) if not within or spot[0] in within])
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    key, how = path[-1], draw.choice(("remove", "rename", "double", *("set",) * 5))
    if how == "remove":
        del inner[key]
    elif how == "rename" and isinstance(inner, dict):
        inner[str(key) + "_"] = inner.pop(key)
    elif how == "double" and isinstance(inner[key], int | float | str | list):
        inner[key] = inner[key] * 2 if not isinstance(inner[key], bool) else not inner[key]
    else:
        how, inner[key] = "set", draw.choice(HOSTILE_VALUES)
        return f"{'.'.join(map(str, path))}={json.dumps(inner[key])[:60]}"
    return f"{how} {'.'.join(map(str, path))}"


def names(text: str, *words: str) -> bool:
    """Whether a text has one of the words, wherever its lines break."""
    bare = "".join(text.split())
    return any("".join(word.split()) in bare for word in words)
