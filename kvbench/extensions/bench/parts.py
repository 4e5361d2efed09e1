"""Time of a prompt and of a decode step by part.

The model's matrices, attention, scores, planning, reserving, writing, and the rest. Calls are timed at the boundaries
between parts; a nested call counts for the called part alone, so that the parts of a step add up to it.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvbench.config.files import FULL
from kvbench.engine.runner import Runner
from kvbench.extensions.bench.decode import WholeModel, matrices_of
from kvbench.extensions.bench.decoders import StoreDecoder
from kvbench.kernels.bench.bench import Bench, main, setting
from kvbench.kernels.bench.rounds import CLOCKS, Variant, failed_variant
from kvbench.runs import choices

PARTS = ("projections", "attention", "scores", "planning", "reserving", "writing", "rest")
BY_PARTS = ", by parts"  # after the name of a row whose calls are timed
RESERVING = ("take", "reserve", "own", "unshare_all", "truncate", "compact")
Call = tuple[Any, str, str]  # an object, the name of what is called of it, and the part that the call is


@dataclass(kw_only=True)
class Settings(WholeModel):
    """Time of a prompt and of a decode step by part, for each method."""

    what = "parts"
    quick = {"context": 256, "rounds": 3, "steps": 2}

    batch: int = setting(1, "Sequences of a decode step.", 1)

    def cells(self, threads: list[int]) -> list[dict]:
        shared = {"context": self.context, "threads": threads[-1]}
        return [{"phase": "prompt", "batch": 1, **shared}, {"phase": "decode", "batch": self.batch, **shared}]

    def prepare(self, bench: Bench) -> None:
        self._model = choices.make_model(self.model, bench.device)
        bench.more["model"] = choices.describe_model(self._model)
        bench.notes += filter(None, [self._model.remark])
        if bench.backend.fuses_layers or bench.backend.keeps_tables:
            bench.notes.append(
                f"of a decode step the backend {bench.backend.name} may write a token, attend and add to the scores in "
                "one call, which counts as attention"
            )
        if bench.device != "cpu":
            bench.notes.append(
                "every timed call waits for the device; compare the rows without parts for what that costs"
            )

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        return {"baselines": [FULL], "warmup": 1}

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        rows, is_prompt = cell["batch"], cell["phase"] == "prompt"
        room = 3 * (self.rounds + 2) * self.steps + 2  # the baseline is timed twice in each round
        text = choices.sample_tokens(self._model, rows, self.context + room)
        prompts = [tokens[: self.context] for tokens in text]
        variants: list[Variant] = []
        for method in self.methods:
            bench.stage(f"reading prompts for {method}")
            try:
                decoder = self.decoder(self._model, method, rows=rows, new_tokens=room)
                if not is_prompt:
                    decoder.prefill(prompts)
            except Exception as problem:  # as in `decode_variants`
                variants.append(failed_variant(method, problem))
                continue
            plain = (
                _reading(method, decoder, prompts)
                if is_prompt
                else self.stepping(method, decoder, [tokens[self.context :] for tokens in text])
            )
            variants += [plain, timed(plain, decoder.runner, CLOCKS[self.clock])]
        return variants

    def finish(self, cell: dict) -> None:
        """Convert the seconds of each round into shares of its parts; the warm-up round is dropped."""
        for row in cell["variants"]:
            if "parts" in row:
                rounds = row["parts"][-len(row["seconds"]) :]
                row["parts"] = {name: [each[name] / sum(each.values()) for each in rounds] for name in PARTS}


def _reading(name: str, decoder: StoreDecoder, prompts: list[list[int]]) -> Variant:
    def call(_: int) -> None:
        decoder.prefill(prompts)
        decoder.clear()

    return Variant(name=name, call=call, before_round=decoder.focus)


def timed(plain: Variant, runner: Runner, now: Callable[[], float]) -> Variant:
    """The same work with its parts on a clock; `extra` gets the seconds of each timing, part by part."""
    clock, places, rounds = Clock(runner.device, now), calls_of(runner), list[dict[str, float]]()
    stack = ExitStack()

    def before() -> None:
        if plain.before_round is not None:
            plain.before_round()
        stack.enter_context(clock.over(places))

    def call(index: int) -> None:
        begin, clock.seconds = now(), defaultdict(float)
        try:
            plain.call(index)
        finally:
            clock.wait()
            whole = now() - begin
            stack.close()
        clock.seconds["rest"] = whole - sum(clock.seconds.values())
        rounds.append({name: clock.seconds[name] for name in PARTS})

    more = plain.extra | {"parts": rounds}
    return Variant(name=plain.name + BY_PARTS, call=call, before_round=before, versus=plain.name, extra=more)


def calls_of(runner: Runner) -> list[Call]:
    """The calls by which a runner's model and store do each part."""
    calls: list[Call] = [(layer, "forward", "projections") for layer in matrices_of(runner.loaded)]
    for store in (runner.store, *runner.store.other_kinds):
        calls += [(store, name, "attention") for name in ("attend", "attend_stored", "prompt_attention")]
        calls.append((store, "measure", "scores"))
        calls += [(store.holding.plans, name, "planning") for name in ("prefill", "decode", "due", "compact")]
        for part in store.holding.parts:
            calls += [(part.pages.table, name, "reserving") for name in RESERVING if hasattr(part.pages.table, name)]
            calls += [
                (part.pages, "put", "writing"),
                (part, "write_prompt", "writing"),
                (part.scores, "add_step", "scores"),
            ]
    return calls


class Clock:
    """Exclusive seconds by part: a nested call of another part counts there.

    Attributes:
        wait: Synchronises with the device.
    """

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        self._now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []  # of each call under way, the seconds of those that it made
        self.wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def over(self, calls: Sequence[Call]) -> ExitStack:
        """Puts the clock over some calls until the context is left."""
        with ExitStack() as stack:
            for owner, name, part in calls:
                attribute, inner = vars(owner).get(name), getattr(owner, name)
                setattr(owner, name, partial(self._timed, part, inner))
                stack.callback(*((delattr, owner, name) if attribute is None else (setattr, owner, name, attribute)))
            return stack.pop_all()

    def _timed(self, part: str, inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self.wait()
        begin = self._now()
        self._inside.append(0.0)
        try:
            return inner(*args, **named)
        finally:
            self.wait()
            spent = self._now() - begin
            self.seconds[part] += spent - self._inside.pop()
            if self._inside:
                self._inside[-1] += spent


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
