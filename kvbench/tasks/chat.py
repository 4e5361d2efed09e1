"""Chat templates: third-party programs that write a conversation as text.

They get a fixed date and the same random numbers at every start, their time and memory are bounded, and their errors
name the model.
"""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any

from kvbench.errors import Unsupported
from kvbench.rules import is_half
from kvbench.tasks.bounds import OutOfTime, memory_limit, time_limit
from kvbench.tasks.protocol import Protocol

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

# More than any template puts around a conversation, or needs for it: transformers' sandbox bounds neither.
_MAX_TEMPLATE_CHARS = 1_000_000
RENDER_LIMIT_S = 10.0
RENDER_LIMIT_BYTES = 1 << 30
REASONS: dict[type, str] = {MemoryError: f"it asks for more than {RENDER_LIMIT_BYTES >> 20} MiB"}
_SAID = 20 * "The quick brown fox jumps over the lazy dog, and goes home to its four young. "  # is to be shown whole
_ANSWER = "kvbenchanswer"  # stands for an answer, whose tokens are the model's own
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class NoSystemMessage(Unsupported):
    """A chat template has none; `why` says what it does with one."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text, setting="protocol.system")
        self.why = why


def check_template(model: "LoadedModel", protocol: Protocol) -> None:
    """Try out a model's chat template with the settings of a protocol.

    Raises:
        ValueError: The protocol switches thinking and the template has no switch for it; or the template cannot be
            rendered, drops the message, a part of it or what the system says, or writes something else at each start.
    """
    if protocol.thinking is not None and "enable_thinking" not in str(model.tokenizer.chat_template):
        raise Unsupported(
            f"protocol.thinking={str(protocol.thinking).lower()}, but the chat template of model {model.name} has no "
            "switch enable_thinking; leave protocol.thinking=null, or choose a model that has one",
            setting="protocol.thinking",
        )
    shown = render_chat(model, [{"role": "user", "content": _SAID}], protocol)
    if _words(_SAID) not in _words(shown):  # some write it in capitals, or part its lines otherwise
        raise _faulty(model, _drops(shown))
    if match := re.search(r"<[^<>]* at 0x[0-9a-f]+>", shown):
        raise _faulty(model, f"writes {match[0]!r}, the address of an object, which is another one at every start")
    if (system := protocol.system) is None:
        return
    try:
        talk = [*system_messages(protocol), {"role": "user", "content": "a"}]
        why = "drops it" if system.strip() not in render_chat(model, talk, protocol) else ""
    except ValueError as error:
        why = f"refuses it: {error}"
    if why:
        text = (
            f"protocol.system={system[:40]!r} needs a chat template with a system message, and that of model "
            f"{model.name} {why}; leave protocol.system=null, or set protocol.chat_template=never"
        )
        raise NoSystemMessage(text, why)


def system_messages(protocol: Protocol) -> list[dict[str, str]]:
    """Messages before those of a chat: the protocol's system message, where there is one."""
    return [] if protocol.system is None else [{"role": "system", "content": protocol.system}]


def render_chat(
    model: "LoadedModel", messages: list[dict[str, str]], protocol: Protocol, add_generation_prompt: bool = True
) -> str:
    """Text of messages under a chat template.

    Args:
        model: Its tokenizer has the template.
        messages: Each with `role` and `content`.
        protocol: Says whether to think, and the date, at midnight, for both ways in which templates ask for it.
        add_generation_prompt: True opens the turn of the model; False leaves the last message open, to be continued.

    Raises:
        ValueError: The template is faulty, refuses the messages, takes far too long or too much memory, or makes far
            more text than it was given.
    """
    num_chars = sum(len(message["content"]) for message in messages)
    now = datetime.fromisoformat(protocol.date)
    # In English whatever the locale, which decides the names that strftime gives.
    variables: dict[str, Any] = {"date_string": f"{now.day:02} {_MONTHS[now.month - 1]} {now.year}"}
    variables |= {} if protocol.thinking is None else {"enable_thinking": protocol.thinking}
    try:
        with time_limit(RENDER_LIMIT_S), memory_limit(RENDER_LIMIT_BYTES), _same_always(now):
            rendered = model.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **variables,
            )
    except OutOfTime:
        fault = f"takes longer than {RENDER_LIMIT_S:g} s for a conversation of {num_chars} characters"
        raise _faulty(model, fault) from None
    except Exception as error:
        # A template is a program of the model's maker: it may fail with any error, or raise one of its own.
        reason = " ".join(str(error).split())[:300] or REASONS.get(type(error), "no message")
        raise _faulty(model, f"cannot be rendered ({type(error).__name__}: {reason})") from error
    assert isinstance(rendered, str), "tokenize=False gives text"
    if len(rendered) > _MAX_TEMPLATE_CHARS + 8 * num_chars:
        raise _faulty(model, f"makes {len(rendered)} characters of a conversation of {num_chars}")
    if len(rendered) < len(messages[-1]["content"].strip()):
        raise _faulty(model, _drops(rendered))
    if is_half(rendered):
        raise _faulty(model, "writes half of a character pair, which is no UTF-8 and no tokenizer reads")
    return rendered


def _drops(rendered: str) -> str:
    return f"drops the message of the user, or a part of it, so that a prompt would be {rendered[:80]!r}"


def _words(text: str) -> str:
    return " ".join(text.casefold().split())


def _faulty(model: "LoadedModel", fault: str) -> Unsupported:
    return Unsupported(
        f"the chat template of model {model.name} {fault}; set protocol.chat_template=never, or repair the template",
        setting="protocol.chat_template",
    )


@contextmanager
def _same_always(now: datetime) -> Iterator[None]:
    """Fix the time (`strftime_now`) and random numbers (`random` and `lipsum`) of chat templates.

    transformers takes no function for the time; the random numbers are Jinja's.
    """
    from transformers.utils import chat_template_utils

    class Stopped(datetime):
        """A clock that stands still."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]  # a plain one will do
            return now

    names = vars(chat_template_utils)
    clock = names["datetime"]
    names["datetime"] = Stopped
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)
        names["datetime"] = clock


def between(model: "LoadedModel", said: str, protocol: Protocol) -> str:
    """The text that a chat template writes after an answer, up to where the next one begins.

    Answers stay in the cache as they were given. So a template that would write the past otherwise, as one that leaves
    thoughts out of it, is not asked to.
    """
    talk = [("user", "a"), ("assistant", _ANSWER), ("user", said)]
    rendered = render_chat(model, [{"role": role, "content": text} for role, text in talk], protocol)
    _, answer, rest = rendered.partition(_ANSWER)
    if not answer or said.strip() not in rest:
        raise _faulty(model, "does not show what was said before, so there is no conversation in it")
    return rest


def require_template(model: "LoadedModel") -> None:
    """Raises ValueError for `protocol.chat_template=always` with a model that has no chat template."""
    if not model.chat_template:
        raise Unsupported(
            f"protocol.chat_template=always, but the tokenizer of model {model.name} has no chat template; use auto or "
            "never, or an instruction-tuned model",
            setting="protocol.chat_template",
        )


def thinking_label(protocol: Protocol, chat: bool) -> str:
    """The note of result rows on thinking: `on`, `off`, `template` (as the template does by itself), `no chat`."""
    return {None: "template", True: "on", False: "off"}[protocol.thinking] if chat else "no chat"
