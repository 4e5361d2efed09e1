"""Simulated serving: the engine's scheduler over a store without memory, with measured times.

Admission, preemption and page contents are decided by the code that serves (`engine.batch`, `engine.reading`, the page
tables, the method). Only the model is absent: a prompt or a step puts tokens without values into the store, and the
clock advances by the measured time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.layout import ModelShape
from kvbench.cache.options import StoreOptions
from kvbench.engine.engine import Engine
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.runner import Runner
from kvbench.engine.states import States
from kvbench.extensions.bench.times import Measured
from kvbench.kernels.bench.rounds import CLOCKS
from kvbench.models.load import LoadedModel
from kvbench.policy import Policy
from kvbench.sizing.project import GLANCE_TOKENS, run
from kvbench.sizing.projection import Projection, is_one_number
from kvbench.sizing.shadow import Shadow, fill_prompt, shadow_step, shadow_store

LAYERS = 4  # that are enough: what a step takes of them is the host's time
ENDS = 4  # requests of the measured load whose bytes are compared
FIXED = ("residual_bytes", "residual_slack_bytes", "table_bytes", "book_bytes")  # of a row, in no page
MODEL: Any = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
TOKENIZER: Any = SimpleNamespace(eos_token_id=None, decode=lambda *_, **__: "")


class Here:
    """Local machine with a model on it.

    Attributes:
        engine: Makes the engine of a method.
        tick: Seconds that work has taken so far, from any beginning.
        share: Bytes of pages that stand for one.
    """

    share = 1.0

    def __init__(self, model: LoadedModel, clock: str) -> None:
        self.engine, self.tick = partial(Engine, model), CLOCKS[clock]

    def row_bytes(self, engine: Engine) -> int:
        """Bytes of a row that are in no page."""
        return sum(engine.store.ledger.fixed_row_bytes())

    def shape_of(self, engine: Engine) -> ModelShape:
        """The shape of the model."""
        return engine.store.shape


class Simulated:
    """A machine that is not here, with one method's times.

    Attributes:
        spent_s: Seconds that its work has taken.
        share: Bytes of pages of the model that a byte of the store without memory stands for. That one has a few
            layers, unless the method has settings for each; and where attention decides what is kept, what a row held
            where it was measured counts.
    """

    def __init__(self, measured: Measured, method: str) -> None:
        self.times, self.spent_s, self.share = measured.times(method), 0.0, 0.0
        self._whole = self._shape = measured.shape.store_shape
        self._model = LoadedModel(
            model=MODEL,
            tokenizer=TOKENIZER,
            name=measured.shape.name,
            fingerprint="",
            max_tokens=measured.max_tokens,
            dtype=self._shape.dtype,
            device=self._shape.device,
            chat_template=False,
        )

    def tick(self) -> float:
        return self.spent_s

    def row_bytes(self, engine: Engine) -> int:
        """Bytes of a row that are in no page."""
        return sum(engine.store.ledger.fixed_row_bytes()) * self._whole.num_layers // self._shape.num_layers

    def shape_of(self, _: Engine) -> ModelShape:
        """The shape of the model, of which the store may have fewer layers."""
        return self._whole

    def engine(self, policy: Policy, *, store: StoreOptions, batch_size: int, seed: int, **_: Any) -> Engine:
        """An engine of a method that answers in no time."""
        if not self.share:
            few = replace(self._whole, num_layers=min(LAYERS, self._whole.num_layers))
            try:
                self.share, self._shape = self._share(policy, few), few
            except ValueError:  # its settings are for so many layers
                self.share = self._share(policy, self._whole)

        def make(model: LoadedModel, policy: Policy, *, options: StoreOptions, **_: Any) -> Runner:
            return _ShadowRunner(self, model, policy, options, self._shape)

        return Engine(
            self._model, policy, store=store, batch_size=batch_size, seed=seed, fidelity_max_tokens=0, make=make
        )

    def _share(self, policy: Policy, few: ModelShape) -> float:
        """Raises ValueError where the method does not fit a model of so few layers."""
        ends = sorted(self.times.ends)[:: max(1, len(self.times.ends) // ENDS)]
        held = counted = 0.0
        for prompt, behind, measured in ends:
            least, most = (run(policy, few, prompt, behind, None, is_even=is_even) for is_even in (False, True))
            if is_one_number(least, most):
                break
            fixed = _in_no_page(run(policy, self._whole, prompt, 0, None, is_even=True))
            held, counted = held + measured - fixed, counted + most.resident_bytes - _in_no_page(most)
        else:
            if ends:
                return held / counted
        # So many that some are in pages, whatever waits in a residual buffer.
        prompt = GLANCE_TOKENS + (policy.residual.num_tokens if policy.residual is not None else 0)
        whole, shallow = (run(policy, shape, prompt, 0, None, is_even=True) for shape in (self._whole, few))
        return (whole.resident_bytes - _in_no_page(whole)) / (shallow.resident_bytes - _in_no_page(shallow))


def _in_no_page(projection: Projection) -> int:
    return sum(projection.items[name] for name in FIXED)


class _ShadowRunner(Runner):
    """A runner without a model, whose passes take the times of `machine`."""

    def __init__(
        self, machine: Simulated, model: LoadedModel, policy: Policy, options: StoreOptions, shape: ModelShape
    ) -> None:
        policy.check_model(shape.num_layers, shape.num_kv_heads)
        self._machine, self.loaded, self.policy, self.options, self.chunk = machine, model, policy, options, None
        self.shape, self.device, self.backend, self.prompts = shape, shape.device, Shadow(True), PromptCache()
        self.open_rows, self.probe_s, self._store, self.states = [], 0.0, None, States(model.model, ())

    def focus(self) -> None:
        """No model to focus on."""

    def reserve(self, *, rows: int, prompt_tokens: int, new_tokens: int) -> None:
        self.open_rows, options = [], vars(self.options)
        if (budget := self.options.budget_bytes) is not None:
            options = options | {"budget_bytes": round(budget / self._machine.share)}
        sizes = self.policy, self.shape, prompt_tokens, new_tokens, StoreOptions(**options)
        self._store = shadow_store(*sizes, is_even=True, rows=rows)

    def read(
        self,
        prompt: Sequence[int],
        ahead: Sequence[int] = (),
        new_tokens: int | None = None,
        instruction_tokens: int = 0,
        closing: Sequence[int] = (),
    ) -> tuple[int, Tensor]:
        row = self._opened(self.store.open_row(new_tokens, min(instruction_tokens, len(prompt))))
        try:
            fill_prompt(self.store, row, len(prompt))
        except BaseException:
            self.close(row)
            raise
        self._machine.spent_s += self._machine.times.prompt_s(len(prompt))
        return row, torch.zeros(1, 2)

    def try_step(self, rows: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, dict[int, int]]:
        shadow_step(self.store, rows)
        held = sum(self.store.counters.seen[row] for row in rows)
        self._machine.spent_s += self._machine.times.step_s(len(rows), held)
        return torch.zeros(len(rows), 2), {}
