"""Announcement of a suite before it starts: samples, time, memory and disk."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.show.progress import format_bytes, format_seconds, note

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvbench.cli.jobs import Jobs
    from kvbench.extensions.suite.preflight import Preflight
    from kvbench.runs.parts import Loaders


def announce(jobs: "Jobs") -> None:
    """Print the preflight of the pending jobs, task by task and in all."""
    say([(job.cfg, job.method) for job in jobs.pending], jobs.loaders)


def say(run_requests: "Sequence[tuple[DictConfig, str]]", loaders: "Loaders") -> list[str]:
    """Print the preflight of runs, each a pair of configuration and method name.

    Returns the reasons of those left out.
    """
    from kvbench.extensions.suite.preflight import run_preflight
    from kvbench.runs import cross_run_batch

    preflights, left_out = [], list[str]()
    for numbers in cross_run_batch.groups([cfg for cfg, _ in run_requests]):
        if preflight := run_preflight([run_requests[number] for number in numbers], loaders, left_out.append):
            preflights.append(preflight)
            note(line(preflight))
    for text in total(preflights):
        note(text)
    return left_out


def line(preflight: "Preflight") -> str:
    """One task."""
    there = f", {preflight.there} of them there" if preflight.there else ""
    return (
        f"{preflight.task}: {preflight.samples} samples of about {preflight.prompt_tokens:.0f} tokens through "
        f"{preflight.runs} runs, {preflight.answers} answers{there}; {_time(preflight.usual_s, preflight.most_s)}"
    )


def total(preflights: "list[Preflight]") -> list[str]:
    """All tasks together."""
    if not preflights:
        return []
    known = [one.usual_s for one in preflights if one.usual_s is not None]
    others = [one.most_s for one in preflights if one.usual_s is None]
    usual = sum(known + others) if known else None
    memory, disk = max(one.memory_bytes for one in preflights), sum(one.disk_bytes for one in preflights)
    time = _time(usual, sum(one.most_s for one in preflights))
    return [
        f"in all {sum(one.answers for one in preflights)} answers; {time}, by a few answers of the full cache, timed "
        f"here on {', '.join(dict.fromkeys(one.device for one in preflights))}",
        f"memory: {format_bytes(memory)} for the model and one run's longest sample, and up to half of what is free "
        f"for runs that go together; disk: at most {format_bytes(disk)} of records",
    ]


def _time(usual_s: float | None, most_s: float) -> str:
    if usual_s is None:
        return f"at most {format_seconds(most_s)}"
    return f"{format_seconds(usual_s)} if answers are as long as the right ones, at most {format_seconds(most_s)}"
