"""A budget in bytes, solved for the tokens that it buys by the ledger's own counting: policies need not count."""

from collections.abc import Callable, Sequence

import torch

from kvbench.cache.pages import Pages
from kvbench.errors import SettingValue
from kvbench.policy import Budget, Policy


class SolvedBudget:
    """Tokens per list that each row may keep within a budget in bytes.

    `tokens`, int64 [rows], as solved by `open`; empty without a `budget`.

    All of it counts: pages, also those that are not full, with their tracked fields; page tables and counters; rings.
    The row is sized for the longest answer that it was opened for, and misses the budget then by less than a page per
    list. Where lists share the budget unequally, the waste of their last pages is not known before the plan, so the
    most that it can be is taken. `fixed_bytes` gives the bytes of a row outside its pages, by the tokens of its prompt
    and the most that follow it, and `other_kinds` count what layers of other kinds hold.
    """

    def __init__(
        self,
        policy: Policy,
        pages: Pages,
        fixed_bytes: Callable[[int, int], int],
        paged_slots: Callable[[int, int], tuple[int, int]],
        other_kinds: "Sequence[SolvedBudget]" = (),
    ) -> None:
        self._policy, self._pages, self._fixed, self._paged = policy, pages, fixed_bytes, paged_slots
        self._other_kinds = other_kinds
        self.budget = policy.byte_budget
        rows = pages.shape[0] if self.budget is not None else 0
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=pages.table.num_slots.device)

    def knows(self, budget: Budget) -> bool:
        """True if it is the budget that was solved for; others, such as of reads, count slots alone."""
        return budget == self.budget

    def of_row(self, row: int) -> int | None:
        return int(self.tokens[row]) if self.budget is not None else None

    def open(self, row: int, prompt_tokens: int, new_tokens: int) -> None:
        """Solves for a row whose prompt is about to be planned; does nothing without a budget."""
        if self.budget is not None:
            self.tokens[row] = self.solve(prompt_tokens, new_tokens)

    def solve(self, prompt_tokens: int, new_tokens: int) -> int:
        """Most tokens per list that stay within the budget for a prompt and at most `new_tokens` after it.

        The mean, where lists share the budget. Refuses a budget that is too small, and names the smallest.
        """
        assert self.budget is not None
        step, budget = self._policy.budget_step, int(self.budget.value)
        low = -(-self._policy.least_tokens(prompt_tokens) // step)
        high = max(low, -(-(prompt_tokens + new_tokens) // step))
        if (needed := self.bytes_of(low * step, prompt_tokens, new_tokens)) > budget:
            fixed = self._fixed(prompt_tokens, new_tokens) + self._windows(prompt_tokens, new_tokens)
            raise SettingValue(
                f"budget={budget}B is too small for {type(self._policy).__name__}: {self._pages.lists_of_model} lists "
                f"of {low * step} tokens behind a prompt of {prompt_tokens}, {new_tokens} tokens that follow it, and "
                f"{fixed} B of tables and buffers may take {needed} B; give method.budget={needed}B or more",
                setting="method.budget",
            )
        while low < high:  # bytes never fall as tokens rise
            middle = (low + high + 1) // 2
            if self.bytes_of(middle * step, prompt_tokens, new_tokens) <= budget:
                low = middle
            else:
                high = middle - 1
        return low * step

    def bytes_of(self, tokens: int, prompt_tokens: int, new_tokens: int) -> int:
        """Most bytes that a row comes to hold when its lists keep so many tokens of a prompt."""
        pool, pages = self._pages.pool, self._pages
        sizes = [fmt.tokens_per_page for fmt in pages.formats]
        lists, per_page = pages.lists_of_model, min(sizes)
        most = self._policy.most_tokens(tokens, prompt_tokens, new_tokens)
        everything = most >= prompt_tokens + new_tokens
        kept = min(tokens, prompt_tokens)
        exact, bound = self._paged(kept, most - kept)
        counted = pages.lists_by_tier if pages.tier_map is not None else {sizes.index(per_page): lists}
        num_pages = sum(count * -(-exact // sizes[tier]) for tier, count in counted.items())
        if self._policy.budget_is_mean and not everything:
            num_pages = min(
                lists * (bound + per_page - 1) // per_page,
                lists * -(-self._paged(prompt_tokens, new_tokens)[1] // per_page),
            )
        total = num_pages * (pool.page_bytes + pool.free_list.element_size())
        total += self._fixed(prompt_tokens, new_tokens)
        return total + self._windows(prompt_tokens, new_tokens)

    def _windows(self, prompt_tokens: int, new_tokens: int) -> int:
        """Most bytes that layers of other kinds come to hold."""
        return sum(each.bytes_of(prompt_tokens, prompt_tokens, new_tokens) for each in self._other_kinds)
