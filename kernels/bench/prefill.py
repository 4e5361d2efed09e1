"""Times the score pass over a prompt (last queries, or all) next to the prompt's attention alone.

Runs with torch (and triton on a GPU) alone: `python -m kvbench.kernels.bench.prefill lengths=[4096]`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels.backend import Backend
from kvbench.kernels.bench import caches, machine, report
from kvbench.kernels.bench.rounds import Variant, choose_timer, measure_cell
from kvbench.kernels.bench.settings import Common, check_list, parse_shape
from kvbench.kernels.dispatch import get_backend

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of the largest exact element. Kernels may multiply 16-bit elements of the prompt in 16 bits and sum in 32.
TOLERANCE = {"fp32": 1e-4, "bf16": 6e-2, "fp16": 1e-2}
GPU_TOLERANCE = 1e-2
CHECKED_TOKENS = 300  # of the same tensors; the exact result is a full matrix in fp64
QUICK = {"lengths": [1024], "windows": [64], "rounds": 3, "threads": [1]}
Found = Tensor | tuple[Tensor, Tensor]  # attention's output, alone or with the scores of the keys


@dataclass(kw_only=True)
class Settings(Common):
    """What to measure.

    Args:
        shapes: Query heads x KV heads x head dim of one layer.
        lengths: Prompt tokens.
        windows: Last queries that count; all queries are measured too.
        eager: Also the full score matrix, as it is computed without a fused kernel.
        dtype: Element type of the prompt: fp32, bf16, fp16.
    """

    shapes: list[str] = field(default_factory=lambda: ["9x3x64"])
    lengths: list[int] = field(default_factory=lambda: [1024, 4096])
    windows: list[int] = field(default_factory=lambda: [32, 64])
    eager: bool = True
    dtype: str = "fp32"

    def check(self) -> None:
        """Raises ValueError for a value out of range, with the rule."""
        super().check()
        check_list("lengths", self.lengths, 2)
        check_list("windows", self.windows, 1)
        for text in self.shapes:
            parse_shape(text)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} does not exist; choose among {', '.join(DTYPES)}")


def run(settings: Settings, progress: report.Progress = report.quiet) -> dict:
    """Measures every cell.

    Args:
        settings: What to measure.
        progress: Told what is done.

    Returns:
        The document that `report.document` describes.
    """
    device = machine.pick_device(settings.device)
    backend = get_backend(settings.kernels, device)
    threads = [n or machine.num_cpus() for n in settings.threads] if device == "cpu" else [0]
    cells = [
        {"shape": shape, "length": length, "threads": count}
        for shape in settings.shapes
        for count in dict.fromkeys(threads)
        for length in settings.lengths
    ]
    bench = report.begin("prefill", settings, device, backend, cells)
    for cell in bench.todo(progress):
        timer = choose_timer(settings.clock, device, cell["threads"])
        variants = _variants(cell, settings, device, backend, bench.notes)
        bench.add(
            measure_cell(
                cell,
                variants,
                baselines=["attention"],
                rounds=settings.rounds,
                seed=settings.seed,
                timer=timer,
                on_round=bench.on_round,
            )
        )
    return bench.document()


def _variants(cell: dict, settings: Settings, device: str, backend: Backend, notes: list[str]) -> list[Variant]:
    queries, heads, dim = parse_shape(cell["shape"])
    length, dtype = cell["length"], DTYPES[settings.dtype]
    generator = torch.Generator(device=device).manual_seed(settings.seed)
    q = (2 * torch.randn(queries, length, dim, generator=generator, device=device)).to(dtype)
    k, v = (torch.randn(heads, length, dim, generator=generator, device=device).to(dtype) for _ in range(2))
    scale = dim**-0.5

    def attend(n: int) -> Tensor:
        return backend.prefill_attention(q[:, :n], k[:, :n], v[:, :n], scale)

    def score(n: int, window: int) -> Tensor:
        return backend.prompt_scores(
            q[:, :n],
            k[:, :n],
            scale,
            queries=window,
            skip_near=0,
            power=1,
            pool="none",
            pool_kernel=1,
            pool_stage="per_query_head",
            pool_region="all",
            group="mean",
        )

    def both(window: int, n: int) -> tuple[Tensor, Tensor]:
        return attend(n), score(n, window)

    def sdpa(n: int) -> Tensor:
        a, b, c = (x[None, :, :n] for x in (q, k, v))
        return F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale, enable_gqa=True)[0]

    tolerance = TOLERANCE[settings.dtype] if device == "cpu" else max(GPU_TOLERANCE, TOLERANCE[settings.dtype])
    exact = _Exact(q, k, v, scale)
    made: dict[str, Callable[[int], Found]] = {"attention": attend, "sdpa": sdpa}
    if backend.name == "triton":
        from kvbench.kernels.gpu.prefill import attention_with_lse

        made["own kernel with lse"] = lambda n: attention_with_lse(q[:, :n], k[:, :n], v[:, :n], scale)[0]
    if settings.eager:
        need = 3 * 4 * queries * length * length
        free = machine.available_bytes(device)
        if free is not None and need > 0.5 * free:
            notes.append(f"eager at {report.label_of(cell)} left out: its matrices take about {need / 1e9:.0f} GB")
        else:
            made["eager, all queries"] = lambda n: eager(q[:, :n], k[:, :n], v[:, :n], scale)
    variants = [
        Variant(name=name, call=_on_all(call, length), check=partial(_error, exact, call, -1), tolerance=tolerance)
        for name, call in made.items()
    ]
    for window in [*settings.windows, -1]:
        name = "attention + scores of " + ("all queries" if window < 0 else f"the last {window}")
        call = partial(both, window)
        variants.append(
            Variant(
                name=name,
                call=_on_all(call, length),
                check=partial(_error, exact, call, window),
                tolerance=tolerance,
                versus="attention",
            )
        )
    return variants


def _on_all(call: Callable[[int], Found], length: int) -> Callable[[int], Found]:
    """The call on the whole prompt; there is one buffer, so its index does not matter."""
    return lambda _: call(length)


def eager(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention through the full matrix of probabilities, and its column sums: what returning attention weights costs.

    Args:
        q: [Hq, N, D]; k, v: [H, N, D].

    Returns:
        [Hq, N, D] and the column sums averaged over the group, fp32 [H, N].
    """
    group = len(q) // len(k)
    keys, values = (x.repeat_interleave(group, 0) for x in (k, v))
    logits = torch.matmul(q, keys.transpose(1, 2)) * scale
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    prob = torch.softmax(logits.masked_fill(mask, float("-inf")), -1, dtype=torch.float32)
    return torch.matmul(prob.to(q.dtype), values), prob.sum(1).unflatten(0, (-1, group)).mean(1)


class _Exact:
    """The first tokens' attention and column sums in fp64; `window` as `prompt_scores` names it."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.length = min(CHECKED_TOKENS, q.shape[1])
        self.group = len(q) // len(k)
        q, k, v = (x[:, : self.length].double() for x in (q, k, v))
        keys, values = (x.repeat_interleave(self.group, 0) for x in (k, v))
        mask = torch.ones(self.length, self.length, dtype=torch.bool, device=q.device).triu(1)
        logits = (torch.matmul(q, keys.transpose(1, 2)) * scale).masked_fill(mask, float("-inf"))
        self.prob = logits.softmax(-1)
        self.out = torch.matmul(self.prob, values)

    def scores(self, window: int) -> Tensor:
        first = 0 if window < 0 else max(0, self.length - window)
        return self.prob[:, first:].sum(1).unflatten(0, (-1, self.group)).mean(1)


def _error(exact: _Exact, call: Callable[[int], Found], window: int) -> float:
    """Largest error of the output, and of the scores where the call gives some."""
    found = call(exact.length)
    if not isinstance(found, tuple):
        return caches.relative_error(found, exact.out)
    scores = exact.scores(window)
    return caches.worst([caches.relative_error(found[0], exact.out), caches.relative_error(found[1], scores)])


if __name__ == "__main__":
    sys.exit(report.main("prefill", Settings, QUICK, run, sys.argv[1:]))
