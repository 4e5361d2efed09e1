"""Papers: their tables and figures by number, and the commands that make each here (conf/paper/)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from kvbench.config import files
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import check_keys, check_name
from kvbench.extensions.papers import published

if TYPE_CHECKING:
    import pandas as pd

GROUP = "paper"
KINDS = ("table", "figure", "claim")  # of what a paper shows: the first word of an entry's `at`
SWEPT = re.compile(r"\{([^{}]+)\}")  # in the name of a row: values, each of which is a row


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A table, a figure or claims of a paper. It has lines to run or an example, or a reason why there are none.

    Args:
        at: Its kind and number, such as `table 1` and `figure 15a`.
        shows: Its content, in a few words.
        cells: Locators of published.csv whose cells it holds, or whose prose states numbers of it.
        every, tasks: Words of every job, and lines of tasks, as a suite has them.
        methods: Name of a printed row -> line of words; or printed model -> line, of which another model takes the
            first. The name is the printed method and variant; `C={128,256}` in it is a row for each value, which
            stands for `{}` in the line, as `{results}` does for the folder of results. Without tasks, the line is the
            method as `bench` or `bytes` names it.
        first: Lines of commands that run before the jobs and make what these take, written as those of `then`.
        then: Lines of commands that run after the jobs. `{results}` is the folder of results, `{at}` the entry as
            names of files have it, `{model}` the model as `bench` names it, and `{methods}` the list of the methods'
            lines.
        example: Name in `examples.EXAMPLES`: the paper's drawing, carried out by the store's code and printed.
        measured: Printed metric -> its counterpart in a further command's output: `WHAT FIELD`, such as
            `throughput batch`, or `throughput ratio full` (see `printed_bench`).
        differs: Parts of the paper's protocol that are not known, or differ here.
        without: Printed row, method or metric -> reason why it has no counterpart here.
        took: Time that the commands took, and the machine.
        cannot: Reason why there cannot be a command.
    """

    at: str
    shows: str
    cells: tuple[str, ...] = ()
    every: str = "seed=0"
    tasks: tuple[str, ...] = ()
    methods: Mapping[str, Any] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    example: str = ""
    measured: Mapping[str, str] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    took: str = ""
    cannot: str = ""

    def rows(self, model: str = "") -> dict[str, str]:
        """Printed row -> its line of words on a printed model, or on any other."""
        rows = {}
        for name, lines in self.methods.items():
            line = lines if isinstance(lines, str) else lines.get(model) or next(iter(lines.values()))
            swept = SWEPT.search(name)
            for value in swept[1].split(",") if swept else ("",):
                rows[SWEPT.sub(value, name)] = line.replace("{}", value)
        return rows

    def reason(self, *names: str) -> str:
        """Reason why a cell of this metric, method and row has no counterpart; empty where none is given."""
        return next((self.without[name] for name in names if name in self.without), "")

    def printed(self, paper: "Paper") -> "pd.DataFrame":
        """Its cells in published.csv."""
        rows = published.rows()
        return rows[(rows["paper"] == paper.name) & rows["locator"].isin(self.cells)]

    @property
    def slug(self) -> str:
        """Its name as that of a file."""
        return self.at.replace(" ", "_")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper.

    Args:
        key: Its name on the command line: that of its file in conf/paper/.
        name: Its name in published.csv.
        about: Short description.
        models: Printed name of a model -> the hub id that stands for it.
        entries: Entries in the paper's order, the tables first.
        note: Note on all entries.
    """

    key: str
    name: str
    about: str
    models: Mapping[str, str]
    entries: tuple[Entry, ...]
    note: str = ""

    def printed_model(self, name: str) -> str:
        """The printed name of the model that a run has under this name; empty where the paper has no such model."""
        for printed, hub in self.models.items():
            if published.plain(name) in (published.plain(printed), published.plain(PurePosixPath(hub).name)):
                return printed
        return ""

    def find(self, kind: str, number: object) -> Entry:
        """The entry of a kind and number."""
        known = {entry.at.partition(" ")[2]: entry for entry in self.entries if entry.at.startswith(kind)}
        return known[check_name(kind, str(number), known)]


@cache
def find(key: str) -> Paper:
    """The paper of a name.

    Raises:
        ValueError: There is none, or its file has an entry that is none.
    """
    raw = _raw(check_name(GROUP, key, files.options(GROUP)))
    check_keys(raw, ("name", "models", "note", "entries"), prefix=f"{key}.yaml: ")
    entries = tuple(_entry(key, content) for content in raw.get("entries", ()))
    about = files.options(GROUP)[key]
    return Paper(key=key, name=raw["name"], about=about, models=raw["models"], note=raw["note"], entries=entries)


def every() -> Iterator[Paper]:
    """All papers."""
    return map(find, files.options(GROUP))


@cache
def _raw(key: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"name": key, "models": {}, "note": "", "entries": []}
    return empty | as_dict(read_config(files.path_of(GROUP, key)))


def _entry(key: str, content: Mapping[str, Any]) -> Entry:
    """Entry of a file.

    `like: PAPER AT` inherits missing keys from that entry, `like: AT` from an earlier one of the same paper.
    """
    known = {item.name for item in fields(Entry)}
    at = str(content.get("at"))
    prefix = f"{key}.yaml: {at}: "
    check_keys(content, {*known, "like"}, prefix=prefix)
    whole = dict(content)
    if like := whole.pop("like", ""):
        paper, _, other = like.partition(" ") if like.split()[0] not in KINDS else (key, "", like)
        others = [one for one in _raw(paper)["entries"] if one.get("at") == other]
        if not others:
            raise ValueError(f"{prefix}like={like} names no entry; write PAPER AT, such as `diffkv table 1`")
        whole = {name: value for name, value in others[0].items() if name != "cells"} | whole
        if inner := whole.pop("like", ""):
            raise ValueError(f"{prefix}like={like} is itself like {inner}; name that one")
    settings: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in whole.items()}
    made = Entry(**settings)
    if made.at.partition(" ")[0] not in KINDS:
        raise ValueError(f"{prefix}at must begin with one of {', '.join(KINDS)}")
    if bool(made.tasks or made.then) + bool(made.example) + bool(made.cannot) != 1:
        raise ValueError(f"{prefix}an entry has tasks or then, or `example`, or `cannot`, and one of these alone")
    if made.first and not made.tasks:
        raise ValueError(f"{prefix}first needs tasks; what runs without jobs is `then`")
    if made.tasks and not made.methods:
        raise ValueError(f"{prefix}tasks need methods")
    return made
