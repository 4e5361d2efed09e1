"""Whole-model decode and prefill compared with transformers' cache, every method in the same rounds."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from kvbench.config.files import FULL
from kvbench.engine.hf import NATIVE_CACHES
from kvbench.engine.prompt_cache import PromptCache
from kvbench.errors import SettingsConflict, SettingValue, unknown_name
from kvbench.extensions.bench.decoders import (
    Decoder,
    Graphed,
    PeerDecoder,
    StaticDecoder,
    StoreDecoder,
    capture_on,
    relative,
)
from kvbench.kernels.bench import machine
from kvbench.kernels.bench.bench import Bench, Common, main, setting
from kvbench.kernels.bench.rounds import Variant, failed_variant
from kvbench.kernels.dispatch import HOST
from kvbench.kernels.names import DECODES, TRITON
from kvbench.models import matrices
from kvbench.models.load import LoadedModel
from kvbench.runs import choices

PEER = "transformers"
GRAPH = ", graph"  # after the name of a row that replays its steps, as the engine does on a GPU
STATIC = PEER + " static" + GRAPH  # on a GPU: the setup for speed
# After the name of a row whose model's own matrices have another layout than those of the requested model.
MARKS = {linear: f", {linear}" for linear in matrices.LINEAR}
BASELINES = (PEER, *(PEER + mark for mark in MARKS.values()), STATIC, FULL)
# Of the largest logit. The first bound is for fp32 sums in another order, which the rounding of a new token's codes can
# amplify; the second for `full`'s 16-bit keys and values against transformers' cache.
REFERENCE_TOLERANCE = {torch.float32: 5e-3}
FULL_TOLERANCE = {torch.float32: 2e-2}
LOW_PRECISION_TOLERANCE = 5e-2
PROMPT_BYTES = 2 << 30  # of prompts that the model reads once for all methods
# Meaning of the names of rows.
CACHES = "transformers is its growing cache (DynamicCache), in eager steps"
STATIC_CACHE = (
    f"; {STATIC} is its static one (StaticCache), whose step is replayed from a CUDA graph, as kvbench's{GRAPH}"
)
LENGTHS = "Prompt tokens, each in cells of their own; 0 = context."
HAS_PACKAGE = {"quanto": is_optimum_quanto_available, "hqq": is_hqq_available}


@dataclass(kw_only=True)
class Methods(Common):
    """The model and the methods of a bench."""

    model: str = setting("smollm2-135m", "A choice of model=, then settings of it.")
    methods: list[str] = setting(
        [FULL, "fp8", "snapkv budget=0.25", "diffkv", "kivi bits=2"],
        "Choices of method=, then settings of each, and of the store: `int4 store.rotation=hadamard`.",
    )

    def check(self) -> None:
        super().check()
        if not self.methods or len(set(self.methods)) != len(self.methods):
            raise SettingValue(f"methods={self.methods} must be one or more, each once", setting=f"{self.what}.methods")
        for text in self.methods:
            choices.make_cache(text)
        choices.read_choice("model", self.model)

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        return {"baselines": BASELINES}


@dataclass(kw_only=True)
class WholeModel(Methods):
    """Settings of every bench that runs a whole model; the last entry of `threads` counts."""

    context: int = setting(4096, "Prompt tokens.", 1)
    steps: int = setting(4, "Decode steps in each timing.", 1)
    decode: str = setting(TRITON, "What attends in steps on a GPU: triton, cuda, torch.", among=(*DECODES, HOST))

    def contexts(self) -> list[int]:
        """The prompts' lengths of a bench that has `lengths`."""
        return list(dict.fromkeys(length or self.context for length in getattr(self, "lengths", [0])))

    def decoder(self, model: LoadedModel, method: str, **more: Any) -> StoreDecoder:
        """A decoder by the settings; see `StoreDecoder`."""
        more.setdefault("context", self.context)
        return StoreDecoder(model, method, kernels=self.kernels, decode=self.decode, **more)

    def stepping(self, name: str, decoder: Decoder | Graphed, answers: list[list[int]], **extra: Any) -> Variant:
        """Runs `steps` decode steps at a time, with the tokens of each row that follow the prompts.

        The decoder has read the prompts; every timing continues from the last one.
        """
        tokens = zip(*answers, strict=True)

        def call(_: int) -> None:
            for _ in range(self.steps):
                decoder.step(list(next(tokens)))

        loaded = decoder.loaded if isinstance(decoder, PeerDecoder) else decoder.runner.loaded
        cache_bytes, numbers = decoder.cache_bytes(), matrix_numbers(loaded)
        extra |= {"tokens_per_call": len(answers) * self.steps, "cache_bytes": cache_bytes}
        extra |= {"flops_per_token": 2 * numbers}
        least = self.steps * (numbers * loaded.dtype.itemsize + cache_bytes)
        variant = Variant(name=name, call=call, bytes_per_call=least, before_round=decoder.focus, extra=extra)
        if isinstance(decoder, StoreDecoder | Graphed):
            variant.check = partial(decoder.step_error, answers[0][0])
            variant.tolerance = REFERENCE_TOLERANCE.get(decoder.runner.loaded.dtype, LOW_PRECISION_TOLERANCE)
        return variant


@dataclass(kw_only=True)
class Settings(WholeModel):
    """Whole-model decode and prefill compared with transformers' cache."""

    what = "decode"
    quick = {"context": 1024, "batches": [1], "rounds": 3, "steps": 2, "prefill_rounds": 1, "peak": False}

    lengths: list[int] = setting([0], LENGTHS, 0)
    batches: list[int] = setting([1, 4], "Sequences.", 1)
    prefill_rounds: int = setting(3, "Rounds of whole prompts; 0 = none.", 0)
    quantised: bool = setting(True, "transformers' quantised caches where their packages are there.")
    apart: bool = setting(
        False, "Each method in a cell of its own beside the baselines, for caches that do not fit into memory together."
    )
    peak: bool = setting(True, "Peak memory of a prompt, each in a process of its own.")
    linear: list[str] = setting(
        [], "Each row once more with the model's own matrices laid so (`model.linear`), transformers' too."
    )

    def check(self) -> None:
        super().check()
        if unknown := [linear for linear in self.linear if linear not in MARKS]:
            raise unknown_name("linear", unknown[0], MARKS)
        of_model = choices.read_choice("model", self.model).get("linear", matrices.AUTO)
        if len(set(self.linear)) != len(self.linear) or (self.linear and of_model != matrices.AUTO):
            raise SettingsConflict(
                f"linear={self.linear} beside model={self.model} would time rows twice; name each way once, and leave "
                "linear= out of model=",
                setting="decode.linear",
            )

    def cells(self, threads: list[int]) -> list[dict]:
        each = [{"context": length, "threads": threads[-1]} for length in self.contexts()]
        prompt = [{"phase": "prompt", "batch": 1, **base} for base in each] if self.prefill_rounds else []
        decode = [{"phase": "decode", "batch": batch, **base} for batch in self.batches for base in each]
        return [
            cell | alone
            for cell in [*prompt, *decode]
            for alone in ([{"method": method} for method in self.methods] if self.apart else [{}])
        ]

    def prepare(self, bench: Bench) -> None:
        each = self.contexts() if self.peak else []
        self._peaks = {length: measure_peaks(replace(self, context=length), bench) for length in each}
        self._models = make_models(self, bench.device, bench.notes)
        bench.notes.append(CACHES + STATIC_CACHE * (bench.device != "cpu"))
        bench.more["model"] = choices.describe_model(self._models[""])

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        more: dict[str, Any]
        if cell["phase"] == "prompt":
            more = {"rounds": self.prefill_rounds, "warmup": 0}  # its checks warm up
        else:
            more = {"probe": bench.bandwidth.variant()}
        return super().timing(bench, cell) | more

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        bench.stage("reading prompts")
        settings = replace(self, context=cell["context"], methods=[cell["method"]] if self.apart else self.methods)
        if cell["phase"] == "decode":
            variants = [
                v for mark, model in self._models.items() for v in decode_variants(settings, model, cell["batch"], mark)
            ]
            return [*variants, machine.product(bench.device, self._models[""].dtype)]
        variants = prompt_variants(settings, self._models)
        for variant in variants:
            variant.extra["peak_bytes"] = self._peaks.get(cell["context"], {}).get(variant.name)
        return variants

    def finish(self, cell: dict) -> None:
        machine.tell_limits(cell)


def matrices_of(model: LoadedModel) -> list[Any]:
    """All linear layers, however their matrices lie."""
    return [layer for layer in model.model.modules() if hasattr(layer, "out_features")]


def matrix_numbers(model: LoadedModel) -> int:
    """Numbers that every token is multiplied with: those of all linear layers."""
    return sum(layer.in_features * layer.out_features for layer in matrices_of(model))


def make_models(settings: Settings, device: str, notes: list[str]) -> dict[str, LoadedModel]:
    """Models by suffix of their rows' names: an empty one, and those of `MARKS` that are requested and available."""
    models = {"": choices.make_model(settings.model, device)}
    notes += filter(None, [models[""].remark])
    for linear in settings.linear:
        if linear == models[""].linear:
            notes.append(f"no {linear} rows: all rows without a mark are")
            continue
        model = choices.make_model(f"{settings.model} linear={linear}", device)
        if model.remark:
            notes.append(f"no {linear} rows: {model.remark}")
        else:
            models[MARKS[linear]] = model
    return models


def peer_kinds(settings: Settings) -> dict[str, str]:
    """Names of the rows that are transformers' own, and the cache of each that can be had here."""
    wanted = NATIVE_CACHES[1:] if settings.quantised else ()
    known = [kind for kind in wanted if HAS_PACKAGE.get(kind.partition("-")[0], lambda: True)()]
    return {PEER: "dynamic"} | {f"{PEER} {kind}": kind for kind in known}


def _peer_decoders(settings: Settings, model: LoadedModel) -> dict[str, Decoder]:
    decoders: dict[str, Decoder] = {}
    for name, kind in peer_kinds(settings).items():
        with suppress(ImportError):  # this package, or transformers, has no such cache
            decoders[name] = PeerDecoder(model, kind)
    return decoders


def decode_variants(settings: Settings, model: LoadedModel, batch: int, mark: str = "") -> list[Variant]:
    """Every cache filled with the same prompts, ready for the same tokens; `mark` comes after every name."""
    # The baseline is timed twice in each round, and so are rows that also replay their steps.
    room = 2 * (settings.rounds + 2) * settings.steps + 2
    text = choices.sample_tokens(model, batch, settings.context + room)
    prompts = [tokens[: settings.context] for tokens in text]
    answers = [tokens[settings.context :] for tokens in text]
    variants = []
    for name, decoder in _peer_decoders(settings, model).items():
        decoder.prefill(prompts)
        variants.append(settings.stepping(name + mark, decoder, answers))
    if model.device.type != "cpu":
        variants.append(static_variant(settings, model, prompts, answers))
    # On a GPU they would take the room of caches, and reading is short.
    kept = PromptCache(PROMPT_BYTES if model.device.type == "cpu" else 0, keeps_queries=True)
    for method in settings.methods:
        try:
            decoder = settings.decoder(model, method, rows=batch, new_tokens=2 * room, prompts=kept)
            decoder.prefill(prompts)
            decoder.runner.prompts = PromptCache()
        except Exception as problem:  # no room, or no kernel: the others are still measured
            variants.append(failed_variant(method + mark, problem))
            continue
        variants.append(settings.stepping(method + mark, decoder, answers))
        if decoder.runner.backend.keeps_tables:
            graphed = Graphed(decoder, capture_on(model.device))
            variants.append(settings.stepping(method + mark + GRAPH, graphed, answers, graph=True))
    return variants


def static_variant(
    settings: Settings, model: LoadedModel, prompts: list[list[int]], answers: list[list[int]]
) -> Variant:
    """Static cache of transformers with the step in a CUDA graph; refused with the reason where capture fails."""
    try:
        static = StaticDecoder(model, len(prompts[0]) + len(answers[0]))
        static.prefill(prompts)
    except Exception as problem:  # drivers have kinds of their own; the other caches are still measured
        return failed_variant(STATIC, problem)
    return settings.stepping(STATIC, static, answers)


def prompt_variants(settings: Settings, models: Mapping[str, LoadedModel]) -> list[Variant]:
    """One prompt, read into an empty cache in each timing.

    Its reference answer is exact for every method: all are compared with that of the first model's cache.
    """
    exact = None
    variants = []
    for mark, model in models.items():
        text = choices.sample_tokens(model, 1, settings.context + 1)[0]
        prompt = text[: settings.context]
        decoders = _peer_decoders(settings, model)
        if exact is None:
            decoders[PEER].prefill([prompt])
            exact = decoders[PEER].logits.clone()
        decoders |= {m: settings.decoder(model, m, rows=1, new_tokens=1) for m in settings.methods}
        bound = FULL_TOLERANCE.get(model.dtype, LOW_PRECISION_TOLERANCE)
        variants += [_reading(name + mark, each, prompt, exact, bound) for name, each in decoders.items()]
    return variants


def _reading(name: str, decoder: Decoder, prompt: list[int], exact: Tensor, bound: float) -> Variant:
    """Reads the prompt; the logits after it are compared with `exact`."""

    def call(_: int) -> None:
        decoder.prefill([prompt])
        decoder.clear()

    def check() -> float:
        call(0)
        return relative(decoder.logits, exact)

    return Variant(name=name, call=call, before_round=decoder.focus, check=check, tolerance=bound)


def measure_peaks(settings: Settings, bench: Bench) -> dict[str, int]:
    """Bytes that reading one prompt adds at its worst moment, its cache included; each in a fresh process."""
    peaks = {}
    kinds, ways = peer_kinds(settings), {"": "", **{MARKS[linear]: f" linear={linear}" for linear in settings.linear}}
    for name, mark in [(name, mark) for mark in ways for name in [*kinds, *settings.methods]]:
        bench.stage(f"peak memory of a prompt, {name}{mark}")
        order = {"model": settings.model + ways[mark], "device": bench.device, "context": settings.context}
        order |= {"name": name, "kind": kinds.get(name), "kernels": settings.kernels}
        order |= {"threads": settings.threads[-1] or machine.num_cpus()}
        command = [sys.executable, "-m", "kvbench.extensions.bench.decoders", json.dumps(order)]
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            peaks[name + mark] = int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])
        except (ValueError, IndexError, KeyError):
            reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
            bench.notes.append(f"peak memory of {name}{mark} not measured: {reason[0][:200]}")
    return peaks


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
