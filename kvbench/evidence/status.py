"""`kvbench status`: how the runs and the sweeps of a results folder stand."""

from collections import Counter
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from kvbench.errors import SettingMissing, SettingsConflict, check_whole, unknown_name
from kvbench.evidence import housekeeping
from kvbench.evidence.load import find_runs, patterns, results_root
from kvbench.results import shards
from kvbench.results.journal import is_held
from kvbench.results.lines import read_samples
from kvbench.results.record import RunRecord
from kvbench.results.refusals import NoResults
from kvbench.results.shards import Shard
from kvbench.results.sweep import JobRecord, State, Sweep, sweeps
from kvbench.show import terminal
from kvbench.show.progress import format_seconds
from kvbench.show.text import MESSAGE_LENGTH, safe

STATES: tuple[State, ...] = ("done", "running", "failed", "lost", "left")


def run_states(results_dir: Path) -> tuple[Counter[str], dict[Path, RunRecord]]:
    """Counts the runs that are done, running, failed, and unfinished; and lists sharded ones that are not done.

    Unfinished runs were stopped or killed, and no process works on them.
    """
    split: dict[Path, RunRecord] = {}
    unreadable: dict[str, str] = {}
    states = []
    for folder, record in find_runs(results_dir, unreadable):
        if record.status not in ("complete", "failed") and shards.shards_in(folder):
            split[folder] = record
        if is_held(folder) or shards.at_work(folder):
            states.append("running")
        else:
            states.append({"complete": "done", "failed": "failed"}.get(record.status, "unfinished"))
    return Counter(states + ["unreadable"] * len(unreadable)), split


def show_shards(folder: Path, record: RunRecord, console: Console) -> None:
    """Print the states of the shards of one run: done, running, failed, stopped, lost (as after a kill) or left."""
    begun = shards.shards_in(folder)
    of = sorted({shard.of for shard in begun})
    counts = record.counts
    console.print(
        Text(f"\nshards of {folder}: {counts.done} of {counts.total} samples are merged", style="bold"), soft_wrap=True
    )
    for shard in [Shard(count, number) for count in of for number in range(1, count + 1)]:
        state, more = _shard_state(begun.get(shard))
        console.print(Text(f"  {state:<8} {shard}{more}"))


def _shard_state(part: Path | None) -> tuple[str, str]:
    """State of one shard, and further facts."""
    try:
        record = RunRecord.load(part) if part else None
    except ValueError as error:
        return "unknown", f": {safe(str(error), MESSAGE_LENGTH)}"
    held = part is not None and is_held(part)
    if part is None or record is None:
        return ("running", ": begins") if held else ("left", "")
    state = {"complete": "done", "running": "lost"}.get(record.status, record.status)
    finished = record.counts.done + len(read_samples(part / shards.SAMPLES, record.hash, sealed=record.sealed)[0])
    more = f": {min(finished, record.counts.total)} of {record.counts.total} samples"
    why = f", {safe(record.message, MESSAGE_LENGTH)}" if record.message and not held else ""
    return "running" if held else state, f"{more}{why}"


def show_workers(results_dir: Path, console: Console) -> None:
    """Print how many answers each worker has finished of runs that are not complete."""
    counts = shards.of_workers(results_dir)
    if counts:
        rule = "the command without selection= and ray= joins them, and does what is left"
        console.print(Text(f"\n{counts.total()} answers of workers; {rule}", style="bold"))
    for name, number in sorted(counts.items()):
        console.print(Text(f"  {number:>8} {safe(name)}"))


def counted(counts: "Counter[str] | Counter[State]") -> str:
    """Counts as `9 done, 1 running`."""
    return ", ".join(f"{number} {state}" for state, number in counts.items() if number) or "none"


def show_sweep(sweep: Sweep, most: int | None, console: Console) -> None:
    """Print the state of one sweep, and at most so many jobs of each kind, or all."""
    record, states, jobs = sweep.record(), sweep.states(), sweep.jobs()
    counts = Counter({state: list(states.values()).count(state) for state in STATES})
    left = sweep.left_s() if counts["left"] or counts["running"] else None
    console.print(
        Text(f"\nsweep of {record.started} on {safe(record.host)}: {safe(record.command, 300)}", style="bold")
    )
    console.print(Text(f"{len(states)} jobs: {counted(counts)}{f'; {format_seconds(left)} left' if left else ''}"))
    for state in STATES[1:]:
        numbers = [number for number, job_state in states.items() if job_state == state]
        for number in numbers[:most]:
            label = record.jobs[number - 1] if number <= len(record.jobs) else ""
            console.print(Text(f"  {state:<8} job {number} {safe(label)}{_more(state, jobs.get(number))}"))
        if most is not None and len(numbers) > most:
            console.print(Text(f"  {state:<8} and {len(numbers) - most} more; jobs=null names all"))
    console.print(Text(f"  log      {sweep.log}", overflow="fold"))


def _more(state: State, job: JobRecord | None) -> str:
    """Further facts of a job."""
    if job is None:
        return ""
    if state == "failed":
        return f": {safe(job.message, MESSAGE_LENGTH)}"
    return f": since {job.started} on {safe(job.host)}, process {job.process}"


def _changed(cfg: DictConfig, root: Path) -> str:
    """Delete, move or tag runs, where a setting requests it; returns a line on it."""
    actions = [name for name in ("delete", "move", "tag") if cfg[name] is not None]
    if not actions:
        return ""
    if len(actions) > 1:
        raise SettingsConflict(f"{' and '.join(actions)} exclude one another; give one")
    name = actions[0]
    wanted = patterns(cfg.delete if name == "delete" else cfg.runs)
    if wanted is None:
        raise SettingMissing(
            f"{name}={cfg[name]} needs runs=: the first digits of a hash, a tag, or a pattern of folders",
            setting="runs",
        )
    chosen = housekeeping.entries(root, wanted)
    if not chosen:
        raise NoResults(
            f"{'delete' if name == 'delete' else 'runs'}={', '.join(wanted)} names no run under {root}",
            setting="delete" if name == "delete" else "runs",
        )
    if name == "delete":
        return housekeeping.delete(chosen, cfg.sure is True)
    if name == "move":
        return housekeeping.move(chosen, Path(str(cfg.move)))
    return housekeeping.tag(chosen, str(cfg.tag))


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench status`."""
    root = results_root(cfg.results_dir)
    if isinstance(cfg.sweeps, str) and cfg.sweeps not in ("newest", "all"):
        raise unknown_name("sweeps", cfg.sweeps, ("newest", "all", "a number"))
    all_sweeps = sweeps(root)
    if cfg.sweeps != "all":
        all_sweeps = all_sweeps[-(1 if cfg.sweeps == "newest" else check_whole("sweeps", cfg.sweeps, 1)) :]
    most = None if cfg.jobs is None else check_whole("jobs", cfg.jobs, 1)
    rows = None if cfg.rows is None else check_whole("rows", cfg.rows, 1)
    console = terminal.console(100)
    if changed := _changed(cfg, root):
        console.print(Text(changed), soft_wrap=True)
        return 0
    listed = housekeeping.entries(root, patterns(cfg.runs))
    if cfg.runs is not None and not listed:
        raise NoResults(f"runs={cfg.runs} names no run under results_dir={cfg.results_dir}", setting="runs")
    if listed:
        housekeeping.show(listed, rows, console)
    if cfg.runs is not None:
        return 0
    states, split = run_states(root)
    console.print(Text(f"{cfg.results_dir}: {sum(states.values())} runs: {counted(states)}"))
    for folder, record in split.items():
        show_shards(folder, record, console)
    show_workers(root, console)
    for sweep in all_sweeps:
        try:
            show_sweep(sweep, most, console)
        except (ValueError, OSError) as error:
            console.print(Text(f"! {sweep.folder} is left out: {error}"), soft_wrap=True)
    return 0
