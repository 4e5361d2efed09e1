"""Pieces of one long text, cut by tokens, for tasks that generate long answers or read streams."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvbench.errors import FileContent, FileMissing, SettingsConflict, SettingValue
from kvbench.tasks.haystack import paragraphs
from kvbench.tasks.prompts import decode
from kvbench.tasks.protocol import Protocol

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

BUILT_IN = "kvbench"


class LongText(NamedTuple):
    """A text to cut pieces from."""

    content: str
    origin: str  # name of the file, or `kvbench` for Python's documentation


class Passage(NamedTuple):
    """A piece of a text."""

    ids: tuple[int, ...]  # after the token that begins every text where the tokenizer has one
    num_words: int  # what white space parts, without the first `head` tokens
    num_bytes: int  # of the same in UTF-8


def read_text(file: object) -> LongText:
    """The setting `task.file`: a text file of the user's, or None for the documentation that ships with Python."""
    if file is None:
        return LongText("\n\n".join(paragraphs()), BUILT_IN)
    path = Path(str(file)).expanduser()
    if not path.is_file():
        raise FileMissing(
            f"task.file={file} is not a file (looked for {path.absolute()}); give the path of a text file, or null for "
            "text of kvbench's own",
            setting="task.file",
        )
    try:
        content = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FileContent(
            f"task.file={file} cannot be read as UTF-8 text ({error}); save it as UTF-8", setting="task.file"
        ) from error
    if not content.strip():
        raise FileContent(f"task.file={file} holds no text; give another file", setting="task.file")
    return LongText(content, path.name)


def begin_ids(model: "LoadedModel") -> list[int]:
    """The special tokens that the tokenizer puts before a text; most have one or none."""
    with_special = model.tokenizer.encode("a", add_special_tokens=True)
    plain = model.tokenizer.encode("a", add_special_tokens=False)
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return with_special[:start]
    return []


def passages(
    model: "LoadedModel", text: LongText, head: int, tail: int, items: int | None, start: int = 0
) -> list[Passage]:
    """Cut consecutive pieces.

    Args:
        head: Tokens of the first part of a piece, special ones included.
        tail: Tokens of the second part, 0 for none; words and bytes are its.
        items: Pieces; None for as many as the text has.
        start: Pieces that are left out at the beginning.
    """
    begin = begin_ids(model)
    step = head + tail - len(begin)
    ids = model.tokenizer.encode(text.content, add_special_tokens=False)
    count = len(ids) // step - start if items is None else items
    if count < 1 or len(ids) < (start + count) * step:
        raise SettingValue(
            f"the text {text.origin} has {len(ids)} tokens, and {items or 1} pieces of {step} take "
            f"{(start + (items or 1)) * step}; lower task.items or task.tokens, or give a longer text as task.file",
            setting="task.items",
        )
    result = []
    for number in range(start, start + count):
        piece = ids[number * step : (number + 1) * step]
        rest = piece[head - len(begin) :] if tail else []
        said = decode(model.tokenizer, rest, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        result.append(Passage((*begin, *piece), len(said.split()), len(said.encode())))
    return result


def check_no_question(name: str, protocol: Protocol) -> None:
    """Raises ValueError for a protocol with settings of questions or chats, of a task that has none."""
    if not protocol.query_aware:
        raise SettingsConflict(
            f"protocol.query_aware=false compresses before a question is seen, and task={name} asks none; leave it at "
            "true",
            setting="protocol.query_aware",
        )
    if protocol.chat_template == "always" or protocol.chat_setting or protocol.system is not None:
        raise SettingsConflict(
            f"task={name} goes on with plain text, without a chat or anything before it; leave "
            "protocol.chat_template=auto, and protocol.system, protocol.thinking and protocol.thinking_tokens at null"
        )
