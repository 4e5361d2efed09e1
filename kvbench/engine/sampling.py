"""Choosing the next token."""

import hashlib

import torch
from torch import Tensor

from kvbench.engine.requests import Request

_FRONT = 1024  # tokens that are sorted where the nucleus is within them


def row_generator(seed: int, sample_id: str, repeat: int, device: torch.device) -> torch.Generator:
    """A random generator of one answer's own, so that a sampled answer does not depend on the batch it ran in."""
    digest = hashlib.sha256(f"{seed}\x00{sample_id}\x00{repeat}".encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def choose_token(logits: Tensor, request: Request, generator: torch.Generator | None, banned: list[int]) -> int:
    """The next token of one row.

    Args:
        logits: fp32 [vocabulary].
        request: Temperature and top_p are read.
        generator: The row's own; None for greedy decoding.
        banned: Tokens that may not come yet (stop tokens before `min_new_tokens`).
    """
    if banned:
        logits = logits.clone()
        logits[banned] = float("-inf")
    if request.temperature == 0:
        return int(logits.argmax())
    prob = torch.softmax(logits / request.temperature, -1)
    if request.top_p < 1:
        tokens, prob = nucleus(prob, request.top_p)
        return int(tokens[torch.multinomial(prob, 1, generator=generator)])
    return int(torch.multinomial(prob, 1, generator=generator))


def nucleus(prob: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens that reach a mass together, and the one that crosses it.

    Args:
        prob: fp32 [vocabulary].
        top_p: The mass, in (0, 1).

    Returns:
        Tokens, int64 [n], likeliest first, of equals the first; and their probabilities, fp32 [n], which sum up to the
        mass or more.
    """
    # To sort a whole vocabulary at every step takes a third of a small model's time; the mass lies in few tokens.
    floor = prob.topk(min(_FRONT, len(prob))).values[-1]
    for tokens in (prob >= floor).nonzero()[:, 0], torch.arange(len(prob), device=prob.device):
        ordered, order = prob[tokens].sort(descending=True, stable=True)
        mass = ordered.cumsum(0)
        if mass[-1] >= top_p:
            break
    keep = mass - ordered < top_p  # the first token is always kept
    return tokens[order[keep]], ordered[keep]
