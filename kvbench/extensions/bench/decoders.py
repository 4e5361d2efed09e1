"""Two ways to decode that a bench drives step by step: kvbench's runner, and transformers with one of its caches.

Run as a module it reads one prompt and prints the bytes that this added at its worst moment, as JSON: `python -m
kvbench.extensions.bench.decoders '{"model": "smollm2-135m", "device": "cpu", "context": 4096, "name": "full", ...}'`
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvbench.cache.async_counts import to_device
from kvbench.engine import hf
from kvbench.engine.decode_loop import CapturedSteps, State
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.runner import Runner
from kvbench.kernels.bench.rounds import cuda_graph
from kvbench.kernels.graphs import Capture, cuda_graphs
from kvbench.kernels.names import TRITON
from kvbench.models.load import LoadedModel
from kvbench.runs import choices

WARM_TOKENS = 32  # threads, scratch memory and compiled kernels are there before a peak is taken
WARM_STEPS = 2  # the first one compiles, the second one is captured
REFERENCE_ROWS = 1  # a copy of a row, for one step that is compared with the reference


class StoreDecoder:
    """A runner whose rows step together, with tokens from the caller.

    Args:
        model: The model, shared with other decoders.
        method: The method's string, see `choices.make_cache`.
        kernels, decode: The backend's name, and its attention kernel of decode steps.
        prompts: Prompt cache, for decoders whose prefill is not timed.
        budget_bytes: Limit of the cache's pool; None = no limit of its own.

    Attributes:
        logits: After the prompts that were read last, fp32 [B, vocabulary].
    """

    logits: Tensor

    def __init__(
        self,
        model: LoadedModel,
        method: str,
        *,
        rows: int,
        context: int,
        new_tokens: int,
        kernels: str = "auto",
        decode: str = TRITON,
        prompts: PromptCache | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        policy, options = choices.make_cache(method)
        if budget_bytes is not None:
            options = replace(options, budget_bytes=budget_bytes)
        self.runner = Runner(model, policy, options=options, backend=kernels, decode=decode, prompts=prompts)
        # The row that the check copies counts among all rows, so that the bytes of a row are what they are in a run.
        self.runner.reserve(rows=rows + REFERENCE_ROWS, prompt_tokens=context, new_tokens=new_tokens)
        self.rows: list[int] = []
        self._made, self._first = (model, policy, options), list[int]()

    def focus(self) -> None:
        """Routes the shared model's attention to this decoder."""
        self.runner.focus()
        self.runner.store.pages.counts.collect()  # of replayed steps, which wait for nothing

    def prefill(self, prompts: list[list[int]]) -> None:
        """Reads prompts into new rows."""
        self.focus()
        rows, logits = zip(*map(self.runner.read, prompts), strict=True)
        self._first, self.rows = prompts[0] if not self.rows else self._first, self.rows + list(rows)
        self.logits = torch.cat([row[:1] for row in logits])

    def repeat(self, rows: int) -> None:
        """Copies rows in turn up to a number of rows, with pages of their own.

        Pages that rows share would be read from a processor's cache.
        """
        held = list(self.rows)
        self.rows += [self.runner.fork(held[row % len(held)], share=False) for row in range(len(held), rows)]

    def clear(self) -> None:
        """Forgets all rows."""
        while self.rows:
            self.runner.close(self.rows.pop())

    def step(self, tokens: list[int]) -> Tensor:
        """One token for every row; next logits fp32 [B, vocabulary]."""
        return self.runner.step(self.rows, tokens)

    def row_bytes(self) -> Tensor:
        """Bytes of each row, int64 [B]."""
        return self.runner.store.ledger.resident_bytes(torch.tensor(self.rows, device=self.runner.device))

    def cache_bytes(self) -> int:
        """Bytes of all rows."""
        return int(self.row_bytes().sum())

    def step_error(self, token: int) -> float:
        """Relative difference of one step after the first prompt from a runner on the plain reference.

        Relative to the largest logit.
        """
        self.focus()
        row = self.runner.fork(self.rows[0], share=False)
        logits = self.runner.step([row], [token])[0].clone()
        self.runner.close(row)
        model, policy, options = self._made
        plain = Runner(model, policy, options=replace(options, budget_bytes=None), backend="torch")
        plain.reserve(rows=1, prompt_tokens=len(self._first), new_tokens=1)
        row, _ = plain.read(self._first)
        return relative(logits, plain.step([row], [token])[0])


class Graphed:
    """Rows of a decoder, stepped as the engine steps them on a GPU: replayed from a CUDA graph.

    It and its decoder may take turns, and their rows grow with both.

    Attributes:
        replays: Steps that were replayed.
    """

    def __init__(self, decoder: StoreDecoder, capture: Capture) -> None:
        self.decoder, self.runner = decoder, decoder.runner
        self._steps = CapturedSteps(decoder.runner, capture)
        self._state: State | None = None
        self._most_late = 0 if decoder.runner.policy.compaction else 1

    @property
    def replays(self) -> int:
        return self._steps.replays

    def focus(self) -> None:
        self.decoder.focus()

    def step(self, tokens: list[int]) -> Tensor:
        """One token for every row; next logits fp32 [B, vocabulary], which the next step overwrites."""
        counts, num_rows = self.runner.store.pages.counts, len(tokens)
        if self._state is None or self._state.rows.numbers != self.decoder.rows:
            self._state = self._steps.begin(self.decoder.rows, tokens, lambda *_: None)
        self._state.tokens[:num_rows].copy_(to_device(tokens, self.runner.device))
        self._state = self._steps.advance(self._state)
        counts.send()
        counts.collect(leave=self._most_late if counts.is_late else 0)
        assert self._state.logits is not None
        return self._state.logits[:num_rows]

    def step_error(self, token: int) -> float:
        """Difference of one replayed step of the first row from an eager one, relative to the largest logit.

        The first steps, which warm up and capture, are made here. Infinite where none was replayed.
        """
        self.focus()
        rows, runner = self.decoder.rows, self.runner
        for _ in range(WARM_STEPS):
            self.step([token] * len(rows))
        self.focus()
        row = runner.fork(rows[0], share=False)
        expected = runner.step([row], [token])[0].clone()
        runner.close(row)
        logits = self.step([token] * len(rows))[0].clone()
        self.focus()
        return relative(logits, expected) if self.replays else float("inf")

    def cache_bytes(self) -> int:
        return self.decoder.cache_bytes()


class PeerDecoder:
    """Forward pass of transformers with one of its caches (see `hf.native_cache`).

    All rows share one length, so nothing is padded.
    """

    logits: Tensor

    def __init__(self, model: LoadedModel, kind: str = "dynamic", max_tokens: int = 0) -> None:
        self.loaded, self.kind, self.max_tokens = model, kind, max_tokens
        self.clear()

    def focus(self) -> None:
        """Restore the attention of the shared model."""
        hf.detach(self.loaded.model)

    def clear(self) -> None:
        self.cache = hf.native_cache(self.loaded.model, self.kind, self.max_tokens)

    def prefill(self, prompts: list[list[int]]) -> None:
        """Reads prompts of one length into an empty cache."""
        self.focus()
        self.clear()
        self.logits = self._run(torch.tensor(prompts, device=self.loaded.device))

    def step(self, tokens: list[int]) -> Tensor:
        return self._run(torch.tensor(tokens, device=self.loaded.device)[:, None])

    @torch.no_grad()
    def _run(self, ids: Tensor) -> Tensor:
        """A forward pass over token ids int64 [B, n]; the last logits fp32 [B, vocabulary]."""
        model = self.loaded.model
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{hf.cache_name(type(model).forward): self.cache})
        return out.logits[:, -1].float()

    def repeat(self, rows: int) -> None:
        held = hf.native_cache_rows(self.cache)
        self.cache.batch_select_indices(torch.arange(rows, device=self.loaded.device) % held)

    def cache_bytes(self) -> int:
        return hf.native_cache_bytes(self.cache)


class StaticDecoder(PeerDecoder):
    """transformers' static cache, whose decode step is a CUDA graph on a GPU: how people serve a model without kvbench.

    The prompt is read eagerly; the first step after it is captured, every step is a replay. On a CPU steps are eager.
    """

    def __init__(self, model: LoadedModel, max_tokens: int) -> None:
        super().__init__(model, "static", max_tokens)
        self._step: Callable[[], object] = self._go

    def prefill(self, prompts: list[list[int]]) -> None:
        super().prefill(prompts)
        self._step = self._go
        self._ids = torch.zeros(len(prompts), 1, dtype=torch.int64, device=self.loaded.device)
        if self.loaded.device.type != "cpu":
            self._step = cuda_graph(self._go)
            hf.rewind(self.cache, len(prompts[0]))  # warming up and capturing have put tokens after the prompt

    def step(self, tokens: list[int]) -> Tensor:
        """One token for every row; next logits fp32 [B, vocabulary], which the next step overwrites on a GPU."""
        self._ids.copy_(torch.tensor(tokens)[:, None])
        self._step()
        return self._outputs

    def _go(self) -> None:
        self._outputs = self._run(self._ids)


def capture_on(device: torch.device) -> Capture:
    """Capture of one cache's steps: CUDA graphs, or on a CPU, where kernels are interpreted, their substitute."""
    if device.type == "cuda":
        return cuda_graphs()
    from kvbench.kernels.gpu.emulator import record

    return record


Decoder = StoreDecoder | PeerDecoder


def relative(logits: Tensor, exact: Tensor) -> float:
    """Largest difference as a share of the largest exact element."""
    return float((logits - exact).abs().max() / exact.abs().max())


def reset(device: str) -> int:
    """Resets the peak of this process's resident memory, or of the GPU's allocator; returns the bytes in use.

    Raises OSError where the system's peak cannot be reset (it needs Linux's /proc/self/clear_refs).
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_bytes(order: dict) -> int:
    """Peak bytes that reading one prompt adds, measured in a process of its own.

    Of a model on a device, with a number of threads, a number of tokens of context, and a method's string with the
    kernels, or the kind of transformers' cache.
    """
    torch.set_num_threads(order["threads"])
    device, context = order["device"], order["context"]
    model = choices.make_model(order["model"], device)
    text = choices.sample_tokens(model, 1, context)[0]
    decoder: Decoder
    if order["kind"]:
        decoder = PeerDecoder(model, order["kind"])
    else:
        decoder = StoreDecoder(model, order["name"], rows=1, context=context, new_tokens=1, kernels=order["kernels"])
    decoder.prefill([text[:WARM_TOKENS]])
    decoder.clear()
    before = reset(device)
    decoder.prefill([text])
    return (torch.cuda.max_memory_allocated(device) if device != "cpu" else _status("VmHWM")) - before


if __name__ == "__main__":
    print(json.dumps({"peak_bytes": peak_bytes(json.loads(sys.argv[1]))}))
