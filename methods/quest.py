"""Quest: everything is kept, and each step reads only the pages that can hold large logits."""

from dataclasses import dataclass
from typing import Annotated, Literal

from kvbench.policy import Budget, BudgetText, Policy, ReadSpec, Tier, TierText, Whole


@dataclass(kw_only=True)
class Quest(Policy):
    """Keeps every token; each decode step reads, per KV head, the pages whose keys' bounds promise the largest logits.

    A page holds `page_tokens` tokens and, per channel, the smallest and the largest value of their keys. It saves
    reads, not memory: the bounds are held on top of the full cache. `read_ratio` in a result is the share of bytes that
    attention read while decoding, the bounds included.

    Args:
        read_budget: Tokens read per KV head and step, whole pages, rounded down: ratio of the prompt, share of all
            tokens seen, which is of those held in the step, the incoming one counted (`50%seen`), tokens, or bytes.
        page_tokens: Tokens per page, a multiple of 8.
        min_pages: Pages read at least, the newest included; >= 1.
        dense_layers: First layers that read everything; >= 0.
        group: Reduction of the bounds of a KV head's query heads: `max` or `mean`.
        tier: Precision of what is kept, a token-axis tier; bounds are of keys before they are quantised.

    Source: Quest (Tang et al. 2024); mit-han-lab/Quest evaluation/quest_attention.py (pages of 16, at least three, two
        dense layers) and quest/utils/controller.py (the newest page is always read and counts).
    Differs: one set of pages per KV head by the group's bounds (the original has one query head per KV head, or repeats
        KV heads); the prompt is read in full, as there. quest_attention.py reads the newest page by its bound alone.
    """

    no_upkeep = ""
    read_budget: BudgetText = 0.25
    page_tokens: Annotated[int, Whole(8, 1024, unit="tokens", multiple_of=8)] = 16
    min_pages: Annotated[int, Whole(1, 2**20, unit="pages")] = 3
    dense_layers: Annotated[int, Whole(0, 1000, unit="layers")] = 2
    group: Literal["max", "mean"] = "max"
    tier: TierText = "fp16"

    def declare(self) -> None:
        self.tiers = (Tier.parse(self.tier),)
        self.reading = ReadSpec(
            budget=Budget.parse(self.read_budget),
            page_tokens=self.page_tokens,
            min_pages=self.min_pages,
            dense_layers=self.dense_layers,
            group_reduce=self.group,
        )
