"""The choices in which a task is posed: query awareness, chat template, sampling and answer length."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from kvbench.config.settings import read_settings
from kvbench.errors import SettingsConflict
from kvbench.rules import DAY, Choice, Number, Text, Whole, check_settings

CHAT_TEMPLATE = ("auto", "always", "never")
# The default of Llama 3.1's chat template.
TEMPLATE_DATE = "2024-07-26"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The choices that every task shares; they are part of each result row.

    Args:
        query_aware: True shows the method the whole prompt before anything is compressed; False compresses the context
            before the question is seen, for tasks whose prompt has a context.
        chat_template: `auto` follows the benchmark's own rule, `always` wraps every prompt, `never` wraps none.
        temperature: 0 is greedy; > 0 samples.
        top_p: Nucleus mass in (0, 1].
        num_samples: Answers per prompt, >= 1; more than one needs a temperature.
        max_new_tokens: Length limit of the answer; None takes the task's own.
        thinking: Sets the `enable_thinking` of the chat template; None leaves it to the template. Thoughts are never
            graded.
        thinking_tokens: Most tokens of thoughts, which then do not count as the answer's: thoughts that have used them
            up are ended, and the answer follows. None counts them as the answer's.
        system: System prompt of every request: as the chat template's system message, and in
            front of a prompt that is no chat. None says nothing.
        date: Today's date for chat templates, as YYYY-MM-DD; fixed, so that a prompt is
            the same on every day.
    """

    query_aware: bool = True
    chat_template: Annotated[str, Choice(CHAT_TEMPLATE)] = "auto"
    temperature: Annotated[float, Number(1e-3, 100, also=(0,))] = 0.0
    top_p: Annotated[float, Number(1e-9, 1)] = 1.0
    num_samples: Annotated[int, Whole(1, 2**16, unit="answers")] = 1
    max_new_tokens: Annotated[int | None, Whole(1, unit="tokens")] = None
    thinking: bool | None = None
    thinking_tokens: Annotated[int | None, Whole(1, unit="tokens")] = None
    system: Annotated[str | None, Text()] = None
    date: Annotated[str, DAY] = TEMPLATE_DATE

    def __post_init__(self) -> None:
        check_settings(self, "protocol.")
        if self.thinking is not None and self.chat_template == "never":
            raise SettingsConflict(
                f"protocol.thinking={str(self.thinking).lower()} sets a switch of the chat template, and "
                "protocol.chat_template=never uses none; change one of the two",
                setting="protocol.thinking",
            )
        if self.thinking_tokens is not None and (self.chat_template == "never" or self.thinking is False):
            raise SettingsConflict(
                f"protocol.thinking_tokens={self.thinking_tokens} bounds thoughts, and there are none with "
                "protocol.chat_template=never or protocol.thinking=false; change one of the two",
                setting="protocol.thinking_tokens",
            )
        if self.num_samples > 1 and self.temperature == 0:
            raise SettingsConflict(
                f"protocol.num_samples={self.num_samples} with temperature=0 would give the same answer "
                f"{self.num_samples} times; set protocol.temperature above 0 or protocol.num_samples=1",
                setting="protocol.num_samples",
            )

    @property
    def chat_setting(self) -> str | None:
        """The setting that only a chat can follow, as the user writes it; None where there is none."""
        if self.thinking is not None:
            return f"protocol.thinking={str(self.thinking).lower()}"
        return None if self.thinking_tokens is None else f"protocol.thinking_tokens={self.thinking_tokens}"

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any] | None) -> "Protocol":
        """Read the `protocol` group of a configuration; None takes all defaults.

        For `chat_template`, YAML's true and false mean `always` and `never`.
        """
        values = dict(settings or {})
        if isinstance(values.get("chat_template"), bool):
            values["chat_template"] = "always" if values["chat_template"] else "never"
        return read_settings(cls, values, "protocol.", "protocol key")
