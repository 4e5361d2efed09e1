"""Pages filled with random tokens, and what they read as, for the tests of attention."""

import torch

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import TierPages

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PAGE_BYTES = 4608


def tier_format(bits: str, head_dim: int, kind: str = "fp16", **extra) -> PageFormat:
    """A format such as `8,4` in pages of 4608 bytes."""
    k_bits, v_bits = (int(b) for b in bits.split(","))
    slot = SlotFormat(head_dim=head_dim, k_bits=k_bits, v_bits=v_bits, dtype=DTYPES[kind], **extra)
    return PageFormat(slot, PAGE_BYTES)


class Cache:
    """Random tiers; `slots[t][s][h]` holds what the oracle attends to: keys and values fp32 [n, D]."""

    def __init__(self, formats: list[PageFormat], counts: list[list[list[int]]], head_dim: int, seed: int = 0) -> None:
        make = torch.Generator().manual_seed(seed)
        num_seq, heads = len(counts[0]), len(counts[0][0])
        widths = [
            max(-(-n // f.tokens_per_page) for row in c for n in row) for f, c in zip(formats, counts, strict=True)
        ]
        total = sum(w * num_seq * heads for w in widths) + 5
        self.pages = torch.randint(256, (total, PAGE_BYTES), dtype=torch.uint8, generator=make)  # NaNs among them
        free = torch.randperm(total, generator=make).tolist()
        self.tiers, self.slots = [], []
        for fmt, count, width in zip(formats, counts, widths, strict=True):
            ids = torch.tensor([free.pop() for _ in range(num_seq * heads * width)], dtype=torch.int64)
            ids = ids.view(num_seq, heads, width)
            held = torch.tensor(count)
            self.slots.append(
                [
                    [self._fill(fmt, ids[s, h], count[s][h], head_dim, make) for h in range(heads)]
                    for s in range(num_seq)
                ]
            )
            self.tiers.append(TierPages(fmt, ids, held, held))

    def _fill(self, fmt: PageFormat, ids: torch.Tensor, count: int, head_dim: int, make: torch.Generator) -> tuple:
        """Writes `count` slots, rounded up to whole key groups, and returns what they read as."""
        group = fmt.slot.group_tokens
        slot = torch.arange(-(-count // group) * group)
        page, within = ids[slot // fmt.tokens_per_page], slot % fmt.tokens_per_page
        k, v = (torch.randn(len(slot), head_dim, generator=make) for _ in range(2))
        REFERENCE.write_keys(self.pages, fmt, page, within, k)
        REFERENCE.write_values(self.pages, fmt, page, within, v)
        keys, values = REFERENCE.read_slots(self.pages, fmt, page, within)
        return keys[:count], values[:count]

    def dense(self, s: int, h: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a list, tiers in order."""
        parts = [tier[s][h] for tier in self.slots]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])
