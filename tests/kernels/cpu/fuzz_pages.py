"""Random calls that write, read, move and search slots, an oracle of each, and ways to make each of them wrong."""

import random

import torch
from fuzz_calls import Call, Wrong, random_format, random_slot
from torch import Tensor

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import SlotSearch, TierPages


class _Slots(Call):
    """What takes slots one by one."""

    names: tuple[str, ...] = ("page", "slot")

    def build(self) -> None:
        slot = random_slot(
            self.dice, self.dim, self.dice.choice(((), ("score",), ("pos",), ("score", "pos"))), plain=self.plain
        )
        fmt = random_format(self.dice, slot, bounds=not self.plain and self.dice.random() < 0.1)
        self.pool(fmt, self.dice.randint(1, 5))
        self.fill(fmt)
        group, tokens = slot.group_tokens, fmt.tokens_per_page
        order = torch.randperm(len(self.pages) * tokens // group, generator=self.make)
        order = order[: self.dice.randint(0 if self.dice.random() < 0.1 else 1, min(40, len(order)))]
        at = (order[:, None] * group + torch.arange(group)).flatten()
        self.args = {"page": at // tokens, "slot": at % tokens}

    plain = False

    def wrongs(self) -> list[Wrong]:
        found = self.other_pool()
        for name in self.names:
            found += self.bent(self.args, name, (0,))
            found += self.poked(self.args, name, len(self.pages) if "page" in name else self.fmt.tokens_per_page)
        return found


class Write(_Slots):
    """Keys or values into slots."""

    def build(self) -> None:
        super().build()
        self.keys = self.dice.random() < 0.5
        self.args["x"] = self.randn(len(self.args["page"]), self.dim)

    def run(self) -> None:
        ops = Cpu().write_keys if self.keys else Cpu().write_values
        ops(self.pages, self.fmt, self.args["page"], self.args["slot"], self.args["x"])

    def judge(self) -> str:
        want = self.pages.clone()
        ops = REFERENCE.write_keys if self.keys else REFERENCE.write_values
        ops(want, self.fmt, self.args["page"], self.args["slot"], self.args["x"])
        self.run()
        return "" if torch.equal(self.pages, want) and self.guarded() else "other bytes than the reference's"

    def wrongs(self) -> list[Wrong]:
        return super().wrongs() + self.bent(self.args, "x", (0, 1))


class Read(_Slots):
    """Slots as vectors."""

    def run(self) -> tuple[Tensor, Tensor]:
        return Cpu().read_slots(self.pages, self.fmt, self.args["page"], self.args["slot"])

    def judge(self) -> str:
        want = REFERENCE.read_slots(self.pages, self.fmt, self.args["page"], self.args["slot"])
        alike = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(self.run(), want, strict=True))
        return "" if alike else "other numbers than the reference's"


class Move(_Slots):
    """Bytes from slots to slots."""

    plain = True
    names = ("src_page", "src_slot", "dst_page", "dst_slot")

    def build(self) -> None:
        super().build()
        half = len(self.args["page"]) // 2
        page, slot = self.args["page"], self.args["slot"]
        parts = page[:half], slot[:half], page[half : 2 * half], slot[half : 2 * half]
        self.args = dict(zip(self.names, parts, strict=True))

    def run(self) -> None:
        Cpu().move_slots(self.pages, self.fmt, *self.args.values())

    def judge(self) -> str:
        want = self.pages.clone()
        REFERENCE.move_slots(want, self.fmt, *self.args.values())
        self.run()
        return "" if torch.equal(self.pages, want) and self.guarded() else "other bytes than the reference's"


class Search(Call):
    """The smallest slot of every list."""

    def build(self) -> None:
        lists = self.dice.randint(1, 6)
        (tier,) = self.tiers((lists,), ("score", "pos"), num=1, plain=True, most=200)
        seen = self.below(1 << 15, lists)
        self.args = {
            "ids": tier.ids,
            "held": tier.num_k,
            "seen": seen,
            "by": self.dice.choice(("mean", "score", "pos")),
        }
        for name in ("floor", "before", "exact"):
            self.args[name] = self.below(1 << 15, lists) if self.dice.random() < 0.3 else None
        if self.args["exact"] is not None:
            self.args["before"] = None
            some = REFERENCE.region(self.pages, self.fmt, "pos")[tier.ids[:, 0], 0] if tier.ids.shape[1] else seen
            self.args["exact"] = torch.where(self.below(2, lists) == 1, some.long(), self.args["exact"])
        self.args["first"] = 0 if self.args["exact"] is not None else self.dice.choice((0, 0, 1 << 13))

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        named = {name: x for name, x in self.args.items() if name not in ("ids", "held")}
        return Cpu().slot_extreme(self.pages, self.fmt, self.args["ids"], self.args["held"], SlotSearch(**named))

    def judge(self) -> str:
        a, tokens = self.args, self.fmt.tokens_per_page
        value, slot, pos = self.run()
        scores, positions = (REFERENCE.region(self.pages, self.fmt, name) for name in ("score", "pos"))
        for m, held in enumerate(a["held"].tolist()):
            index = torch.arange(held)
            page, at = a["ids"][m, index // tokens], index % tokens
            where, x = positions[page, at].long(), scores[page, at]
            if a["by"] == "mean":
                origin = where if a["floor"] is None else where.clamp(min=int(a["floor"][m]))
                x = x / (a["seen"][m] - origin).clamp(min=1)
            elif a["by"] == "pos":
                x = where.float()
            fits = where >= a["first"]
            if a["before"] is not None:
                fits &= where < a["before"][m]
            if a["exact"] is not None:
                fits &= where == a["exact"][m]
            options = [(float(x[i]), int(where[i]), i) for i in index[fits].tolist()]
            best, p, i = min(options, default=(float("inf"), -1, -1))
            if (float(value[m]), int(slot[m])) != (best, i) or int(pos[m]) != p:
                return f"list {m}: {(float(value[m]), int(pos[m]), int(slot[m]))} instead of {(best, p, i)}"
        return ""

    def wrongs(self) -> list[Wrong]:
        found = self.other_pool() + self.bent(self.args, "ids", (0,)) + self.bent(self.args, "held", (0,))
        for name in ("seen", "floor", "before", "exact"):
            if self.args[name] is not None:
                found += self.bent(self.args, name, (0,))
        tier = TierPages(self.fmt, self.args["ids"], self.args["held"], self.args["held"])
        found += self.poked(self.args, "held", self.args["ids"].shape[-1] * self.fmt.tokens_per_page + 1)
        found += self.poked(self.args, "ids", len(self.pages), where=self.used(tier, tier.num_k))
        bare = PageFormat(random_slot(random.Random(1), self.dim, (), plain=True), 1 << 16)
        bare = PageFormat(bare.slot, self.fmt.page_bytes) if bare.slot.quantum_bytes <= self.fmt.page_bytes else bare
        sparse = lambda x: torch.cat([x, x], 1)[:, : x.shape[1]]  # noqa: E731
        found.append(Wrong("another by", self.change(self.args, "by", lambda _: "size")))
        found.append(Wrong("untracked", self.change(self, "fmt", lambda _: bare)))
        found.append(Wrong("a pool with gaps", self.change(self, "pages", sparse)))
        return found


class AddScores(Call):
    """Scores onto those in the pages."""

    def build(self) -> None:
        lists = self.dice.randint(1, 3), self.dice.randint(1, 3)
        track = self.dice.choice((("score",), ("score", "pos")))
        (self.tier,) = self.tiers(lists, track, num=1, plain=False, most=150)
        self.args = {
            "scores": torch.rand(*lists, self.tier.ids.shape[-1] * self.fmt.tokens_per_page, generator=self.make)
        }

    def run(self) -> None:
        Cpu().add_scores(self.pages, self.tier, self.args["scores"])

    def judge(self) -> str:
        want = self.pages.clone()
        REFERENCE.add_scores(want, self.tier, self.args["scores"])
        self.run()
        return "" if torch.equal(self.pages, want) and self.guarded() else "other bytes than the reference's"

    def wrongs(self) -> list[Wrong]:
        bare = random_slot(random.Random(1), self.dim, (), plain=True)
        bare = PageFormat(bare, self.fmt.page_bytes if bare.quantum_bytes <= self.fmt.page_bytes else 1 << 16)
        untracked = Wrong("untracked", self.change(self.tier, "fmt", lambda _: bare))
        lists = [x for x in self.bent_tier(self.tier) if not x.name.startswith("num_v out")]  # nobody asks for values
        return [*self.other_pool(), *self.bent(self.args, "scores", (0, 1, 2)), *lists, untracked]
