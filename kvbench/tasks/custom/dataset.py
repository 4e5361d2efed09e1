"""Rows of a file of the user's own."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvbench.errors import FileContent, FileMissing, unknown_name
from kvbench.tasks.custom.metrics import CHOICE, check_answers
from kvbench.tasks.formats import READ, source_of
from kvbench.tasks.rows import Rows, kind_of, read_rows

ROLES = ("system", "user", "assistant")
# No model reads that much; a line this long is a broken file.
MAX_LINE_BYTES = 10_000_000
FIELDS = ("context", "question", "messages", "answers", "answer", "choices", "turns", "subset", "id")
TURN_FIELDS, MESSAGE_FIELDS = ("question", "answers", "answer"), ("role", "content")
_MISSPELT = 0.85  # share of a field's letters, so that `turn` and `anwsers` are, and `question_id` is not


def read_file(file: str, metric: str, requires_context: bool, settings: Collection[str]) -> Rows:
    """Read the rows of the setting `task.file`; as `check_row` otherwise."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileMissing(
            f"task.file={file} is not a file (looked for {path.absolute()}); give the path of a file of rows",
            setting="task.file",
        )
    source = source_of(path, one_row=True)
    if source is None:
        raise FileContent(
            f"task.file={file} is an archive without rows; rows are read from {READ}", setting="task.file"
        )
    unused: dict[str, None] = {}

    def check(row: Mapping[str, Any]) -> dict[str, Any]:
        row = with_question(row)
        unused.update(dict.fromkeys(unused_fields(row, metric, settings)))
        return check_row(row, metric=metric, requires_context=requires_context)

    rows = read_rows(source, check, MAX_LINE_BYTES)
    rows.unused = list(unused)
    return rows


def with_question(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with `prompt` as its `question`, or as its `messages` where it is a list, unless it has one of them."""
    if row.get("prompt") is None or row.get("question") is not None or row.get("messages") is not None:
        return row
    name = "messages" if isinstance(row["prompt"], list) else "question"
    return {**{key: value for key, value in row.items() if key != "prompt"}, name: row["prompt"]}


def unused_fields(row: Mapping[str, Any], metric: str, settings: Collection[str] = ()) -> list[str]:
    """The fields of a row that nothing reads, those of its turns and messages as `turns.x`.

    Args:
        row: Any JSON object; a field that is null counts as missing.
        metric: Metric of the row.
        settings: Full names of settings of all rows' prompts, such as `task.answer_prefix`.

    Raises:
        ValueError: A field has the name of a setting, or is a misspelt field.
    """
    ignored = {"answer"} if row.get("answers") is not None else set()
    ignored |= set() if metric == CHOICE else {"choices"}
    unused = _unknown(row, FIELDS, settings, ignored)
    for name, known in (("turns", TURN_FIELDS), ("messages", MESSAGE_FIELDS)):
        inner = row.get(name)
        for item in inner if isinstance(inner, list) else ():
            if isinstance(item, dict):
                ignored = {"answer"} if item.get("answers") is not None else set()
                unused += [f"{name}.{field}" for field in _unknown(item, known, settings, ignored)]
    return unused


def _unknown(
    row: Mapping[str, Any], known: Collection[str], settings: Collection[str], ignored: Collection[str]
) -> list[str]:
    """The fields outside of `known`, and the `ignored` ones of these."""
    unread = []
    missing = [name for name in known if row.get(name) is None and name not in ignored]
    for name, value in row.items():
        if value is None or (name in known and name not in ignored):
            continue
        if setting := next((one for one in settings if one.rpartition(".")[2] == name), ""):
            raise ValueError(f"field {name} is a setting of all rows: take it out, and set {setting}=")
        if name not in known and get_close_matches(name.casefold().strip(), missing, n=1, cutoff=_MISSPELT):
            raise unknown_name("field", name, known)
        unread.append(name)
    return unread


def check_row(row: Mapping[str, Any], *, metric: str, requires_context: bool) -> dict[str, Any]:
    """Check the object of a line.

    Args:
        row: `question` (`with_question` takes a `prompt`) and, where there is one, `context`; or `messages`, each with
            `role` and `content`, the last of the user. `answers`, a text or a list of texts. For the metric `choice`,
            `choices`, and `answers` is one of them or its place from 0. `turns`, further questions with their answers,
            makes it a conversation. `subset` and `id` may be there.
        metric: Metric of the row.
        requires_context: The context is compressed before the question is seen.
    """
    messages = _messages(row["messages"]) if row.get("messages") is not None else None
    if messages is not None and (row.get("question") is not None or row.get("context") is not None):
        raise ValueError("a row has either messages, or context and question")
    context = "" if messages is not None else _text("context", row.get("context", ""), may_be_empty=True)
    question = messages[-1]["content"] if messages is not None else _text("question", row.get("question"))
    if requires_context and not context.strip() and len(messages or ()) < 2:
        raise ValueError("no context, and protocol.query_aware=false compresses it before the question is seen")
    choices = [] if metric != CHOICE else _texts("choices", row.get("choices"))
    stated = row["answers"] if row.get("answers") is not None else row.get("answer")
    if metric == CHOICE and isinstance(stated, int) and not isinstance(stated, bool):
        if not 0 <= stated < len(choices):
            raise ValueError(f"field answers is {stated}, and the places of its {len(choices)} choices begin with 0")
        stated = choices[stated]
    answers = _texts("answers", stated)
    if metric == CHOICE and (len(choices) < 2 or len(set(choices)) < len(choices) or answers[0] not in choices):
        raise ValueError("field choices must be two or more different texts, with the answer among them")
    check_answers(metric, answers)
    turns = _turns(row.get("turns"), metric)
    subset = _text("subset", row.get("subset", "all"))
    name = row.get("id", "")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"field id must be a text or a whole number, it is {type(name).__name__}")
    checked = {"context": context, "question": question, "messages": messages, "answers": answers}
    return checked | {"choices": choices, "turns": turns, "subset": subset, "id": str(name)}


def _turns(value: object, metric: str) -> list[dict[str, Any]]:
    """The questions after the first answer: each with `question` and `answers`."""
    if value is None:
        return []
    if metric == CHOICE:
        raise ValueError(f"field turns goes on behind an answer, and with metric={CHOICE} nothing is answered")
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("field turns must be a list of objects with question and answers")
    turns = []
    for item in value:
        stated = item["answers"] if item.get("answers") is not None else item.get("answer")
        answers = _texts("turns.answers", stated)
        turns.append({"question": _text("turns.question", item.get("question")), "answers": answers})
        check_answers(metric, answers)
    return turns


def _text(field: str, value: object, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (may_be_empty or value.strip()):
        raise ValueError(f"field {field} must be a text, it is {kind_of(value)}")
    if "\0" in value:
        raise ValueError(f"field {field} holds a NUL character, at character {value.index(chr(0)) + 1}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field} holds half of a character pair, at character {error.start + 1}") from error
    return value


def _texts(field: str, value: object) -> list[str]:
    if isinstance(value, str):
        return [_text(field, value)]
    if not isinstance(value, list) or not value:
        kind = "empty" if value == [] else kind_of(value)
        raise ValueError(f"field {field} must be a text or a list of texts, it is {kind}")
    return [_text(field, item) for item in value]


def _messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ValueError("field messages must be a list of objects with role and content")
    for item in value:
        if item.get("role") not in ROLES:
            raise ValueError(f"field messages has the role {item.get('role')!r}; known: {', '.join(ROLES)}")
    if value[-1]["role"] != "user":
        raise ValueError("the last of the messages must be the user's")
    return [{"role": item["role"], "content": _text("messages", item.get("content"))} for item in value]
