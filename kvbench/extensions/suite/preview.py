"""What a suite says before it starts: samples, time, memory and disk."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.show.progress import format_bytes, format_seconds, note

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvbench.cli.jobs import Jobs
    from kvbench.extensions.suite.ahead import Ahead
    from kvbench.runs.parts import Loaders


def announce(jobs: "Jobs") -> None:
    """Say what is ahead of the jobs that wait, task by task and in all."""
    say([(job.cfg, job.method) for job in jobs.waiting], jobs.loaders)


def say(asked: "Sequence[tuple[DictConfig, str]]", loaders: "Loaders") -> list[str]:
    """Say what is ahead of some runs, each by its configuration and the name of its method; gives which were left out,
    and why."""
    from kvbench.extensions.suite.ahead import look_ahead
    from kvbench.runs import together

    found, left_out = [], list[str]()
    for numbers in together.groups([cfg for cfg, _ in asked]):
        if ahead := look_ahead([asked[number] for number in numbers], loaders, left_out.append):
            found.append(ahead)
            note(line(ahead))
    for text in total(found):
        note(text)
    return left_out


def line(ahead: "Ahead") -> str:
    """One task."""
    there = f", {ahead.there} of them there" if ahead.there else ""
    return (
        f"{ahead.task}: {ahead.samples} samples of about {ahead.prompt_tokens:.0f} tokens through {ahead.runs} runs, "
        f"{ahead.answers} answers{there}; {_time(ahead.usual_s, ahead.most_s)}"
    )


def total(found: "list[Ahead]") -> list[str]:
    """All tasks together."""
    if not found:
        return []
    known = [ahead.usual_s for ahead in found if ahead.usual_s is not None]
    others = [ahead.most_s for ahead in found if ahead.usual_s is None]
    usual = sum(known + others) if known else None
    memory, disk = max(ahead.memory_bytes for ahead in found), sum(ahead.disk_bytes for ahead in found)
    time = _time(usual, sum(ahead.most_s for ahead in found))
    return [
        f"in all {sum(ahead.answers for ahead in found)} answers; {time}, by a few answers of the full cache, timed "
        f"here on {', '.join(dict.fromkeys(ahead.device for ahead in found))}",
        f"memory: {format_bytes(memory)} for the model and one run's longest sample, and up to half of what is free "
        f"for runs that go together; disk: at most {format_bytes(disk)} of records",
    ]


def _time(usual_s: float | None, most_s: float) -> str:
    if usual_s is None:
        return f"at most {format_seconds(most_s)}"
    return f"{format_seconds(usual_s)} if answers are as long as the right ones, at most {format_seconds(most_s)}"
