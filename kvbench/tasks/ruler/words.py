"""The material of RULER's haystacks and needles: words, essays, and the documents of its question answering."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from random import Random

from kvbench.errors import FileContent, FileMissing
from kvbench.tasks.files import MissingDataError
from kvbench.tasks.formats import PACKERS, READ, find_source, read_json, source_of, unread
from kvbench.tasks.haystack import paragraphs
from kvbench.tasks.rows import Source

BUILT_IN = "kvbench"
ESSAYS = ("PaulGrahamEssays", "paul_graham_essays")  # names without their ending
FOLDERS = ("ruler", "data", "needle", "instructions")  # below `task.data_dir`
QA_FILES = {"qa_1": ("dev-v2.0.json", "squad.json"), "qa_2": ("hotpot_dev_distractor_v1.json", "hotpotqa.json")}
QA_URLS = {
    "qa_1": "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
    "qa_2": "https://huggingface.co/datasets/namlh2004/hotpotqa (hotpot_dev_distractor_v1.json)",
}
# Sentences end before white space. Punkt, which the original uses, also handles abbreviations.
_SENTENCE_BREAK = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"')\]])\s+")
_WORD = re.compile(r"\b[a-z]{3,12}\b")


@dataclass(frozen=True)
class Vocabulary:
    """Words for keys, values and lists."""

    adjectives: tuple[str, ...]  # first parts of a key
    nouns: tuple[str, ...]  # last part of a key
    singles: tuple[str, ...]  # words for lists, sorted, each once
    parts: int  # adjectives in a key
    origin: str  # `wonderwords` and its version, or `kvbench`

    def key(self, rng: Random) -> str:
        """One key, for example `quiet-river`."""
        return "-".join([*(rng.choice(self.adjectives) for _ in range(self.parts)), rng.choice(self.nouns)])


@cache
def vocabulary() -> Vocabulary:
    """The words of RULER where the package wonderwords is installed, else words of our own.

    Ours are those of the documentation that ships with Python and compounds of two words, enough for a list of 128k
    tokens, and keys of two adjectives and a noun: with one there would be too few for a long haystack of keys.
    """
    if (words := _wonderwords()) is not None:
        return words
    from kvbench.tasks.longctx.generate import ADJECTIVES, NOUNS

    singles = sorted({word for text in paragraphs() for word in _WORD.findall(text)})
    compounds = [f"{first}-{second}" for first in (*ADJECTIVES, *NOUNS) for second in NOUNS if first != second]
    return Vocabulary(tuple(ADJECTIVES), tuple(NOUNS), tuple(sorted({*singles, *compounds})), 2, BUILT_IN)


def _wonderwords() -> Vocabulary | None:
    spec = find_spec("wonderwords")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "assets"
    try:
        texts = [(folder / f"{name}list.txt").read_text("utf-8") for name in ("adjective", "noun", "verb")]
        release = version("wonderwords")
    except (OSError, PackageNotFoundError):
        return None
    adjectives, nouns, verbs = (tuple(filter(None, map(str.strip, text.split("\n")))) for text in texts)
    singles = tuple(sorted({*adjectives, *nouns, *verbs}))
    return Vocabulary(adjectives, nouns, singles, 1, f"wonderwords {release}")


@dataclass(frozen=True)
class Essays:
    """The text of a haystack, as words; a longer haystack begins again."""

    words: tuple[str, ...]
    origin: str  # name of the file, or `kvbench` for Python's documentation

    def sentences(self, num_words: int) -> list[str]:
        """The sentences of the first words."""
        times = -(-num_words // len(self.words))
        text = " ".join((self.words * times)[:num_words])
        return [sentence for sentence in _SENTENCE_BREAK.split(text) if sentence]


def essays(data_dir: str | None, *, needed: bool = True) -> Essays:
    """Paul Graham's essays from `task.data_dir`, else the documentation that ships with the running Python.

    Args:
        data_dir: A folder that holds one of `ESSAYS` in a format that rows are read from: objects with `text`, one of
            them as in the original, or several.
        needed: The task reads nothing else of the folder.

    Raises:
        MissingDataError: The folder has none, and they are needed.
        ValueError: It is no folder, or what it has cannot be read as essays.
    """
    source = None if data_dir is None else _essay_source(data_dir, needed)
    if source is None:
        return Essays(tuple(" ".join(paragraphs()).split()), BUILT_IN)
    try:
        texts = [json.loads(line.removeprefix(BOM_UTF8))["text"] for line in source.lines if line.strip()]
        words = tuple(" ".join(texts).split())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileContent(
            f"{source.name} cannot be read as essays ({type(error).__name__}: {error}); it must hold objects with a "
            "text under `text`, as RULER's script writes them"
        ) from error
    if not words:
        raise FileContent(f"{source.name} holds no text; fetch it again, or take it away to use text of kvbench's own")
    return Essays(words, source.name.removeprefix(f"{source.path.parent}/") if source.path else source.name)


def _essay_source(data_dir: str, needed: bool) -> Source | None:
    root = _root(data_dir)
    # As they were looked for when these names were the only ones.
    first = (f"{ESSAYS[0]}.json", f"{ESSAYS[1]}.json", f"{ESSAYS[1]}.jsonl")
    path = next(
        (path for folder in (root, root / "ruler") for name in first if (path := folder / name).is_file()), None
    )
    if path is not None:
        return source_of(path, one_row=True)
    folders = [root, *(root / name for name in FOLDERS)]
    source = next((one for folder in folders if (one := find_source(folder, ESSAYS, one_row=True)) is not None), None)
    if source is not None:
        return source
    left = {path: step for folder in folders for path, step in unread(folder, ESSAYS).items()}
    packed = [path for path in left if path.name.startswith(tuple(f"{stem}." for stem in ESSAYS))]
    if needed or packed:
        at_hand = "".join(f" At hand is {path}: {left[path]}." for path in packed or left)
        raise MissingDataError(
            f"task.data_dir={data_dir} has nothing that the task reads: no {ESSAYS[0]}.json or .jsonl there or in its "
            f"{', '.join(FOLDERS)}.{at_hand} Rows are read from {READ}; leave task.data_dir out to use text of "
            "kvbench's own"
        )
    return None


def has_files(data_dir: str, names: Sequence[str]) -> bool:
    """Tell whether a folder has one of some files, in any format, readable or not.

    Extensions do not count.
    """
    stems = [name.removesuffix(".json") for name in names]
    folders = [_root(data_dir), *(_root(data_dir) / name for name in FOLDERS)]
    return any(path.name.startswith(f"{stem}.") for folder in folders for path in folder.glob("*") for stem in stems)


def _root(data_dir: str) -> Path:
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileMissing(
            f"task.data_dir={data_dir} is not a folder (looked for {root.absolute()})", setting="task.data_dir"
        )
    return root


def _file(data_dir: str | None, names: Sequence[str]) -> Path | None:
    if data_dir is None:
        return None
    root = _root(data_dir)
    packed = [f"{name}{ending}" for name in names for ending in PACKERS]
    candidates = [(folder, name) for folder in (root, root / "ruler") for name in names]
    candidates += [
        (folder, name) for folder in (root, *(root / part for part in FOLDERS)) for name in (*names, *packed)
    ]
    return next((path for folder, name in candidates if (path := folder / name).is_file()), None)


@dataclass(frozen=True)
class Question:
    """A question about documents, which are indices."""

    query: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]  # those it needs
    near: tuple[int, ...] = ()  # those of the same article, which come before others


@dataclass(frozen=True)
class Documents:
    """Documents and the questions about them that have an answer, in the order of the file."""

    texts: tuple[str, ...]  # every document once, sorted
    questions: tuple[Question, ...]
    file: str


def documents(task: str, data_dir: str | None) -> Documents:
    """The documents and questions of `qa_1` (SQuAD 2.0) or `qa_2` (HotpotQA, distractor setting)."""
    names = QA_FILES[task]
    path = _file(data_dir, names)
    if path is None:
        folders = [_root(data_dir), *(_root(data_dir) / part for part in FOLDERS)] if data_dir else []
        stems = [name.removesuffix(".json") for name in names]
        left = {path: step for folder in folders for path, step in unread(folder, stems).items()}
        at_hand = "".join(f" At hand is {path}: {step}." for path, step in left.items())
        raise MissingDataError(
            f"task=ruler has no data for {task}: it needs {' or '.join(names)} in task.data_dir={data_dir or 'FOLDER'}."
            f"{at_hand} Get it from {QA_URLS[task]}. The other tasks (task.tasks=generated) need no data"
        )
    try:
        data = read_json(path)
        parsed = _squad(data) if task == "qa_1" else _hotpot(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileContent(
            f"{path} is not the file that {task} needs ({type(error).__name__}: {error}); get it from {QA_URLS[task]}"
        ) from error
    if not parsed[1]:
        raise FileContent(f"{path} holds no question that has an answer; get it from {QA_URLS[task]}")
    return Documents(*parsed, str(path))


def _squad(data: dict) -> tuple[tuple[str, ...], tuple[Question, ...]]:
    texts = tuple(sorted({part["context"] for article in data["data"] for part in article["paragraphs"]}))
    index_of = {text: at for at, text in enumerate(texts)}
    questions = []
    for article in data["data"]:
        all_parts = [index_of[part["context"]] for part in article["paragraphs"]]
        for part in article["paragraphs"]:
            index = index_of[part["context"]]
            near = tuple(at for at in all_parts if at != index)
            questions += [
                Question(entry["question"], tuple(answer["text"] for answer in entry["answers"]), (index,), near)
                for entry in part["qas"]
                if not entry.get("is_impossible")
            ]
    return texts, tuple(questions)


def _hotpot(data: list[dict]) -> tuple[tuple[str, ...], tuple[Question, ...]]:
    def text(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    texts = tuple(sorted({text(*part) for row in data for part in row["context"]}))
    index_of = {content: at for at, content in enumerate(texts)}
    questions = tuple(
        Question(row["question"], (row["answer"],), tuple(index_of[text(*part)] for part in row["context"]))
        for row in data
    )
    return texts, questions
