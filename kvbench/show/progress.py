"""Progress of a run on stderr: a live bar on a terminal, a line for each stage and each tenth elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from kvbench.show.pace import Pace, left_s
from kvbench.show.text import visible

PATIENCE_S = 2.0
PLAIN_EVERY_S = 10.0  # between two lines of a log, at least; each has a new tenth or a new stage of the work
SIGN_EVERY_S = 600.0  # between two lines where neither is new, so that it is seen to be at work
LEAST_LEFT_S = 1.0  # a rest of less is not told: something is still to be done


def format_bytes(count: float | None) -> str:
    """Bytes in decimal units with three significant digits, as `12.3 MB`; `-` for None."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            digits = 0 if unit == "B" or abs(count) >= 99.95 else 1 if abs(count) >= 9.995 else 2
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_seconds(seconds: float | None) -> str:
    """A duration as `12 s`, `3 min 05 s` or `2 h 07 min`; `?` for None."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


_logs: list[tuple[Path, str]] = []  # files that get every line too, and what stands before each line there


@contextmanager
def logged(path: Path, lead: str = "") -> Iterator[None]:
    """Write every line that is said inside into a file too, with the local time and `lead` before it.

    Several processes may write into one file: each line is one write at its end.
    """
    _logs.append((path, lead))
    try:
        yield
    finally:
        _logs.remove((path, lead))


def log(text: str) -> None:
    """Write lines into the log files alone, if there are any."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    for path, lead in _logs[-1:]:
        lines = "".join(f"{stamp} {lead}{visible(line)}\n" for line in text.splitlines() or [""])
        with suppress(OSError), path.open("ab", buffering=0) as file:  # a log that cannot be written stops no work
            file.write(lines.encode())


def note(text: str) -> None:
    """Print one line on stderr and into the log."""
    print(visible(text), file=sys.stderr, flush=True)
    log(text)


@contextmanager
def said_when_slow(text: str) -> Iterator[None]:
    """Name the work of the block on stderr if it takes long."""
    timer = threading.Timer(PATIENCE_S, note, [f"{text} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class LiveBar:
    """A bar that stands on a terminal while work goes on, and goes away after it; `state` is the text after it."""

    def __init__(self, stream: TextIO, label: str, total: int | None, done: int = 0, state: str = "") -> None:
        from rich.progress import BarColumn, TextColumn  # slow to import, and needed on a terminal only
        from rich.progress import Progress as Bars

        from kvbench.show.terminal import console

        texts = [TextColumn(form, markup=False) for form in ("{task.description}", "{task.fields[state]}")]
        self._bars = Bars(texts[0], BarColumn(bar_width=24), texts[1], console=console(file=stream), transient=True)
        self._task = self._bars.add_task(label, total=total, completed=done, state=state)
        self._bars.start()

    def update(self, done: int, total: int, state: str) -> None:
        """Show how far the work is."""
        self._bars.update(self._task, completed=done, total=total, state=state)

    def stop(self) -> None:
        """Take the bar away, if its terminal is still there."""
        with suppress(OSError):
            self._bars.stop()


class Progress:
    """Shows samples done, tokens per second, cache bytes and time left.

    `done` of the total are those that an earlier session had finished. A stream that is a terminal gets the live bar.
    """

    def __init__(
        self, label: str, total: int, done: int = 0, *, stream: TextIO | None = None, unit: str = "samples"
    ) -> None:
        self.label, self.total, self.done, self.unit = label, total, done, unit
        self._first = done
        self._paces: list[Pace] = []
        self._stream = stream or sys.stderr
        self._started = self._spoken = time.monotonic()
        self._said: tuple[bool, int] = (False, 0)
        self._last = ""
        self._rate: float | None = None
        self._cache_bytes: float | None = None
        self._live: LiveBar | None = None

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._spoken = self._started + PATIENCE_S - PLAIN_EVERY_S  # the first line comes early
        resumed = f", {self.done} of them done before" if self.done else ""
        first = f"{self.label}: {self.total} {self.unit}{resumed}"
        log(first)
        if self._stream.isatty():
            self._live = LiveBar(self._stream, self.label, self.total, self.done, self.state())
        else:
            self._write(first)
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        log(f"{self.label}: {self.state()}")
        if self._live is not None:
            self._live.stop()
        elif self.done > self._first:
            with suppress(OSError):  # the error that ended the work must be shown, not that stderr is closed
                self._write(f"{self.label}: {self.state()}")

    def state(self) -> str:
        """The numbers as one line of text."""
        parts = [f"{self.done}/{self.total} {self.unit}"]
        if self._paces:
            furthest = max(self._paces, key=lambda pace: pace.num_read / max(1, pace.prompts))
            parts.append(f"prompt {furthest.num_read}/{furthest.prompts}")
        if self._rate is not None:
            parts.append(f"{self._rate:.1f} tokens/s")
        if self._cache_bytes is not None:
            parts.append(f"cache {format_bytes(self._cache_bytes)}")
        finished = self.done - self._first
        left = left_s(self._paces)
        if not self._paces and finished:
            left = "", (time.monotonic() - self._started) / finished * (self.total - self.done)
        if left is not None and self.done < self.total and left[1] >= LEAST_LEFT_S:
            parts.append(f"{left[0]}{format_seconds(left[1])} left")
        return ", ".join(parts)

    def add(self, total: int, done: int) -> None:
        """Add work, of which so much was done before."""
        self.total, self.done, self._first = self.total + total, self.done + done, self._first + done

    def follow(self, pace: Pace) -> None:
        """Include this pace in the time left."""
        self._paces.append(pace)

    def show(self) -> None:
        """Show the numbers, now or when it is time."""
        if self._live is not None:
            self._live.update(self.done, self.total, self.state())
            return
        passed_s = time.monotonic() - self._spoken
        stage = any(pace.decode_s for pace in self._paces), 10 * self.done // max(1, self.total)
        if passed_s >= SIGN_EVERY_S or (passed_s >= PLAIN_EVERY_S and stage != self._said):
            self._spoken, self._said = time.monotonic(), stage
            self._write(f"{self.label}: {self.state()}")

    def advance(self) -> None:
        """Count one more finished sample."""
        self.done += 1
        self.show()

    def step(self, info: dict) -> None:
        """Update from the engine's numbers after a decode step: `decode_tokens_per_s`, `cache_bytes`."""
        self._rate = info.get("decode_tokens_per_s", self._rate)
        self._cache_bytes = info.get("cache_bytes", self._cache_bytes)
        self.show()

    def _write(self, text: str) -> None:
        if text == self._last:
            return
        self._last = text
        print(visible(text), file=self._stream, flush=True)


@contextmanager
def steps_shown(label: str, steps: int) -> Iterator[Callable[[], None]]:
    """Shows work of so many steps before a run begins; gives a function to call after each step."""
    with Progress(label, steps, unit="programs") as progress:
        yield progress.advance
