"""The `data` command: fetch a benchmark for machines without a network, or check the files at hand."""

from pathlib import Path

from omegaconf import DictConfig
from rich.text import Text

from kvbench.config.settings import as_dict
from kvbench.errors import FileMissing, NameUnknown, SettingMissing, SettingsConflict
from kvbench.results.writing import write_atomic
from kvbench.show import terminal
from kvbench.show.progress import note
from kvbench.tasks import data_files
from kvbench.tasks.fetch import Fetch, Report, check_copy, check_file, read_manifest

MAX_LISTED = 50  # broken rows that are shown; all are counted
# Tasks of lm-eval: a copy of the whole repository is what `task.data_dir` takes.
# Longer names first: a task belongs to the first that it begins with.
REPOSITORIES = {"mmlu_pro": "TIGER-Lab/MMLU-Pro", "mmlu": "cais/mmlu", "gpqa": "Idavidrein/gpqa"}


def main(cfg: DictConfig) -> int:
    """Fetch or check; 0 where everything is there and right, else 1."""
    if (cfg.to is None) == (cfg.check is None):
        raise SettingsConflict(
            f"to={cfg.to} and check={cfg.check}: give one of to=FOLDER (fetch) and check=FOLDER (look at what is "
            "there)",
            setting="to",
        )
    if not cfg.get("task"):
        raise SettingMissing(
            "which benchmark? For example task=longbench; `kvbench data --help` lists them", setting="task"
        )
    settings = as_dict(cfg.task)
    # A task of lm-eval is called after its variant (gpqa_diamond_...), its data after the family.
    name = str(settings.get("name"))
    task = next((known for known in REPOSITORIES if settings.get("harness") and name.startswith(known)), name)
    files = [] if task in REPOSITORIES else data_files(settings)
    if not files and task not in REPOSITORIES:
        raise NameUnknown(
            f"task={task} has no files that this command knows; `kvbench data --help` lists those it does",
            setting="task",
        )
    folder = Path(str(cfg.to if cfg.check is None else cfg.check)).expanduser()
    if cfg.to is not None:
        fetch = Fetch(task, folder, write_atomic, note)
        fetch.files(files) if files else fetch.copy(REPOSITORIES[task])
    elif not folder.is_dir():
        raise FileMissing(f"check={folder} is not a folder (looked for {folder.absolute()})", setting="check")
    manifest = read_manifest(folder)
    reports = [check_file(file, folder, manifest, bool(cfg.partial)) for file in files]
    return _show(task, folder, reports if files else check_copy(folder, manifest), bool(cfg.partial))


def _show(task: str, folder: Path, reports: list[Report], partial_data: bool) -> int:
    table = terminal.plain_table(f"{task} in {folder}", title_style=None)
    table.add_column("file", no_wrap=True)
    for heading in ("rows", "of", "broken"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("sha256", no_wrap=True)
    table.add_column("")
    for report in reports:
        state = "; ".join((*report.faults, *report.notes)) or ("good" if report.good else "")
        counts = [str(report.rows), str(report.wanted), str(len(report.broken))] if report.wanted else ["", "", ""]
        table.add_row(report.name, *counts, report.sha256[:16], Text(state, overflow="fold"))
    console = terminal.console(140)
    console.print(table)
    broken = [row for report in reports for row in report.broken]
    for row in broken[:MAX_LISTED]:
        console.print(Text(f"{row['file']}:{row['line']}: {row['reason']}"), soft_wrap=True)
    if len(broken) > MAX_LISTED:
        console.print(f"and {len(broken) - MAX_LISTED} more broken rows")
    nothing = not any(report.path for report in reports)
    if all(report.good for report in reports) and not nothing:
        whole = "All good." if all(report.rows == report.wanted for report in reports) else "A part, and good."
        console.print(Text(f"{whole} Use it with: task={task} task.data_dir={folder}"), soft_wrap=True)
        return 0
    hint = "" if partial_data or broken else " (partial=true takes a part of the benchmark for good)"
    console.print(Text(f"Not complete or not right, see above{hint}."), soft_wrap=True)
    return 1
