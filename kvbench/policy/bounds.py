"""Bounds on the tokens of a sequence: a method's promise, checked on results by `kvbench/runs/verdict.py`.

Methods import these from `kvbench.policy`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvbench.policy.budget import Budget

Range = tuple[float, float]
ANY: Range = (0, inf)


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The lengths of a sequence that was answered, which bounds depend on.

    Args:
        prompt_tokens: Tokens of the prompt.
        tokens_seen: Tokens of the prompt and of everything read after it.
        lists: Layers x KV heads.
        prompt_slots: Slots that the plan of the prompt left in all lists together.
        page_tokens: Tokens per page.
        slot_bytes: Bytes per slot.
        instruction_tokens: First tokens that are the prompt's instruction, if the method uses them.
        prompt_chunks: Pieces that the prompt was read in.
        budget_tokens: Tokens per list that a budget in bytes buys; 0 = the method has none.
    """

    prompt_tokens: int
    tokens_seen: int
    lists: int
    prompt_slots: int
    page_tokens: int = 1
    slot_bytes: float = 0.0
    instruction_tokens: int = 0
    prompt_chunks: int = 1
    budget_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens after the prompt."""
        return self.tokens_seen - self.prompt_tokens

    def allowed(self, budget: Budget, num_tokens: int) -> int:
        """Tokens per list that a budget allows; a ratio, and a share of all tokens seen, is one of `num_tokens`."""
        return self.budget_tokens or budget.tokens(num_tokens, self.lists, self.slot_bytes)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The fewest and the most tokens that lists may hold.

    Args:
        why: The rule behind the bounds, before its number: `the budget 40 tokens allows`.
        prompt: Prompt tokens in each list.
        prompt_mean: Prompt tokens, the mean over lists.
        prompt_sizes: Allowed numbers of prompt tokens in each list; empty = any.
        end_mean: Tokens at the end, the mean over lists.
        tiers: Tiers that `in_tiers` is about.
        in_tiers: Tokens at the end in `tiers`, the mean over lists.
        resident_bytes: Most bytes at the end.
    """

    why: str = ""
    prompt: Range = ANY
    prompt_mean: Range = ANY
    prompt_sizes: tuple[int, ...] = ()
    end_mean: Range = ANY
    tiers: tuple[int, ...] = ()
    in_tiers: Range = ANY
    resident_bytes: float = inf


def within(
    extent: Extent,
    budget: Budget,
    *,
    at_least: int = 1,
    mean: bool = False,
    block: int = 1,
    spare_pages: int = 0,
    unspent: int = 0,
    at_end: int | None = None,
    floor: int = 1,
) -> Bounds:
    """The bounds of a budget: no list holds more of the prompt, and lists hold on average at most a page less.

    Args:
        extent: The sequence.
        budget: The requested budget.
        at_least: Tokens per list that the method keeps whatever the budget says.
        mean: The budget is a mean over lists; otherwise every list has to keep to it.
        block: The budget is rounded up to whole blocks of so many tokens.
        spare_pages: Pages per list that may be spent beyond the budget, for released code that rounds.
        unspent: Tokens per list that may be missing where that is more than a page.
        at_end: When not None, the sequence's last state must keep to the budget too, with this many tokens per list to
            spare.
        floor: Tokens per list that stay at the end of a sequence whatever a share of all tokens seen says.
    """
    tokens = extent.allowed(budget, extent.prompt_tokens)
    limit = max(at_least, -(-tokens // block) * block)
    allowed = min(extent.prompt_tokens, limit)
    most = allowed + spare_pages * extent.page_tokens
    # Of a prompt that was read in chunks, what an early plan dropped cannot come back when shares move.
    least = 0 if extent.prompt_chunks > 1 else allowed - max(extent.page_tokens, block, unspent)
    end = ANY if at_end is None else (0, limit + at_end)
    if budget.of_seen:
        seen = extent.allowed(budget, extent.tokens_seen) + spare_pages * extent.page_tokens
        fewest = floor if extent.new_tokens else max(floor, limit)
        end = (0, max(fewest, seen) + (at_end or 0))
    return Bounds(
        why=f"the budget {budget.text} allows",
        prompt=ANY if mean else (0, most),
        prompt_mean=(least, most),
        end_mean=end,
        resident_bytes=budget.value if budget.unit == "bytes" else inf,
    )


def of_answer(extent: Extent, budget: Budget, window: int, spare: int) -> Bounds:
    """Bounds of a sequence with a whole prompt and an answer within the budget, or its last `window` tokens.

    `spare` tokens per list may come in before the next eviction.
    """
    prompt = extent.prompt_tokens
    allowed = int(budget.value * extent.new_tokens) if budget.unit == "ratio" else int(budget.value)
    if budget.unit == "bytes":
        allowed = extent.budget_tokens - prompt
    return Bounds(
        why="protect=prompt keeps all, and with the budget allows",
        prompt_mean=(prompt, prompt),
        end_mean=(0, prompt + max(window, allowed) + spare),
        resident_bytes=budget.value if budget.unit == "bytes" else inf,
    )


def quantised(extent: Extent, tiers: Sequence[int], beyond: int) -> Bounds:
    """The bounds of a method that quantises some tokens of every sequence with more than `beyond` of them.

    Args:
        extent: The sequence.
        tiers: Tiers of quantised tokens.
        beyond: Tokens of which none need be quantised.
    """
    least = 1 / extent.lists if extent.tokens_seen > beyond else 0
    why = "were quantised, but that should be"
    return Bounds(why=why, tiers=tuple(tiers), in_tiers=(least, inf))
