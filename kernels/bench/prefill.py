"""Times the score pass over a prompt and its attention in two parts, next to the prompt's attention alone.

The scores are of the last queries, or of all.

Runs with torch (and triton on a GPU) alone: `python -m kvbench.kernels.bench.prefill lengths=[4096]`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels.bench import caches, machine
from kvbench.kernels.bench.bench import DTYPES, Bench, Common, label_of, main, parse_shape, setting
from kvbench.kernels.bench.rounds import Variant
from kvbench.kernels.operands import ColumnSums, HeadScores

# Of the largest exact element. Kernels may multiply 16-bit elements of the prompt in 16 bits and sum in 32.
TOLERANCE = {"fp32": 1e-4, "bf16": 6e-2, "fp16": 1e-2}
GPU_TOLERANCE = 1e-2
CHECKED_TOKENS = 300  # of the same tensors; the exact result is a full matrix in fp64
Output = Tensor | tuple[Tensor, Tensor]  # attention's output, alone or with the scores of the keys


@dataclass(kw_only=True)
class Settings(Common):
    """Score pass over a prompt, compared with its attention."""

    what = "prefill"
    quick = {"lengths": [1024], "windows": [64], "rounds": 3, "threads": [1]}

    shapes: list[str] = setting(["9x3x64"], "Query heads x KV heads x head dim of one layer.")
    lengths: list[int] = setting([1024, 4096], "Prompt tokens.", 2)
    windows: list[int] = setting([32, 64], "Last queries that count; all queries are measured too.", 1)
    eager: bool = setting(True, "Also the full score matrix, as it is computed without a fused kernel.")
    dtype: str = setting("fp32", "Element type of the prompt: fp32, bf16, fp16.", among=DTYPES)

    def check(self) -> None:
        super().check()
        for text in self.shapes:
            parse_shape(text)

    def cells(self, threads: list[int]) -> list[dict]:
        every = product(self.shapes, threads, self.lengths)
        return [{"shape": shape, "length": length, "threads": count} for shape, count, length in every]

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        return {"baselines": ["attention"]}

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        queries, heads, dim = parse_shape(cell["shape"])
        length, dtype, device, backend = cell["length"], DTYPES[self.dtype], bench.device, bench.backend
        generator = torch.Generator(device=device).manual_seed(self.seed)
        q = (2 * torch.randn(queries, length, dim, generator=generator, device=device)).to(dtype)
        k, v = (torch.randn(heads, length, dim, generator=generator, device=device).to(dtype) for _ in range(2))
        scale = dim**-0.5

        def attend(n: int) -> Tensor:
            return backend.prefill_attention(q[:, :n], k[:, :n], v[:, :n], scale)

        def both(window: int, n: int) -> tuple[Tensor, Tensor]:
            columns, reduction = ColumnSums(queries=window), HeadScores(group="mean")
            return attend(n), backend.prompt_scores(q[:, :n], k[:, :n], scale, columns, reduction)

        def sdpa(n: int) -> Tensor:
            a, b, c = (x[None, :, :n] for x in (q, k, v))
            return F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale, enable_gqa=True)[0]

        def behind(whole: bool, n: int) -> Tensor:
            half = n // 2
            live = None if whole else torch.ones(heads, half, dtype=torch.bool, device=device)
            past = k[:, :half], v[:, :half], live
            tail = backend.chunk_attention(q[:, half:n], k[:, half:n], v[:, half:n], past, scale)
            return torch.cat([attend(half), tail.to(dtype)], 1)

        made: dict[str, tuple[Callable[[int], Output], int]] = {"attention": (attend, -1), "sdpa": (sdpa, -1)}
        made |= {"attention in two chunks": (partial(behind, False), -1)}
        made |= {"attention, then that of a replay": (partial(behind, True), -1)}
        if self.eager:
            need, free = 3 * 4 * queries * length * length, machine.available_bytes(device)
            if free is None or need <= 0.5 * free:
                made["eager, all queries"] = lambda n: eager(q[:, :n], k[:, :n], v[:, :n], scale), -1
            else:
                size = f"its matrices take about {need / 1e9:.0f} GB"
                bench.notes.append(f"eager at {label_of(cell)} left out: {size}")
        for window in [*self.windows, -1]:
            name = "all queries" if window < 0 else f"the last {window}"
            made[f"attention + scores of {name}"] = partial(both, window), window
        tolerance = TOLERANCE[self.dtype] if device == "cpu" else max(GPU_TOLERANCE, TOLERANCE[self.dtype])
        exact = _Exact(q, k, v, scale)
        return [
            Variant(
                name=name,
                call=partial(lambda call, _: call(length), call),
                check=partial(exact.error, call, window),
                tolerance=tolerance,
                versus="attention" if name.startswith("attention") and name != "attention" else None,
            )
            for name, (call, window) in made.items()
        ]


def eager(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention [Hq, N, D] through the full matrix of probabilities, with its column sums: the eager baseline.

    The column sums, fp32 [H, N], are averaged over the group.
    """
    prob, values = _probabilities(q, k, v, scale, torch.float32)
    return torch.matmul(prob.to(q.dtype), values), prob.sum(1).unflatten(0, (len(k), -1)).mean(1)


def _probabilities(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The full matrix [Hq, N, N], and the values of each query head [Hq, N, D]."""
    keys, values = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    logits = torch.matmul(q, keys.transpose(1, 2)) * scale
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(logits.masked_fill(mask, float("-inf")), -1, dtype=dtype), values


class _Exact:
    """The first tokens' attention and column sums in fp64; `window` as `prompt_scores` names it."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.length, self.heads = min(CHECKED_TOKENS, q.shape[1]), len(k)
        q, k, v = (x[:, : self.length].double() for x in (q, k, v))
        self.prob, values = _probabilities(q, k, v, scale, torch.float64)
        self.out = torch.matmul(self.prob, values)

    def error(self, call: Callable[[int], Output], window: int) -> float:
        """Largest error of the output, and of the scores where the call gives some."""
        output = call(self.length)
        if not isinstance(output, tuple):
            return caches.relative_error(output, self.out)
        first = 0 if window < 0 else max(0, self.length - window)
        scores = self.prob[:, first:].sum(1).unflatten(0, (self.heads, -1)).mean(1)
        return caches.worst([caches.relative_error(output[0], self.out), caches.relative_error(output[1], scores)])


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
