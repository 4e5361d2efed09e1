"""Bytes of a method on a deep model, from shallow ones of the same heads and length.

Within 1 % of `project`, in a fraction of its time.

Bytes are a line over layers once a method's exceptions (first or last ones, of another precision) are all there. Two
small caches determine the line; nothing here depends on the method.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvbench.cache.layout import ModelShape
from kvbench.policy import Policy
from kvbench.sizing.project import GLANCE_TOKENS, keeps_all, project, project_shares, run
from kvbench.sizing.projection import SAME, Projection, is_one_number

LAYERS = (2, 4)
STEPS = 64  # of an answer; the rest of a longer one grows as these did
FEW_STEPS, LONG_TOKENS = 16, 16384  # so few represent a prompt so long, of which the last pages are less than 1 %
EXACT_TOKENS = 4096  # of a context that is no longer, all steps are counted: a page is a larger part of it


def outline(
    policy: Policy, shape: ModelShape, prompt_tokens: int, new_tokens: int, shares: Sequence[float] = ()
) -> Projection | None:
    """Bytes that one sequence holds when its answer ends; None where the text decides and no shares were measured.

    Raises:
        ValueError: The method does not fit the model.
    """
    sizes = policy, shape, prompt_tokens, new_tokens
    budget = getattr(policy, "budget", None)
    if shape.num_layers <= LAYERS[1] or isinstance(budget, str):
        return _whole(*sizes, shares)  # a budget in bytes is one for all layers
    few, more = (replace(shape, num_layers=layers) for layers in LAYERS)
    try:
        most = FEW_STEPS if prompt_tokens > LONG_TOKENS else STEPS
        steps = new_tokens if prompt_tokens + new_tokens <= EXACT_TOKENS else min(most, new_tokens)
        if _text_decides(policy, few, prompt_tokens, steps):
            return project_shares(*sizes, shares) if shares else None
        base, deep = (run(policy, one, prompt_tokens, 0, None, is_even=True) for one in (few, more))
        later = run(policy, few, prompt_tokens, steps, None, is_even=True) if steps else base
        is_alike = abs(deep.resident_bytes / base.resident_bytes * LAYERS[0] / LAYERS[1] - 1) < SAME
        deeper = None if is_alike or not steps else run(policy, more, prompt_tokens, steps, None, is_even=True)
    except ValueError:  # its settings are for so many layers; else it says again what is wrong
        return _whole(*sizes, shares)
    each = (shape.num_layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])

    def at(name: str) -> int:
        count, behind = base.items[name], deep.items[name]
        grown = later.items[name] - count
        grown_deep = grown * LAYERS[1] / LAYERS[0] if deeper is None else deeper.items[name] - behind
        per_step = (grown + each * (grown_deep - grown)) / max(1, steps)
        return round(count + each * (behind - count) + new_tokens * per_step)

    items = {name: at(name) for name in base.items}
    return Projection(items=items, fp16_bytes=shape.fp16_bytes(prompt_tokens + new_tokens))


def _whole(policy: Policy, shape: ModelShape, prompt: int, new: int, shares: Sequence[float]) -> Projection | None:
    least, most = project(policy, shape, prompt, new, shares=shares)
    return most if is_one_number(least, most) else None


def _text_decides(policy: Policy, shape: ModelShape, prompt_tokens: int, steps: int) -> bool:
    """True if the attention pattern changes the bytes of a prompt, or of the steps after it."""
    if not (policy.score.measures_prompts or policy.score.decode_update):
        return False
    is_one = False
    for tokens in sorted({min(prompt_tokens, GLANCE_TOKENS), prompt_tokens}):
        new = steps if tokens == prompt_tokens <= EXACT_TOKENS else 0
        ends = [run(policy, shape, tokens, new, None, is_even=is_even) for is_even in (False, True)]
        least, most = sorted(ends, key=lambda one: one.resident_bytes)
        is_one = is_one_number(least, most)
        if not is_one and prompt_tokens > EXACT_TOKENS:
            return True  # thresholds of a long prompt hardly come to one number again, and to see it takes long
        full_bytes = shape.layers_fp16_bytes(tokens + new)
        if is_one and not keeps_all(
            policy, least, full_bytes
        ):  # it has begun to decide, and alike: so it does at any length
            return False
    return not is_one
