"""Cross-run batch: several runs of one task and model, with one prefill of each prompt for all of them.

The runs advance in turns, prompt by prompt. The first run that reaches a prompt reads it; the other stores get the
model's outputs from the prompt cache (`engine/prompt_cache.py`), which then drops them. The full cache, the reference
of the others, goes first, after runs whose prompts no other run can measure. Where answers are independent of their
neighbours in a batch, small decode steps of several runs share one model pass (`engine/cross_run_batch.py`). Each run
computes the same, in the same order, as alone; its records are equal to the bit. A single run that is compared with the
full cache is a batch of two.
"""

import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config.files import FULL
from kvbench.engine.requests import Request
from kvbench.errors import no_sys_exit
from kvbench.results.journal import RunLocked
from kvbench.runs.config import AUTO, RunConfig
from kvbench.runs.experiment import Experiment, prepare
from kvbench.runs.parts import Loaders
from kvbench.runs.portions import Share
from kvbench.runs.run import (
    Run,
    Steps,
    Waits,
    Wanted,
    answers_to_force,
    comparable,
    conclude,
    execute,
    plan,
    run_experiment,
)
from kvbench.runs.sessions import Origin
from kvbench.show.progress import Progress

if TYPE_CHECKING:
    from kvbench.cache.store import CompressedStore
    from kvbench.engine.cross_run_batch import Step
    from kvbench.engine.engine import Engine
    from kvbench.engine.prompt_cache import PromptCache

Ends = Iterator[tuple[int, Run | Exception]]  # numbers of runs, and how they ended
APART = ("method", "store", "fidelity", "reference", "tracker")  # settings that runs which go together may differ in


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Arguments of `run_experiment` for one run."""

    cfg: Mapping[str, Any]
    method: str
    say: Callable[[str], None]
    origin: Origin


def groups(cfgs: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """Group runs that can share a cross-run batch, by their numbers; a run that cannot is a group by itself.

    A prompt that is read in chunks is another one for every method, several processes replay none, and a shard waits
    for others.
    """
    by_key: dict[object, list[int]] = {}
    for number, cfg in enumerate(cfgs):
        key: object = number
        with suppress(ValueError):  # raised again by the run itself
            config = RunConfig.read(cfg)
            if _can_share(config):
                settings = config.settings()
                key = repr([value for name, value in settings.items() if name not in APART])
        by_key.setdefault(key, []).append(number)
    return list(by_key.values())


def _can_share(config: RunConfig) -> bool:
    """True where another run may replay the prompts of this one."""
    return not (config.shard or config.prefill.chunk or config.model.get("tensor_parallel"))


def _with_full(job: RunRequest) -> bool:
    """True where a run by itself shares its prompts with the full cache that it is compared with."""
    with suppress(ValueError):  # raised again by the run itself
        config = RunConfig.read(job.cfg)
        # prompt_cache_bytes keeps prompts for later jobs of the process, which those of a call are not.
        return config.reference == AUTO and job.method != FULL and _can_share(config) and not config.prompt_cache_bytes
    return False


def needed_bytes(experiment: Experiment) -> tuple[int, int]:
    """Bytes of the full cache of a run's longest sample, and of its prompt while it is replayed."""
    shape = experiment.engine.shape
    tokens = max(request.num_prompt_tokens + request.max_new_tokens for request in experiment.task.requests)
    row = shape.fp16_bytes(tokens) * shape.dtype.itemsize // 2
    return row, int(row * (1 + shape.num_q_heads / (2 * shape.num_kv_heads)))


def run_cross_batch(run_requests: Sequence[RunRequest], parts: Loaders, share: Share | None = None) -> Ends:
    """Run one group and the full cache that it is compared with; yields each run as it ends, also one that fails.

    A run that another process holds, or a duplicate, is run alone at the end.

    Args:
        share: Prompts that a worker takes; runs that cannot share a batch are run one after the other.

    Raises:
        KeyboardInterrupt: A signal stopped them; everything finished is on disk.
    """
    alone = dict(enumerate(run_requests))
    shares = len(run_requests) > 1 or any(map(_with_full, run_requests))
    if shares or share:
        from kvbench.engine.prompt_cache import PromptCache

        prompts = PromptCache()
        with parts.sharing(prompts):
            for number, ended in _CrossRunBatch(run_requests, parts, prompts, share, shares).run():
                if share or not isinstance(ended, RunLocked):
                    del alone[number]
                    yield number, ended
    for number, job in alone.items():
        try:
            yield number, run_experiment(job.cfg, method=job.method, parts=parts, say=job.say, origin=job.origin)
        except Exception as error:
            yield number, error


def run_one(run_request: RunRequest, parts: Loaders) -> Run:
    """Run one experiment together with the full cache on the same samples, where that is not there yet.

    Raises:
        Exception: The error that ended it; see `run_experiment`.
    """
    ((_, ended),) = run_cross_batch([run_request], parts)
    if isinstance(ended, Exception):
        raise ended
    return ended


class _Lane:
    """A run in the rotation.

    `at` is the index of the prompt that it reads next, infinite while it waits for another run; `step` the pending
    decode step before it; `ended` its outcome; `number` that of its job, None for a reference.
    """

    def __init__(self, wanted: Wanted, steps: Steps, number: int | None) -> None:
        self.number, self.at = number, -math.inf
        self.step: Step | None = None
        self.ended: Run | Exception | None = None
        self._steps: Steps | None = steps
        self._engine: Engine | None = wanted.experiment.engine
        requests = wanted.experiment.task.requests
        self._places = {request.sample_id: index for index, request in enumerate(requests)}

    def go(self) -> None:
        """Read the next prompt, or take a step, and advance to the next one."""
        self._go_on(None)

    def write(self) -> None:
        """Write the answers that were graded while others had their turn."""
        if self.stores:
            self._go_on(True)

    def _go_on(self, only_write: bool | None) -> None:
        assert self._steps is not None, "it has not ended"
        self.step = None
        try:
            with no_sys_exit():
                due = self._steps.send(only_write)
            if isinstance(due, Request | None):
                self.at = math.inf if due is None else self._places[due.sample_id]
            else:
                self.step = due
            return
        except StopIteration as end:
            self.ended = end.value
        except Exception as error:
            self.ended = error
        self._steps = self._engine = None  # lets go of its cache

    @property
    def measures_alone(self) -> bool:
        """True if no other run can measure its prompts for it."""
        from kvbench.engine.prompt_cache import from_queries, how_measured

        store = None if self._engine is None or not math.isfinite(self.at) else self._engine.store
        return store is not None and how_measured(store) is not None and from_queries(store) is None

    @property
    def stores(self) -> "list[CompressedStore]":
        """Its stores, where it is about to read a prompt."""
        waits = self.step is None and math.isfinite(self.at)
        return [self._engine.store] if self._engine is not None and waits else []

    def stop(self, error: BaseException) -> None:
        """Raise an error inside it, at its current step."""
        if self._steps is not None:
            with suppress(BaseException):
                self._steps.throw(error)

    def wait(self) -> Generator[None, None, Run]:
        """Wait for its end; raises the error that ended it."""
        while self.ended is None:
            yield None
        if isinstance(self.ended, Exception):
            raise self.ended
        return self.ended


class _CrossRunBatch:
    """State of one call of `run_cross_batch`; of a single run only with `share`."""

    def __init__(
        self,
        run_requests: Sequence[RunRequest],
        parts: Loaders,
        prompts: "PromptCache",
        share: Share | None,
        shares: bool,
    ) -> None:
        self._run_requests, self._parts, self._prompts, self._share, self._shares = (
            run_requests,
            parts,
            prompts,
            share,
            shares,
        )
        self._lanes: dict[Path, _Lane] = {}  # by the folder of the run, in the order of their turns
        self._at_once, self._room_bytes = sys.maxsize, sys.maxsize
        self._rows: int | None = None  # requests of a run at once, where no answer depends on it
        self._progress = Progress("", 0)

    def run(self) -> Ends:
        """Run all of them, so many at once that their caches fit into memory."""
        wanted: dict[int, Wanted] = {}
        for number, job in enumerate(self._run_requests):
            try:
                with no_sys_exit():
                    wanted[number] = plan(job.cfg, job.method, self._parts, job.say, job.origin)
            except Exception as error:
                yield number, error
        for number, each in sorted(wanted.items(), key=lambda item: (item[1].method != FULL, item[0])):
            try:
                self._add(each, number)
            except Exception as error:
                yield number, error
        if not self._shares:
            self._at_once = 1
        elif wanted:
            self._look_at_memory(next(iter(wanted.values())).experiment)
        wanted.clear()
        while self._lanes:
            folders = list(self._lanes)[: self._at_once]
            for lane in self._take_turns([self._lanes.pop(folder) for folder in folders]):
                if lane.number is not None and lane.ended is not None:
                    yield lane.number, lane.ended

    def _add(self, wanted: Wanted, number: int) -> None:
        """Make the lane of a run, after that of its full-cache reference."""
        full = None
        if wanted.with_full:
            with no_sys_exit():
                experiment = prepare(wanted.config.of_full(), FULL, self._parts)
            reference = replace(wanted, method=FULL, experiment=experiment)
            steps = self._execute(reference, experiment, resume=True)
            full = self._lanes.setdefault(experiment.folder, _Lane(reference, steps, None))
        folder = wanted.experiment.folder
        if folder in self._lanes:
            raise RunLocked(f"{folder} is asked for twice")
        self._lanes[folder] = _Lane(wanted, self._steps(wanted, full), number)

    def _steps(self, wanted: Wanted, full: _Lane | None) -> Steps:
        experiment, config, against = wanted.experiment, wanted.config, None
        if full is not None:
            against = _comparable(full, wanted.say)
            if wanted.forces_full:
                ended = yield from full.wait()
                experiment = experiment.forcing(ended.samples if self._share else answers_to_force(config, ended))
        done = yield from self._execute(wanted, experiment, resume=config.resume, reference=against)
        return done if self._share else conclude(wanted, done)

    def _execute(
        self, wanted: Wanted, experiment: Experiment, *, resume: bool, reference: Waits | None = None
    ) -> Steps:
        if self._rows is not None:
            experiment.engine.batch_size = self._rows
        experiment.engine.gives_steps = self._at_once > 1
        if self._share is not None:
            computing = self._share.compute(experiment, say=wanted.say, origin=wanted.origin, shown=self._show)
            record, samples = yield from computing
            return Run(record=record, samples=list(samples.values()), folder=experiment.folder)
        return (
            yield from execute(
                experiment,
                resume=resume,
                say=wanted.say,
                reference=reference,
                origin=wanted.origin,
                wait=False,
                shown=self._show,
            )
        )

    @contextmanager
    def _show(self, label: str, total: int, done: int) -> Iterator[Progress]:
        self._progress.add(total, done)
        yield self._progress

    def _look_at_memory(self, experiment: Experiment) -> None:
        """Set the number of concurrent runs, and with `batch_size=auto` of requests of each, by free memory.

        Their caches, each counted as a full one, and the current prompt take half of it.
        """
        from kvbench.kernels import memory
        from kvbench.kernels.bench import machine

        free = memory.free_bytes(experiment.engine.shape.device) or machine.available_bytes("cpu")
        if free is None:
            return
        self._room_bytes = free // 2
        row, prompt = needed_bytes(experiment)
        rows, room = experiment.engine.most_requests, max(0, self._room_bytes - prompt)
        if not isinstance(experiment.engine.batch_size, int):  # rather fewer rows than fewer runs, which read again
            rows = self._rows = max(1, min(rows, room // (row * len(self._lanes))))
        self._at_once = max(1, room // (row * rows))

    def _take_turns(self, lanes: list[_Lane]) -> Iterator[_Lane]:
        """Advance runs prompt by prompt, in their order; yields each when it has ended."""
        self._progress = Progress("", 0)
        try:
            yield from self._turn(lanes, lanes)  # opens them, up to the first prompt that is missing
            self._progress.label = f"{len(lanes)} runs"
            with self._progress if self._progress.total else nullcontext():
                while lanes:
                    first = min(lane.at for lane in lanes)
                    turns = [lane for lane in lanes if lane.at == first]
                    turns.sort(key=lambda lane: not lane.measures_alone)  # which read for themselves in any case
                    self._prompts.limit_bytes = self._room_bytes if len(turns) > 1 else 0
                    yield from self._turn(lanes, turns)
                    self._prompts.forget()
                    yield from self._decode(lanes)
        except BaseException as error:
            for lane in lanes:
                lane.stop(error)
            raise

    def _decode(self, lanes: list[_Lane]) -> Iterator[_Lane]:
        """Make due decode steps until none is left; yields the runs that have ended."""
        from kvbench.engine.cross_run_batch import join
        from kvbench.engine.engine import AUTO_ROWS

        while steps := [lane.step for lane in lanes if lane.step is not None]:
            join(steps, AUTO_ROWS)
            for lane in [lane for lane in lanes if lane.step is not None]:
                lane.go()
            yield from self._ended(lanes)

    def _turn(self, lanes: list[_Lane], turns: Sequence[_Lane]) -> Iterator[_Lane]:
        """Advance some of the runs to their next prompt; yields and removes those that have ended."""
        turns = list(turns)
        for index, lane in enumerate(turns):
            for other in lanes:
                other.write()  # or they would wait for a whole round
            self._prompts.others = [store for other in turns[index + 1 :] for store in other.stores]
            if lane.ended is None:
                lane.go()
            yield from self._ended(lanes)

    def _ended(self, lanes: list[_Lane]) -> Iterator[_Lane]:
        """Remove and yield the runs that have ended."""
        for ended in [lane for lane in lanes if lane.ended is not None]:
            lanes.remove(ended)
            yield ended


def _comparable(full: _Lane, say: Callable[[str], None]) -> Waits:
    return comparable((yield from full.wait()), say)
