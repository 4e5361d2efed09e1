"""The material of RULER's haystacks and needles: words, essays, and the documents of its question answering."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from random import Random

from kvbench.tasks.files import MissingDataError
from kvbench.tasks.haystack import paragraphs

OWN = "kvbench"
ESSAY_FILES = ("PaulGrahamEssays.json", "paul_graham_essays.json", "paul_graham_essays.jsonl")
QA_FILES = {"qa_1": ("dev-v2.0.json", "squad.json"), "qa_2": ("hotpot_dev_distractor_v1.json", "hotpotqa.json")}
QA_URLS = {
    "qa_1": "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
    "qa_2": "https://huggingface.co/datasets/namlh2004/hotpotqa (hotpot_dev_distractor_v1.json)",
}
# Sentences end before white space. Punkt, which the original asks, also knows abbreviations.
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
    if (found := _wonderwords()) is not None:
        return found
    from kvbench.tasks.longctx.generate import ADJECTIVES, NOUNS

    singles = sorted({word for text in paragraphs() for word in _WORD.findall(text)})
    compounds = [f"{first}-{second}" for first in (*ADJECTIVES, *NOUNS) for second in NOUNS if first != second]
    return Vocabulary(tuple(ADJECTIVES), tuple(NOUNS), tuple(sorted({*singles, *compounds})), 2, OWN)


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


def essays(data_dir: str | None) -> Essays:
    """Paul Graham's essays from `task.data_dir`, else the documentation that ships with the running Python.

    Args:
        data_dir: A folder; it may hold one of `ESSAY_FILES`: the original's object with `text`, or one object a line.
    """
    path = _file(data_dir, ESSAY_FILES)
    if path is None:
        return Essays(tuple(" ".join(paragraphs()).split()), OWN)
    try:
        content = path.read_text("utf-8")
        parts = content.splitlines() if path.suffix == ".jsonl" else [content]
        texts = [json.loads(part)["text"] for part in parts if part.strip()]
        words = tuple(" ".join(texts).split())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as essays ({type(error).__name__}: {error}); it must hold objects with a text "
            "under `text`, as RULER's script writes them"
        ) from error
    if not words:
        raise ValueError(f"{path} holds no text; fetch it again, or take it away to use text of kvbench's own")
    return Essays(words, path.name)


def _file(data_dir: str | None, names: Sequence[str]) -> Path | None:
    if data_dir is None:
        return None
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise ValueError(f"task.data_dir={data_dir} is not a folder (looked for {root.absolute()})")
    places = (place / name for place in (root, root / "ruler") for name in names)
    return next((path for path in places if path.is_file()), None)


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
        raise MissingDataError(
            f"task=ruler has no data for {task}: it needs {' or '.join(names)} in task.data_dir={data_dir or 'FOLDER'}."
            f" Get it from {QA_URLS[task]}. The other tasks (task.tasks=generated) need no data"
        )
    try:
        data = json.loads(path.read_text("utf-8"))
        found = _squad(data) if task == "qa_1" else _hotpot(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not the file that {task} needs ({type(error).__name__}: {error}); get it from {QA_URLS[task]}"
        ) from error
    if not found[1]:
        raise ValueError(f"{path} holds no question that has an answer; get it from {QA_URLS[task]}")
    return Documents(*found, str(path))


def _squad(data: dict) -> tuple[tuple[str, ...], tuple[Question, ...]]:
    texts = tuple(sorted({part["context"] for article in data["data"] for part in article["paragraphs"]}))
    place = {text: at for at, text in enumerate(texts)}
    questions = []
    for article in data["data"]:
        all_parts = [place[part["context"]] for part in article["paragraphs"]]
        for part in article["paragraphs"]:
            own = place[part["context"]]
            near = tuple(at for at in all_parts if at != own)
            questions += [
                Question(asked["question"], tuple(answer["text"] for answer in asked["answers"]), (own,), near)
                for asked in part["qas"]
                if not asked.get("is_impossible")
            ]
    return texts, tuple(questions)


def _hotpot(data: list[dict]) -> tuple[tuple[str, ...], tuple[Question, ...]]:
    def text(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    texts = tuple(sorted({text(*part) for row in data for part in row["context"]}))
    place = {content: at for at, content in enumerate(texts)}
    questions = tuple(
        Question(row["question"], (row["answer"],), tuple(place[text(*part)] for part in row["context"]))
        for row in data
    )
    return texts, questions
