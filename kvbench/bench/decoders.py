"""Two ways to decode that a bench drives step by step: kvbench's runner, and transformers with a cache of its own."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.cache.layout import StoreOptions
from kvbench.engine import hf
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.runner import Runner
from kvbench.kernels.bench.rounds import cuda_graph
from kvbench.kernels.dispatch import get_backend
from kvbench.models.load import LoadedModel
from kvbench.policy import Policy

REFERENCE_ROWS = 2  # copies of a row, for one step by the backend and one by the reference


class StoreDecoder:
    """A runner whose rows all take a step together, token by token from outside.

    Args:
        model: The model, shared with other decoders.
        policy: The method.
        rows: Sequences.
        context: Prompt tokens.
        new_tokens: Tokens that will be decoded at most.
        kernels: Backend.
        prompts: Keeps what was read of prompts, for decoders whose reading is not timed.
        options: Memory layout.
        chunk: Tokens of a prompt that are read at once; None = all.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        *,
        rows: int,
        context: int,
        new_tokens: int,
        kernels: str = "auto",
        prompts: PromptCache | None = None,
        options: StoreOptions | None = None,
        chunk: int | None = None,
    ) -> None:
        self.runner = Runner(model, policy, options=options, backend=kernels, prompts=prompts, chunk=chunk)
        # The rows that the check copies count among all rows, so that the bytes of a row are what they are in a run.
        self.runner.reserve(rows=rows + REFERENCE_ROWS, prompt_tokens=context, new_tokens=new_tokens)
        self.rows: list[int] = []
        self.logits: list[Tensor] = []

    def focus(self) -> None:
        """Routes the shared model's attention to this decoder."""
        self.runner.focus()

    def prefill(self, prompt: list[int]) -> int:
        """Reads a prompt into a new row; returns it."""
        row, logits = self.runner.read(prompt)
        self.logits.append(logits[0])
        self.rows.append(row)
        return row

    def fork(self, source: int) -> int:
        """Copies a row, in pages of its own: rows that share pages would be read from a processor's cache."""
        row = self.runner.fork(source, share=False)
        self.rows.append(row)
        return row

    def drop(self, row: int) -> None:
        """Forgets a row."""
        self.runner.close(row)
        if row in self.rows:
            self.rows.remove(row)

    def step(self, tokens: list[int]) -> Tensor:
        """One token for every row; next logits fp32 [B, vocabulary]."""
        return self.runner.step(self.rows, tokens)

    def row_bytes(self) -> Tensor:
        """What each row holds, int64 [B]."""
        return self.runner.store.ledger.resident_bytes(torch.tensor(self.rows, device=self.runner.device))

    def cache_bytes(self) -> int:
        """What all rows hold."""
        return int(self.row_bytes().sum())

    def reference_error(self, token: int) -> float:
        """Difference of one step between the backend and the plain reference on two copies of the first row, as a share
        of the largest logit."""
        self.focus()
        pages, found = self.runner.store.pages, []
        own = pages.backend
        for backend in (own, get_backend("torch", self.runner.device)):
            row = self.runner.fork(self.rows[0])
            pages.backend = backend
            try:
                found.append(self.runner.step([row], [token])[0])
            finally:
                pages.backend = own
                self.runner.close(row)
        return relative(found[0], found[1])


class OwnDecoder:
    """transformers' own forward with one of its own caches; all rows share one length, so nothing is padded.

    Args:
        model: The model, shared with other decoders.
        kind: One of `hf.OWN_CACHES`, or `static`.
        max_tokens: What a static cache holds.

    Raises:
        ImportError: See `hf.own_cache`.
    """

    def __init__(self, model: LoadedModel, kind: str = "dynamic", max_tokens: int = 0) -> None:
        self.loaded, self.kind, self.max_tokens = model, kind, max_tokens
        self.cache = hf.own_cache(model.model, kind, max_tokens)
        self.logits: Tensor | None = None

    def focus(self) -> None:
        """Gives the shared model its own attention."""
        hf.detach(self.loaded.model)

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]]) -> None:
        """Reads prompts of one length into an empty cache."""
        self.focus()
        self.cache = hf.own_cache(self.loaded.model, self.kind, self.max_tokens)
        self.logits = self._forward(prompts)

    def step(self, tokens: list[int]) -> Tensor:
        """One token for every row; next logits fp32 [B, vocabulary]."""
        return self._forward([[token] for token in tokens])

    def _forward(self, tokens: list[list[int]]) -> Tensor:
        return self._run(torch.tensor(tokens, device=self.loaded.device))

    @torch.no_grad()
    def _run(self, ids: Tensor) -> Tensor:
        """A forward pass over token ids int64 [B, n]; the last logits fp32 [B, vocabulary]."""
        out = self.loaded.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].float()

    def repeat(self, rows: int) -> None:
        """Copies rows in turn until there are as many."""
        held = hf.own_cache_rows(self.cache)
        self.cache.batch_select_indices(torch.arange(rows, device=self.loaded.device) % held)

    def cache_bytes(self) -> int:
        """What the cache's tensors hold."""
        return hf.own_cache_bytes(self.cache)


class StaticDecoder(OwnDecoder):
    """transformers' static cache, whose decode step is a CUDA graph on a GPU: how people serve a model without kvbench.

    The prompt is read eagerly; the first step after it is captured, every step is a replay. On a CPU steps are eager.

    Args:
        model: The model, shared with other decoders.
        max_tokens: What the cache holds.
    """

    def __init__(self, model: LoadedModel, max_tokens: int) -> None:
        super().__init__(model, "static", max_tokens)
        self._step: Callable[[], object] | None = None

    def prefill(self, prompts: list[list[int]]) -> None:
        super().prefill(prompts)
        self._step, self._held = None, len(prompts[0])
        self._ids = torch.zeros(len(prompts), 1, dtype=torch.int64, device=self.loaded.device)
        if self.loaded.device.type == "cuda":
            self._step = cuda_graph(self._go)
            hf.rewind(self.cache, self._held)  # warming up and capturing have put tokens behind the prompt

    def step(self, tokens: list[int]) -> Tensor:
        """One token for every row; next logits fp32 [B, vocabulary], which the next step overwrites on a GPU."""
        self._ids.copy_(torch.tensor(tokens)[:, None])
        if self._step is None:
            self._go()
        else:
            self._step()
        return self._found

    def _go(self) -> None:
        self._found = self._run(self._ids)


def relative(found: Tensor, exact: Tensor) -> float:
    """Largest difference as a share of the largest exact element."""
    return float((found - exact).abs().max() / exact.abs().max())
