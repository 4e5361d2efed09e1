"""Base of tasks: their settings, their data, and the requests of a run."""

import inspect
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvbench.engine.requests import Request
from kvbench.errors import SettingValue, Unsupported
from kvbench.rules import Choice, Form, Several, Text, Whole, check_settings
from kvbench.tasks.files import DataFile, at_hand
from kvbench.tasks.prompts import fitting
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.rows import Rows
from kvbench.tasks.taskset import MetricInfo, TaskSet, fingerprint

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

MIN_PROMPT_TOKENS = 256
MAX_ITEMS = 2**20
AVAILABLE = "available"  # among the names of a setting: those whose rows are at hand

# Settings of many tasks: where their files lie, how many prompts are made, which k of pass@k are reported, how long
# prompts may be before they lose their middle (None: what the model takes).
DataDir = Annotated[str | None, Text()]
Items = Annotated[int, Whole(1, MAX_ITEMS, unit="prompts")]
_LENGTH = Whole(MIN_PROMPT_TOKENS, unit="tokens")
Length = Annotated[int, _LENGTH]
Lengths = Annotated[int | Sequence[int], Several(_LENGTH, alone=_LENGTH)]
_DRAWS = Whole(1, 2**16, unit="answers")
Draws = Annotated[int | Sequence[int] | None, Several(_DRAWS, alone=_DRAWS)]
_PROMPT = Whole(2, unit="tokens")
MaxPromptTokens = Annotated[
    int | str | None,
    Form(
        f"{_PROMPT.text}, or fit:N for N of them where the model holds as many and for what it leaves elsewhere",
        lambda value: _PROMPT.fits(fitting(value) or value),
    ),
]

# Takes what is done while a task is loaded, and its number of steps; gives a context for the time of the work, with a
# function to call after each step. A task does not depend on bars and terminals: its loader passes the display of
# progress.
Watcher = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report the progress of the long work that is done inside."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def long_work(label: str, steps: int) -> AbstractContextManager[Callable[[], None]]:
    """A context for work that takes long, with a function to call after each of its steps."""
    watcher = _watcher.get()
    return nullcontext(lambda: None) if watcher is None else watcher(label, steps)


@dataclass(frozen=True)
class Limit:
    """The samples of each subset in a run: at most `count` of them, or all `after` so many.

    They are a random sample, or the `first` ones of the file: files are often sorted, by length or by topic, and their
    beginning is no sample of the benchmark. `first:100` has none of those after the first 100.
    """

    count: int
    first: bool = False
    after: bool = False

    @classmethod
    def read(cls, value: object) -> "Limit | None":
        """The setting `limit`: a whole number, `first:` or `after:` and a whole number, or None for all samples.

        Raises:
            ValueError: It is something else.
        """
        if value is None or isinstance(value, Limit):
            return value
        match = re.fullmatch(r"(?:(first|after):)?(\d{1,9})", value) if isinstance(value, str) else None
        count = int(match[2]) if match else value
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SettingValue(
                f"limit={value!r} is no number of samples; write a whole number for a random sample of each subset, "
                "first:20 for the first 20, after:20 for all but these, or null for all samples",
                setting="limit",
            )
        return cls(count, **({match[1]: True} if match and match[1] else {}))

    @property
    def setting(self) -> int | str:
        """The limit as the setting is written."""
        return f"first:{self.count}" if self.first else f"after:{self.count}" if self.after else self.count

    def of(self, total: int, subset: str) -> list[int]:
        """Indices of the samples to take, ascending, of a subset that has `total`.

        Every run draws the same ones, whatever its seed, and a larger limit keeps those of a smaller one.
        """
        if self.after:
            return list(range(self.count, total))
        if self.first or self.count >= total:
            return list(range(min(self.count, total)))
        order = list(range(total))
        random.Random(f"limit:{subset}").shuffle(order)
        return sorted(order[: self.count])


@dataclass(frozen=True)
class Ask:
    """The choices of a run about a task."""

    model: "LoadedModel"  # its tokenizer, context length and chat template are used; its weights are not
    limit: Limit | None  # which samples of each subset; where prompts are made, how many at most
    seed: int  # decides what is random in prompts
    protocol: Protocol

    def drawn(self, rows: Sequence[Any], subset: str) -> list[Any]:
        """Selected rows of a subset, in order."""
        return list(rows) if self.limit is None else [rows[at] for at in self.limit.of(len(rows), subset)]

    def items(self, wanted: int) -> int:
        """Number of prompts to make, of those that the task has.

        Raises:
            ValueError: The limit leaves out the first of a file's rows, and there is no file.
        """
        if self.limit and self.limit.after:
            raise Unsupported(
                f"limit={self.limit.setting} leaves out the first rows of a file, and this task makes its prompts; "
                "write a whole number",
                setting="limit",
            )
        return min(wanted, self.limit.count) if self.limit else wanted


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task; the fields are its settings, checked against their rules before anything is loaded.

    The class has what all of its runs share: `metrics`, name -> meaning of every score; `primary`, the one that stands
    for the task; `kind`, the class of what an experiment gets.

    Args:
        name: Name of the task.

    Raises:
        ValueError: Names the first setting that may not be what it is, its value and what is allowed.
    """

    metrics: ClassVar[Mapping[str, MetricInfo]] = {}
    primary: ClassVar[str] = "score"
    kind: ClassVar[type[TaskSet]] = TaskSet

    name: Annotated[str, Text()]

    def __post_init__(self) -> None:
        check_settings(self, "task.")

    def check_chat(self, model: "LoadedModel", protocol: Protocol) -> None:  # noqa: B027 - most tasks take any
        """Refuse a chat template that the task has no use for, before weights are loaded; default: none.

        Args:
            model: A model without weights; its tokenizer is used.
            protocol: Form of the prompts.

        Raises:
            ValueError: Names the task, the model and the remedy.
        """

    @classmethod
    def folder(cls) -> Path:
        """The folder of its code."""
        return Path(inspect.getfile(cls)).resolve().parent

    def files(self) -> list[DataFile]:
        """The files of the benchmark, for `kvbench data`; none for a task that is made, or that lm-eval reads."""
        return []

    @classmethod
    def reads_folder(cls, folder: str) -> bool:
        """Tell whether a folder of data applies to the task.

        Always where the task cannot do without its data; else where the folder holds some of it.
        """
        return True

    def data(self, seed: int, protocol: Protocol) -> Any:
        """Read what needs no model; refuse a protocol that the task cannot follow whatever the model.

        Raises:
            MissingDataError: Names every part of the data that is missing.
            ValueError: Data is broken, or the protocol does not fit.
        """
        return None

    @abstractmethod
    def load(self, ask: Ask) -> TaskSet:
        """Read or make its samples, and their prompts.

        Raises:
            ValueError: As `data`, or a setting does not fit the model.
        """

    def task_set(
        self,
        ask: Ask,
        requests: list[Request],
        notes: Mapping[str, Any],
        references: Mapping[str, object] | None = None,
        scorer: Callable[[str, str], Mapping[str, float]] = lambda sample_id, answer: {},
        rows: Iterable[Rows] = (),
        **more: Any,
    ) -> TaskSet:
        """Task set of a run, from its requests and references.

        Args:
            ask: Its protocol goes into each result row.
            requests: The prompts.
            notes: Further fields of each result row.
            references: Sample id -> what its answer is scored against, as JSON types; None where there is nothing.
            scorer: See `TaskSet`, as for `more`.
            rows: Sources of the samples; the rows that were set aside, the copies, and unused fields are named.
        """
        if references is None:
            references = {request.sample_id: None for request in requests}
        more = {"name": self.name, "metrics": dict(self.metrics), "primary": self.primary} | more
        rows = list(rows)
        for name in ("quarantined", "copies"):
            more.setdefault(name, [row for some in rows for row in getattr(some, name)])
        more.setdefault("sources", [source(some) for some in rows if some.file])
        more.setdefault("unused", [f"{Path(some.file).name}: {', '.join(some.unused)}" for some in rows if some.unused])
        return self.kind(
            protocol=asdict(ask.protocol) | dict(notes),
            fingerprint=fingerprint(requests, references, self.folder()),
            requests=requests,
            scorer=scorer,
            **more,
        )


def source(rows: Rows, whole: int = 0) -> dict[str, Any]:
    """Name the file of some rows, as an entry of `TaskSet.sources`; `whole` is the number that the benchmark's has."""
    return {"file": "/".join(Path(rows.file).parts[-2:]), "rows": len(rows), **({"of": whole} if whole else {})}


def names_of(
    known: Sequence[str], groups: Mapping[str, Sequence[str]] | None = None, *, of_files: bool = False
) -> Several:
    """Rule of a setting that lists names.

    `groups` are short names that stand for several of the known ones. Names `of_files` may have `AVAILABLE` among them,
    see `at_hand_of`.
    """
    name = Choice((*(groups or ()), *known, *((AVAILABLE,) if of_files else ())))
    return Several(name, alone=name)


def name_list(value: str | Sequence[str], groups: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """The names that a setting of `names_of` lists: in the order given, groups as their members, each name once."""
    names = [value] if isinstance(value, str) else value
    return list(dict.fromkeys(name for item in names for name in (groups or {}).get(item, (item,))))


def at_hand_of(
    value: str | Sequence[str],
    groups: Mapping[str, Sequence[str]],
    usual: str,
    file_of: Callable[[str], DataFile],
    data_dir: str | None,
) -> tuple[list[str], list[str]]:
    """Names that a setting chooses, and those left out because their rows are not available.

    Rows are in the folder or in the local caches. None is left out unless `AVAILABLE` is listed: alone, it is of the
    usual names. Where no row of any is there, all are chosen, so that the reader's error names all.

    Args:
        value: The setting, of the rule `names_of` with files.
        groups: Short name -> the names it stands for.
        usual: The short name that is the setting's default.
        file_of: Gives the file of a name.
        data_dir: See `files.at_hand`.
    """
    words = [value] if isinstance(value, str) else list(value)
    others = [word for word in words if word != AVAILABLE]
    names = name_list(others or usual, groups)
    here = [name for name in names if len(others) == len(words) or at_hand(file_of(name), data_dir)]
    return (here, [name for name in names if name not in here]) if here else (names, [])


def listed(value: int | Sequence[int]) -> list[int]:
    """The numbers of a setting that is one or a list."""
    return list(value) if isinstance(value, Sequence) else [value]
