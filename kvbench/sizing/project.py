"""Bytes that a method would hold on a model of another size.

By the store's decisions and its ledger, without any keys and values.

Nothing here repeats a formula of the cache: the method's plan says what each list keeps, the page tables and the rings
of a real store take as many slots, and the ledger counts them (`kvbench.sizing.count`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvbench.cache.layout import ModelShape
from kvbench.cache.options import StoreOptions
from kvbench.policy import Policy
from kvbench.sizing.count import count
from kvbench.sizing.projection import Projection, is_one_number
from kvbench.sizing.shadow import fill_prompt, shadow_store

GLANCE_TOKENS = 1024  # a prompt long enough to tell whether it decides


def project(
    policy: Policy,
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    options: StoreOptions | None = None,
    shares: Sequence[float] = (),
) -> tuple[Projection, Projection]:
    """Bytes that one sequence holds when its answer ends: the least and the most that attention can make of it.

    A method with a budget keeps the same however attention looks, and both are one. One that decides by thresholds
    keeps the least where queries attend to one token alone, and the most where they attend to all alike; where the
    shares of its tiers were measured, they decide in their place (`project_shares`), at a fraction of the work.

    Raises:
        ValueError: The method does not fit the model.
    """
    sizes = policy, shape, prompt_tokens, new_tokens, options
    least, most = _both(policy, shape, min(prompt_tokens, GLANCE_TOKENS), 0, options)
    measures = policy.score.measures_prompts or policy.score.decode_update
    is_one = is_one_number(least, most)
    full_bytes = shape.layers_fp16_bytes(min(prompt_tokens, GLANCE_TOKENS))
    if is_one and not (measures and prompt_tokens > GLANCE_TOKENS and keeps_all(policy, least, full_bytes)):
        # Then it is one at any length, and half the work shows which. A method that keeps all of a short prompt may be
        # one whose windows are longer, and decides later.
        only = run(*sizes, is_even=True)
        return only, only
    if is_one or not shares:
        least, most = _both(*sizes)
        if not shares or is_one_number(least, most):
            return least, most
    only = project_shares(policy, shape, prompt_tokens, new_tokens, shares, options)
    return only, only


def _both(*sizes: Any) -> tuple[Projection, Projection]:
    """Results of `project` for both extremes of attention."""
    peaked, even = (run(*sizes, is_even=is_even) for is_even in (False, True))
    return (peaked, even) if peaked.resident_bytes < even.resident_bytes else (even, peaked)


def keeps_all(policy: Policy, projection: Projection, fp16_bytes: int) -> bool:
    """True where as much is held as of all tokens; a method that holds less has begun to decide.

    Their keys and values take `fp16_bytes` in the layers on which the method acts.
    """
    bits = min(tier.k_bits + tier.v_bits for tier in policy.tiers)  # of a key's and a value's number
    return 32 * projection.items["payload_bytes"] >= bits * fp16_bytes


def project_shares(
    policy: Policy,
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    shares: Sequence[float],
    options: StoreOptions | None = None,
) -> Projection:
    """Bytes of one sequence when the method gives each tier a known share of tokens x lists, measured by a stored run.

    The method has no residual buffer.

    Lists differ by up to half a page from the mean, so that slack is what it is on average.

    Raises:
        ValueError: The method does not fit the model, or has another number of tiers.
    """
    store = shadow_store(policy, shape, prompt_tokens, new_tokens, options, is_even=True)
    if len(shares) != len(policy.tiers) or policy.residual is not None:
        raise ValueError(f"{type(policy).__name__} has {len(policy.tiers)} tiers, not {len(shares)} shares")
    tokens, lists = prompt_tokens + new_tokens, torch.arange(store.pages.lists_per_row)
    row = store.open_row(new_tokens=0)  # windows are filled as by a prompt of all tokens
    for tier, (share, fmt) in enumerate(zip(shares, store.pages.formats, strict=True)):
        placed = store.pages.tier_map
        used = lists if placed is None else placed.where(tier, 1)  # lists that hold any in it
        spread = ((torch.arange(len(used)) + 0.5) / max(1, len(used)) - 0.5) * fmt.tokens_per_page
        each = share * tokens * len(lists) / max(1, len(used))
        slots = (each + (spread if tier % 2 else -spread)).round().long()
        store.pages.table.reserve(used, tier, slots.clamp(min=0) if share else torch.zeros_like(used))
    for windows in store.other_kinds:
        fill_prompt(windows, row, tokens)
    return Projection(items=store.ledger.itemise(row), fp16_bytes=shape.fp16_bytes(tokens), measured=True)


def run(
    policy: Policy,
    shape: ModelShape,
    prompt_tokens: int,
    new_tokens: int,
    options: StoreOptions | None,
    *,
    is_even: bool,
) -> Projection:
    """The ledger after a prompt and the steps of an answer, where queries attend to all tokens alike, or to one."""
    items = count(policy, shape, prompt_tokens, new_tokens, options, is_even=is_even)
    return Projection(items=items, fp16_bytes=shape.fp16_bytes(prompt_tokens + new_tokens))
