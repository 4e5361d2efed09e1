"""A fixed amount of KV memory: how many sequences of each method fit, and how many tokens per second they make."""

import sys
from dataclasses import dataclass
from functools import partial

from kvbench.bench import choices
from kvbench.bench.decode import BASELINES, OWN, REFERENCE_TOLERANCE, WholeModel, tolerance
from kvbench.bench.decoders import REFERENCE_ROWS, OwnDecoder, StoreDecoder
from kvbench.cache.layout import StoreOptions
from kvbench.engine.prompt_cache import PromptCache
from kvbench.kernels.bench import machine, report
from kvbench.kernels.bench.rounds import Variant, choose_timer, measure_cell, ratios
from kvbench.kernels.bench.settings import check_whole
from kvbench.kernels.dispatch import get_backend
from kvbench.models.load import LoadedModel

PROMPT_BYTES = 2 << 30  # of prompts that are kept from a method's trial to its batch
DISTINCT_PROMPTS = 4  # read one by one; further sequences are copies of their pages
QUICK = {"kv_mb": 32, "context": 256, "new_tokens": 16, "rounds": 3, "steps": 2}


@dataclass(kw_only=True)
class Settings(WholeModel):
    """What to measure.

    Args:
        kv_mb: MB (10^6 bytes) for everything that a cache holds: pages, tables, buffers.
        context: Prompt tokens.
        new_tokens: Tokens that every sequence must have room for.
        max_batch: Sequences at most.
    """

    kv_mb: int = 256
    context: int = 1024
    new_tokens: int = 96
    max_batch: int = 256

    def check(self) -> None:
        """Raises ValueError for a value out of range, with the rule."""
        super().check()
        for name in ("kv_mb", "new_tokens", "max_batch"):
            check_whole(name, getattr(self, name), 1)
        need = 2 * (self.rounds + 1) * self.steps  # the baseline is timed twice in each round
        if self.new_tokens < need:
            raise ValueError(
                f"new_tokens={self.new_tokens} is below the {need} tokens that rounds={self.rounds} of "
                f"steps={self.steps} decode, with the warm-up and the baseline's second timing; raise new_tokens, or "
                "lower rounds or steps"
            )


def run(settings: Settings, progress: report.Progress = report.quiet) -> dict:
    """Finds every method's batch, then decodes all batches in the same rounds.

    Args:
        settings: What to measure.
        progress: Told what is done.

    Returns:
        The document that `kernels.bench.report` describes; ratios are of tokens per second.
    """
    device = machine.pick_device(settings.device)
    backend = get_backend(settings.kernels, device)
    cell = {
        "kv_mb": settings.kv_mb,
        "context": settings.context,
        "new_tokens": settings.new_tokens,
        "threads": settings.num_threads if device == "cpu" else 0,
    }
    bench = report.begin("throughput", settings, device, backend, [cell])
    model = choices.make_model(settings.model, device)
    bench.notes += filter(None, [model.remark])
    text = choices.sample_tokens(model, DISTINCT_PROMPTS, settings.context + settings.new_tokens)
    for _ in bench.todo(progress):
        bench.stage(f"filling {settings.kv_mb} MB for {OWN}")
        variants = [own_variant(settings, model, text, bench.notes)]
        for method in settings.methods:
            bench.stage(f"filling {settings.kv_mb} MB for {method}")
            variants.append(store_variant(settings, model, method, text, bench.notes))
        found = measure_cell(
            cell,
            [v for v in variants if v is not None],
            baselines=BASELINES,
            rounds=settings.rounds,
            seed=settings.seed,
            timer=choose_timer(settings.clock, device, cell["threads"]),
            on_round=bench.on_round,
        )
        add_rates(found["variants"])
        bench.add(found)
    document = bench.document()
    document["model"] = choices.describe_model(model)
    return document


def add_rates(rows: list[dict]) -> None:
    """Adds `rate_ratios`: tokens per second of a row over those of each baseline, formed within each round."""
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        row["rate_ratios"] = {}
        for name in BASELINES:
            if base := by_name.get(name):
                slow = [s / base["tokens_per_call"] for s in base["seconds"]]
                fast = [s / row["tokens_per_call"] for s in row["seconds"]]
                row["rate_ratios"][name] = ratios(slow, fast)


def fitting(settings: Settings, sequence_bytes: int, name: str, notes: list[str]) -> int:
    """Sequences that fit; 0 with a note when not even one does."""
    batch = int(settings.kv_mb * 1e6 // sequence_bytes)
    if not batch:
        notes.append(f"{name}: one sequence holds {sequence_bytes / 1e6:.1f} MB and does not fit; raise kv_mb")
    if batch > settings.max_batch:
        notes.append(f"{name}: {batch} sequences would fit; max_batch={settings.max_batch} were run")
    return min(batch, settings.max_batch)


def own_variant(settings: Settings, model: LoadedModel, text: list[list[int]], notes: list[str]) -> Variant | None:
    """transformers' own cache, in the model's dtype, with as many sequences as fit at their final length."""
    decoder = OwnDecoder(model)
    decoder.prefill([tokens[: settings.context] for tokens in text])
    token_bytes = decoder.cache_bytes() / (len(text) * settings.context)
    batch = fitting(settings, round(token_bytes * (settings.context + settings.new_tokens)), OWN, notes)
    if not batch:
        return None
    decoder.repeat(batch)
    return _variant(OWN, decoder, settings, text, batch)


def store_variant(
    settings: Settings, model: LoadedModel, method: str, text: list[list[int]], notes: list[str]
) -> Variant | None:
    """A method with as many sequences as fit at their final length, which is measured by answering once."""
    make = partial(
        StoreDecoder,
        model,
        context=settings.context,
        new_tokens=settings.new_tokens,
        kernels=settings.kernels,
        prompts=PromptCache(PROMPT_BYTES),  # the trial's prompts are those of the batch
    )
    trial = make(choices.make_method(method), rows=len(text))
    trial.focus()
    for tokens in text:
        trial.prefill(tokens[: settings.context])
    peak = 0
    for index in range(settings.new_tokens):
        trial.step([tokens[settings.context + index] for tokens in text])
        peak = max(peak, int(trial.row_bytes().max()))
    batch = fitting(settings, peak, method, notes)
    del trial
    if not batch:
        return None
    # A GPU's pool is made once: without a budget each method's would hold what its lists could ever need.
    room = int(1.1 * peak * (batch + REFERENCE_ROWS)) if model.device.type == "cuda" else None
    decoder = make(choices.make_method(method), rows=batch, options=StoreOptions(budget_bytes=room))
    first = [decoder.prefill(tokens[: settings.context]) for tokens in text[:batch]]
    for index in range(len(first), batch):
        decoder.fork(first[index % len(first)])
    decoder.runner.prompts = PromptCache()
    variant = _variant(method, decoder, settings, text, batch)
    variant.check = partial(decoder.reference_error, text[0][settings.context])
    variant.tolerance = tolerance(REFERENCE_TOLERANCE, model)
    variant.extra["sequence_bytes"] = peak
    return variant


def _variant(
    name: str, decoder: OwnDecoder | StoreDecoder, settings: Settings, text: list[list[int]], batch: int
) -> Variant:
    state = {"at": settings.context}

    def call(_: int) -> None:
        for _ in range(settings.steps):
            decoder.step([text[row % len(text)][state["at"]] for row in range(batch)])
            state["at"] += 1

    extra = {"tokens_per_call": batch * settings.steps, "batch": batch, "cache_bytes": decoder.cache_bytes()}
    return Variant(name=name, call=call, before_round=decoder.focus, extra=extra)


if __name__ == "__main__":
    sys.exit(report.main("throughput", Settings, QUICK, run, sys.argv[1:], package="kvbench.bench"))
