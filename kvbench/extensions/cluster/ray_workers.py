"""A suite's items on Ray: an actor for each worker keeps the model loaded, and takes items from this process's queue.

The items are the jobs of a sweep, so that `status` shows their states. An item whose worker dies goes to another, and a
new worker replaces the dead one. `Crew` is the interface to Ray.
"""

import os
import shlex
import signal
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omegaconf import DictConfig

from kvbench.cli import endings
from kvbench.cli.jobs import at_home
from kvbench.cli.words import config_dir_flags
from kvbench.config import files
from kvbench.errors import PackageMissing, SettingValue, Unsupported, check_whole, what_happened
from kvbench.results.refusals import NotMeasured, OtherRun
from kvbench.results.sweep import JobRecord, Sweep
from kvbench.results.writing import check_writable
from kvbench.show.progress import Progress, logged, note

if TYPE_CHECKING:
    from kvbench.cli.jobs import Jobs
    from kvbench.extensions.suite.worker import Item, Worker

MOST_TRIES = 3  # workers that may die of one item, and that may die before they have one
WAIT_S = 2.0  # between two looks at the progress
OBJECTS_BYTES = 2**27  # of Ray's store of objects, which holds nothing but words here
Member = Any  # what a crew names a worker by


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a worker on an item or, with neither answers nor seconds, that it is ready."""

    host: str
    process: int
    answers: int = 0
    work_s: float = 0.0
    message: str = ""
    """Errors that ended single runs; empty without any."""


class Crew(Protocol):
    """Workers that take items."""

    def hire(self) -> Member:
        """Start a worker, which reports once it is ready."""

    def items(self, member: Member, prompts: int) -> "list[Item]":
        """All items, as a worker finds them."""

    def give(self, member: Member, item: "Item", log: Path) -> None:
        """Assign an item to a ready worker, with its output in a file."""

    def next(self, timeout_s: float) -> tuple[Member, Report | None] | None:
        """Wait for the next report of any worker: its report is None where it died; None at the timeout."""


class Hand:
    """A worker in a separate process, as an actor or otherwise."""

    def __init__(self, jobs: Sequence[Sequence[str]], directory: Path, config_dirs: tuple[Path, ...]) -> None:
        self._jobs, self._config_dirs, self._stack = jobs, config_dirs, ExitStack()
        self._stack.enter_context(at_home(directory, config_dirs))

    @cached_property
    def _worker(self) -> "Worker":
        """The worker, made by the first call, which raises errors of the jobs."""
        from kvbench.extensions.suite.worker import Worker

        return Worker(self._jobs, name="ray", flags=config_dir_flags(self._config_dirs))

    def ready(self) -> Report:
        """Report host and process, once the jobs are read."""
        assert self._worker
        return Report(host=socket.gethostname(), process=os.getpid())

    def items(self, prompts: int) -> "list[Item]":
        """List all items."""
        return self._worker.items(prompts)

    def work(self, item: "Item", folder: Path) -> Report:
        """Do an item, with its output in a separate file in a folder."""
        with logged(folder / f"{self._worker.name}.log", f"[{item}] "):
            done = self._worker.work([item])
            for error in done.errors:
                endings.report(error)
        said = "; ".join(dict.fromkeys(what_happened(error) for error in done.errors))
        where = socket.gethostname(), os.getpid()
        return Report(host=where[0], process=where[1], answers=done.answers, work_s=done.work_s, message=said)


def carry_out(
    cfg: DictConfig, jobs: Sequence[Sequence[str]], command: Sequence[str]
) -> "Callable[[Jobs], None] | None":
    """Let workers on Ray do all items of a suite.

    Returns:
        A check that the runs of this machine are those of the workers, to call before merging; None where items failed.
    """
    size, prompts = check_whole("ray", cfg.ray, 1), check_whole("item_prompts", cfg.item_prompts, 1)
    if find_spec("ray") is None:
        raise PackageMissing(
            f"ray={size} needs the package ray, which is not installed; pip install -e '.[ray]'", setting="ray"
        )
    check_writable(Path(cfg.results_dir), "results_dir")
    with on_ray(size, jobs) as crew:
        members = [crew.hire() for _ in range(size)]
        items = crew.items(members[0], prompts)
        said = shlex.join(["kvbench", *command])
        sweep = Sweep.start(Path(cfg.results_dir), said, "ray", [f"{item}" for item in items])
        with logged(sweep.log):
            is_done = share_out(crew, items, sweep, size)
    return partial(check_same, items) if is_done else None


def share_out(crew: Crew, items: "Sequence[Item]", sweep: Sweep, size: int) -> bool:
    """Give every item to a worker, and those of workers that died to others; False where an item was given up.

    Args:
        size: Workers that were hired, and whose reports are to come.

    Raises:
        ValueError: Workers die before they are ready.
    """
    pending, tries = deque(range(1, len(items) + 1)), Counter[int]()
    ready: deque[tuple[Member, Report]] = deque()
    held: dict[Member, tuple[int, JobRecord, ExitStack]] = {}
    early, failed = 0, list[int]()
    with ExitStack() as stack, Progress(f"{size} workers on Ray", len(items), unit="items") as progress:
        while pending or held:
            while pending and ready:
                (member, at), number = ready.popleft(), pending.popleft()
                job = stack.enter_context(ExitStack())
                held[member] = number, job.enter_context(sweep.job(number, at.host, at.process)), job
                crew.give(member, items[number - 1], sweep.folder)
            message = crew.next(WAIT_S)
            progress.show()
            if message is None:
                continue
            member, report = message
            number, record, job = held.pop(member, (0, JobRecord(), ExitStack()))
            if report is None:
                early += not number
                if early > MOST_TRIES * size:
                    raise NotMeasured(
                        f"{early} workers died before they were ready; see Ray's logs, and give ray= fewer",
                        setting="ray",
                    )
                if number:
                    tries[number] += 1
                    is_dropped = tries[number] == MOST_TRIES
                    what = f"the {MOST_TRIES}rd at it: it is given up" if is_dropped else "it goes to another"
                    record.message = f"worker {record.process} on {record.host} died at {items[number - 1]}, {what}"
                    note(record.message)
                    record.code = endings.EXIT_FAILED if is_dropped else None
                    (failed.append if is_dropped else pending.appendleft)(number)
            else:
                ready.append((member, report))
                if number:
                    record.num_done, record.work_s, record.message = report.answers, report.work_s, report.message
                    record.code = endings.EXIT_FAILED if report.message else 0
                    progress.advance()
            job.close()
            if report is None:
                crew.hire()
    for number in failed:
        note(f"error: {items[number - 1]} killed {MOST_TRIES} workers; give the command without ray= to see it fail")
    return not failed


def check_same(items: "Sequence[Item]", jobs: "Jobs") -> None:
    """Refuse to join where this process would make other runs than the workers made."""
    from kvbench.extensions.suite.worker import digest
    from kvbench.runs import cross_run_batch
    from kvbench.runs.experiment import prepared

    known = {item.runs for item in items}
    for numbers in cross_run_batch.groups([job.cfg for job in jobs.pending]):
        run_requests = [(jobs.pending[number].cfg, jobs.pending[number].method) for number in numbers]
        experiments = prepared(run_requests, jobs.loaders)
        if experiments and digest(one.hash for one in experiments) not in known:
            raise OtherRun(
                f"this machine would make other runs of {experiments[0].task.name} than the workers on Ray did: it has "
                f"another device ({experiments[0].model.device}), libraries or code; what they did is kept: give the "
                "same command without ray= on a machine like theirs"
            )


@contextmanager
def on_ray(size: int, jobs: Sequence[Sequence[str]]) -> "Iterator[Crew]":
    """Workers on the Ray cluster at hand (`RAY_ADDRESS`, or one that runs on this machine), else on one of their own.

    Raises:
        ValueError: The cluster has no room for so many.
    """
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    stopping = signal.getsignal(signal.SIGTERM)  # Ray puts its own in place, which would leave in the middle of a file
    try:
        ray.init("auto", **quiet)
    except ConnectionError:
        cores = max(size, len(os.sched_getaffinity(0)))
        try:
            ray.init(num_cpus=cores, include_dashboard=False, object_store_memory=OBJECTS_BYTES, **quiet)
        except Exception as error:  # of any class, where this machine is too busy
            raise Unsupported(
                f"ray={size}: Ray does not start here: {error}; start it yourself, `ray start`", setting="ray"
            ) from error
    signal.signal(signal.SIGTERM, stopping)
    try:
        has = ray.cluster_resources()
        gpus, cpus = int(has.get("GPU", 0)), int(has.get("CPU", 0))
        if size > (gpus or cpus):
            what = f"{gpus} GPUs" if gpus else f"{cpus} processors"
            raise SettingValue(
                f"ray={size}: the Ray cluster has {what}, and each worker takes one; give ray= fewer", setting="ray"
            )
        yield _OnRay(jobs, {"num_gpus": 1 if gpus else 0, "num_cpus": max(1, cpus // max(size, gpus)) if cpus else 0})
    finally:
        ray.shutdown()


class _OnRay:
    """A crew of Ray actors."""

    def __init__(self, jobs: Sequence[Sequence[str]], resources: dict[str, int]) -> None:
        import ray

        actor: Any = ray.remote(Hand)
        self._make = actor.options(max_restarts=0, **resources).remote
        self._arguments = jobs, Path.cwd(), files.config_dirs()
        self._pending: dict[Any, Member] = {}  # by what Ray will give

    def hire(self) -> Member:
        """Start an actor."""
        member = self._make(*self._arguments)
        self._pending[member.ready.remote()] = member
        return member

    def items(self, member: Member, prompts: int) -> "list[Item]":
        """All items."""
        items = _got(member.items.remote(prompts))
        if items is None:
            raise NotMeasured("the worker that read the tasks died; see Ray's logs", setting="ray")
        return items

    def give(self, member: Member, item: "Item", log: Path) -> None:
        """Call an actor."""
        self._pending[member.work.remote(item, log.absolute())] = member

    def next(self, timeout_s: float) -> tuple[Member, Report | None] | None:
        """Wait for the first call that ends."""
        import ray

        ended, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        return (self._pending.pop(ended[0]), _got(ended[0])) if ended else None


def _got(reference: Any) -> Any:
    """Result of a remote call; None where its actor died; raises its error."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from error
    except RayError:
        return None
