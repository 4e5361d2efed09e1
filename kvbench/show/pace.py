"""Rates at which runs read prompts and decode answers, and the time left."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Pace:
    """The pace of one run, measured from the moment it begins to read; loading a model is no part of it.

    A clock runs between `read` or the last step, and the next step or `pause`: time of other runs' turns does not
    count.

    Args:
        prompts: Prompts that have to be read.
        prompt_tokens: Tokens of all of them.
        answers: Answers that have to be given.
        most_steps: Decode steps of an answer at most; where only a text is forced, the text's.
    """

    prompts: int
    prompt_tokens: int
    answers: int
    most_steps: float
    num_read: int = field(default=0, init=False)
    num_ended: int = field(default=0, init=False)  # answers
    read_tokens: int = field(default=0, init=False)
    read_s: float = field(default=0.0, init=False)
    decode_s: float = field(default=0.0, init=False)
    _steps: float = field(default=0.0, init=False)  # of decoding, until now
    _begun: deque[float] = field(default_factory=deque, init=False)  # for each answer under way, the steps before it
    _ended_steps: float = field(default=0.0, init=False)  # of the answers that have ended, together
    _since: float | None = field(default=None, init=False)
    _paused: float | None = field(default=None, init=False)
    _paused_s: float = field(default=0.0, init=False)
    _reading: int = field(default=0, init=False)  # tokens

    def read(self, tokens: int, answers: int) -> None:
        """Start the clock of a prompt for so many answers."""
        self._since, self._reading = time.monotonic(), tokens
        self._paused_s, self._paused = self.paused_s, None
        self._begun += [self._steps] * answers
        self.num_read += 1

    def step(self, tokens_per_s: float, rows: int) -> None:
        """Count one or several decode steps of so many rows; the first after a prompt counts as its reading."""
        passed = self._lap()
        self.decode_s += passed
        self._steps += passed * tokens_per_s / rows

    def end(self) -> None:
        """Count a finished answer, as if it were the oldest one under way."""
        self.num_ended += 1
        if self._begun:
            self._ended_steps += self._steps - self._begun.popleft()

    def pause(self) -> None:
        """Stop the clock for the turns of other runs."""
        self.decode_s += self._lap()
        self._since, self._paused = None, time.monotonic()

    def go_on(self, taken_s: float) -> None:
        """Restart the clock; add so many seconds of the other runs' turns that were its own."""
        self._paused_s, self._paused = self.paused_s - taken_s, None
        self._since = time.monotonic() - taken_s

    def _lap(self) -> float:
        """Seconds since the last event, unless they belong to a prompt, which they are added to."""
        now = time.monotonic()
        passed, self._since = 0.0 if self._since is None else now - self._since, now
        if not self._reading:
            return passed
        self.read_s, self.read_tokens, self._reading = self.read_s + passed, self.read_tokens + self._reading, 0
        return 0.0

    @property
    def paused_s(self) -> float:
        """Seconds of other runs' turns."""
        return self._paused_s + (0.0 if self._paused is None else time.monotonic() - self._paused)

    @property
    def token_s(self) -> float | None:
        """Seconds for each token of a prompt."""
        return self.read_s / self.read_tokens if self.read_tokens else None

    @property
    def usual_steps(self) -> float:
        """Decode steps of an answer: the mean of those that have ended and of longer ones in progress.

        Without any that ended, as many as it may take.
        """
        if not self.num_ended:
            return max(1.0, self.most_steps)
        mean = self._ended_steps / self.num_ended
        longer = [taken for begin in self._begun if (taken := self._steps - begin) > mean]
        return max(1.0, (self._ended_steps + sum(longer)) / (self.num_ended + len(longer)))

    @property
    def is_settled(self) -> bool:
        """True where as many answers have ended as are under way: those that ended first were the shortest."""
        return 0 < self.num_ended >= len(self._begun)

    @property
    def answered(self) -> float:
        """Answers given, and of those under way the share of the steps that an answer takes."""
        return self.num_ended + sum(min(1.0, (self._steps - begin) / self.usual_steps) for begin in self._begun)

    @property
    def answer_s(self) -> float | None:
        """Seconds for each answer."""
        return self.decode_s / self.answered if self.decode_s and self.answered else None


def left_s(paces: Sequence[Pace]) -> tuple[str, float] | None:
    """Seconds that runs still need, and `at most` or nothing.

    At most while fewer answers have ended than are in progress. A run that has not started is taken to be as fast as
    the fastest reader, and to decode as the others do on average. None before the first step of decoding: until then
    most of the work may still be unknown.
    """
    read = [pace.token_s for pace in paces if pace.token_s is not None]
    answers = [pace.answer_s for pace in paces if pace.answer_s is not None]
    if not read or not answers:
        return None
    usual, total = sum(answers) / len(answers), 0.0
    for pace in paces:
        token_s = min(read) if pace.token_s is None else pace.token_s
        answer_s = usual if pace.answer_s is None else pace.answer_s
        total += token_s * max(0, pace.prompt_tokens - pace.read_tokens)  # some may be read twice
        total += answer_s * max(0.0, pace.answers - pace.answered)
    return ("" if any(pace.is_settled for pace in paces) else "at most "), total
