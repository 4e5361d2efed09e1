"""The settings of a task: fields of a dataclass, each with its rule, read from the configuration's `task` group."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Self

from kvbench.config.settings import as_dict
from kvbench.errors import check_keys
from kvbench.rules import Choice, Several, Text, Whole, check_settings, declared

MIN_PROMPT_TOKENS = 256
MAX_ITEMS = 2**20

# What many tasks have: where their files lie, how many prompts are made, which k of pass@k are reported.
DataDir = Annotated[str | None, Text()]
Items = Annotated[int, Whole(1, MAX_ITEMS, unit="prompts")]
_LENGTH = Whole(MIN_PROMPT_TOKENS, unit="tokens")
Length = Annotated[int, _LENGTH]
Lengths = Annotated[int | Sequence[int], Several(_LENGTH, alone=_LENGTH)]
_DRAWS = Whole(1, 2**16, unit="answers")
Draws = Annotated[int | Sequence[int] | None, Several(_DRAWS, alone=_DRAWS)]


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What is set of a task, checked against the rules of its fields before anything is loaded.

    Args:
        name: Which task it is.

    Raises:
        ValueError: Names the first setting that may not be what it is, its value and what is allowed.
    """

    name: Annotated[str, Text()]

    def __post_init__(self) -> None:
        check_settings(self, "task.")

    @classmethod
    def read(cls, cfg: Mapping[str, Any]) -> Self:
        """The settings of a `task` group; what it lacks takes its default.

        Raises:
            ValueError: Names a setting that the task has not, that is wrong, or that is missing and has no default.
        """
        values = {key: value for key, value in as_dict(cfg).items() if value != "???"}
        check_keys(values, declared(cls), what="task key")
        for item in fields(cls):
            if item.name not in values and item.default is MISSING and item.default_factory is MISSING:
                raise ValueError(
                    f"task.{item.name} is missing and has no default; give {declared(cls)[item.name].text}"
                )
        return cls(**values)


def names_of(known: Sequence[str], groups: Mapping[str, Sequence[str]] | None = None) -> Several:
    """The rule of a setting that lists names.

    Args:
        known: All valid names.
        groups: Short names that stand for several.
    """
    name = Choice((*(groups or ()), *known))
    return Several(name, alone=name)


def name_list(value: str | Sequence[str], groups: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """The names that a setting of `names_of` lists: in the order given, groups as their members, each name once."""
    return list(dict.fromkeys(name for item in listed_texts(value) for name in (groups or {}).get(item, (item,))))


def listed(value: int | Sequence[int]) -> list[int]:
    """The numbers of a setting that is one or a list."""
    return list(value) if isinstance(value, Sequence) else [value]


def listed_texts(value: str | Sequence[str]) -> list[str]:
    """The texts of a setting that is one or a list."""
    return [value] if isinstance(value, str) else list(value)
