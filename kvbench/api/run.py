"""Experiments from Python: the same runs in the same folders as the command line's."""

import html
import io
import sys
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.api.load import run_row, sample_row
from kvbench.api.objects import method_of, shared
from kvbench.config import calibrated, files
from kvbench.config.code import check_unchanged
from kvbench.config.compose import compose, for_their_methods, words_of
from kvbench.config.files import FULL
from kvbench.config.one_file import is_method_file
from kvbench.config.shorthand import every_setting
from kvbench.errors import ArgumentValue, SettingsConflict, SettingValue
from kvbench.policy import Policy
from kvbench.results import provenance
from kvbench.results.record import RunRecord
from kvbench.runs.cross_run_batch import RunRequest, groups, run_cross_batch
from kvbench.runs.parts import Loaders, policy_class
from kvbench.runs.run import Run
from kvbench.runs.sessions import Origin
from kvbench.show.progress import note

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WIDTH = 100  # columns of a table


class _Tables(ABC):
    """Tables common to one run and to several."""

    @abstractmethod
    def _runs(self) -> list[Run]: ...

    @property
    @abstractmethod
    def picture(self) -> Path:
        """The picture of scores and bytes, a PNG file next to the results."""

    @property
    def _records(self) -> list[RunRecord]:
        records = [record for run in self._runs() for record in run.records]
        return sorted(records, key=lambda record: record.method != FULL)

    @property
    def table(self) -> str:
        """The table that the command line prints, as text."""
        from kvbench.show import table, terminal

        target = io.StringIO()
        table.show(self._records, console=terminal.console(_WIDTH, file=target))
        return "\n".join(line.rstrip() for line in target.getvalue().strip("\n").splitlines())

    @property
    def frame(self) -> "DataFrame":
        """One row per run, with the columns of `kvbench.load`."""
        import pandas as pd

        return pd.DataFrame([run_row(run.record, run.folder) for run in self._runs()])

    @property
    def samples(self) -> "DataFrame":
        """One row per answer, with the columns of `kvbench.load(samples=True)`."""
        import pandas as pd

        return pd.DataFrame([sample_row(run.record, run.folder, item) for run in self._runs() for item in run.samples])

    def __repr__(self) -> str:
        return self.table

    def _repr_html_(self) -> str:
        table = f'<pre style="line-height:1.2">{html.escape(self.table)}</pre>'
        if not all(run.ended for run in self._runs()):  # of shards, the last one makes the picture
            return table
        image = b64encode(self.picture.read_bytes()).decode()
        return f'{table}<img alt="scores with intervals against resident bytes" src="data:image/png;base64,{image}">'


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(_Tables):
    """One run, compared with the full cache on the same samples."""

    run: Run
    """The records and samples as they were stored."""

    def _runs(self) -> list[Run]:
        return [self.run]

    @property
    def record(self) -> RunRecord:
        """Content of `run.json`; its status is `failed` when the result must not be used."""
        return self.run.record

    @property
    def reference(self) -> RunRecord | None:
        """The full cache's `run.json`; None without one."""
        return self.run.reference

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.run.folder

    @property
    def picture(self) -> Path:
        return self.folder / "result.png"


@dataclass(frozen=True, kw_only=True, repr=False)
class Results(_Tables, Sequence[Result]):
    """Several runs of one task and model, in the order of the sweep."""

    results: list[Result]
    """One for each combination."""

    def _runs(self) -> list[Run]:
        return [result.run for result in self.results]

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    @property
    def picture(self) -> Path:
        from kvbench.show import figure

        return figure.draw(self._records, self.results[0].folder.parent.parent / "sweep.png")


@cache
def _loaders() -> Loaders:
    """Loaders of the process: runs share the last model, the last task and the prompts that were read."""
    return Loaders()


def release() -> None:
    """Release the model, the task and the prompts that `run` keeps for the next run."""
    _loaders.cache_clear()


def run(
    method: str = "diffkv",
    *,
    task: str = "longctx",
    model: "str | PreTrainedModel" = "smollm2-135m",
    protocol: str = "default",
    limit: int | str | None = None,
    results_dir: str | Path = "results",
    resume: bool = True,
    config_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    **method_settings: Any,
) -> Result:
    """Run one experiment as the command line does: resumed where it was stopped, stored, compared with the full cache.

    A run that is there already is read, not run again. The model and the task stay loaded for the next call; `release`
    lets them go.

    Args:
        method: Name in conf/method, or the path of a Python file with a method of one's own.
        task: Name in conf/task.
        model: Name in conf/model, a folder or a hub id; or a model that is loaded already, with its tokenizer.
        protocol: Name in conf/protocol.
        limit: Samples per subset, or `first:n`; None for all.
        results_dir: Folder of the runs.
        resume: False starts this run again from nothing.
        config_dir: A folder with `method/NAME.yaml` of one's own, as `--config-dir` takes it.
        settings: Any other settings by the names of the command line, such as `{"task.subsets": ["trec"],
            "protocol.max_new_tokens": 64}`.
        policy: A policy that was made already, instead of a method.
        tokenizer: That of a model that is loaded already.
        **method_settings: Settings of the method, such as `budget=0.25`, and others that one group alone has, such as
            `length=512` of the task.

    Raises:
        ValueError: A setting is unknown or out of range, or data or weights are missing.
        RuntimeError: The method's source, or the task's, was changed after Python had imported it.
    """
    wanted = {
        "method": method,
        "task": task,
        "model": model,
        "protocol": protocol,
        "limit": limit,
        "results_dir": results_dir,
        "resume": resume,
        "settings": settings,
        **method_settings,
    }
    if policy is not None and method_settings:
        raise SettingsConflict(
            f"{', '.join(method_settings)} cannot be set of a policy that was made already; give it there",
            setting=f"method.{next(iter(method_settings))}",
        )
    if isinstance(model, str):
        return _run([wanted], config_dir, policy=policy)[0]
    if not hasattr(model, "state_dict"):
        raise ArgumentValue(
            f"model is a {type(model).__name__}; give a name, a folder, a hub id, or a loaded model", setting="model"
        )
    with shared(model, tokenizer) as (group, loaders):
        return _run([wanted | {"model": "hf"}], config_dir, policy=policy, model=group, loaders=loaders)[0]


def _run(
    calls: Sequence[Mapping[str, Any]],
    config_dir: str | Path | None,
    *,
    policy: Policy | None = None,
    model: Mapping[str, Any] | None = None,
    loaders: Loaders | None = None,
) -> list[Result]:
    """Runs calls with the arguments of `run`, in cross-run batches where possible.

    Raises the error of the first that failed, once all have ended.

    Args:
        policy: Instead of the method of each.
        model: The group of a model that `loaders` have, instead of that of each.
    """
    from kvbench.show import figure

    config_dirs = list(files.config_dirs()) if config_dir is None else [Path(config_dir).expanduser()]
    calls, method_files = _without_files(calls)
    config_dirs += [path for path in method_files if path not in config_dirs]
    finished: dict[int, Run | Exception] = {}
    with files.with_config_dirs(config_dirs):
        sys.path += [folder for folder in files.import_folders(method_files) if folder not in sys.path]
        jobs = []
        wanted, said = for_their_methods([_words(**each) for each in calls])
        for sentence in said:
            note(sentence)
        for words in wanted:
            cfg, name = compose(words), words[0].removeprefix("method=")
            calibrated.resolve(cfg, words)
            if policy is not None:
                name, cfg.method = method_of(policy)
            if model is not None:
                cfg.model = model
            check_unchanged(provenance.method_files(policy_class(cfg.method._target_)))
            jobs.append(RunRequest(cfg=cfg, method=name, say=note, origin=Origin()))
        for numbers in groups([job.cfg for job in jobs]):
            for index, ended in run_cross_batch([jobs[number] for number in numbers], loaders or _loaders()):
                finished[numbers[index]] = ended
    results = []
    for _, ended in sorted(finished.items()):
        if isinstance(ended, Exception):
            raise ended
        results.append(result := Result(run=ended))
        if ended.ended:
            figure.draw(result._records, result.picture)
    return results


def _without_files(calls: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Path]]:
    """The arguments of `run` with a method's name instead of its file; and these files."""
    method_files = [one["method"] for one in calls if is_method_file(one["method"])]
    named = [{**one, "method": Path(one["method"]).stem} if is_method_file(one["method"]) else one for one in calls]
    return named, [Path(path).expanduser() for path in dict.fromkeys(method_files)]


def _words(
    *,
    method: str,
    task: str = "longctx",
    model: str = "smollm2-135m",
    protocol: str = "default",
    settings: Mapping[str, Any] | None = None,
    limit: int | str | None = None,
    results_dir: str | Path = "results",
    resume: bool = True,
    **method_settings: Any,
) -> list[str]:
    """The arguments of `run` as words of the command line, the method first."""
    choices = {"method": method, "task": task, "model": model, "protocol": protocol}
    words = [f"{group}={name}" for group, name in choices.items()]
    words += words_of({"limit": limit, "results_dir": str(results_dir), "resume": resume})
    known = every_setting(words) if method_settings else []
    elsewhere = {name.rpartition(".")[2] for name in known} - {name[7:] for name in known if name[:7] == "method."}
    others = {name: value for name, value in method_settings.items() if name in elsewhere}
    method_words = {name: value for name, value in method_settings.items() if name not in elsewhere}
    return words + words_of({**(settings or {}), **others}) + words_of(method_words, "method.")


def sweep(method: str | Sequence[str] = "diffkv", **choices: Any) -> Results:
    """Runs every combination of settings, as `-m` does on the command line.

    A prompt is read once for all methods, and a method's setting goes to the methods that have it.

    Args:
        method: Name, or names.
        **choices: As `run` takes them; a list or tuple holds the values to try. `settings` and `config_dir` are given
            as they are. A setting whose value is itself a list goes into `settings`.

    Raises:
        ValueError, RuntimeError: As `run`, by the first that failed, once all have ended.
    """
    tried = {"method": method} | choices
    fixed = {name: tried.pop(name) for name in ("settings", "config_dir") if name in tried}
    lists = [value if isinstance(value, list | tuple) else [value] for value in tried.values()]
    for key, entries in zip(tried, lists, strict=True):
        if not entries:
            raise SettingValue(f"{key}=[] is empty", setting=key)
    folder = fixed.pop("config_dir", None)
    return Results(results=_run([dict(zip(tried, each, strict=True)) | fixed for each in product(*lists)], folder))
