"""Sampling of a row's next token: the likeliest, or one drawn by a request's temperature and top_p.

A draw is a function of the logits, the seed of the answer and the number of choices before it. Its sums are of whole
numbers, which have no order, so that a token does not depend on the batch, on the device, or on the kind of step. No
state of a generator has to follow, so a captured step draws too.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.async_counts import to_device

_FRONTS = 1024, 8192  # tokens that a nucleus mostly lies within, and that nearly each one does
_BITS = 40  # the likeliest token weighs 2 ** 40, the others less, and what rounds to 0 is never drawn

Drawing = tuple[int, int, float, float]  # of a row: seed, tokens chosen before, temperature, top_p


def answer_seed(seed: int, sample_id: str, repeat: int) -> int:
    """Seed of one answer's random numbers, in 64 bits, signed.

    A sampled answer does not depend on the batch that it ran in.
    """
    digest = hashlib.sha256(f"{seed}\x00{sample_id}\x00{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def random_numbers(seeds: Tensor, chosen: Tensor, retry: bool = False) -> Tensor:
    """The random numbers by which rows choose their next tokens, fp64 [S] in [0, 1).

    Args:
        seeds: int64 [S].
        chosen: int64 [S] tokens that the rows have chosen before.
        retry: Those for a second choice, where the first one may not be taken.

    Source: SplitMix64 (Steele, Lea and Flood 2014), whose state is a counter; a token takes two of its numbers.
    Differs: its first 53 bits, as a share.
    """
    x = seeds + (2 * chosen + retry + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _signed(number: int) -> int:
    return number - 2**64


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros coming in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


@dataclass
class Draws:
    """Sampling state of rows, on their device, where it stays.

    Args:
        seeds: int64 [S] of their random numbers.
        chosen: int64 [S] tokens chosen before.
        temperature: fp32 [S]; 0 = the likeliest token is taken.
        top_p: fp64 [S] nucleus mass in (0, 1]; None = 1.
    """

    seeds: Tensor
    chosen: Tensor
    temperature: Tensor
    top_p: Tensor | None

    def take(self, others: "Draws") -> None:
        """Takes what draws the tokens of as many other rows in the place of these."""
        self.seeds.copy_(others.seeds)
        self.chosen.copy_(others.chosen)
        self.temperature.copy_(others.temperature)
        if self.top_p is not None and others.top_p is not None:
            self.top_p.copy_(others.top_p)

    def next(self, logits: Tensor, retry: bool = False, waits: bool = False) -> Tensor:
        """Chooses tokens int64 [S] under logits fp32 [S, vocabulary].

        `retry` is as in `random_numbers`, `waits` as in `draw`.
        """
        numbers = random_numbers(self.seeds, self.chosen, retry)
        self.chosen += 1
        drawn = draw(logits, self.temperature, self.top_p, numbers, waits)
        return torch.where(self.temperature > 0, drawn, likeliest(logits))


def draws_of(rows: Sequence[Drawing | None], device: torch.device) -> Draws | None:
    """Sampling state of rows, of which those with None take the likeliest token; None where all of them do."""
    if not any(rows):
        return None
    each = [(0, 0, 0.0, 1.0) if row is None else row for row in rows]
    seeds, chosen = to_device([[row[i] for row in each] for i in range(2)], device)
    temperature, top_p = to_device([[row[i] for row in each] for i in range(2, 4)], device, torch.float64)
    part = any(row[3] < 1 for row in each)
    return Draws(seeds, chosen, temperature.float(), top_p if part else None)


def likeliest(logits: Tensor) -> Tensor:
    """Argmax int64 [S] of logits fp32 [S, vocabulary], the first of equals.

    On a CPU by the largest of each part first, since torch's argmax compares number by number there.
    """
    size = min(256, logits.shape[1] & -logits.shape[1])
    if logits.device.type != "cpu" or size < 32 or not logits.is_contiguous():
        return logits.argmax(-1)
    parts = logits.view(len(logits), -1, size)
    part = parts.amax(-1).argmax(-1)
    return part * size + parts[torch.arange(len(parts)), part].argmax(-1)


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor | None, numbers: Tensor, waits: bool = False) -> Tensor:
    """Tokens int64 [S] drawn under logits fp32 [S, vocabulary].

    Args:
        temperature: fp32 [S], > 0; of rows where it is 0 some token comes out, too.
        top_p: fp64 [S] nucleus mass in (0, 1]; None = 1.
        numbers: fp64 [S] random numbers in [0, 1).
        waits: The host may read back whether nuclei lie in few tokens, as they mostly do: to go through a whole
            vocabulary takes a third of a small model's time. The tokens are the same.
    """
    weights = _weigh(logits, temperature)
    if top_p is None:
        return _pick(weights, numbers)
    need = _needed(weights, top_p)
    return _pick_in_fronts(weights, need, numbers) if waits else _pick(nucleus(weights, need), numbers)


def _weigh(logits: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities int64 [S, vocabulary], as shares of the largest."""
    far = (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    return far.exp_().mul_(2.0**_BITS).long().clamp_(min=0)  # of logits that are not finite, anything


def _needed(weights: Tensor, top_p: Tensor) -> Tensor:
    """The weight int64 [S, 1] that a nucleus has at least."""
    total = weights.sum(-1, keepdim=True)
    return (total.double() * top_p[:, None]).ceil().long().minimum(total)


def nucleus(weights: Tensor, need: Tensor) -> Tensor:
    """Weights int64 [S, n], 0 except for the largest that sum to at least `need` int64 [S, 1].

    The one that crosses it is included; of equals the first.
    """
    least = torch.zeros_like(need)  # the largest number that what weighs at least as much is enough for
    for bit in reversed(range(_BITS + 1)):
        higher = least + 2**bit
        enough = torch.where(weights >= higher, weights, 0).sum(-1, keepdim=True) >= need
        least = torch.where(enough, higher, least)
    return _kept(weights, need, least)


def _kept(weights: Tensor, need: Tensor, least: Tensor) -> Tensor:
    """Weights that make `need` together and do not lie below `least`, the largest number for which that is enough."""
    above, equal = weights > least, weights == least
    left = need - torch.where(above, weights, 0).sum(-1, keepdim=True)
    most = -(-left // least.clamp(min=1))
    return torch.where(above | (equal & (equal.cumsum(-1) <= most)), weights, 0)


def _pick(weights: Tensor, numbers: Tensor) -> Tensor:
    """The places int64 [S] that random numbers fp64 [S] fall on."""
    mass = weights.cumsum(-1)
    last = mass[:, -1:]
    # A share of the mass, not a remainder: what moves the last bit of a logit must not move the place.
    at = (numbers[:, None] * last).long().minimum(last - 1)
    return (mass[:, :-1] <= at).sum(-1)


def _pick_in_fronts(weights: Tensor, need: Tensor, numbers: Tensor) -> Tensor:
    """`_pick` over nuclei: over each row's largest weights, or over more where they lie beyond."""
    vocabulary, device = weights.shape[1], weights.device
    picked, rows = (
        torch.zeros(len(weights), dtype=torch.int64, device=device),
        torch.arange(len(weights), device=device),
    )
    for size in (*_FRONTS, vocabulary):
        largest, tokens = weights.topk(min(size, vocabulary))
        mass = largest.cumsum(-1)
        least = largest.gather(-1, (mass < need).sum(-1, keepdim=True).clamp(max=largest.shape[1] - 1))
        # Of equals the first ones belong to a nucleus, and a front has any: it ends with less, or has all there are.
        inside = ((mass[:, -1:] >= need) & (largest[:, -1:] < least))[:, 0] | (size >= vocabulary)
        tokens, order = tokens[inside].sort(-1)
        kept = _kept(largest[inside].gather(-1, order), need[inside], least[inside])
        picked[rows[inside]] = tokens.gather(-1, _pick(kept, numbers[inside])[:, None])[:, 0]
        weights, need, numbers, rows = weights[~inside], need[~inside], numbers[~inside], rows[~inside]
        if not len(rows):
            break
    return picked


def choose(logits: Tensor, rows: Sequence[Drawing | None], banned: Sequence[int] = ()) -> list[int]:
    """Chooses tokens under logits fp32 [S, vocabulary] and synchronises; rows with None are greedy.

    A row that chose one of its `banned` tokens takes its second choice.
    """
    if banned:
        logits = logits.clone()
        logits[:, list(banned)] = float("-inf")
    draws = draws_of(rows, logits.device)
    chosen = likeliest(logits) if draws is None else draws.next(logits, retry=bool(banned), waits=True)
    return [int(token) for token in chosen.tolist()]
