"""Random calls of attention, fused steps and prompt scores, an oracle of each, and ways to make each of them wrong."""

import torch
from fuzz_calls import CLOSE, RULES, Call, Wrong
from oracles import slow_attention
from torch import Tensor

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.operands import Channels, ColumnSums, InOrder, Ring, StepRing, StepScores, TierPages


def close(got: Tensor, want: Tensor, size: float) -> bool:
    """Within `CLOSE` of the largest number there is; NaN and infinity where the oracle has them."""
    ends = torch.equal(got.isfinite(), want.isfinite())
    return ends and bool(((got.double() - want).nan_to_num().abs() <= CLOSE * max(size, 1e-30)).all())


def attend(q: Tensor, dense: tuple, scale: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """Output, log-sum-exp and probabilities of every query head in float64; and the largest value."""
    keys, values, live = dense
    group, size = q.shape[1] // keys.shape[1], 0.0
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    chances = torch.zeros(*q.shape[:2], keys.shape[2], dtype=torch.float64)
    for s in range(q.shape[0]):
        for head in range(q.shape[1]):
            held = live[s, head // group]
            v = values[s, head // group, held]
            size = max(size, float(v.abs().max()) if v.numel() else 0.0)
            out[s, head], lse[s, head], p = slow_attention.attend_one(
                q[s, head], keys[s, head // group, held], v, scale
            )
            chances[s, head, held] = p
            if not held.any():
                out[s, head] = float("nan")
    return out, lse, chances, size


def group_scores(chances: Tensor, heads: int, power: int, how: str) -> Tensor:
    """Scores [S, H, n] of probabilities [S, Hq, n]."""
    parts = (chances**power).unflatten(1, (heads, -1)).transpose(0, 2)  # [G, H, S, n]
    return slow_attention.reduce(parts, how).transpose(0, 1)


class Decode(Call):
    """Attention of one query token per sequence."""

    def build(self) -> None:
        dice = self.dice
        lists = dice.randint(1, 3), dice.randint(1, 3)
        self.ring = None
        num = dice.choice((1, 1, 2, 3, 4))
        track = dice.choice(((), ("score", "pos")))
        self.list = self.tiers(lists, track, num=num, plain=False, most=dice.choice((20, 150, 150, 4200)))
        for tier in self.list:
            if dice.random() < 0.2:
                tier.num_v = (tier.num_k * torch.rand(lists, generator=self.make)).long()
        if num == 1 and dice.random() < 0.35:
            self.add_ring(lists)
        elif dice.random() < 0.2 and all(tier.fmt.slot.key_channels == self.dim for tier in self.list):
            self.turn(lists, half=dice.choice((self.dim // 2, dice.randint(1, self.dim // 2))))
        bare = [tier for tier in self.list if not tier.fmt.regions["k_scale"][1]]
        if all(tier.fmt.slot.key_channels == self.dim for tier in bare):
            own = Channels(*(torch.randn(lists[1], self.dim, generator=self.make) for _ in range(2)))
            for tier in bare:
                book = tier.fmt.slot.k_code == "book_channels"  # of levels up to 255
                if dice.random() < (0.8 if book else 0.1):
                    tier.channels = Channels(own.scale / 100 if book else own.scale, own.zero)
        heads = lists[1] * dice.choice((1, 2, 3, 4, 5, 7))
        rule = dice.choice((None, *RULES))
        self.args = {"q": self.randn(lists[0], heads, self.dim), "power": dice.choice((1, 2)), "group": rule}
        self.scale = self.dim**-0.5

    def turn(self, lists: tuple[int, int], half: int) -> None:
        """Rotations of all tiers: any angles, or positions in order. Those have frequencies whose products with
        positions are exact: a rounded angle would differ from a sum of two rounded ones by more than `CLOSE`."""
        exact = 0.5 ** torch.randint(12, (half,), generator=self.make)
        for tier in self.list:
            width = tier.ids.shape[-1] * tier.fmt.tokens_per_page
            any_angles = torch.randn(lists[0], width, half, generator=self.make)
            first = torch.randint(5000, lists[:1], generator=self.make)
            tier.rotation = self.dice.choice((any_angles, InOrder(first, exact)))

    def add_ring(self, lists: tuple[int, int]) -> None:
        """Residual buffers, each with as many tokens as fit beside the pages'."""
        tier, (k_length, v_length) = self.list[0], (self.dice.randint(1, 40) for _ in "kv")
        dtype = self.dice.choice((torch.float16, torch.bfloat16, torch.float32))
        k, v = (torch.randn(*lists, n, self.dim, generator=self.make).to(dtype) for n in (k_length, v_length))
        tier.num_v = torch.minimum(torch.maximum(tier.num_k - v_length, tier.num_v), tier.num_k + k_length)
        low, high = torch.maximum(tier.num_k, tier.num_v), torch.minimum(tier.num_k + k_length, tier.num_v + v_length)
        total = low + (torch.rand(lists, generator=self.make) * (high - low + 1)).long()
        self.ring = Ring(k, v, torch.minimum(total, high))

    def run(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        a = self.args
        return Cpu().paged_decode(
            a["q"], self.pages, self.list, self.ring, self.scale, power=a["power"], group=a["group"]
        )

    def judge(self) -> str:
        before = self.pages.clone()
        out, lse, scores = self.run()
        dense = REFERENCE.gather_dense(self.pages, self.list, self.ring)
        want, log, chances, size = attend(self.args["q"], dense, self.scale)
        if not torch.equal(before, self.pages):
            return "the pool was changed"
        if not close(out, want, size):
            return f"out is {float((out - want).abs().max())} off, of {size}"
        if not close(lse, log, max(1.0, float(log[log.isfinite()].abs().max()) if log.isfinite().any() else 1.0)):
            return f"lse is {float((lse - log).abs().max())} off"
        heads, begin = self.list[0].ids.shape[1], 0
        for tier, found in zip(self.list, scores, strict=False):
            width = tier.ids.shape[-1] * tier.fmt.tokens_per_page
            expected = group_scores(chances[..., begin : begin + width], heads, self.args["power"], self.args["group"])
            if self.ring is not None:  # what lies in the buffer has no score
                slots = torch.arange(expected.shape[-1])
                expected = expected.masked_fill(slots >= tier.num_k[..., None], 0.0)[..., :width]
            if found.shape[-1] != width or not close(found, expected.nan_to_num(), 1.0):
                return "scores are off"
            begin += width
        return "" if len(scores) == (len(self.list) if self.args["group"] else 0) else "another number of scores"

    def wrongs(self) -> list[Wrong]:
        found = self.other_pool() + self.bent(self.args, "q", (0, 2))
        for tier in self.list:
            found += self.bent_tier(tier)
        found.append(Wrong("power 3", self.change(self.args, "power", lambda _: 3)))
        found.append(Wrong("another group", self.change(self.args, "group", lambda _: "min")))
        heads = self.list[0].ids.shape[1]
        if heads > 1:
            found.append(Wrong("a query head more", self.change(self.args, "q", lambda q: torch.cat([q, q[:, :1]], 1))))
        found.append(Wrong("no tier", self.change(self, "list", lambda _: [])))
        found.append(Wrong("five tiers", self.change(self, "list", lambda x: (x * 5)[:5])))
        if self.ring is not None:
            ring = self.ring
            found += (
                self.bent(ring, "k", (0, 1, 3))
                + self.bent(ring, "v", (0, 1, 3))
                + self.bent(ring, "num_tokens", (0, 1))
            )
            most = int(self.list[0].num_k.max()) + ring.k.shape[2]
            found += self.poked(ring, "num_tokens", most + 1)
            found.append(Wrong("an empty ring", self.change(ring, "k", lambda x: x[:, :, :0])))
        return found


class Step(Call):
    """A decode step of all layers, with or without residual buffers."""

    def build(self) -> None:
        dice = self.dice
        self.lists = dice.randint(1, 3), dice.randint(1, 3), dice.randint(1, 2)
        self.group_size, self.scale, self.layer = dice.choice((1, 2, 3, 5)), self.dim**-0.5, None
        buffered = dice.random() < 0.4
        track = () if buffered else dice.choice(((), ("score", "pos")))
        self.list = self.tiers(
            self.lists,
            track,
            num=1 if buffered else dice.choice((1, 2, 3, 4)),
            plain=not buffered,
            most=dice.choice((30, 150)),
        )
        heads = self.lists[2]
        self.args = {
            "seen": (1 << 15) + self.below(1 << 10, self.lists[0]),
            "power": dice.choice((1, 2)),
            "group": dice.choice(RULES),
        }
        self.args |= {"update": dice.choice((None, "add", "replace")) if track else None, "skip_near": 0, "ring": None}
        self.args |= {"num_q_heads": heads * self.group_size}
        if self.args["update"]:
            self.args["skip_near"] = dice.choice((0, 0, 1 << 14))
        if buffered:
            self.add_ring()
        else:
            self.add_target()
        self.tokens = [
            {
                name: self.randn(self.lists[0], n, self.dim)
                for name, n in (("q", heads * self.group_size), ("k", heads), ("v", heads))
            }
            for _ in range(self.lists[1])
        ]

    def add_target(self) -> None:
        """The last slot of a tier in which every list holds one."""
        at = self.dice.randrange(len(self.list))
        tier = self.list[at]
        if not tier.ids.shape[-1]:
            tier.ids = (len(self.pages) - 1 - torch.arange(tier.num_k.numel()) % 2).view(*self.lists, 1)  # spare ones
            tier.ids = tier.ids if tier.num_k.numel() <= 2 else tier.ids.new_zeros(tier.ids.shape)
        tier.num_k = tier.num_v = tier.num_k.clamp(min=1)
        last = tier.num_k - 1
        page = tier.ids.gather(-1, (last // tier.fmt.tokens_per_page)[..., None])[..., 0]
        self.args["target"] = [at, page, last % tier.fmt.tokens_per_page]

    def add_ring(self) -> None:
        """Buffers of a few rows; in this step keys leave by whole groups and values one by one."""
        tier, dice, make = self.list[0], self.dice, self.make
        group = tier.fmt.slot.group_tokens
        size = group * dice.randint(1, 2)
        rows = self.lists[0] + dice.randint(0, 2)
        dtype = dice.choice((torch.float16, torch.bfloat16, torch.float32))
        shape = rows, *self.lists[1:]
        k, v = (torch.randn(*shape, n, self.dim, generator=make).to(dtype) for n in (size, size + 1))
        room = tier.ids.shape[-1] * tier.fmt.tokens_per_page
        total = 1 + self.below(max(1, room), *self.lists)
        old_k, old_v = (total - 1) // size * size, (total - 1 - size).clamp(min=0)
        new_k, new_v = torch.where(total % size == 0, total, old_k), (total - size).clamp(min=0)
        new_k = torch.where(new_k <= room, new_k, old_k)
        first = dice.random() < 0.5
        tier.num_k, tier.num_v = (new_k, new_v) if first else (old_k, old_v)
        chosen = torch.randperm(rows, generator=make)[: self.lists[0]]
        self.args["target"] = None
        self.args["ring"] = StepRing(
            k=k, v=v, rows=chosen, num_tokens=total, before=(old_k, old_v), after=(new_k, new_v), flush_first=first
        )

    def run(self) -> list[Tensor]:
        named = {**self.args, "target": None if self.args["target"] is None else tuple(self.args["target"])}
        scores = StepScores(**{name: named.pop(name) for name in ("power", "group", "update", "skip_near")})
        step = Cpu().open_step(self.pages, self.list, **named, scores=scores)
        assert step is not None
        layers = range(self.lists[1]) if self.layer is None else [self.layer]
        return [step.attend(layer, *self.tokens[layer % self.lists[1]].values(), self.scale) for layer in layers]

    def judge(self) -> str:
        want, ring = self.pages.clone(), self.args["ring"]
        buffers = None if ring is None else (ring.k.clone(), ring.v.clone())
        for layer, out in enumerate(self.run()):
            x = self.tokens[layer]
            tiers = [TierPages(t.fmt, *(y[:, layer] for y in (t.ids, t.num_k, t.num_v))) for t in self.list]
            view = None
            if ring is None:
                at, page, slot = self.args["target"]
                for write, new in ((REFERENCE.write_keys, x["k"]), (REFERENCE.write_values, x["v"])):
                    write(
                        want, self.list[at].fmt, page[:, layer].flatten(), slot[:, layer].flatten(), new.flatten(0, 1)
                    )
            else:
                view = self.append(layer, buffers, x)
                if ring.flush_first:
                    self.flush(want, layer, buffers)
            expected, _, chances, size = attend(x["q"], REFERENCE.gather_dense(want, tiers, view), self.scale)
            if not close(out, expected, size):
                return f"layer {layer} is {float((out - expected).abs().max())} off, of {size}"
            if ring is not None and not ring.flush_first:
                self.flush(want, layer, buffers)
            if self.args["update"]:
                self.update(want, tiers, chances)
        fields = [
            REFERENCE.region(p, t.fmt, "score") for t in self.list if t.fmt.slot.track for p in (self.pages, want)
        ]
        if fields and self.args["update"]:
            used = [(t.fmt, t.ids[self.used(t, t.num_k)]) for t in self.list]
            for fmt, ids in used:
                a, b = (REFERENCE.region(p, fmt, "score")[ids] for p in (self.pages, want))
                if not close(a, b.double(), 1.0):
                    return "scores are off"
                for p in (self.pages, want):
                    REFERENCE.region(p, fmt, "score")[ids] = 0.0
        if ring is not None and not (torch.equal(ring.k, buffers[0]) and torch.equal(ring.v, buffers[1])):
            return "other buffers than the reference's"
        return "" if torch.equal(self.pages, want) and self.guarded() else "other bytes than the reference's"

    def append(self, layer: int, buffers: tuple[Tensor, Tensor], x: dict[str, Tensor]) -> Ring:
        """The new token in copies of the buffers."""
        ring = self.args["ring"]
        heads = torch.arange(self.lists[2])
        for buffer, new in zip(buffers, (x["k"], x["v"]), strict=True):
            buffer[ring.rows[:, None], layer, heads, (ring.num_tokens[:, layer] - 1) % buffer.shape[3]] = new.to(
                buffer.dtype
            )
        return Ring(*(buffer[ring.rows, layer] for buffer in buffers), ring.num_tokens[:, layer])

    def flush(self, want: Tensor, layer: int, buffers: tuple[Tensor, Tensor]) -> None:
        """What leaves the buffers, list by list."""
        ring, tier = self.args["ring"], self.list[0]
        writes = REFERENCE.write_keys, REFERENCE.write_values
        for old, new, buffer, write in zip(ring.before, ring.after, buffers, writes, strict=True):
            for s in range(self.lists[0]):
                for h in range(self.lists[2]):
                    token = torch.arange(int(old[s, layer, h]), int(new[s, layer, h]))
                    page, slot = (
                        tier.ids[s, layer, h, token // tier.fmt.tokens_per_page],
                        token % tier.fmt.tokens_per_page,
                    )
                    if len(token):
                        write(want, tier.fmt, page, slot, buffer[ring.rows[s], layer, h, token % buffer.shape[3]])

    def update(self, want: Tensor, tiers: list[TierPages], chances: Tensor) -> None:
        """Scores of one layer, added or put in place."""
        begin = 0
        for tier in tiers:
            width = tier.ids.shape[-1] * tier.fmt.tokens_per_page
            if not width:
                continue
            part = group_scores(
                chances[..., begin : begin + width], self.lists[2], self.args["power"], self.args["group"]
            )
            begin += width
            score, pos = (REFERENCE.region(want, tier.fmt, name) for name in ("score", "pos"))
            where = pos[tier.ids].flatten(-2)
            near = self.args["seen"][:, None, None] - where < self.args["skip_near"]
            part = part.masked_fill(near, 0.0).float().unflatten(-1, (-1, tier.fmt.tokens_per_page))
            slots = torch.arange(width).view(-1, tier.fmt.tokens_per_page)
            for s, h, i, t in (slots < tier.num_k[..., None, None]).nonzero().tolist():
                at = tier.ids[s, h, i], t
                score[at] = part[s, h, i, t] + (score[at] if self.args["update"] == "add" else 0.0)

    def wrongs(self) -> list[Wrong]:
        found = self.other_pool() + self.bent(self.args, "seen", (0,))
        for tier in self.list:
            found += self.bent_tier(tier, late=True)
        lists = self.lists
        for name in ("q", "k", "v"):
            found += self.bent(self.tokens[-1], name, (0, 1, 2), late=True)
        for layer in (lists[1], -1, 2**30):
            found.append(Wrong("no such layer", self.change(self, "layer", lambda _, n=layer: n)))
        found.append(Wrong("power 3", self.change(self.args, "power", lambda _: 3)))
        found.append(Wrong("negative skip_near", self.change(self.args, "skip_near", lambda _: -1)))
        if lists[2] > 1:
            found.append(Wrong("a query head more", self.change(self.args, "num_q_heads", lambda n: n + 1)))
        if not self.list[0].fmt.slot.track:
            found.append(Wrong("untracked", self.change(self.args, "update", lambda _: "add")))
        ring = self.args["ring"]
        if ring is None:
            target = dict(zip(("tier", "page", "slot"), self.args["target"], strict=True))
            tokens = self.list[target["tier"]].fmt.tokens_per_page
            aimed = self.bent(target, "page", (0, 1, 2)) + self.bent(target, "slot", (0, 1, 2))
            aimed += self.poked(target, "page", len(self.pages), late=True) + self.poked(
                target, "slot", tokens, late=True
            )
            aimed += [
                Wrong("no such tier", self.change(target, "tier", lambda _, t=t: t)) for t in (4, -1, len(self.list))
            ]
            found += [
                Wrong(w.name, lambda w=w: (w.make(), self.args.update(target=list(target.values())))[1], w.late)
                for w in aimed
            ]
            found.append(Wrong("no target", self.change(self.args, "target", lambda _: None)))
            return found
        found += self.bent(ring, "k", (1, 2, 4)) + self.bent(ring, "v", (1, 2, 4)) + self.bent(ring, "rows", (0,))
        found += self.bent(ring, "num_tokens", (0, 1, 2)) + self.poked(ring, "rows", len(ring.k), late=True)
        found += self.poked(ring, "num_tokens", 2**20, late=True)
        zero = lambda x: torch.zeros_like(x)  # noqa: E731
        found.append(Wrong("no tokens", self.change(ring, "num_tokens", zero), True))
        counts = {"old_k": ring.before[0], "old_v": ring.before[1], "new_k": ring.after[0], "new_v": ring.after[1]}

        def put() -> None:
            ring.before = counts["old_k"], counts["old_v"]
            ring.after = counts["new_k"], counts["new_v"]

        for name in counts:
            for w in self.bent(counts, name, (0, 1, 2)) + self.poked(counts, name, 2**20, late=True):
                found.append(Wrong(w.name, lambda w=w: (w.make(), put())[1], w.late))
        return found


class Columns(Call):
    """Column sums of a prompt."""

    def build(self) -> None:
        dice = self.dice
        heads, length = dice.randint(1, 3), dice.randint(1, 70)
        self.pool(PageFormat(SlotFormat(self.dim, 16, 16), 1 << 15), 1)
        self.args = {
            "q": self.randn(heads * dice.choice((1, 2, 3)), length, self.dim),
            "k": torch.randn(heads, length, self.dim, generator=self.make),
            "queries": dice.choice((-1, 0, 1, 5, 100)),
            "skip_near": dice.choice((0, 0, 1, 4, 100)),
            "power": dice.choice((1, 2)),
        }

    def run(self) -> Tensor:
        named = {name: x for name, x in self.args.items() if name not in ("q", "k")}
        return Cpu().column_scores(self.args["q"], self.args["k"], self.dim**-0.5, ColumnSums(**named))

    def judge(self) -> str:
        a, got = self.args, self.run()
        length, group = a["q"].shape[1], a["q"].shape[0] // a["k"].shape[0]
        i, j = torch.arange(length)[:, None], torch.arange(length)
        counted = (i - j >= a["skip_near"]) & (j <= i) & (torch.tensor(a["queries"] < 0) | (i >= length - a["queries"]))
        for head, row in enumerate(got):
            p = slow_attention.causal_probabilities(a["q"][head], a["k"][head // group], self.dim**-0.5)
            if not close(row, (p ** a["power"] * counted).sum(0), length):
                return f"head {head} is off"
        return ""

    def wrongs(self) -> list[Wrong]:
        found = self.bent(self.args, "q", (1, 2)) + self.bent(self.args, "k", (1, 2))
        for name, bad in (("queries", -2), ("skip_near", -1), ("skip_near", -(2**40)), ("power", 3), ("power", 0)):
            found.append(Wrong(f"{name}={bad}", self.change(self.args, name, lambda _, bad=bad: bad)))
        return found
