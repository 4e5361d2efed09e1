"""Untrusted names as plain text: those of models, tasks and stored runs may contain anything."""

import textwrap

NAME_LENGTH = 100  # characters of one name
LINE_LENGTH = 400  # characters of a label or a title, which hold several names
MESSAGE_LENGTH = 2000  # characters of a sentence, which may list names
ESCAPES = {"\n": "\\n", "\t": "\\t"}


def visible(text: str) -> str:
    """Removes terminal controls from a text of several lines.

    Control characters, escapes, bidirectional marks, lone surrogates.
    """
    if text.isprintable():
        return text
    return "\n".join(line if line.isprintable() else _flat(line) for line in text.split("\n"))


def safe(text: object, length: int = NAME_LENGTH) -> str:
    """A name or an answer, or anything as Python prints it, as one line of visible text.

    A longer one loses its middle.
    """
    flat = str(text)
    if len(flat) > length:  # far more than is shown need not be looked at
        flat = f"{flat[:length]}{flat[-length:]}" if len(flat) > 2 * length else flat
    flat = _flat(flat)
    if len(flat) <= length:
        return flat
    half = (length - 5) // 2
    return f"{flat[:half]} ... {flat[-half:]}"


def meaning(word: str, text: str, width: int) -> list[str]:
    """A word with its meaning, as lines of a width; no part of a word is broken off."""
    return textwrap.wrap(
        f"{word}: {text}",
        width,
        initial_indent="  ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _flat(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ESCAPES.get(char, "?") for char in text)
