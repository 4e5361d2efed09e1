"""A fixed amount of KV memory: the most sequences and the longest prompt that fit, by counting and by trying."""

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.cache.layout import ModelShape
from kvbench.cache.options import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.config.files import FULL
from kvbench.engine.prompt_cache import Recording
from kvbench.engine.runner import Runner
from kvbench.errors import SettingsConflict
from kvbench.extensions.bench.decode import Methods
from kvbench.kernels.bench.bench import Bench, main, setting
from kvbench.kernels.bench.rounds import Variant, failed_variant
from kvbench.kernels.dispatch import get_backend
from kvbench.kernels.pool import PoolExhausted
from kvbench.policy import Policy
from kvbench.runs import choices
from kvbench.sizing.outline import outline
from kvbench.sizing.shapes import find_shape

DISTINCT_PROMPTS = 4  # put in one by one; further sequences are copies of their pages
PRECISION = 128  # a longest prompt is found to this part of itself
MOST = 1 << 40  # bytes or sequences, where nothing else is a limit
TRIES = 6
LONGEST = 1 << 20  # tokens of a prompt that are counted


@dataclass(kw_only=True)
class Settings(Methods):
    """A fixed amount of KV memory: the most sequences and the longest prompt that fit, by counting and by trying."""

    what = "capacity"
    quick = {"rounds": 1, "kv_mb": [8, 16], "context": 128, "new_tokens": 8, "longest": 512}

    kv_mb: list[int] = setting([32, 64, 128, 256], "MB (10^6 bytes) for all that a cache holds, each a cell.", 1)
    context: int = setting(1024, "Prompt tokens of the sequences that are counted.", 1)
    new_tokens: int = setting(64, "Tokens behind every prompt.", 1)
    longest: int = setting(8064, "Longest prompt that is tried.", 1)
    shape: str = setting("", "Count only, for a model that is not here: as bytes model= takes it; empty = try, too.")

    def check(self) -> None:
        super().check()
        if self.context > self.longest:
            raise SettingsConflict(
                f"context={self.context} is above longest={self.longest}, the longest prompt that is tried",
                setting="capacity.context",
            )
        if self.shape:
            find_shape(self.shape)

    @property
    def reported_rounds(self) -> int:
        return len(self.methods)

    def cells(self, threads: list[int]) -> list[dict]:
        return [{"kv_mb": each, "threads": threads[-1]} for each in self.kv_mb]

    def prepare(self, bench: Bench) -> None:
        self._text: list[Recording] = []
        self._counted: dict[str, dict[int, int | None]] = defaultdict(dict)  # a memory's counts serve the next one
        if self.shape:
            self._shape = find_shape(self.shape).store_shape
            bench.more["shape"] = self.shape
            return
        model = choices.make_model(self.model, bench.device)
        bench.more["model"] = choices.describe_model(model)
        lengths = [self.longest, *[self.context] * (DISTINCT_PROMPTS - 1)]
        texts = choices.sample_tokens(model, len(lengths), self.longest + self.new_tokens)
        policy, options = choices.make_cache(FULL)
        runner = Runner(model, policy, options=options, backend=self.kernels)
        self._shape = runner.shape
        for number, (text, length) in enumerate(zip(texts, lengths, strict=True), 1):
            bench.stage(f"reading text {number} of {len(lengths)}")
            runner.reserve(rows=1, prompt_tokens=length + self.new_tokens, new_tokens=1)
            self._text.append(recording := Recording(MOST, keeps_queries=True))
            runner.store.watcher = recording.add
            runner.read(text[: length + self.new_tokens])
        del runner._store

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        return {"baselines": [FULL], "rounds": 1, "warmup": 0, "twice": False, "on_round": lambda: None}

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        variants = []
        for name in self.methods:
            try:
                policy, options = choices.make_cache(name)
                policy.check_model(self._shape.num_layers, self._shape.num_kv_heads)
            except ValueError as problem:
                variants.append(failed_variant(name, problem))
                continue
            arguments = policy, options, self._shape, self._text, int(cell["kv_mb"] * 1e6), self._counted[name]
            memory = Memory(self, bench, name, *arguments)
            variants.append(Variant(name=name, call=memory.search, extra=memory.result))
        return variants


class Memory:
    """A memory of so many bytes, for one method.

    Attributes:
        found: `sequence_bytes`, `counted_batch` and `counted_prompt`, None where attention decides what is kept;
            `tried_batch` and `tried_prompt`, None where nothing was tried; and `longest`, the last prompt to be tried.
    """

    def __init__(
        self,
        settings: Settings,
        bench: Bench,
        name: str,
        policy: Policy,
        options: StoreOptions,
        shape: ModelShape,
        text: list[Recording],
        num_bytes: int,
        counted: dict[int, int | None],
    ) -> None:
        self._settings, self._bench, self._name, self._num_bytes = settings, bench, name, num_bytes
        self._policy, self._options, self._shape, self._text = policy, options, shape, text
        self._counted = counted
        self._backend = get_backend(settings.kernels, shape.device) if text else None
        self.result: dict[str, Any] = {"longest": settings.longest}

    def search(self, _: int) -> None:
        """Counts, and then tries."""
        settings, result = self._settings, self.result
        self._bench.stage(f"counting {self._name}")
        result["sequence_bytes"] = self._counted_bytes(settings.context)
        result["counted_batch"] = result["sequence_bytes"] and self._num_bytes // result["sequence_bytes"]
        result["counted_prompt"] = result["sequence_bytes"] and self._counted_prompt()
        result |= {"tried_batch": None, "tried_prompt": None}
        if self._text and (reason := self._untried()):
            self._bench.notes.append(f"{self._name} was not tried: {reason}")
        elif self._text:
            token_bytes = self._shape.fp16_bytes(1)
            self._bench.stage(f"filling {self._num_bytes / 1e6:g} MB with sequences of {self._name}")
            guess = result["counted_batch"] or self._num_bytes // (
                token_bytes * (settings.context + settings.new_tokens)
            )
            result["tried_batch"] = largest(self._takes_batch, guess, MOST)
            self._bench.stage(f"filling {self._num_bytes / 1e6:g} MB with a prompt of {self._name}")
            guess = result["counted_prompt"] or self._num_bytes // token_bytes
            result["tried_prompt"] = largest(self._takes_prompt, guess, settings.longest, PRECISION)
        self._bench.advance()

    def _untried(self) -> str:
        spec = self._policy.score
        if spec.probe is not None:
            return "it reads a prompt more than once"
        if not spec.statistic.needs.isdisjoint({"hidden_states", "attention_call"}):
            return "it looks at more of the model than queries, keys and values"
        return ""

    def _counted_bytes(self, prompt_tokens: int) -> int | None:
        """Bytes of a sequence when its answer ends; None where attention decides."""
        if prompt_tokens not in self._counted:
            projection = outline(self._policy, self._shape, prompt_tokens, self._settings.new_tokens)
            self._counted[prompt_tokens] = None if projection is None else projection.resident_bytes
        return self._counted[prompt_tokens]

    def _counted_prompt(self) -> int | None:
        """The longest prompt, on lines through lengths that come nearer; None where attention decides."""
        at = 4 * self._settings.context
        for _ in range(TRIES):
            before = max(1, at // 4)  # far below: bytes come in pages, and two near lengths may hold as many
            first, second = self._counted_bytes(before), self._counted_bytes(at)
            if first is None or second is None:
                return None
            per_token = max(1e-9, (second - first) / max(1, at - before))
            prompt = max(1, at + int((self._num_bytes - second) / per_token))
            if prompt >= LONGEST:
                return LONGEST
            if abs(prompt - at) <= prompt // PRECISION:
                break
            at = prompt
        # Bytes come in pages, around whose edge the lines go to and fro.
        return largest(lambda tokens: (self._counted_bytes(tokens) or 0) <= self._num_bytes, at, LONGEST, PRECISION)

    def _takes_batch(self, rows: int) -> bool:
        return self._takes(rows, self._settings.context)

    def _takes_prompt(self, tokens: int) -> bool:
        return self._takes(1, tokens)

    def _takes(self, rows: int, prompt_tokens: int) -> bool:
        """Fills a real cache with so many sequences; True if there was a page for everything."""
        fixed = sum(self._store(1, prompt_tokens, self._options).ledger.fixed_row_bytes())
        left = self._num_bytes - rows * fixed
        try:
            store = self._store(rows, prompt_tokens, replace(self._options, budget_bytes=max(1, left)))
        except ValueError:  # not one page
            return False
        try:
            first = [self._put(store, text, prompt_tokens) for text in self._text[:rows]]
            for step in range(self._settings.new_tokens):
                self._step(store, first, prompt_tokens + step)
            for row in range(len(first), rows):
                store.fork_row(first[row % len(first)], share=False)
        except PoolExhausted:
            return False
        return True

    def _store(self, rows: int, prompt_tokens: int, options: StoreOptions) -> CompressedStore:
        assert self._backend is not None
        return CompressedStore(
            self._policy,
            self._shape,
            rows=rows,
            max_prompt_tokens=prompt_tokens,
            max_new_tokens=self._settings.new_tokens,
            options=options,
            backend=self._backend,
        )

    def _put(self, store: CompressedStore, text: Recording, tokens: int) -> int:
        row = store.open_row()
        for layer, (held, (q, scale)) in enumerate(zip(text.layers, text.queries, strict=True)):
            store.prefill_layer(row, layer, q[:, :tokens], held.k[:, :tokens], held.v[:, :tokens], scale)
        return row

    def _step(self, store: CompressedStore, rows: list[int], at: int) -> None:
        """Reads the next token of each text into its row."""
        texts = self._text[: len(rows)]
        store.begin_step(rows)
        for layer in range(self._shape.num_layers):
            q = torch.stack([text.queries[layer][0][:, at] for text in texts])
            k, v = (torch.stack([getattr(text.layers[layer], name)[:, at] for text in texts]) for name in "kv")
            store.attend(layer, q, k, v, texts[0].queries[layer][1])
        store.end_step()


def largest(fits: Callable[[int], bool], guess: int, most: int, precision: int = MOST) -> int:
    """Largest whole number from 0 to `most` that fits, to a fraction of it where a precision is set.

    Searched near a guess, with steps that double, and then by bisection.
    """
    low, high = 0, most + 1  # fits, and does not
    at, step = min(max(1, guess), most), max(1, guess // precision)
    while high - low > max(1, low // precision):
        if fits(at):
            low = at
        else:
            high = at
        if high > most:
            at = min(low + step, most)
        elif not low:
            at = max(high - step, 1)
        else:
            at = (low + high) // 2
        step *= 2
    return low


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
