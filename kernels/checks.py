"""Checks of every backend before memory is touched: shape, dtype and device of each tensor.

One function per operation of `Backend`, called by everything that does it. They look at what tensors say of themselves
and never at their data, so that they cost a microsecond or two and no synchronisation; the ranges of indices are
checked where they are read (csrc/limits.h, and torch's own indexing). A refusal is a mistake of the caller's program
and no user's error: an AssertionError with a sentence, and nothing has been written.
"""

from typing import get_args

import torch
from torch import Tensor

from kvbench.kernels.format import PageFormat
from kvbench.kernels.operands import (
    PLAIN,
    ColumnSums,
    ExtremeOf,
    HeadScores,
    InOrder,
    Pool,
    PoolRegion,
    PoolStage,
    Reduce,
    Ring,
    ScoreUpdate,
    SlotSearch,
    Softmax,
    StepRing,
    StepScores,
    StepTarget,
    TierPages,
)

MAX_TIERS = 4
_INDEX = {torch.int64, torch.int32}
_MAIN = torch.device("cpu")
_REDUCES = {*get_args(Reduce)}
_COUNTS = ("num_tokens", "before", "before", "after", "after")  # of a step's residual buffers


def _refuse(name: str, value: object, rule: str) -> AssertionError:
    return AssertionError(f"{name} is {value}, but {rule}")


def _said(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"


def index(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuses what is no int64 (or int32) tensor of a shape on a device."""
    if x.shape != shape or x.dtype not in _INDEX or x.device != device:
        raise _refuse(name, _said(x), f"it must be int64 {list(shape)} on {device}")


def vectors(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuses what is no floating-point tensor of a shape on a device."""
    if x.shape != shape or not x.dtype.is_floating_point or x.device != device:
        raise _refuse(name, _said(x), f"it must be floating-point {list(shape)} on {device}")


def choice(name: str, value: object, allowed: set) -> None:
    """Refuses a word or number that is not among those of an operation."""
    if value not in allowed:
        raise _refuse(name, repr(value), f"it must be one of {sorted(allowed, key=str)}")


def at_least(name: str, value: object, low: int) -> None:
    """Refuses a number that is no integer from `low` on."""
    if not isinstance(value, int) or value < low:
        raise _refuse(name, repr(value), f"it must be an integer from {low} on")


def pool(pages: Tensor, fmt: PageFormat) -> None:
    """Refuses what is no pool of a format's pages."""
    if pages.dtype is not torch.uint8 or pages.dim() != 2 or pages.shape[1] != fmt.page_bytes:
        raise _refuse("the pool", _said(pages), f"its pages must be uint8 [P, {fmt.page_bytes}], as their format says")
    if pages.data_ptr() % 16:
        raise AssertionError(
            "the pool does not begin at a multiple of 16 bytes, so its numbers cannot be read in place"
        )


def slots(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor) -> None:
    """Refuses a pool and addresses of slots, [M] each, that do not belong together."""
    pool(pages, fmt)
    if page.dim() != 1:
        raise _refuse("page", _said(page), "it must be int64 [M], one page per slot")
    index("page", page, page.shape, pages.device)
    index("slot", slot, page.shape, pages.device)


def within(fmt: PageFormat, num_pages: int, page: Tensor, slot: Tensor) -> None:
    """Refuses pages and slots that do not exist, for code that indexes with them: torch takes -1 for the last one.

    Only in main memory: on a GPU the answer would have to be waited for.
    """
    if page.device.type != "cpu" or not page.numel():
        return
    for name, x, end in (("page", page, num_pages), ("slot", slot, fmt.tokens_per_page)):
        low, high = (int(bound) for bound in x.aminmax())
        if low < 0 or high >= end:
            raise _refuse(name, f"{low} to {high}", f"the call has {end} of them, counted from 0")


def write(pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, x: Tensor, *, keys: bool) -> None:
    """Checks of `write_keys` and `write_values`."""
    slots(pages, fmt, page, slot)
    vectors("k" if keys else "v", x, (len(page), fmt.slot.head_dim), pages.device)
    if keys and len(page) % fmt.slot.group_tokens:
        raise _refuse("k", f"{len(page)} vectors", f"keys are written in groups of {fmt.slot.group_tokens}")


def write_tracked(
    pages: Tensor,
    fmt: PageFormat,
    page: Tensor,
    slot: Tensor,
    score: Tensor | float | None,
    pos: Tensor | None,
    passes_over: bool = False,
) -> None:
    """Checks of the operation of that name; `passes_over`: a page below 0 is not written to."""
    slots(pages, fmt, page, slot)
    if not passes_over:
        within(fmt, len(pages), page, slot)
    if "score" in fmt.slot.track:
        if isinstance(score, Tensor):
            vectors("score", score, page.shape, pages.device)
        elif not isinstance(score, (int, float)):
            raise _refuse("score", repr(score), "the format tracks scores, so the call needs one")
    if "pos" in fmt.slot.track:
        if pos is None:
            raise _refuse("pos", "None", "the format tracks positions, so the call needs them")
        index("pos", pos, page.shape, pages.device)


def widen_bounds(
    pages: Tensor, fmt: PageFormat, page: Tensor, slot: Tensor, k: Tensor, passes_over: bool = False
) -> None:
    """Checks of the operation of that name; `passes_over`: bounds of a page below 0 stay unchanged."""
    slots(pages, fmt, page, slot)
    if not passes_over:
        within(fmt, len(pages), page, slot)
    vectors("k", k, (len(page), fmt.slot.head_dim), pages.device)
    if not fmt.bounds:
        raise AssertionError("the format's pages carry no bounds that could be widened")


def move(
    pages: Tensor, fmt: PageFormat, src_page: Tensor, src_slot: Tensor, dst_page: Tensor, dst_slot: Tensor
) -> None:
    """Checks of `move_slots`.

    Raises:
        ValueError: Slots of this format do not stand alone.
    """
    movable(fmt)
    slots(pages, fmt, src_page, src_slot)
    slots(pages, fmt, dst_page, dst_slot)
    if src_page.shape != dst_page.shape:
        raise _refuse("dst_page", _said(dst_page), f"there are {len(src_page)} sources")


def movable(fmt: PageFormat) -> None:
    """Refuses formats whose slots do not stand alone.

    Raises:
        ValueError: Keys share scales over tokens, or pages carry bounds of their keys.
    """
    if fmt.slot.channel_keys:
        raise ValueError(
            f"slots with per-channel keys (group {fmt.slot.k_channel_group}) cannot move one by one; "
            "evict before quantising, or store the tokens in a tier with k_axis=token"
        )
    if fmt.bounds:
        raise ValueError("slots of pages that carry bounds of their keys cannot move: the bounds would no longer hold")


def tier_pages(pages: Tensor, tier: TierPages, lists: tuple[int, ...], head_dim: int) -> None:
    """Refuses a tier that does not describe `lists` on the pool's pages."""
    fmt, ids, device = tier.fmt, tier.ids, pages.device
    pool(pages, fmt)
    if fmt.slot.head_dim != head_dim:
        raise _refuse("the head dim of the pages", fmt.slot.head_dim, f"the call's is {head_dim}")
    columns = ids.shape[-1]
    index("ids", ids, (*lists, columns), device)
    index("num_k", tier.num_k, lists, device)
    if tier.num_v is not tier.num_k:
        index("num_v", tier.num_v, lists, device)
    if (turn := tier.rotation) is not None:
        if fmt.slot.key_channels < head_dim:
            raise _refuse("rotation", "of keys without all channels", "their pairs are not there")
        half = tier.half
        if isinstance(turn, InOrder):
            index("the first positions", turn.first, lists[:1], device)
            vectors("the rotary frequencies", turn.frequencies, (half,), device)
        else:
            vectors("rotation", turn, (lists[0], columns * fmt.tokens_per_page, half), device)
        if not 0 < 2 * half <= head_dim:
            raise _refuse("rotation", f"{half} angles per slot", f"a key has {head_dim} channels, two for each angle")
    if (channels := tier.channels) is not None:
        if fmt.regions["k_scale"][1]:
            raise _refuse("the channels' scale", "beside scales in the page", "keys have the one or the other")
        for name, x in (("scale", channels.scale), ("zero", channels.zero)):
            vectors(f"the channels' {name}", x, (lists[-1], head_dim), device)
    if tier.offset is not None:
        vectors("the keys' offset", tier.offset, (lists[-1], head_dim), device)


def _tiers(pages: Tensor, tiers: list[TierPages], lists: tuple[int, ...], head_dim: int) -> None:
    if not 1 <= len(tiers) <= MAX_TIERS:
        raise _refuse("tiers", f"{len(tiers)} of them", f"a call takes 1 to {MAX_TIERS}")
    for tier in tiers:
        tier_pages(pages, tier, lists, head_dim)
    if len(angles := {tier.half for tier in tiers if tier.half}) > 1:
        raise _refuse("rotation", f"{sorted(angles)} angles per slot", "all tiers turn the same channels")


def _heads(num_q_heads: int, heads: int) -> None:
    if heads < 1 or num_q_heads < 1 or num_q_heads % heads:
        raise _refuse("the number of query heads", num_q_heads, f"it must be a multiple of the {heads} KV heads")


def softmax(how: Softmax, heads: tuple[int, ...], device: torch.device) -> None:
    """Checks of caps and sinks of so many query heads, or layers and query heads."""
    if not 0 <= how.cap < float("inf"):
        raise _refuse("cap", how.cap, "logits are capped at a number above 0, or at 0, which is none")
    if how.sinks is not None:
        vectors("sinks", how.sinks, heads, device)
        if how.sinks.dtype is not torch.float32 or not how.sinks.is_contiguous():
            raise _refuse("sinks", _said(how.sinks), "they must be fp32, in one plain array")


def decode(
    q: Tensor,
    pages: Tensor,
    tiers: list[TierPages],
    ring: Ring | None,
    power: int,
    group: Reduce | None,
    how: Softmax = PLAIN,
) -> None:
    """Checks of `paged_decode`."""
    if q.dim() != 3 or not tiers or tiers[0].ids.dim() != 3:
        raise _refuse("q", _said(q), "it must be [S, Hq, D], with ids [S, H, m] in every tier")
    num_seq, num_q_heads, head_dim = q.shape
    heads = tiers[0].ids.shape[1]
    vectors("q", q, q.shape, pages.device)
    _heads(num_q_heads, heads)
    softmax(how, (num_q_heads,), pages.device)
    _tiers(pages, tiers, (num_seq, heads), head_dim)
    if ring is not None:
        _buffers(ring, (num_seq, heads), head_dim, len(tiers), pages)
        index("the ring's num_tokens", ring.num_tokens, (num_seq, heads), pages.device)
    if power != 1:
        choice("power", power, {1, 2})
    if group is not None:
        choice("group", group, _REDUCES)


def _buffers(ring: Ring | StepRing, lists: tuple[int, ...], head_dim: int, num_tiers: int, pages: Tensor) -> None:
    if num_tiers != 1:
        raise _refuse("tiers", f"{num_tiers} of them", "there is one behind residual buffers")
    for name, x in (("the ring's k", ring.k), ("the ring's v", ring.v)):
        vectors(name, x, (*lists, max(1, x.shape[-2]), head_dim), pages.device)
    if ring.k.dtype != ring.v.dtype:
        raise _refuse("the ring's v", _said(ring.v), f"its keys are {ring.k.dtype}")


def dense(pages: Tensor, tiers: list[TierPages], ring: Ring | None) -> None:
    """Checks of `gather_dense`."""
    if not tiers or tiers[0].ids.dim() != 3:
        raise AssertionError("gather_dense takes 1 to 3 tiers with ids [S, H, m]")
    lists, head_dim = tuple(tiers[0].ids.shape[:2]), tiers[0].fmt.slot.head_dim
    _tiers(pages, tiers, lists, head_dim)
    if ring is not None:
        _buffers(ring, lists, head_dim, len(tiers), pages)
        index("the ring's num_tokens", ring.num_tokens, lists, pages.device)


def choose(q: Tensor, pages: Tensor, tier: TierPages, count: Tensor, width: int, group: Reduce) -> None:
    """Checks of `choose_pages`."""
    decode(q, pages, [tier], None, 1, group)
    index("count", count, (len(q),), pages.device)
    at_least("width", width, 1)
    if not tier.fmt.bounds:
        raise AssertionError("pages without bounds of their keys cannot be chosen by them")


def scores(pages: Tensor, tier: TierPages, score: Tensor) -> None:
    """Checks of `add_scores`."""
    lists = tuple(tier.num_k.shape)
    tier_pages(pages, tier, lists, tier.fmt.slot.head_dim)
    vectors("scores", score, (*lists, tier.ids.shape[-1] * tier.fmt.tokens_per_page), pages.device)
    tracked(tier.fmt, "score")


def tracked(fmt: PageFormat, name: str) -> None:
    """Refuses a format without a field that the call reads or changes."""
    if name not in fmt.slot.track:
        raise _refuse("the format's track", fmt.slot.track, f"the call needs {name}")


def search(pages: Tensor, fmt: PageFormat, ids: Tensor, held: Tensor, search: SlotSearch) -> None:
    """Checks of `slot_extreme`."""
    pool(pages, fmt)
    if not pages.is_contiguous():
        raise AssertionError("slots are searched in a pool that is one plain array")
    if held.dim() != 1:
        raise _refuse("held", _said(held), "it must be int64 [M], one number per list")
    index("held", held, held.shape, pages.device)
    index("ids", ids, (len(held), ids.shape[-1]), pages.device)
    for name in ("seen", "floor", "before", "exact"):
        if (x := getattr(search, name)) is not None:
            index(name, x, held.shape, pages.device)
    choice("by", search.by, {*get_args(ExtremeOf)})
    at_least("first", search.first, 0)
    if search.by != "pos" and search.exact is None:  # the value of a single position is there with or without a score
        tracked(fmt, "score")
    if search.by == "pos" or search.first or search.before is not None or search.exact is not None:
        tracked(fmt, "pos")


def step(
    pages: Tensor,
    tiers: list[TierPages],
    *,
    num_q_heads: int,
    seen: Tensor,
    target: StepTarget | None,
    ring: StepRing | None,
    scores: StepScores,
    how: Softmax = PLAIN,
) -> None:
    """Checks of `open_step`."""
    if not tiers or tiers[0].ids.dim() != 4:
        raise AssertionError("a step takes 1 to 3 tiers with ids [S, L, H, m]")
    lists, head_dim = tuple(tiers[0].ids.shape[:3]), tiers[0].fmt.slot.head_dim
    _heads(num_q_heads, lists[2])
    softmax(how, (lists[1], num_q_heads), pages.device)
    _tiers(pages, tiers, lists, head_dim)
    index("seen", seen, lists[:1], pages.device)
    choice("power", scores.power, {1, 2})
    choice("group", scores.group, {None, *_REDUCES})
    choice("update", scores.update, {None, *get_args(ScoreUpdate)})
    at_least("skip_near", scores.skip_near, 0)
    if scores.update is not None:
        choice("group", scores.group, _REDUCES)
        for tier in tiers:
            tracked(tier.fmt, "score")
            if scores.skip_near:
                tracked(tier.fmt, "pos")
    if (target is None) == (ring is None):
        raise AssertionError("a step writes its token either to a page or to a residual buffer: give one target")
    if target is not None:
        at, page, slot = target
        choice("the target's tier", at, {*range(len(tiers))})
        index("the target's page", page, lists, pages.device)
        index("the target's slot", slot, lists, pages.device)
        if tiers[at].fmt.slot.channel_keys:
            raise AssertionError("keys that share scales over tokens are written in groups, not one a step")
    if ring is not None:
        _buffers(ring, (len(ring.k), *lists[1:]), head_dim, len(tiers), pages)
        index("the ring's rows", ring.rows, lists[:1], pages.device)
        counts = zip(_COUNTS, (ring.num_tokens, *ring.before, *ring.after), strict=True)
        for name, x in counts:
            index(f"the ring's {name}", x, lists, pages.device)


def layer(q: Tensor, k: Tensor, v: Tensor, of_q: tuple[int, int, int], of_kv: tuple[int, int, int]) -> None:
    """Checks of `FusedStep.attend`, in main memory: the shapes of q, and of k and v."""
    vectors("q", q, of_q, _MAIN)
    vectors("k", k, of_kv, _MAIN)
    vectors("v", v, of_kv, _MAIN)


def prompt(q: Tensor, k: Tensor, v: Tensor | None = None, how: Softmax = PLAIN) -> None:
    """Checks of attention within a prompt: q [Hq, N, D], k and v [H, N, D]."""
    if q.dim() != 3 or k.dim() != 3:
        raise _refuse("q", _said(q), f"it must be [Hq, N, D] beside keys [H, N, D]; these are {_said(k)}")
    num_q_heads, length, head_dim = q.shape
    vectors("q", q, q.shape, q.device)
    for name, x in (("k", k), ("v", k if v is None else v)):
        vectors(name, x, (k.shape[0], length, head_dim), q.device)
    _heads(num_q_heads, k.shape[0])
    softmax(how, (num_q_heads,), q.device)


def chunk(q: Tensor, k: Tensor, v: Tensor, history: tuple[Tensor, Tensor, Tensor | None], how: Softmax = PLAIN) -> None:
    """Checks of `chunk_attention`."""
    prompt(q, k, v, how)
    past_k, past_v, live = history
    heads, _, head_dim = k.shape
    shape = (heads, past_k.shape[1] if live is None else live.shape[-1], head_dim)
    vectors("the history's keys", past_k, shape, q.device)
    vectors("the history's values", past_v, shape, q.device)
    if live is not None and (live.dtype is not torch.bool or live.shape != shape[:2]):
        raise _refuse("the history's live", _said(live), f"it must be bool {list(shape[:2])}")


def columns(q: Tensor, k: Tensor, sums: ColumnSums, how: Softmax = PLAIN) -> None:
    """Checks of `column_scores`."""
    prompt(q, k, how=how)
    at_least("queries", sums.queries, -1)
    at_least("skip_near", sums.skip_near, 0)
    choice("power", sums.power, {1, 2})
    choice("reduce", sums.reduce, _REDUCES)


def reduction(how: HeadScores) -> None:
    """Checks of the reduction of column sums in `prompt_scores`."""
    choice("pool", how.pool, {*get_args(Pool)})
    choice("pool_stage", how.pool_stage, {*get_args(PoolStage)})
    choice("pool_region", how.pool_region, {*get_args(PoolRegion)})
    choice("group", how.group, _REDUCES)
    if how.pool != "none":
        at_least("pool_kernel", how.pool_kernel, 1)
        choice("pool_kernel % 2", how.pool_kernel % 2, {1})
