"""What every random call of the CPU backend's operations shares: formats, pages, guards, and ways to make it wrong."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.codes import BITS, NAMES
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import Channels, InOrder, TierPages

FAR = (-1, -7, -(2**40), 2**40, 2**62, -(2**62))
GUARD = 4096
RULES = ("sum", "mean", "max")
# Of the largest value, logit or probability: fp32 sums of up to some hundred products, a few of which cancel.
CLOSE = 1e-4


@dataclass
class Wrong:
    """A way to make a call wrong: what it is called, what does it, and whether only part of the call is refused."""

    name: str
    make: Callable[[], None]
    late: bool = False


def random_slot(dice: random.Random, head_dim: int, track: tuple[str, ...], *, plain: bool = False) -> SlotFormat:
    """A random slot format of any code there is; `plain` has no keys that share scales over tokens."""
    while True:
        dtype = dice.choice((torch.float16, torch.bfloat16, torch.float32))
        bits = [dice.choice((*BITS, dtype.itemsize * 8)) for _ in "kv"]
        codes = [dice.choice(("", *NAMES)) for _ in "kv"]
        tables = [random_table(dice, *side) for side in zip(codes, bits, strict=True)]
        apart = [dice.choice((0, 1, 3)) if code.startswith("book") else 0 for code in codes]
        thin = bits[0] >= 16 and dice.random() < 0.3
        try:
            slot = SlotFormat(
                head_dim,
                *bits,
                k_channel_group=0 if plain else dice.choice((0, 0, 8, 16, 32)),
                k_groups=dice.choice((1, 1, 2, 4)),
                v_groups=dice.choice((1, 1, 2, 4, 8)),
                symmetric=dice.random() < 0.3,
                fp8=dice.random() < 0.2,
                k_code=codes[0],
                v_code=codes[1],
                k_table=tables[0],
                v_table=tables[1],
                k_apart=apart[0],
                v_apart=apart[1],
                dtype=dtype,
                track=track,
                k_channels=dice.randint(1, head_dim) if thin else 0,
                keys_only=dice.random() < 0.15,
            )
        except ValueError:
            continue
        if not (slot.channel_keys and slot.k_groups > 1):
            return slot


def random_table(dice: random.Random, code: str, bits: int) -> tuple[int, ...]:
    """Levels for a code of a calibrated table; now and then none, which makes them equally far apart."""
    if not code.startswith("book") or bits > 8 or dice.random() < 0.3:
        return ()
    return tuple(sorted(dice.sample(range(256), 2**bits)))


def random_format(dice: random.Random, slot: SlotFormat, *, bounds: bool = False) -> PageFormat:
    """Pages of one to four quanta of slots, with some bytes to spare."""
    need = slot.quantum_bytes * dice.randint(1, 4) + 2 * slot.head_dim * slot.dtype.itemsize * bounds
    return PageFormat(slot, -(-need // 16) * 16 + 16 * dice.randint(0, 2), bounds)


class Call:
    """One call: `self.args` by name, what runs it, what judges its result, and how it can be wrong.

    Args:
        dice: Random numbers.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.make = dice, torch.Generator().manual_seed(dice.randrange(2**31))
        self.dim = dice.choice((8, 16, 24, 32, 64, 64, 80, 128, 256))
        self.args: dict[str, Any] = {}
        self.top, self.positions = 0, torch.randperm(1 << 15, generator=self.make)  # of tokens, each of them once
        self.build()

    def build(self) -> None:
        """Fills `args`, and `pages` with them."""
        raise NotImplementedError

    def run(self) -> Any:
        """Does the call."""
        raise NotImplementedError

    def judge(self) -> str:
        """Does the call and says what is wrong with its result."""
        raise NotImplementedError

    def wrongs(self) -> list[Wrong]:
        """Ways to make the call wrong."""
        raise NotImplementedError

    def said(self) -> str:
        """The call in words."""
        parts = {k: list(v.shape) if isinstance(v, Tensor) else v for k, v in self.args.items()}
        return f"{parts}"

    # Random things.

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers in a random dtype, now and then of another size."""
        size = self.dice.choice((1.0, 1.0, 1.0, 1e-4, 30.0))
        x = torch.randn(*shape, generator=self.make) * size
        return x.to(self.dice.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)))

    def below(self, end: int, *shape: int) -> Tensor:
        """int64 in [0, end)."""
        return torch.randint(end, shape, generator=self.make)

    def pool(self, fmt: PageFormat, num_pages: int) -> None:
        """A pool of random numbers, between guards (the sanitizers have their own)."""
        size = num_pages * fmt.page_bytes
        self.room = torch.full((size + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        self.fmt, self.pages = fmt, self.room[GUARD : GUARD + size].view(num_pages, fmt.page_bytes)
        if self.dice.random() < 0.5:  # exactly as long as it is
            self.room = torch.full((2 * GUARD,), 0xA5, dtype=torch.uint8)
            self.pages = torch.zeros(num_pages, fmt.page_bytes, dtype=torch.uint8)
        self.pages.zero_()

    def fill(self, fmt: PageFormat) -> None:
        """Numbers in every slot of every page, as slots of a format; pages of several tiers are filled by list."""
        page = torch.arange(len(self.pages)).repeat_interleave(fmt.tokens_per_page)
        self.put(fmt, page, torch.arange(fmt.tokens_per_page).repeat(len(self.pages)))

    def put(self, fmt: PageFormat, page: Tensor, slot: Tensor) -> None:
        """Writes random tokens by the reference."""
        for write in (REFERENCE.write_keys, REFERENCE.write_values):
            write(self.pages, fmt, page, slot, torch.randn(len(page), self.dim, generator=self.make))
        if fmt.slot.track:
            score = torch.rand(len(page), generator=self.make)
            REFERENCE.write_tracked(self.pages, fmt, page, slot, score, self.unseen(len(page)))

    def unseen(self, number: int) -> Tensor:
        """Positions int64 [number] that no token has yet; of the rare large lists, beyond the first 32,768."""
        while len(self.positions) < number:
            more = torch.randperm(1 << 15, generator=self.make)
            self.top += 1 << 15
            self.positions = torch.cat([self.positions, self.top + more])
        taken, self.positions = self.positions[:number], self.positions[number:]
        return taken

    def tiers(self, lead: tuple[int, ...], track: tuple[str, ...], *, num: int, plain: bool, most: int) -> list:
        """Tiers of random lists [*lead] on a new pool."""
        slots = [random_slot(self.dice, self.dim, track, plain=plain) for _ in range(num)]
        size = max(random_format(self.dice, slot).page_bytes for slot in slots)
        formats = [PageFormat(slot, size) for slot in slots]
        lists = torch.Size(lead).numel()
        counts = [self.below(min(most, 5 * fmt.tokens_per_page) + 1, *lead) for fmt in formats]
        widths = [
            int(-(-count.max() // fmt.tokens_per_page)) + self.dice.randint(0, 1) if lists else 0
            for count, fmt in zip(counts, formats, strict=True)
        ]
        self.pool(formats[0], lists * sum(widths) + 2)
        free, made = torch.randperm(len(self.pages), generator=self.make), []
        for fmt, count, width in zip(formats, counts, widths, strict=True):
            ids, free = free[: lists * width].view(*lead, width), free[lists * width :]
            tokens = torch.arange(fmt.tokens_per_page)
            page = ids.flatten().repeat_interleave(len(tokens))
            self.put(fmt, page, tokens.repeat(lists * width))
            made.append(TierPages(fmt, ids, count, count.clone()))
        return made

    # Ways to be wrong.

    def guarded(self) -> bool:
        """Nothing was written beside the pool."""
        return bool((self.room[:GUARD] == 0xA5).all() and (self.room[-GUARD:] == 0xA5).all())

    def change(self, owner: Any, name: str, what: Callable[[Any], Any]) -> Callable[[], None]:
        """Replaces an argument, or a field of one, by something made of it."""

        def make() -> None:
            if isinstance(owner, dict):
                owner[name] = what(owner[name])
            else:
                setattr(owner, name, what(getattr(owner, name)))

        return make

    def bent(self, owner: Any, name: str, dims: tuple[int, ...], *, late: bool = False) -> list[Wrong]:
        """A tensor with one row too few or too many along the dims that matter, of another dtype, or elsewhere."""
        x = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        found = []
        for dim in dims:
            if x.shape[dim]:
                less = lambda t, d=dim: t.narrow(d, 0, t.shape[d] - 1).contiguous()  # noqa: E731
                more = lambda t, d=dim: torch.cat([t, t.narrow(d, 0, 1)], d)  # noqa: E731
                found += [
                    Wrong(f"{name} too short along {dim}", self.change(owner, name, less), late),
                    Wrong(f"{name} too long along {dim}", self.change(owner, name, more), late),
                ]
        other = torch.float32 if not x.dtype.is_floating_point else torch.int64
        found.append(Wrong(f"{name} as {other}", self.change(owner, name, lambda t: t.to(other)), late))
        found.append(Wrong(f"{name} elsewhere", self.change(owner, name, lambda t: t.to("meta")), late))
        found.append(
            Wrong(f"{name} flat", self.change(owner, name, lambda t: t.flatten()[None, None, None, None]), late)
        )
        return found

    def poked(self, owner: Any, name: str, end: int, *, late: bool = False, where: Tensor | None = None) -> list[Wrong]:
        """One number (of those that `where` names) below 0, or `end` and more."""
        x = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        chosen = torch.arange(x.numel()) if where is None else where.flatten().nonzero()[:, 0]
        if not len(chosen):
            return []

        def poke(x: Tensor) -> Tensor:
            x = x.clone(memory_format=torch.contiguous_format)
            x.view(-1)[self.dice.choice(chosen.tolist())] = self.dice.choice((*FAR, end, end + 1))
            return x

        return [Wrong(f"{name} out of range", self.change(owner, name, poke), late)] * 3

    def other_pool(self) -> list[Wrong]:
        """A pool that is not what the format says."""
        narrow = lambda x: x[:, :-16].contiguous()  # noqa: E731
        return [
            Wrong("int64 pool", self.change(self, "pages", lambda x: x.to(torch.int64))),
            Wrong("narrow pool", self.change(self, "pages", narrow)),
            Wrong("flat pool", self.change(self, "pages", lambda x: x.flatten())),
        ]

    def used(self, tier: TierPages, count: Tensor) -> Tensor:
        """Which entries of a tier's table are in use."""
        first = torch.arange(tier.ids.shape[-1]) * tier.fmt.tokens_per_page
        return (first < count[..., None]).expand_as(tier.ids)

    def bent_tier(self, tier: TierPages, *, late: bool = False) -> list[Wrong]:
        """A tier whose description is wrong."""
        lead = tuple(range(tier.num_k.dim()))
        found = [x for name in ("ids", "num_k", "num_v") for x in self.bent(tier, name, lead)]
        width = tier.ids.shape[-1] * tier.fmt.tokens_per_page
        found += self.poked(tier, "num_k", width + 1, late=late) + self.poked(tier, "num_v", width + 1, late=late)
        if isinstance(turn := tier.rotation, InOrder):
            others = {
                "too many first positions": InOrder(turn.first.repeat(2), turn.frequencies),
                "first positions as floats": InOrder(turn.first.float(), turn.frequencies),
                "too many frequencies": InOrder(turn.first, turn.frequencies.repeat(self.dim)),
            }
            for name, other in others.items():
                found.append(Wrong(name, self.change(tier, "rotation", lambda _, other=other: other)))
        elif turn is not None:
            found += self.bent(tier, "rotation", (0, 1))
            wide = lambda x: x.repeat(1, 1, self.dim)  # noqa: E731
            found.append(Wrong("rotation too wide", self.change(tier, "rotation", wide)))
        if tier.fmt.regions["k_scale"][1]:
            own = Channels(*torch.ones(2, tier.ids.shape[-2], self.dim))
            found.append(Wrong("two scales of a key", self.change(tier, "channels", lambda _: own)))
        return found + self.poked(tier, "ids", len(self.pages), late=late, where=self.used(tier, tier.num_k))
