"""Settings count in the identity as they stand, unless they are marked."""

from dataclasses import dataclass, field
from typing import Annotated

from kvbench.rules import Whole
from kvbench.rules.counting import Outside, Through, counted, marks_of, unmarked


@dataclass
class Shown:
    """Settings that all count in another way."""

    colour: Annotated[str, Outside("a label")] = "red"


@dataclass
class Part:
    """Settings of which one counts."""

    size: Annotated[int, Whole(0)] = 2
    shown: Shown = field(default_factory=Shown)
    path: Annotated[str, Outside("where it lies"), Whole(0)] = "here"


@dataclass
class Settings:
    """Settings of each kind."""

    seed: int
    limit: Annotated[int | None, Whole(0), Through("task.limit")] = None
    part: Part = field(default_factory=Part)
    shown: Shown = field(default_factory=Shown)
    kind: type = Part
    derived: int = field(init=False, default=0)


def test_what_is_not_marked_counts():
    """Also in nested settings; those of which nothing counts are left out, and a class is a value."""
    assert counted(Settings(seed=7, part=Part(size=3))) == {"seed": 7, "part": {"size": 3}, "kind": Part}


def test_marks_are_read_wherever_they_stand():
    """Before or behind a rule; a field that no user sets has none."""
    assert marks_of(Settings) == {
        "seed": None,
        "limit": Through("task.limit"),
        "part": None,
        "shown": None,
        "kind": None,
    }
    assert marks_of(Part)["path"] == Outside("where it lies")


def test_entries_without_a_mark_count():
    """A group's setting that nobody listed is not lost."""
    assert unmarked({"name": "x", "new": 1}, {"name": Outside("a label")}) == {"new": 1}
