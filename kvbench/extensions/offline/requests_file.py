"""The file of requests: one task's prompts as token ids, and the settings of the runs that answer them.

Its first line is a JSON object, each other one a request. Data for grading alone is not in it:
right answers as text, and the metadata of a task's samples.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.engine.requests import Request, Thoughts, Turn
from kvbench.errors import FileContent, FileMissing
from kvbench.models.files import combine_fingerprints
from kvbench.results.typed import Misfit, parse, read_json
from kvbench.results.writing import encode_line, plain, write_atomic
from kvbench.runs import calibration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1


@dataclass(kw_only=True)
class OfflineRun:
    """A run to be answered."""

    label: str
    """Its method and what sets it apart, such as `snapkv budget=0.25`."""
    method: str
    """Name of the method."""
    protocol: dict
    """As `TaskSet.protocol`."""
    settings: dict
    """As the run's config.yaml."""
    reference: str | None = None
    """`key` of the full cache's run that it is compared with; None for none."""

    @property
    def key(self) -> str:
        """Digits of a hash over its settings, which name the folder of its answers."""
        method = {name: value for name, value in self.settings["method"].items() if name != calibration.KEY}
        return hashlib.sha256(json.dumps(self.settings | {"method": method}, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(kw_only=True)
class Head:
    """The first line."""

    format: int
    task: str
    """Name of the task."""
    model: str
    """Name of the model in records, where its weights come from another folder."""
    tokenizer: str
    """`tokenizer_hash` of what the token ids are of."""
    requests: str
    """SHA-256 of the lines of requests."""
    runs: list[OfflineRun]
    """The full cache goes first."""


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash of the meaning of token ids: the vocabulary and the special tokens; 64 hex digits."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return combine_fingerprints([json.dumps(words), json.dumps(sorted(tokenizer.all_special_ids))])


def request_lines(requests: Iterable[Request]) -> bytes:
    """The lines of requests."""
    lines = []
    for request in requests:
        turns = tuple(replace(turn, answers=()) for turn in request.turns)
        lines.append(encode_line(plain(asdict(replace(request, answers=(), turns=turns, meta={})))))
    return b"".join(lines)


def digest_of(lines: bytes) -> str:
    """`Head.requests` of lines."""
    return hashlib.sha256(lines).hexdigest()


def write(path: Path, head: Head, lines: bytes) -> None:
    """Write a file of requests, whole or not at all."""
    write_atomic(path, encode_line(plain(asdict(head))) + lines)


def read(path: Path) -> tuple[Head, list[Request]]:
    """Read a file of requests.

    Raises:
        ValueError: It is none, is of another version, or was damaged.
    """
    remedy = "write it with `kvbench offline what=ask`, or copy it again"
    try:
        first, _, lines = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise FileMissing(f"file={path} cannot be read: {error.strerror}; {remedy}", setting="file") from error
    try:
        head: Head = parse(read_json(first), Head)
    except (Misfit, ValueError) as error:
        raise FileContent(f"file={path} is no file of requests ({error}); {remedy}", setting="file") from error
    if head.format != FORMAT:
        raise FileContent(
            f"file={path} has format {head.format}, and this kvbench reads {FORMAT}; {remedy}", setting="file"
        )
    if digest_of(lines) != head.requests:
        raise FileContent(
            f"file={path} is damaged: its requests have another SHA-256 than its first line says; {remedy}",
            setting="file",
        )
    return head, [_request(json.loads(line)) for line in lines.splitlines()]


def _request(fields: Mapping[str, Any]) -> Request:
    values = {name: _tuples(value) for name, value in fields.items() if name not in ("turns", "thoughts")}
    thoughts = fields["thoughts"] and Thoughts(**{name: _tuples(value) for name, value in fields["thoughts"].items()})
    turns = tuple(Turn(**{name: _tuples(value) for name, value in turn.items()}) for turn in fields["turns"])
    return Request(**values, thoughts=thoughts, turns=turns)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def folder_of(answers: Path, run: OfflineRun) -> Path:
    """The folder of a run's answers."""
    return answers / f"{run.method}-{run.key}"


def answers_folder(file: Path, answers: object) -> Path:
    """The folder of answers that a setting names; None = next to the file."""
    return Path(str(answers)) if answers else file.with_name(f"{file.stem}-answers")
