"""Cross-run batch: decode steps of several caches in one pass of the model.

Runs of one model under several methods have a batch each. Towards its end a batch has few rows, and a step of few rows
costs nearly as much as one of many: so small batches go through the model together, and only attention is per cache.
    Answers are unchanged if the products of the model do not depend on other rows (`Engine.group`).
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor, cat

from kvbench.cache.async_counts import to_device
from kvbench.engine import hf
from kvbench.engine.runner import Runner, finite_rows
from kvbench.engine.sessions import Decode, Session


def can_join(runner: Runner) -> bool:
    """True if a runner's steps can be made with those of others.

    That takes one process, one device, no layer with a state, and no rotary table that depends on a row's length.
    """
    is_plain = type(runner) is Runner and runner.shape.is_whole and not runner.shape.state_bytes
    return is_plain and not runner.lengths


@dataclass(eq=False)
class Step:
    """Pending decode step: one token for every row of a cache.

    `finish` makes it, unless `join` has made it with others.

    Attributes:
        taken_s: Its seconds of a pass: its attention, and its rows' share of everything else.
        logits, bad, error: Results of the pass.
    """

    runner: Runner
    rows: Sequence[int]
    tokens: Sequence[int]
    taken_s: float = field(default=0.0, init=False)
    logits: Tensor | None = field(default=None, init=False)
    bad: dict[int, int] = field(default_factory=dict, init=False)
    error: Exception | None = field(default=None, init=False)

    def finish(self) -> tuple[Tensor, dict[int, int]]:
        """Result of `Runner.try_step`, or its exception."""
        if self.error is not None:
            error, self.error = self.error, None  # its traceback holds every tensor of the failed pass
            raise error
        if self.logits is None:
            return self.runner.try_step(self.rows, self.tokens)
        return self.logits, self.bad


@dataclass
class _Pass(Session):
    """Session of one pass over several steps; a step whose cache raises an error is skipped from then on."""

    parts: list[tuple[Step, Decode, slice]]
    attention_s: dict[Step, float] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._each("attend", layer, q, k, v, scale)

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self._each("attend_stored", layer, q, k, v, scale)

    def _each(self, name: str, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        outputs = []
        for step, session, rows in self.parts:
            begin, out = time.perf_counter(), None
            if step.error is None:
                try:
                    out = getattr(session, name)(layer, q[rows], k[rows], v[rows], scale)
                except Exception as error:
                    step.error = error
            outputs.append(q.new_zeros(*q[rows].shape[:3], v.shape[3]) if out is None else out)
            self.attention_s[step] = self.attention_s.get(step, 0.0) + time.perf_counter() - begin
        return cat(outputs)

    def trace(self, out: Tensor) -> Tensor:
        return out

    def without_grad(self) -> AbstractContextManager:
        return self.parts[0][1].without_grad()


def join(steps: Sequence[Step], most: int) -> None:
    """Makes pending steps of one model, as many in one pass as have at most `most` rows together.

    Steps that fit with no other one are left alone.
    """
    for group in _groups(steps, most):
        if len(group) > 1:
            _make(group)


def _groups(steps: Sequence[Step], most: int) -> list[list[Step]]:
    """Puts each step, beginning with the largest, into the first group that has room for it."""
    groups: list[list[Step]] = []
    for step in sorted(steps, key=lambda one: -len(one.rows)):
        fits = (one for one in groups if sum(len(each.rows) for each in one) + len(step.rows) <= most)
        if (group := next(fits, None)) is not None:
            group.append(step)
        else:
            groups.append([step])
    return groups


def _make(steps: Sequence[Step]) -> None:
    """Makes steps in one pass; an error of one cache fails its step, any other error fails all of them."""
    begin, parts, end = time.perf_counter(), list[tuple[Step, Decode, slice]](), 0
    for step in steps:
        try:
            step.runner.store.begin_step(step.rows)
        except Exception as error:
            step.error = error
        else:
            parts.append((step, Decode(step.runner.store), slice(end, end := end + len(step.rows))))
    if not parts:
        return
    runner = parts[0][0].runner
    first = [step.runner.store.counters.seen[row] for step, _, _ in parts for row in step.rows]
    ids = to_device([[token] for step, _, _ in parts for token in step.tokens], runner.device)
    positions = to_device(first, runner.device)[:, None]
    whole = _Pass(runner.store, parts)
    try:
        logits = hf.forward(runner.loaded.model, whole, ids, positions, max(first), 1)[:, 0]
        finite = finite_rows(logits, waits=True)
        are_finite = bool(finite.all())
    except Exception as error:
        for step, _, _ in parts:
            step.error = step.error or error
        return
    rest_s = time.perf_counter() - begin - sum(whole.attention_s.values())
    for step, _, rows in parts:
        if step.error is None:
            step.runner.store.end_step()
            step.logits = logits[rows]
            if not are_finite:
                at = (~finite[rows]).nonzero()[:, 0].tolist()
                step.bad = {index: whole.first_bad_layer(rows.start + index) for index in at}
        step.taken_s = whole.attention_s[step] + rest_s * len(step.rows) / end
