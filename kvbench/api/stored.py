"""Results of commands that run nothing, as data: `compare`, `table`, `bytes` and `list_methods`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.api.load import run_row
from kvbench.config import extensions, files
from kvbench.config.compose import compose, words_of
from kvbench.errors import PackageMissing
from kvbench.evidence import compare as comparing
from kvbench.evidence.load import load_groups

if TYPE_CHECKING:
    from pandas import DataFrame


def compare(results_dir: str | Path = "results", **settings: Any) -> "DataFrame":
    """Compare stored runs with the full cache, or with another method, as `kvbench compare` does; nothing is run.

    Args:
        results_dir: The folder that runs landed in.
        **settings: Those of `kvbench compare`, such as `metric="nll"`, `against="snapkv"` or `where={"budget": 0.25}`.

    Returns:
        One row for each run and task: the paired difference with its 95 % interval, p, and the verdict. Notes on runs
        that were left out are in `.attrs["notes"]`.

    Raises:
        ValueError: A setting is unknown, or there is nothing to compare.
    """
    return comparing.main.evaluate(_command("compare", results_dir, settings)).frame


def table(results_dir: str | Path = "results", **settings: Any) -> "DataFrame":
    """Read the stored runs that may be compared: of each method and setting the newest whole one.

    Args:
        results_dir: The folder that runs landed in.
        **settings: Filters of `kvbench compare`: `tasks`, `models`, `methods`, `where`, `code`.

    Returns:
        One row for each run, with `label`, unique among the runs of its method, and the columns of `load`.

    Raises:
        ValueError: A setting is unknown, or nothing fits.
    """
    import pandas as pd

    cfg = _command("compare", results_dir, settings)
    groups, root = load_groups(cfg), Path(str(cfg.results_dir))
    rows = [
        {"group": group.title, "label": run.label, **run_row(run.record, root / run.name)}
        for group in groups
        for run in group.runs
    ]
    frame = pd.DataFrame(rows)
    frame.attrs["notes"] = [text for group in groups for text in group.notes]
    return frame


def bytes(method: str = "full", *, model: str = "llama3-8b", length: int = 32768, **settings: Any) -> "DataFrame":
    """Count what a method would hold on a model that is not here, as `kvbench bytes` does.

    Args:
        method: Name, or names with commas between them.
        model: A preset, a config.json or its folder, or a .gguf file.
        length: Tokens of one sequence, prompt and answer together.
        **settings: Those of `kvbench bytes`, such as `batch=16`, and of the method, such as `budget=0.25`.

    Returns:
        One row for each method and bound, with every item of the ledger in bytes of one sequence.

    Raises:
        ValueError: A setting is unknown or out of range, or the extension `advise` is missing.
    """
    import pandas as pd

    counting: Callable[..., list[dict[str, Any]]] | None = next(extensions.hooks("python.bytes"), None)
    if counting is None:
        raise PackageMissing("kvbench.bytes is a part of the extension advise, which is not installed")
    return pd.DataFrame(counting([f"method={method}", *words_of({"model": model, "length": length, **settings})]))


def list_methods() -> dict[str, str]:
    """List the methods by name, with what each one does in a sentence."""
    return files.options("method")


def _command(name: str, results_dir: str | Path, settings: dict[str, Any]) -> Any:
    return compose(words_of({"results_dir": str(results_dir), **settings}), name=f"command/{name}")
