"""Second passes over a prompt, for methods that ask for one: what the model looks at while it repeats the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.policy import Probe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEWEST_TOKENS = 32  # of a part; shorter ones would take dozens of passes over a prompt that fills the context


@dataclass(frozen=True)
class Pass:
    """Tokens that are read behind a whole prompt, the last of which are its tokens from `first` up to `end` again."""

    first: int
    end: int
    tokens: tuple[int, ...]


def plan_passes(
    probe: Probe, tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], closing: Sequence[int], max_tokens: int
) -> list[Pass]:
    """What to read behind a prompt so that every token of it is repeated once.

    Args:
        probe: What the method asks for.
        tokenizer: The model's.
        prompt: Token ids.
        closing: Token ids that close a user's turn and open the answer; empty outside of chats.
        max_tokens: The model's context.

    Raises:
        ValueError: The context leaves no room for a part behind the prompt.
    """
    ask, go_on = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (probe.ask, probe.go_on))
    around = max(len(ask), len(go_on) + probe.overlap_tokens) + len(closing)
    room, length = max_tokens - len(prompt) - around, len(prompt)
    if room < min(FEWEST_TOKENS, length):
        raise ValueError(
            f"the method reads a prompt a second time behind itself, and one of {length} tokens leaves {max(room, 0)} "
            f"for that in the model's context of {max_tokens}, fewer than {min(FEWEST_TOKENS, length)}; shorten the "
            "task's prompts, or choose a model with a longer context"
        )
    passes = []
    for first in range(0, length, size := min(probe.part_tokens, room)):
        before = tuple(prompt[max(0, first - probe.overlap_tokens) : first])
        request = (*go_on, *before) if first else ask
        part = tuple(prompt[first : first + size])
        passes.append(Pass(first, first + len(part), (*request, *closing, *part)))
    return passes
