"""`kvbench paper`: tables and figures of a paper by number, the commands that run them, and printed cells with ours.

The jobs of an entry are a suite's, in one sweep; nothing here runs a model itself.
"""

import csv
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.text import Text

from kvbench.cli import commands, sweeping
from kvbench.config import files
from kvbench.config.settings import read_config
from kvbench.errors import SettingsConflict, SettingValue, Unsupported, unknown_setting
from kvbench.extensions.papers import papers, printed, printed_bench
from kvbench.extensions.papers.papers import GROUP, KINDS, Entry, Paper
from kvbench.extensions.papers.report_section import OTHER_MODEL
from kvbench.extensions.suite import suite
from kvbench.results.sweep import process_sweep
from kvbench.results.writing import write_files
from kvbench.show import terminal
from kvbench.show.picture import headed

CLUSTER = "hydra/launcher=submitit_slurm hydra.launcher.partition=NAME hydra.launcher.timeout_min=MINUTES"
IN_A_JOB = "on a Slurm cluster put it into a job:"
EXAMPLE = "a checked example, printed from the store's own code"
BYTES, DEFAULT_MODEL = "bytes", "smollm2-135m"
TIMED = "timed"  # a plan for which a model is loaded
# Words of the user's that change no answer, or nothing that a paper states; every other one is another protocol.
NEUTRAL = {"model", "model.path", "model.name", "model.device", "model.dtype", "model.linear", "model.tensor_parallel"}
NEUTRAL |= {"batch_size", "backend", "results_dir", "shard", "resume", "prompt_cache_bytes", "tracker", "reference"}
NEUTRAL |= {"fidelity.on", "fidelity.max_tokens", "fidelity.per_token", "task.data_dir", "seed"}


def main(arguments: Sequence[str], sweep: suite.Sweeping) -> int:
    """Carry out `kvbench paper`; `sweep` runs words of a sweep with these jobs. Returns the exit code."""
    listed = read_config(files.path_of("command", GROUP))
    words, others = list[str](), list[str]()
    for word in arguments:
        key, sign, value = word.partition("=")
        if key == "task.data_dir":
            words.append(f"data_dir={value}")
        else:
            (words if key in listed or not (sign or word.startswith("-")) else others).append(word)
    cfg = commands.compose_command(GROUP, words)
    if cfg.paper is None:
        return _list_papers()
    paper = papers.find(str(cfg.paper))
    if cfg.plan not in (True, False, TIMED):
        raise SettingValue(
            f"plan={cfg.plan} is no plan; write true for what would run, {TIMED} for how long it takes, too",
            setting="plan",
        )
    wanted = [(kind, cfg[kind]) for kind in KINDS if cfg[kind] is not None]
    if not wanted:
        return _list(paper)
    if len(wanted) > 1:
        raise SettingsConflict(
            f"{', '.join(f'{kind}={number}' for kind, number in wanted)}: give one of them at a time"
        )
    entry = paper.find(*wanted[0])
    cfg.results_dir = cfg.results_dir or f"results/paper/{paper.key}"
    if entry.cannot:
        terminal.console().print(Text(f"{paper.name}, {entry.at}: {entry.shows}\nno command: {entry.cannot}"))
        return 2
    if entry.example:
        return show_example(paper, entry)
    if cfg.plan:
        return plan(paper, entry, cfg, others, list(arguments))
    return run(paper, entry, cfg, others, list(arguments), sweep)


def show_example(paper: Paper, entry: Entry) -> int:
    """Print what an entry's example does on the store's own code; the exit code."""
    from kvbench.extensions.papers.examples import EXAMPLES

    lines = [f"{paper.name}, {entry.at}: {entry.shows} ({here(entry)})", *EXAMPLES[entry.example]()]
    for line in [*lines, *(f"known to differ: {text}" for text in entry.differs)]:
        terminal.console().print(Text(line), soft_wrap=True)
    return 0


def run(
    paper: Paper, entry: Entry, cfg: DictConfig, others: list[str], arguments: list[str], sweep: suite.Sweeping
) -> int:
    """Run an entry's jobs, compare them with the printed cells, and carry out its further commands."""
    codes, began, heading = [0], time.time(), heading_of(paper, entry, others)
    further = command_lines(entry, cfg, others)  # now: a wrong word should not be told after hours of work
    before = command_lines(entry, cfg, _of_model(others), entry.first)
    rows: list[str] = []
    with headed(heading):
        for name, words in before:
            terminal.console().print(Text(f"kvbench {files.spelled(name)} {shlex.join(words)}"), soft_wrap=True)
            if code := commands.run(name, words):
                return code
        if entry.tasks:
            from kvbench.extensions.suite.preview import announce

            jobs = jobs_of(paper, entry, cfg, others)
            rows = [row for row, _ in jobs]
            listed = sweeping.Listed(command=[GROUP, *arguments], jobs=[words for _, words in jobs], announce=announce)
            launcher = [word for word in others if word.startswith("hydra")]
            codes.append(sweep(["-m", f"results_dir={cfg.results_dir}", *launcher], listed))
        for name, words in further:
            terminal.console().print(Text(f"\nkvbench {files.spelled(name)} {shlex.join(words)}"), soft_wrap=True)
            codes.append(commands.run(name, words))
    terminal.console().print(Text(heading), soft_wrap=True)
    ran = ran_of(cfg, rows) if entry.tasks else []
    write_memory(paper, entry, cfg, ran)
    if entry.tasks and entry.cells:
        changed = [word for word in others if word.partition("=")[0].lstrip("+~") not in NEUTRAL]
        changed = [word for word in changed if not word.startswith("hydra")]
        write(paper, entry, cfg, printed.join(paper, entry, ran, changed))
    elif entry.cells:
        documents = [*_documents(further, began)]
        write(paper, entry, cfg, printed_bench.join(paper, entry, documents))
    return max(codes)


def heading_of(paper: Paper, entry: Entry, words: Sequence[str]) -> str:
    """Heading of the pictures of an entry, which says that they are not the paper's."""
    lines = [*entry.tasks, *(line for line in entry.then if "{model}" in line or not line.startswith(("bench", BYTES)))]
    about = f"{paper.name}, {entry.at}, measured here"
    if not lines:
        is_counted = all(line.startswith(BYTES) for line in entry.then)
        return f"{about}: {'counted, nothing was run' if is_counted else f'{printed.OTHER_MACHINE}, no model'}"
    name, models = model_name(words) or DEFAULT_MODEL, entry.printed(paper)["model"].unique()
    if paper.printed_model(name):
        return f"{about} with {name}, the paper's {paper.printed_model(name)}"
    shown = models if len(models) and "all" not in models else paper.models
    theirs = ", ".join(model for model in shown if model in paper.models)
    return f"{about}: {OTHER_MODEL}, {name} (the paper {f'has {theirs}' if theirs else 'names none'})"


def ran_of(cfg: DictConfig, rows: Sequence[str]) -> list[printed.Ran]:
    """Jobs of this process's last sweep, by their rows."""
    root = Path(str(cfg.results_dir))
    begun = process_sweep(root).jobs()
    folders = [begun[number].run if number in begun else "" for number in range(1, len(rows) + 1)]
    return [printed.Ran(row, root / one if one else None) for row, one in zip(rows, folders, strict=True)]


def write_memory(paper: Paper, entry: Entry, cfg: DictConfig, ran: Sequence[printed.Ran]) -> None:
    """Write the sizes of an entry's runs as its paper counts them, next to the bytes that were resident."""
    from kvbench.extensions.papers import memory

    if sizes := memory.sizes(paper, entry, ran):
        root, title = Path(str(cfg.results_dir)), f"{paper.name}, {entry.at}"
        contents = {
            root / f"{entry.slug}_memory.md": memory.markdown(title, sizes).encode(),
            root / f"{entry.slug}_memory.csv": memory.csv_of(sizes),
        }
        terminal.print_paths(write_files(root, contents), terminal.console())


def write(paper: Paper, entry: Entry, cfg: DictConfig, cells: Sequence[printed.Cell]) -> None:
    """Print the table of an entry, and write it."""
    printed.show(paper, entry, cells)
    root = Path(str(cfg.results_dir))
    page = printed.markdown(paper, entry, cells).encode()
    contents = {root / f"{entry.slug}.md": page, root / f"{entry.slug}.csv": printed.csv_of(cells)}
    terminal.print_paths(write_files(root, contents), terminal.console())


def _documents(further: Sequence[tuple[str, list[str]]], began: float) -> Iterator[dict[str, Any]]:
    """Documents that benches and tables of bytes wrote since a time."""
    from kvbench.kernels.bench.bench import read_document

    for name, words in further:
        settings = dict(word.partition("=")[::2] for word in words)
        if name == "bench":
            for path in sorted((Path(settings["out"]) / settings["what"]).glob("*/bench.json")):
                if path.stat().st_mtime >= began:
                    yield read_document(path)
        elif name == BYTES and Path(settings.get("out", "")).is_file():
            with Path(settings["out"]).open(newline="", encoding="utf-8") as file:
                yield {"what": BYTES, "rows": list(csv.DictReader(file))}


def jobs_of(paper: Paper, entry: Entry, cfg: DictConfig, others: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The printed row that each job stands for, and the words of the job; a method that the user adds has no row."""
    of_model = entry.rows(paper.printed_model(model_name(others)))
    rows = {row: line.replace("{results}", str(cfg.results_dir)) for row, line in of_model.items()}
    of_line = {tuple(sweeping.combinations(shlex.split(line))[0]): row for row, line in rows.items()}
    chosen = suite.Suite(every=entry.every, tasks=entry.tasks, methods=tuple(rows.values()))
    return [(of_line.get(tuple(line), ""), job) for line, job in suite.by_method(chosen, cfg, others)]


def model_name(words: Sequence[str]) -> str:
    """Name that a run's model will have: a hub id without its owner, a folder's name, or a choice."""
    settings = {key: value for key, _, value in (word.partition("=") for word in words)}
    return Path(settings.get("model.path") or settings.get("model", "")).name


def command_lines(
    entry: Entry, cfg: DictConfig, others: Sequence[str], lines: Sequence[str] | None = None
) -> list[tuple[str, list[str]]]:
    """Further commands of an entry, or these lines of it, each its name and words.

    With the user's words that it has a setting for.

    Raises:
        ValueError: Nothing of the entry has a setting of the user's, or it has no jobs for a launcher.
    """
    model = " ".join(word.removeprefix("model=").removeprefix("model.") for word in others if word[:5] == "model")
    data, commands, taken = suite.data_words(cfg), [], set[str]()
    methods = ",".join(f"'{line}'" for line in dict.fromkeys(entry.rows().values()))
    for line in entry.then if lines is None else lines:
        name, *words = shlex.split(line.replace("{results}", str(cfg.results_dir)).replace("{at}", entry.slug))
        words = [
            word.replace("{model}", f"'{model or DEFAULT_MODEL}'").replace("{methods}", f"[{methods}]")
            for word in words
        ]
        listed = read_config(files.path_of("command", name))
        is_run = "/config" in listed.get("defaults", [])
        mine = [word for word in others if is_run or word.partition("=")[0].partition(".")[0] in listed]
        mine = [word for word in mine if not word.startswith("hydra") and (is_run or not word.startswith("model"))]
        taken |= set(mine)
        commands.append((name, [*words, *mine, *(data if is_run else [])]))
    for word in () if entry.tasks else others:
        if word.startswith("hydra"):
            raise Unsupported(
                f"{word}: {entry.at} is one command and no sweep; {IN_A_JOB} srun --gres=gpu:1, this line without it"
            )
        if word not in taken and not word.startswith("model"):
            raise unknown_setting(word.partition("=")[0], read_config(files.path_of("command", GROUP)))
    return commands


def _of_model(words: Sequence[str]) -> list[str]:
    """The user's words about the model, which alone go to commands before the jobs: these have a task of their own."""
    return [word for word in words if word.startswith("model")]


def plan(paper: Paper, entry: Entry, cfg: DictConfig, others: list[str], arguments: list[str]) -> int:
    """Print what an entry would run: samples and missing data, with no model loaded.

    `plan=timed` also time by a rate measured here, memory and disk; its further commands; and the words that start it,
    here and on a cluster.
    """
    console = terminal.console()
    launcher = [word for word in others if word.startswith("hydra")]
    sweeping.check_launcher(["-m", *launcher])
    console.print(Text(f"{paper.name}, {entry.at}: {entry.shows}"), soft_wrap=True)
    further = command_lines(entry, cfg, others)
    start = shlex.join(
        ["python", "-m", "kvbench", GROUP, *(word for word in arguments if not word.startswith("plan="))]
    )
    lines = list[str]()
    if entry.tasks:
        from kvbench.config.compose import compose

        jobs = jobs_of(paper, entry, cfg, others)
        for row, words in jobs:
            console.print(Text(f"{row or '(no printed row)'}: kvbench {shlex.join(words)}"), soft_wrap=True)
        if cfg.plan == TIMED:
            methods = [suite.choice(words, "method") for _, words in jobs]
            lines += _preflight([(compose(words), name) for (_, words), name in zip(jobs, methods, strict=True)])
        else:
            lines += _counted([words for _, words in jobs])
        each = f", each a job of {shlex.join(launcher)}" if launcher else ""
        lines.append(f"{len(jobs)} runs{each}; to start them: {start}")
        if not launcher:
            lines.append(f"on a Slurm cluster, each run a job: {start} {CLUSTER}")
    for name, words in further:
        lines.append(
            f"{'then ' if entry.tasks else ''}kvbench {files.spelled(name)} {shlex.join(words)}{_size(name, words)}"
        )
        if name == "calibrate" and cfg.plan == TIMED:
            lines += _preflight(_calibrated(words))
    if not entry.tasks:
        lines += [f"to start it: {start}", f"{IN_A_JOB} srun --gres=gpu:1 {start}"]
    if entry.took:
        lines.append(f"a small run of it took {entry.took}")
    rows = entry.printed(paper)
    named = {str(model): paper.models.get(str(model), "") for model in rows["model"].unique()}
    if any(named.values()):
        lines.append("models of the printed cells; any other is never a match:")
    lines += [f"{model}: model=hf model.path={hub}" for model, hub in named.items() if hub]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return 0


def _counted(jobs: Sequence[list[str]]) -> list[str]:
    """Count the samples of jobs, task by task, as published, and name missing data.

    No model is loaded, no row read and nothing fetched.
    """
    from kvbench.config.compose import compose
    from kvbench.tasks import data_files
    from kvbench.tasks.files import at_hand
    from kvbench.tasks.task import Limit

    of_task: dict[tuple[str, ...], list[list[str]]] = {}
    for words in jobs:
        of_task.setdefault(tuple(word for word in words if not word.startswith("method")), []).append(words)
    lines = []
    for words, *others in of_task.values():
        runs, cfg = 1 + len(others), compose(words)
        name = suite.choice(words, "task")
        try:
            limit, listed = Limit.read(cfg.limit), [file for file in data_files(cfg.task) if file.has_questions]
            missing = [file.label for file in listed if not at_hand(file, cfg.task.get("data_dir"))]
        except ValueError as error:
            lines.append(f"! nothing is known of {runs} of {len(jobs)} runs: {error}")
            continue
        if listed and all(file.rows for file in listed):
            samples = sum(len(limit.of(file.rows, file.label)) if limit else file.rows for file in listed)
            answers = samples * runs * cfg.protocol.num_samples
            lines.append(f"{name}: {samples} samples as published, through {runs} runs, {answers} answers")
        else:
            lines.append(f"{name}: as many samples as its data or its settings say, through {runs} runs")
        if missing:
            lines.append(f"! {name}: no data at hand for {', '.join(missing)}; see `kvbench data task={name}`")
    return [*lines, f"how long and how large: plan={TIMED} times a few answers; so does the sweep before it begins"]


def _preflight(run_requests: Sequence[tuple[DictConfig, str]]) -> list[str]:
    """Print the preflight of runs; returns the reasons of those left out, each once."""
    from kvbench.extensions.suite.preview import say
    from kvbench.runs.parts import Loaders

    reasons = Counter(text.split(": ", 2)[-1] for text in say(run_requests, Loaders()))
    return [f"! nothing is known of {count} of {len(run_requests)} runs: {reason}" for reason, count in reasons.items()]


def _calibrated(words: list[str]) -> list[tuple[DictConfig, str]]:
    """Runs of a calibration's grid, for the preflight."""
    from kvbench.config.compose import compose

    count, tuning = _grid(words)
    mine = [word for word in words if not word.startswith(("calibrate.", "what=", "rule="))]
    return [(compose([*mine, f"limit={tuning}"]), suite.choice(mine, "method"))] * count


def _grid(words: list[str]) -> tuple[int, int]:
    """Number of settings that a calibration tries, and of samples of each subset."""
    from kvbench.extensions.calibrate.plan import read_plan
    from kvbench.runs.parts import make_policy

    cfg = commands.compose_command("calibrate", words)
    plan = read_plan(cfg.calibrate, str(cfg._choices_.method), make_policy(cfg.method), rule=cfg.rule)
    return sum(len(stage.values) for stage in plan.stages), plan.tuning_samples


def _size(name: str, words: list[str]) -> str:
    """Size of a bench or a calibration, in words after its command."""
    if name == "bench":
        from kvbench.extensions.bench.command import settings_of
        from kvbench.kernels.bench.bench import Bench

        cfg = commands.compose_command(name, words)
        cells = Bench(settings := settings_of(cfg, cfg.what)).cells
        return (
            f"\n{len(cells)} cell{'s' * (len(cells) != 1)}, {settings.rounds} timed rounds each; quick=true takes small"
            " values. No rate is measured ahead of a bench: after its first round it says how long the rest takes"
        )
    if name == "calibrate":
        count, tuning = _grid(words)
        return f"\nat most {count} settings through {tuning} samples of each subset, and three through held-out ones"
    return ""


def _list_papers() -> int:
    console = terminal.console()
    table = terminal.plain_table()
    terminal.add_names(table, "paper", [paper.key for paper in papers.every()])
    for heading in ("what it is", "entries", "printed cells"):
        table.add_column(heading, justify="left" if heading == "what it is" else "right")
    for paper in papers.every():
        count = sum(len(entry.printed(paper)) for entry in paper.entries)
        table.add_row(*map(Text, (paper.key, paper.about, f"{len(paper.entries)}", f"{count}")))
    console.print(table)
    return 0


def _list(paper: Paper) -> int:
    """Every entry with what runs it; the exit code."""
    console = terminal.console(140)
    table = terminal.plain_table(f"{paper.name}: {paper.about}")
    terminal.add_names(table, "at", [entry.at for entry in paper.entries])
    table.add_column("shows")
    table.add_column("here")
    table.add_column("printed", justify="right")
    for entry in paper.entries:
        table.add_row(*map(Text, (entry.at, entry.shows, here(entry), f"{len(entry.printed(paper))}")))
    console.print(table)
    if paper.note:
        console.print(Text(paper.note, style="dim"))
    console.print(Text(f"one of them: kvbench paper {paper.key} table=NUMBER (or figure=, claim=); plan=true says what "
                       "would run", style="dim"))  # fmt: skip
    return 0


def here(entry: Entry) -> str:
    """Means by which an entry is made here, in a few words."""
    if entry.cannot:
        return f"cannot be: {entry.cannot}"
    if entry.example:
        return EXAMPLE
    parts = []
    if entry.tasks:
        names = ", ".join(suite.choice(shlex.split(line), "task") for line in entry.tasks)
        parts.append(f"{names} through {len(entry.rows())} rows")
    return "; ".join([*parts, *(line.partition(" ")[0] for line in entry.then)])
