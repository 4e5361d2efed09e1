"""What each benchmark consists of: its files, their rows, what a row must hold, and where they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvbench.rules import Declared, declared
from kvbench.tasks.settings import name_list
from kvbench.tasks.source import RowCheck


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a benchmark.

    Args:
        name: Name without `.jsonl`, as a fetch writes it.
        rows: Rows of the whole benchmark.
        check: What a row must be.
        stems: Further names that a local file may have.
        hub: (repository, path) pairs of data sets on the hub, best first: `.jsonl`, `.json` (one list), `.parquet`,
            or a `.zip` that holds `<name>.jsonl`.
        url: Address of a gzip file that holds it, for what is not on the hub.
        official: SHA-256 of the authors' own file, where it is known.
        by_hand: How to get it otherwise.
    """

    name: str
    rows: int
    check: RowCheck
    stems: tuple[str, ...] = ()
    hub: tuple[tuple[str, str], ...] = ()
    url: str = ""
    official: str = ""
    by_hand: str = ""


# Rows as the authors publish them (LongBench and LongBench-E: the hub's viewer of their repository).
_LONGBENCH = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
_LONGBENCH_E = {"qasper_e": 224, "multifieldqa_en_e": 150, "multi_news_e": 294}
_MATH = {
    "algebra": 1187,
    "counting_and_probability": 474,
    "geometry": 479,
    "intermediate_algebra": 903,
    "number_theory": 540,
    "prealgebra": 871,
    "precalculus": 546,
}
# The train file of openai/grade-school-math at 3101c7d.
_GSM8K = {"test": (1319, ""), "train": (7473, "6043ef64147b59871f4fd3adf669c306fe0a4c27e5a5c4bfb761f3f084895a13")}
_EVALPLUS = {"humaneval_plus": 164, "mbpp_plus": 378}
# Tasks of lm-eval: a copy of the whole repository is what `task.data_dir` takes.
# Longer names first: a task belongs to the first that it begins with.
REPOSITORIES = {"mmlu_pro": "TIGER-Lab/MMLU-Pro", "mmlu": "cais/mmlu", "gpqa": "Idavidrein/gpqa"}


def files_of(task: str, subsets: str | Sequence[str] | None = None) -> list[DataFile]:
    """The files of a benchmark.

    Args:
        task: As in `task=`.
        subsets: For longbench, infinitebench and math: some of them, or a group (`en`, `e`, `all`); None takes what the
            task takes.

    Raises:
        ValueError: The task has no files, or no such subset.
    """
    if task not in _MAKERS:
        raise ValueError(
            f"task={task} has no files that this command knows; it knows {', '.join((*_MAKERS, *REPOSITORIES))}"
        )
    return _MAKERS[task](task, subsets)


def _names(setting: Declared, chosen: str | Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The parts of a benchmark that were asked for, as the setting of its task reads them."""
    setting.check(chosen, "task.")
    return name_list(chosen, groups)


def _longbench(task: str, subsets: str | Sequence[str] | None) -> list[DataFile]:
    from kvbench.tasks.longbench import GROUPS, Settings
    from kvbench.tasks.longbench.dataset import HUB_ARCHIVE, HUB_REPOS, check_row

    names = _names(declared(Settings)["subsets"], subsets or "en", GROUPS)
    return [
        DataFile(
            name=name,
            rows=_LONGBENCH_E.get(name, 300) if name.endswith("_e") else _LONGBENCH.get(name, 200),
            check=partial(check_row, subset=name),
            hub=tuple((repo, HUB_ARCHIVE) for repo in HUB_REPOS)
            + tuple((repo, f"{name}/test-00000-of-00001.parquet") for repo in HUB_REPOS),
            by_hand=f"unpack {HUB_ARCHIVE} of the data set {HUB_REPOS[0]} into a folder",
        )
        for name in names
    ]


def _longbench_v2(task: str, subsets: str | Sequence[str] | None) -> list[DataFile]:
    from kvbench.tasks.longbench_v2.dataset import PLACE, check_row

    name = PLACE.stems[0]
    return [DataFile(name=name, rows=503, check=check_row, hub=PLACE.hub, by_hand=PLACE.fetch)]


def _infinitebench(task: str, subsets: str | Sequence[str] | None) -> list[DataFile]:
    from kvbench.tasks.infinitebench import GROUPS, Settings
    from kvbench.tasks.infinitebench.dataset import SUBSETS, check_row, place

    names = _names(declared(Settings)["subsets"], subsets or "retrieval", GROUPS)
    return [
        DataFile(name=name, rows=SUBSETS[name].rows, check=check_row, hub=place(name).hub, by_hand=place(name).fetch)
        for name in names
    ]


def _gsm8k(task: str, subsets: str | Sequence[str] | None) -> list[DataFile]:
    from kvbench.tasks.gsm8k.dataset import check_row, place

    return [
        DataFile(
            name=name, rows=rows, check=check_row, hub=place(name).hub, official=official, by_hand=place(name).fetch
        )
        for name, (rows, official) in _GSM8K.items()
    ]


def _math(task: str, subsets: str | Sequence[str] | None) -> list[DataFile]:
    from kvbench.tasks.mathematics import GROUPS, SubjectSettings
    from kvbench.tasks.mathematics.dataset import check_row, place

    if task == "math500":
        names = {"math500": 500}
    else:
        names = {name: _MATH[name] for name in _names(declared(SubjectSettings)["subjects"], subsets or "all", GROUPS)}
    return [
        DataFile(
            name=place(name).stems[0],
            rows=rows,
            check=check_row,
            stems=place(name).stems[1:],
            hub=place(name).hub,
            by_hand=place(name).fetch,
        )
        for name, rows in names.items()
    ]


def _aime(task: str, subsets: str | Sequence[str] | None) -> list[DataFile]:
    from kvbench.tasks.aime.dataset import check_row, place

    found = place(task)
    return [
        DataFile(
            name=found.stems[0], rows=30, check=check_row, stems=found.stems[1:], hub=found.hub, by_hand=found.fetch
        )
    ]


def _evalplus(task: str, subsets: str | Sequence[str] | None) -> list[DataFile]:
    from kvbench.tasks.code.dataset import RELEASE, check_row, place

    name, version = RELEASE[task]
    found = place(task)
    # The address that EvalPlus itself fetches from.
    url = f"https://github.com/evalplus/{name.lower()}_release/releases/download/{version}/{name}.jsonl.gz"
    return [
        DataFile(
            name=found.stems[0],
            rows=_EVALPLUS[task],
            check=check_row,
            stems=found.stems[1:],
            url=url,
            by_hand=found.fetch,
        )
    ]


_MAKERS = {
    "longbench": _longbench,
    "longbench_v2": _longbench_v2,
    "infinitebench": _infinitebench,
    "gsm8k": _gsm8k,
    "math500": _math,
    "math": _math,
    "aime24": _aime,
    "aime25": _aime,
    "humaneval_plus": _evalplus,
    "mbpp_plus": _evalplus,
}
