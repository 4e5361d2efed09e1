"""Starts one caged process, feeds it its job, reads its outputs under deadlines, and ends everything it started."""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

_STARTUP_S = 20.0
# A call that has used up its time is stopped inside the cage; where it resists, the parent waits this much longer.
_GRACE_S = 0.5
# CPU time is what is limited, and a busy machine gives a process little of it; one that sleeps or waits uses none.
_WALL_PER_CPU, _MIN_WALL_S = 15.0, 15.0
_MAX_HEADER_BYTES = 80


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The means of a caged program; times in seconds, sizes in bytes."""

    load_s: float = 5.0  # CPU time to load the program (its top level)
    cpu_s: float = 60.0  # CPU time of the program for everything
    # Time on the clock for everything. A program's progress in it depends on the machine's other load, so it only
    # guards against one that waits.
    wall_s: float = 300.0
    memory_bytes: int = 1 << 30  # address space of the program, which can start no other: so this is the cage's
    processes: int = 16  # threads of the program and processes of the cage together
    file_bytes: int = 16 << 20
    scratch_bytes: int = 64 << 20  # its temporary directory, all files together
    open_files: int = 64
    value_bytes: int = 8 << 20  # one output, as sent
    output_bytes: int = 64 << 20  # all outputs, as sent

    def rlimits(self) -> dict[str, int]:
        """The limits that the kernel keeps for the program: name in `resource` -> value."""
        return {
            "RLIMIT_CPU": math.ceil(self.cpu_s) + 1,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 0,
        }


@dataclass(frozen=True)
class Output:
    """The outcome of one call, as the cage reports it; `payload` comes from untrusted code.

    Args:
        index: Number of the call; -1 is the loading of the program.
        kind: `v` a value, `e` an exception, `t` out of time, `u` a value that cannot be sent.
        elapsed_s: CPU time of the call and of writing its value, as measured inside the cage.
        payload: For `v` the value for `wire.decode`; otherwise text for people.
    """

    index: int
    kind: str
    elapsed_s: float
    payload: bytes


@dataclass(frozen=True)
class CageReport:
    """The end of a caged run.

    Args:
        status: `done` all calls reported; `stopped` by the caller; `timeout`; `died` before its last call; `flood` too
            much output; `forged` bytes that are no report; `jail` the cage itself did not come up.
        outputs: Reported ones, in order, without gaps; empty where a callback saw them.
        wall_s: From start to the end of every process.
        message: For people; empty when done.
    """

    status: str
    outputs: tuple[Output, ...]
    wall_s: float
    message: str = ""


class Frames:
    """Cuts the bytes from the cage into outputs and checks them against the order of the calls."""

    def __init__(self, num_calls: int, max_payload_bytes: int, *, keep: bool = True) -> None:
        self.outputs: list[Output] = []
        self.num_outputs, self.loaded, self.keep = 0, True, keep
        self.num_calls, self.max_payload_bytes = num_calls, max_payload_bytes
        self.data = bytearray()

    @property
    def complete(self) -> bool:
        """All calls reported, or the program did not load, after which none will."""
        return not self.loaded or self.num_outputs == self.num_calls + 1

    def feed(self, data: bytes) -> list[Output]:
        """Take more bytes of the pipe; gives the outputs that these completed.

        Raises:
            ValueError: The bytes are not a report of the next call.
        """
        self.data += data
        new = []
        while not self.complete:
            end = self.data.find(b"\n", 0, _MAX_HEADER_BYTES)
            if end < 0:
                if len(self.data) >= _MAX_HEADER_BYTES:
                    raise ValueError("no header where one must be")
                break
            index, kind, elapsed_us, size = self._header(bytes(self.data[:end]))
            if len(self.data) < end + 1 + size:
                break
            output = Output(index, kind, elapsed_us / 1e6, bytes(self.data[end + 1 : end + 1 + size]))
            del self.data[: end + 1 + size]
            self.num_outputs += 1
            self.loaded = self.loaded and (index >= 0 or output.kind == "v")
            if self.keep:
                self.outputs.append(output)
            new.append(output)
        return new

    def _header(self, line: bytes) -> tuple[int, str, int, int]:
        fields = line.split(b" ")
        if len(fields) != 4 or fields[1] not in (b"v", b"e", b"t", b"u"):
            raise ValueError("a header that no report has")
        index, elapsed_us, size = (int(fields[column]) for column in (0, 2, 3))
        if index != self.num_outputs - 1 or not 0 <= size <= self.max_payload_bytes or elapsed_us < 0:
            raise ValueError("a report out of order or size")
        return index, fields[1].decode(), elapsed_us, size


def guard_s(cpu_s: float) -> float:
    """Seconds on the clock that work may take which has a limit in CPU time."""
    return max(_MIN_WALL_S, _WALL_PER_CPU * cpu_s)


def run_process(
    argv: Sequence[str],
    run_as: Mapping[str, Any],
    job: bytes,
    call_s: Sequence[float],
    limits: Limits,
    on_output: Callable[[Output], bool] | None = None,
) -> CageReport:
    """Run one job in a cage and wait until nothing of it is left.

    Args:
        argv: Command line of the cage.
        run_as: The user that starts it, as `subprocess.Popen` takes it.
        job: Goes to its standard input, after its length and a newline. The pipe stays open after it: its end, which
            comes with the end of this process, ends the cage.
        call_s: CPU time of each call, in seconds; kept inside. Here `guard_s` of it bounds the time on the clock.
        limits: Counted from after the start.
        on_output: Sees each output as it comes, the loading included; a false answer ends the run.
    """
    start = time.monotonic()
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/", env={}, start_new_session=True, **run_as
    )
    frames = Frames(len(call_s), limits.value_bytes, keep=on_output is None)
    try:
        seconds = [_STARTUP_S + guard_s(limits.load_s), *map(guard_s, call_s)]
        end = start + limits.wall_s
        status, message = _converse(process, frames, job, seconds, end, limits.output_bytes, on_output)
        if status == "died" and not frames.num_outputs:
            errors = _pipes(process)[2]
            os.set_blocking(errors.fileno(), False)
            said = (errors.read(2000) or b"").decode("utf-8", "replace").strip()
            status, message = ("jail", said) if said else (status, message)
    finally:
        _end(process)
    return CageReport(status, tuple(frames.outputs), time.monotonic() - start, message)


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    """Its standard input, output and error output."""
    assert process.stdin and process.stdout and process.stderr, "all three were asked for as pipes"
    return process.stdin, process.stdout, process.stderr


def _converse(
    process: subprocess.Popen[bytes],
    frames: Frames,
    job: bytes,
    limits: list[float],
    end: float,
    output_bytes: int,
    on_output: Callable[[Output], bool] | None,
) -> tuple[str, str]:
    pending, received = memoryview(b"%d\n" % len(job) + job), 0
    into, out, _ = _pipes(process)
    deadline = min(end, time.monotonic() + limits[0] + _GRACE_S)
    with selectors.DefaultSelector() as selector:
        for stream, event in ((into, selectors.EVENT_WRITE), (out, selectors.EVENT_READ)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, event)
        while not frames.complete:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout", "the time limit was reached"
            for key, _ in selector.select(left):
                if key.fileobj is into:
                    pending = _write_some(into, pending)
                    if not pending:
                        selector.unregister(into)
                    continue
                data = os.read(out.fileno(), 1 << 16)
                received += len(data)
                if not data:
                    return "died", "the process ended before its last call"
                if received > output_bytes:
                    return "flood", f"more than {output_bytes} bytes of output"
                try:
                    new = frames.feed(data)
                except ValueError as error:
                    return "forged", str(error)
                if on_output is not None and not all(on_output(output) for output in new):
                    return "stopped", ""
                if new and not frames.complete:
                    deadline = min(end, time.monotonic() + limits[frames.num_outputs] + _GRACE_S)
    return "done", ""


def _write_some(into: IO[bytes], pending: memoryview) -> memoryview:
    try:
        return pending[os.write(into.fileno(), pending[: 1 << 16]) :]
    except BrokenPipeError:
        return pending[:0]  # it ended without reading; the reading side finds out


def _end(process: subprocess.Popen[bytes]) -> None:
    # The group holds the keeper and the first process of the namespace, with which the kernel ends all others.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in _pipes(process):
        with contextlib.suppress(BrokenPipeError):
            stream.close()
