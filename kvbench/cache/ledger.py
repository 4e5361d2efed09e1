"""Byte ledger: bytes that a row of the cache really holds, item by item, now and over time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.cache.async_counts import Receiver, one_row
from kvbench.cache.layout import ModelShape, most_slots
from kvbench.cache.paged import Paged
from kvbench.cache.solve_budget import SolvedBudget
from kvbench.cache.split import Split
from kvbench.cache.steps import PagedStep
from kvbench.policy import Policy

ITEMS = (
    "payload_bytes",
    "quant_meta_bytes",
    "track_bytes",
    "slack_bytes",
    "residual_bytes",
    "residual_slack_bytes",
    "table_bytes",
    "free_list_bytes",
    "book_bytes",
)


@dataclass
class RowMeter:
    """Bytes of one row over time.

    Peaks, and sums over decode steps of resident bytes and of their ratio to the fp16 bytes of the same tokens.

    Args:
        staging_peak_bytes: Largest amount of an uncompressed prompt held while planning: keys and values, and what a
            probe's passes gave.
        read_bytes, readable_bytes: Where steps choose what to read: bytes that attention read, the bounds included, and
            those that it would have read of everything.
        one_shot_peak_bytes: In a run that reads in chunks, the prompt's peak had it been read at once: what the row
            held after it, and the uncompressed keys and values of the layers that are planned together. Else 0.
        prompt: Tokens that the prompt's plan kept, in the journal's form.
    """

    peak_bytes: int = 0
    staging_peak_bytes: int = 0
    sum_bytes: float = 0.0
    sum_ratio: float = 0.0
    steps: int = 0
    read_bytes: float = 0.0
    readable_bytes: float = 0.0
    one_shot_peak_bytes: int = 0
    prompt: dict[str, float] = field(default_factory=dict)


class Ledger:
    """Counts the bytes of every row, wherever its layers and heads lie.

    Bytes of a row on several devices are summed. Counters of tokens, which every place repeats (16 or 24 bytes
    a row), count once, so that no number depends on where a model lies. `other_kinds` are the ledgers of layers of
    other kinds.

    Page tables are made for the longest prompt and answer of a run. A row is billed the entries that its own prompt and
    its own limit of new tokens need, as if it were alone; the others are `table_slack_bytes`, which no row is billed.
    """

    def __init__(
        self, policy: Policy, holding: Paged | Split, shape: ModelShape, other_kinds: "Sequence[Ledger]" = ()
    ) -> None:
        self._parts, self._shape, self._ranks, self._other_kinds = holding.parts, shape, shape.ranks, other_kinds
        self._policy = policy
        first = self._parts[0]
        self._counters, self._pages = first.counters, first.pages
        self.budget: SolvedBudget = SolvedBudget(
            policy,
            self._pages,
            lambda prompt, new: sum(self.fixed_row_bytes(prompt, new)) + shape.state_bytes,
            first.paged_slots,
            [each.budget for each in other_kinds],
        )
        self._open: set[int] = set()
        self._sizes: dict[int, tuple[int, int]] = {}  # of rows with a prompt: its tokens, and most that follow it
        self._fixed: dict[int, int] = {}  # what that comes to, here and in the states
        self._widest = sum(self.fixed_row_bytes(), shape.state_bytes)
        self.meters = [RowMeter() for _ in range(self._pages.shape[0])]

    # Bytes held now.

    def fixed_row_bytes(self, prompt_tokens: int | None = None, new_tokens: int = 0) -> tuple[int, int, int]:
        """Constant bytes of one row from its prompt on: (tables and counters, residual rings, codebooks).

        For `prompt_tokens` and at most `new_tokens` after it; None = as each row is allocated, for the longest.
        """
        slots = None if prompt_tokens is None else most_slots(self._policy, prompt_tokens, new_tokens)
        fixed = rings = 0
        for part in self._parts:
            counters, ring = part.row_bytes
            tables = part.pages.table.row_bytes(slots)
            fixed += tables + counters + part.counters.row_bytes - part.counters.repeated_bytes
            rings += ring
        solved = self.budget.tokens.element_size() * (self.budget.budget is not None)
        size = self._ranks.size  # processes hold alike many heads
        return fixed * size + self._counters.repeated_bytes + solved, rings * size, self.book_bytes

    @property
    def book_bytes(self) -> int:
        """Bytes of a model's codebooks and key offsets, which all rows share and each is billed in full."""
        codebooks = [part.pages.codebooks for part in self._parts if part.pages.codebooks is not None]
        books = sum(books.table_bytes + books.channel_bytes * self._ranks.size for books in codebooks)
        offsets = [part.offsets for part in self._parts if part.offsets is not None]
        return books + sum(each.table_bytes for each in offsets) * self._ranks.size

    @property
    def _page_bytes(self) -> int:
        """Bytes of a page with its free-list entry."""
        return self._pages.pool.page_bytes + self._pages.pool.free_list.element_size()

    def resident_bytes(self, rows: Tensor) -> Tensor:
        """Resident bytes of rows, int64 [S].

        Pages with their free-list entries, tables, counters, rings and codebooks; and windows and states.
        """
        fixed = torch.tensor([self._fixed_of(row) for row in rows.tolist()], dtype=torch.int64, device=rows.device)
        return fixed + self._paged_bytes(rows)

    def _paged_bytes(self, rows: Tensor) -> Tensor:
        """Bytes of the pages of rows, int64 [S], of all kinds of layers."""
        local = self._num_pages(rows) * self._page_bytes
        return sum((each._paged_bytes(rows) for each in self._other_kinds), local)

    def _fixed_of(self, row: int) -> int:
        """Bytes of a row that no page holds, of all kinds of layers."""
        return self._fixed.get(row, self._widest) + sum(each._fixed_of(row) for each in self._other_kinds)

    @property
    def table_slack_bytes(self) -> int:
        """Bytes of page tables that rows were allocated and do not need, being shorter than the longest of the run."""
        local = sum(self._widest - fixed for fixed in self._fixed.values())
        return local + sum(each.table_slack_bytes for each in self._other_kinds)

    def _num_pages(self, rows: Tensor) -> Tensor:
        """Pages of rows, int64 [S], on the first part's device."""
        first, *others = self._parts
        total = first.pages.num_pages(rows)
        for part in others:
            total = total + part.pages.num_pages(rows.to(part.shape.device)).to(rows.device)
        return self._ranks.total(total)

    @property
    def shared_bytes(self) -> int:
        """Bytes saved by sharing of pages and codebooks: billed minus really held.

        A row is billed what it would hold alone, so that its bytes do not depend on other rows.
        """
        shared = [part.pages.pool.others for part in self._parts]
        (num_pages,) = self._ranks.totals([sum(int(others.sum()) for others in shared if others is not None)])
        local = num_pages * self._page_bytes + max(0, len(self._open) - 1) * self.book_bytes
        return local + sum(each.shared_bytes for each in self._other_kinds)

    def row_bytes(self, row: int) -> int:
        return int(self.resident_bytes(one_row(row, self._shape.device))[0])

    def itemise(self, row: int) -> dict[str, int]:
        """The ledger of one row; the items sum to `resident_bytes`.

        Returns:
            `payload_bytes` codes and 16-bit elements in pages; `quant_meta_bytes` scales and zeros; `track_bytes`
            scores, positions and bounds of pages; `slack_bytes` unused bytes of the row's pages; `residual_bytes`
            tokens in the rings; `residual_slack_bytes` empty ring entries; `table_bytes` page tables for the row's own
            length, counters, orders of key channels and offsets of the row's keys; `free_list_bytes` one free-list
            entry per page; `book_bytes` codebooks of the model, and offsets of its keys, outside the pages;
            `resident_bytes` their sum. Of a model that has layers of other kinds, `window_bytes` all that layers with
            windows hold, and `state_bytes` the states.
        """
        total = dict.fromkeys(ITEMS, 0)
        formats = self._pages.formats
        counts = [0] * (4 * len(formats) + 1)  # by tier: slots, pages, keys, values; and what lies in rings
        for part in self._parts:
            lists = part.lists(row)
            for tier, fmt in enumerate(formats):
                held = part.pages.held(tier, lists)
                per_list = held, -(-held // fmt.tokens_per_page), *part.sides(tier, lists)
                for index, count in enumerate(per_list, 4 * tier):
                    counts[index] += int(count.sum())
            counts[-1] += part.ring_bytes(lists)
        *counts, total["residual_bytes"] = self._ranks.totals(counts)
        num_pages = 0
        for tier, fmt in enumerate(formats):
            held_slots, pages, keys, values = counts[4 * tier : 4 * tier + 4]
            num_pages += pages
            slot = fmt.slot
            total["payload_bytes"] += keys * slot.k_code_bytes + values * slot.v_code_bytes
            total["quant_meta_bytes"] += round(keys * slot.k_meta_bytes + values * slot.v_meta_bytes)
            total["track_bytes"] += held_slots * slot.track_bytes + pages * fmt.bounds_bytes
        filled = total["payload_bytes"] + total["quant_meta_bytes"] + total["track_bytes"]
        pool = self._pages.pool
        total["slack_bytes"] = num_pages * pool.page_bytes - filled
        total["free_list_bytes"] = num_pages * pool.free_list.element_size()
        total["table_bytes"], rings, total["book_bytes"] = self.fixed_row_bytes(*self._sizes.get(row, ()))
        total["residual_slack_bytes"] = rings - total["residual_bytes"]
        if not self._shape.is_uniform:
            total["window_bytes"] = sum(each.row_bytes(row) for each in self._other_kinds)
            total["state_bytes"] = self._shape.state_bytes
        total["resident_bytes"] = sum(total.values())
        return total

    # Bytes held over time.

    def open(self, row: int) -> None:
        self._pages.counts.collect()
        self.meters[row] = RowMeter()
        self._open.add(row)
        self._forget_size(row)

    def close(self, row: int) -> None:
        self._open.discard(row)
        self._forget_size(row)

    def _forget_size(self, row: int) -> None:
        self._sizes.pop(row, None)
        self._fixed.pop(row, None)

    def begin_prompt(self, row: int, prompt_tokens: int, new_tokens: int) -> None:
        """Notes the size of a row whose prompt is about to be planned, and solves its budget where that is in bytes."""
        for kind in (self, *self._other_kinds):  # the other kinds' layers may come later, and what they hold counts now
            kind._size(row, prompt_tokens, new_tokens)
        self.budget.open(row, prompt_tokens, new_tokens)

    def _size(self, row: int, prompt_tokens: int, new_tokens: int) -> None:
        self._sizes[row] = prompt_tokens, new_tokens
        self._fixed[row] = sum(self.fixed_row_bytes(prompt_tokens, new_tokens), self._shape.state_bytes)

    def resize(self, row: int, new_tokens: int) -> None:
        """Changes the limit of tokens after a prompt that was read for several rows.

        Peaks so far are those of the row alone.
        """
        if row not in self._sizes:
            return
        self._settle()
        meter, before = self.meters[row], self._fixed_of(row)
        for kind in (self, *self._other_kinds):
            kind._size(row, kind._sizes[row][0], new_tokens)
        more = self._fixed_of(row) - before
        meter.peak_bytes += more
        meter.one_shot_peak_bytes += more if meter.one_shot_peak_bytes else 0

    def fork(self, source: int, row: int) -> None:
        """Begins a row that was copied: it has the size and the peaks of its source, and no steps of its own yet."""
        self._settle()
        meter = self.meters[source]
        if source in self._sizes:
            self._size(row, *self._sizes[source])
        self.meters[row] = RowMeter(
            meter.peak_bytes,
            meter.staging_peak_bytes,
            one_shot_peak_bytes=meter.one_shot_peak_bytes,
            prompt=dict(meter.prompt),
        )

    def hold(self, row: int, staging_bytes: int = 0) -> None:
        """Notes a row's bytes while this process also holds `beside_bytes` of an uncompressed prompt."""
        meter, staging_bytes = self.meters[row], staging_bytes * self._ranks.size
        meter.staging_peak_bytes = max(meter.staging_peak_bytes, staging_bytes)
        held_bytes = staging_bytes + self._fixed_of(row)

        def receive(paged: list[int]) -> None:
            meter.peak_bytes = max(meter.peak_bytes, held_bytes + paged[0])

        self._pages.counts.post(self._paged_bytes(one_row(row, self._shape.device)), lambda: receive)

    def _settle(self) -> None:
        """Waits for what was noted on a device."""
        self._pages.counts.send()
        self._pages.counts.collect()

    def note_probe(self, row: int, held_bytes: int, num_tokens: int) -> None:
        """Notes what was held after the further passes over a prompt, and how many tokens they read."""
        self.hold(row, staging_bytes=held_bytes)
        self.meters[row].prompt["replay_tokens"] = num_tokens

    def note_prompt(self, row: int, counts: Tensor, num_tokens: int) -> None:
        """Notes what a prompt's plan kept; `counts` int64 [M] slots per list."""
        largest = max(self._pages.formats[tier].tokens_per_page for tier in self._pages.lists_by_tier)
        least, most, total = torch.stack([*counts.aminmax(), counts.sum()]).tolist()
        self.meters[row].prompt |= {
            "prompt_tokens": num_tokens,
            "prompt_slots_min": least,
            "prompt_slots_max": most,
            "prompt_slots": total,
            "lists": len(counts),
            "page_tokens": largest,
            "slot_bytes": self._pages.planned_bytes[0],
        }
        if self._counters.instruction_tokens.numel():
            self.meters[row].prompt["instruction_tokens"] = self._counters.instruction_of(row)
        if (tokens := self.budget.of_row(row)) is not None:
            self.meters[row].prompt["budget_tokens"] = tokens

    def note_chunks(self, row: int, chunks: int, at_once_bytes: int) -> None:
        """Notes that a prompt, now complete, was read in `chunks` chunks.

        `at_once_bytes` are the uncompressed keys and values, of the layers planned together, that reading it at once
        would have held in addition.
        """
        self.meters[row].prompt["prompt_chunks"] = chunks
        self.meters[row].one_shot_peak_bytes = self.row_bytes(row) + at_once_bytes

    def note_whole(self, row: int) -> None:
        """Notes that a prompt of a run that reads in chunks was short enough to be read at once."""
        self._settle()
        self.meters[row].one_shot_peak_bytes = self.meters[row].peak_bytes

    def restart(self, row: int) -> None:
        """Begins the averages anew: they are over the answer, not over a question that was fed token by token."""
        self._pages.counts.collect()
        self.meters[row] = replace(self.meters[row], sum_bytes=0.0, sum_ratio=0.0, steps=0)

    def leave(self, row: int) -> None:
        """Leaves steps of a row that are under way out of what it reports: they came after its end."""
        self.meters[row] = replace(self.meters[row])

    @contextmanager
    def aside(self, row: int) -> Iterator[None]:
        """Leaves what happens to a row out of its averages: tokens read between two answers are no answer."""
        self._pages.counts.collect()
        before = self.meters[row]
        kept = before.sum_bytes, before.sum_ratio, before.steps
        yield
        self._pages.counts.collect()
        meter = self.meters[row]
        meter.sum_bytes, meter.sum_ratio, meter.steps = kept

    def step(self, steps: Sequence[PagedStep]) -> None:
        """Notes a decode step, which has a part for each place."""
        rows, kinds = steps[0].rows, (self, *self._other_kinds)

        def bind() -> Receiver:
            stepped = [(self.meters[row], self._counters.seen[row], self._fixed_of(row)) for row in rows.numbers]

            def receive(num_pages: list[int]) -> None:
                width = len(num_pages) // len(kinds)  # rows that pad come last
                for index, (meter, tokens, fixed) in enumerate(stepped):
                    pages_by_kind = num_pages[index::width]
                    resident = fixed + sum(n * kind._page_bytes for n, kind in zip(pages_by_kind, kinds, strict=True))
                    meter.peak_bytes = max(meter.peak_bytes, resident)
                    meter.sum_bytes += resident
                    meter.sum_ratio += resident / self._shape.fp16_bytes(tokens)
                    meter.steps += 1

            return receive

        counts = self._pages.counts
        counted = [kind._num_pages(rows.tensor) for kind in kinds]
        counts.post(counted[0] if len(counted) == 1 else torch.cat(counted), bind)
        totals = [step.reads.totals() for step in steps if step.reads is not None]
        if totals:  # whole numbers, whose sums are exact
            reads = torch.stack([each.to(totals[0].device) for each in totals]).sum(0)
            counts.post(self._ranks.total(reads).view(torch.int64), lambda: self._reads_into(rows.numbers))

    def _reads_into(self, numbers: Sequence[int]) -> Receiver:
        """Takes the bits of what a step's rows read and could have read (`PageSelection.totals`)."""
        meters = [self.meters[row] for row in numbers]

        def receive(bits: list[int]) -> None:
            totals = torch.tensor(bits).view(torch.float64).view(-1, 2).tolist()
            for meter, (read, readable) in zip(meters, totals, strict=False):
                meter.read_bytes += read
                meter.readable_bytes += readable

        return receive

    def report(self, row: int) -> tuple[dict, dict]:
        """Ledger and kept-token summary of a finished row, as written to the journal.

        `ledger` and `kept` of `kvbench.results.sample.SampleRecord`.
        """
        self._settle()
        items, meter = self.itemise(row), self.meters[row]
        seen = self._counters.seen[row]
        fp16 = self._shape.fp16_bytes(seen)
        resident = items["resident_bytes"]
        ledger = {
            **items,
            "average_bytes": meter.sum_bytes / meter.steps if meter.steps else float(resident),
            "average_ratio": meter.sum_ratio / meter.steps if meter.steps else resident / fp16,
            "peak_bytes": max(meter.peak_bytes, resident),
            "staging_peak_bytes": meter.staging_peak_bytes,
            "fp16_bytes": fp16,
            "ratio": resident / fp16,
            "payload_ratio": items["payload_bytes"] / fp16,
            "page_bytes": self._pages.pool.page_bytes,
        }
        if not self._shape.is_uniform:
            full_bytes = resident - items["window_bytes"] - items["state_bytes"]
            ledger |= {"full_layers_bytes": full_bytes, "full_layers_fp16_bytes": self._shape.layers_fp16_bytes(seen)}
        if meter.one_shot_peak_bytes:
            ledger["one_shot_peak_bytes"] = max(meter.one_shot_peak_bytes, resident)
        by_part = [[int(count.sum()) for count in part.slots_per_tier(part.lists(row))] for part in self._parts]
        slots = self._ranks.totals([sum(counts) for counts in zip(*by_part, strict=True)])
        kept = {
            "tokens_seen": seen,
            "slots_per_tier": slots,
            "slot_ratio": sum(slots) / (seen * self._pages.lists_of_model),
            **meter.prompt,
        }
        if meter.readable_bytes:
            kept["read_ratio"] = meter.read_bytes / meter.readable_bytes
        return ledger, kept
