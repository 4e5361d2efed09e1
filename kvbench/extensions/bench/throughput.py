"""A fixed amount of KV memory: how many sequences of each method fit, and how many tokens per second they make."""

import sys
from dataclasses import dataclass, replace
from typing import Any

from kvbench.engine.prompt_cache import PromptCache
from kvbench.errors import SettingsConflict
from kvbench.extensions.bench.decode import BASELINES, GRAPH, LENGTHS, PEER, PROMPT_BYTES, WholeModel
from kvbench.extensions.bench.decoders import REFERENCE_ROWS, WARM_STEPS, Decoder, Graphed, PeerDecoder, capture_on
from kvbench.kernels.bench.bench import Bench, main, setting
from kvbench.kernels.bench.rounds import Variant, ratios
from kvbench.models.load import LoadedModel
from kvbench.runs import choices

DISTINCT_PROMPTS = 4  # read one by one; further sequences are copies of their pages


@dataclass(kw_only=True)
class Settings(WholeModel):
    """A fixed amount of KV memory: how many sequences fit, and how many tokens per second they make."""

    what = "throughput"
    quick = {"kv_mb": 32, "context": 256, "new_tokens": 16, "rounds": 3, "steps": 2}

    kv_mb: int = setting(256, "MB (10^6 bytes) for everything that a cache holds: pages, tables, buffers.", 1)
    context: int = setting(1024, "Prompt tokens.", 1)
    lengths: list[int] = setting([0], LENGTHS, 0)
    new_tokens: int = setting(96, "Tokens that every sequence must have room for.", 1)
    max_batch: int = setting(256, "Sequences at most.", 1)

    @property
    def decoded_tokens(self) -> int:
        """Tokens of a sequence that one row of the table decodes at most: the baseline is timed twice in each round."""
        return 2 * (self.rounds + 1) * self.steps

    def check(self) -> None:
        super().check()
        need = self.decoded_tokens
        if self.new_tokens < need:
            raise SettingsConflict(
                f"new_tokens={self.new_tokens} is below the {need} tokens that rounds={self.rounds} of "
                f"steps={self.steps} decode, with the warm-up and the baseline's second timing; raise new_tokens, or "
                "lower rounds or steps",
                setting="throughput.new_tokens",
            )

    def cells(self, threads: list[int]) -> list[dict]:
        more = {"new_tokens": self.new_tokens, "threads": threads[-1]}
        return [{"kv_mb": self.kv_mb, "context": length, **more} for length in self.contexts()]

    def prepare(self, bench: Bench) -> None:
        self._model = choices.make_model(self.model, bench.device)
        bench.more["model"] = choices.describe_model(self._model)
        bench.notes += filter(None, [self._model.remark])

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        at = replace(self, context=cell["context"])
        text = choices.sample_tokens(self._model, DISTINCT_PROMPTS, at.context + self.new_tokens)
        variants: list[Variant] = []
        prompts = PromptCache(PROMPT_BYTES, keeps_queries=True)  # those of a trial are its batch's and other methods'
        for name in (PEER, *self.methods):
            bench.stage(f"filling {self.kv_mb} MB for {name}")
            arguments = (at, self._model, text, bench.notes)
            variants += peer_variants(*arguments) if name == PEER else store_variants(name, *arguments, prompts)
        return variants

    def finish(self, cell: dict) -> None:
        """Adds `rate_ratios`: tokens per second of a row over those of each baseline, formed within each round."""
        rows = cell["variants"]
        per_token = {row["name"]: [s / row["tokens_per_call"] for s in row["seconds"]] for row in rows}
        bases = [base for base in BASELINES if base in per_token]
        for row in rows:
            row["rate_ratios"] = {base: ratios(per_token[base], per_token[row["name"]]) for base in bases}


def fitting(settings: Settings, sequence_bytes: int, name: str, notes: list[str]) -> int:
    """Sequences that fit; 0 with a note when not even one does."""
    batch = int(settings.kv_mb * 1e6 // sequence_bytes)
    if not batch:
        size_text = f"{name}: one sequence behind {settings.context} tokens holds {sequence_bytes / 1e6:.1f} MB"
        notes.append(f"{size_text} and does not fit; raise kv_mb")
    if batch > settings.max_batch:
        size_text = f"{name}: {batch} sequences behind {settings.context} tokens would fit"
        notes.append(f"{size_text}; max_batch={settings.max_batch} were run")
    return min(batch, settings.max_batch)


def peer_variants(settings: Settings, model: LoadedModel, text: list[list[int]], notes: list[str]) -> list[Variant]:
    """Cache of transformers, in the model's dtype, with as many sequences as fit at their final length."""
    decoder = PeerDecoder(model)
    decoder.prefill([tokens[: settings.context] for tokens in text])
    token_bytes = decoder.cache_bytes() / (len(text) * settings.context)
    batch = fitting(settings, round(token_bytes * (settings.context + settings.new_tokens)), PEER, notes)
    return [_filled(settings, PEER, decoder, text, batch)] if batch else []


def store_variants(
    method: str, settings: Settings, model: LoadedModel, text: list[list[int]], notes: list[str], prompts: PromptCache
) -> list[Variant]:
    """A method with as many sequences as fit at their final length, measured by answering once.

    On a GPU the same sequences once more, with their steps replayed from a graph.
    """
    options: dict[str, Any] = {"new_tokens": settings.new_tokens, "prompts": prompts}
    trial = settings.decoder(model, method, rows=len(text), **options)
    trial.prefill([tokens[: settings.context] for tokens in text])
    peak = 0
    for index in range(settings.new_tokens):
        trial.step([tokens[settings.context + index] for tokens in text])
        peak = max(peak, int(trial.row_bytes().max()))
    batch = fitting(settings, peak, method, notes)
    del trial
    if not batch:
        return []
    # A GPU's pool is made once: without a budget each method's would hold what its lists could ever need.
    room = int(1.1 * peak * (batch + REFERENCE_ROWS)) if model.device.type != "cpu" else None
    decoder = settings.decoder(model, method, rows=batch, budget_bytes=room, **options)
    decoder.prefill([tokens[: settings.context] for tokens in text[:batch]])
    variants = [_filled(settings, method, decoder, text, batch, sequence_bytes=peak)]
    decoder.runner.prompts = PromptCache()
    if decoder.runner.backend.keeps_tables:
        need = 2 * settings.decoded_tokens + WARM_STEPS + 1
        if need <= settings.new_tokens:
            graphed = Graphed(decoder, capture_on(model.device))
            answers = answers_of(settings, text, batch)
            variants.append(settings.stepping(method + GRAPH, graphed, answers, batch=batch, sequence_bytes=peak))
        else:
            notes.append(f"{method}{GRAPH} not measured: new_tokens={settings.new_tokens} is below {need}")
    return variants


def answers_of(settings: Settings, text: list[list[int]], batch: int) -> list[list[int]]:
    """The tokens after the prompt of every sequence."""
    return [text[row % len(text)][settings.context :] for row in range(batch)]


def _filled(
    settings: Settings, name: str, decoder: Decoder, text: list[list[int]], batch: int, **extra: Any
) -> Variant:
    """Variant of a decoder with as many sequences as fit, copies of those that it has read."""
    decoder.repeat(batch)
    return settings.stepping(name, decoder, answers_of(settings, text, batch), batch=batch, **extra)


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
