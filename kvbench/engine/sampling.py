"""How a row's next token is chosen: the likeliest, or one drawn by a request's temperature and top_p.

A draw is a function of the logits, the seed of the answer and the number of choices before it. Its sums are of whole
numbers, which have no order, so that a token does not depend on the batch, on the device, or on who steps. No state of
a generator has to follow, so a captured step draws too.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.cache.async_counts import to_device
from kvbench.engine.requests import Request

_FRONT = 1024  # tokens that a nucleus mostly lies within
_BITS = 40  # the likeliest token weighs 2 ** 40, the others less, and what rounds to 0 is never drawn

Drawing = tuple[int, int, float, float]  # of a row: seed, tokens chosen before, temperature, top_p


def answer_seed(seed: int, sample_id: str, repeat: int) -> int:
    """The seed of one answer's own random numbers, in 64 bits, signed: a sampled answer does not depend on the batch
    that it ran in."""
    digest = hashlib.sha256(f"{seed}\x00{sample_id}\x00{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def random_numbers(seeds: Tensor, chosen: Tensor, again: bool = False) -> Tensor:
    """The random numbers by which rows choose their next tokens, fp64 [S] in [0, 1).

    Args:
        seeds: int64 [S].
        chosen: int64 [S] tokens that the rows have chosen before.
        again: Those for a second choice, where the first one may not be taken.

    Source: SplitMix64 (Steele, Lea and Flood 2014), whose state is a counter; a token takes two of its numbers.
    Differs: its first 53 bits, as a share.
    """
    x = seeds + (2 * chosen + again + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _signed(number: int) -> int:
    return number - 2**64


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


@dataclass
class Draws:
    """What draws the next tokens of rows, on their device, where it stays.

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

    def next(self, logits: Tensor) -> Tensor:
        """Chooses tokens int64 [S] under logits fp32 [S, vocabulary]."""
        numbers = random_numbers(self.seeds, self.chosen)
        self.chosen += 1
        return torch.where(self.temperature > 0, draw(logits, self.temperature, self.top_p, numbers), logits.argmax(-1))


def draws_of(rows: Sequence[Drawing | None], device: torch.device) -> Draws | None:
    """What draws the tokens of rows, of which those with None take the likeliest; None where all of them do."""
    if not any(rows):
        return None
    each = [(0, 0, 0.0, 1.0) if row is None else row for row in rows]
    seeds, chosen = to_device([[row[i] for row in each] for i in range(2)], device)
    temperature, top_p = to_device([[row[i] for row in each] for i in range(2, 4)], device, torch.float64)
    part = any(row[3] < 1 for row in each)
    return Draws(seeds, chosen, temperature.float(), top_p if part else None)


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor | None, numbers: Tensor) -> Tensor:
    """Tokens int64 [S] drawn under logits fp32 [S, vocabulary]; nothing is read back.

    Args:
        temperature: fp32 [S], > 0; of rows where it is 0 some token comes out, too.
        top_p: fp64 [S] nucleus mass in (0, 1]; None = 1.
        numbers: fp64 [S] random numbers in [0, 1).
    """
    weights = _weigh(logits, temperature)
    if top_p is not None:
        weights = nucleus(weights, _needed(weights, top_p))
    return _pick(weights, numbers)


def _weigh(logits: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities int64 [S, vocabulary], as shares of the largest."""
    far = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    return far.exp().mul(2.0**_BITS).long().clamp(min=0)  # of logits that are not finite, anything


def _needed(weights: Tensor, top_p: Tensor) -> Tensor:
    """The weight int64 [S, 1] that a nucleus has at least."""
    total = weights.sum(-1, keepdim=True)
    return (total.double() * top_p[:, None]).ceil().long().minimum(total)


def nucleus(weights: Tensor, need: Tensor) -> Tensor:
    """Weights int64 [S, n], 0 but for the largest that make at least `need` int64 [S, 1] together, with the one that
    crosses it; of equals the first."""
    least = torch.zeros_like(need)  # the largest number that what weighs at least as much is enough for
    for bit in reversed(range(_BITS + 1)):
        higher = least + 2**bit
        enough = torch.where(weights >= higher, weights, 0).sum(-1, keepdim=True) >= need
        least = torch.where(enough, higher, least)
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


def choose_token(logits: Tensor, request: Request, number: Tensor | None, banned: Sequence[int] = ()) -> int:
    """The next token under logits fp32 [vocabulary] by a request's temperature and top_p; `draw`'s of a random number
    fp64 [1], without which decoding is greedy. `banned` tokens may not come yet."""
    if banned:
        logits = logits.clone()
        logits[list(banned)] = float("-inf")
    if number is None:
        return int(logits.argmax())
    device = logits.device
    weights, tokens = _weigh(logits[None], torch.tensor([request.temperature], device=device)), None
    if request.top_p < 1:
        need = _needed(weights, torch.tensor([request.top_p], dtype=torch.float64, device=device))
        # To go through a whole vocabulary takes a third of a small model's time; the mass lies in few tokens.
        front = weights.topk(min(_FRONT, weights.shape[1])).values
        if bool(front.sum() >= need):
            tokens = (weights[0] >= front[0, -1]).nonzero()[:, 0]
            weights = weights[:, tokens]
        weights = nucleus(weights, need)
    found = _pick(weights, number)
    return int(found if tokens is None else tokens[found])
