"""math-verify in a process of its own, which a time limit can end whatever it is doing.

sympy may chew on ten characters for hours, in C code that no exception interrupts, or take all memory. Alarms inside
math-verify reach the main thread only, and what they stop counts as a wrong answer without a word.
"""

import atexit
import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

CPU_S = 5.0  # processor time of one comparison, so that a busy machine changes no verdict
WALL_S = 100.0  # for a process that is stuck without computing
MEMORY_BYTES = 4 << 30
DECIMALS = 12  # of a comparison with a decimal number: more than answers are rounded to, fewer than floats err by
DIGITS = 15  # significant ones of a difference that is evaluated


class Verifier:
    """Compares final answers in another process, one at a time; thread-safe. The process starts when it is needed."""

    def __init__(self, cpu_s: float = CPU_S, wall_s: float = WALL_S) -> None:
        self._cpu_s, self._wall_s = cpu_s, wall_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def equal(self, reference: str, answer: str) -> bool:
        """Ask math-verify whether two pieces of LaTeX are equal; False also for what it cannot read.

        Raises:
            TimeoutError: It did not end in time, or died of what it was asked.
            RuntimeError: The process dies whatever it is asked.
        """
        try:
            return self._ask(reference, answer)
        except RuntimeError as error:
            self._ask("0", "0")
            raise TimeoutError(f"math-verify cannot do this comparison: {error}") from error

    def _ask(self, reference: str, answer: str) -> bool:
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([reference, answer]).encode() + b"\n")
                process.stdin.flush()
                reply = process.stdout.readline() if self._answers(process.stdout.fileno()) else b""
            except BaseException as error:
                self._end()  # what comes out later belongs to no question
                if isinstance(error, BrokenPipeError):
                    raise RuntimeError("the process of math-verify has ended") from error
                raise
            if reply.endswith(b"\n"):
                return bool(json.loads(reply))
            code = self._end()
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            raise TimeoutError(f"math-verify did not end in {self._cpu_s:g} s of processor time")
        raise RuntimeError(f"the process of math-verify ended with code {code}; does `import math_verify` work?")

    def _start(self) -> "subprocess.Popen[bytes]":
        # -P: the files next to this one must not shadow modules.
        words = [sys.executable, "-P", __file__, str(self._cpu_s)]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)

    def _answers(self, descriptor: int) -> bool:
        """Wait for something to read; False at the end of the wait."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(1000 * self._wall_s))

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.wait(0.5)  # one that died by itself says of what
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return process.wait()

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._end()


shared = Verifier()
atexit.register(shared.close)


def _serve(cpu_s: float) -> None:
    """Answer questions until the other side is gone; die of SIGPROF when one takes too long."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from math_verify import grader, parse, verify

    setattr(grader, "sympy_numeric_eq", _relative(grader.sympy_numeric_eq))  # noqa: B010
    for line in sys.stdin:
        gold, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        sides = [parse(f"\\boxed{{{latex}}}", parsing_timeout=None) for latex in (gold, answer)]
        equal = bool(all(sides) and verify(*sides, float_rounding=DECIMALS, timeout_seconds=None))
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(json.dumps(equal).encode() + b"\n")


def _relative(near: Callable[..., bool]) -> Callable[..., bool]:
    """math-verify's comparison of two numbers, which must also be equal by their own size.

    It rounds decimal numbers to so many decimals, and drops what is below 1e-15 of the difference of others: by that
    all small numbers are equal.
    """
    from math_verify.grader import get_pct_val

    def equal(a: Any, b: Any, *limits: int) -> bool:
        # 9 % is 9 for math-verify.
        return near(a, b, *limits) and (_same(a, b) or _same(get_pct_val(a, a), get_pct_val(b, b)))

    return equal


def _same(a: Any, b: Any) -> bool:
    """Tell whether two sympy expressions are one number.

    Exactly, or to `DECIMALS` digits where one has decimals; also True where they are no numbers.
    """
    from sympy import Expr, Float, Rational

    if not isinstance(a, Expr) or not isinstance(b, Expr):
        return True
    decimals = a.atoms(Float) | b.atoms(Float)
    exact = {value: Rational(str(value)) for value in decimals}
    a, b = a.xreplace(exact).doit(), b.xreplace(exact).doit()
    parts = (a - b).evalf(DIGITS).as_real_imag()
    if not all(part.is_Number for part in parts):
        return True
    # A part of precision 1 has no digit that is known: it is 0 as far as anything can be evaluated.
    parts = [part for part in parts if part and getattr(part, "_prec", 0) != 1]
    if not decimals:
        return not parts
    size = max(abs(a.evalf(DIGITS)), abs(b.evalf(DIGITS)))
    return all(abs(part) <= size / 10**DECIMALS for part in parts)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
