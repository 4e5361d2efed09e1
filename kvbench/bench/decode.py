"""Whole-model decoding and prompt reading beside transformers' own cache, every method in the same rounds."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kvbench.bench import choices
from kvbench.bench.decoders import OwnDecoder, StaticDecoder, StoreDecoder, relative
from kvbench.config.files import FULL
from kvbench.engine.hf import OWN_CACHES
from kvbench.errors import unknown_name
from kvbench.kernels.bench import machine, report
from kvbench.kernels.bench.rounds import Variant, choose_timer, failed_variant, measure_cell
from kvbench.kernels.bench.settings import Common, check_list, check_whole
from kvbench.kernels.dispatch import get_backend
from kvbench.models import matrices
from kvbench.models.load import LoadedModel

OWN = "transformers"
STATIC = "transformers static, graph"  # on a GPU: what people who want speed run
# Behind the name of a row whose model's own matrices are not plain.
MARKS = {linear: f", {linear}" for linear in matrices.LINEAR if linear != matrices.PLAIN}
BASELINES = (OWN, *(OWN + mark for mark in MARKS.values()), STATIC, FULL)
# Of the largest logit. The first bound is for fp32 sums in another order, which the rounding of a new token's codes can
# amplify; the second for `full`'s 16-bit keys and values beside transformers' own.
REFERENCE_TOLERANCE = {torch.float32: 5e-3}
FULL_TOLERANCE = {torch.float32: 2e-2}
LOW_PRECISION_TOLERANCE = 5e-2
QUICK = {"context": 1024, "batches": [1], "rounds": 3, "steps": 2, "prefill_rounds": 1, "peak": False}
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}


@dataclass(kw_only=True)
class WholeModel(Common):
    """Settings of every bench that runs a whole model; the last entry of `threads` counts.

    Args:
        model: A choice of model=, then settings of it.
        methods: Choices of method=, then settings of each, and of the store: `int4 store.rotation=hadamard`.
        context: Prompt tokens.
        steps: Decode steps in each timing.
    """

    model: str = "smollm2-135m"
    methods: list[str] = field(default_factory=lambda: [FULL, "fp8", "snapkv budget=0.25", "diffkv", "kivi bits=2"])
    context: int = 4096
    steps: int = 4

    def check(self) -> None:
        """Raises ValueError for a value out of range, with the rule."""
        super().check()
        check_whole("context", self.context, 1)
        check_whole("steps", self.steps, 1)
        if not self.methods or len(set(self.methods)) != len(self.methods):
            raise ValueError(f"methods={self.methods} must be one or more, each once")
        for text in self.methods:
            choices.make_cache(text)
        choices.read_choice("model", self.model)

    @property
    def num_threads(self) -> int:
        """CPU threads to use."""
        return self.threads[-1] or machine.num_cpus()


@dataclass(kw_only=True)
class Settings(WholeModel):
    """What to measure.

    Args:
        batches: Sequences.
        prefill_rounds: Rounds of whole prompts; 0 = none.
        quantised: transformers' quantised caches where their packages are there.
        peak: Peak memory of a prompt, each in a process of its own.
        linear: Each row once more with the model's own matrices laid so (`model.linear`), transformers' too.
    """

    batches: list[int] = field(default_factory=lambda: [1, 4])
    prefill_rounds: int = 3
    quantised: bool = True
    peak: bool = True
    linear: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises ValueError for a value out of range, with the rule."""
        super().check()
        check_list("batches", self.batches, 1)
        check_whole("prefill_rounds", self.prefill_rounds, 0)
        if unknown := [linear for linear in self.linear if linear not in MARKS]:
            raise unknown_name("linear", unknown[0], MARKS)
        own = choices.read_choice("model", self.model).get("linear", matrices.PLAIN)
        if len(set(self.linear)) != len(self.linear) or (self.linear and own != matrices.PLAIN):
            raise ValueError(
                f"linear={self.linear} beside model={self.model} would time rows twice; name each way once, and leave "
                "linear= out of model="
            )


def run(settings: Settings, progress: report.Progress = report.quiet) -> dict:
    """Measures prompt reading once and decoding at every batch size.

    Args:
        settings: What to measure.
        progress: Told what is done.

    Returns:
        The document that `kernels.bench.report` describes.
    """
    device = machine.pick_device(settings.device)
    backend = get_backend(settings.kernels, device)
    base = {"context": settings.context, "threads": settings.num_threads if device == "cpu" else 0}
    cells = [{"phase": "decode", "batch": batch, **base} for batch in settings.batches]
    if settings.prefill_rounds:
        cells.insert(0, {"phase": "prompt", "batch": 1, **base})
    bench = report.begin("decode", settings, device, backend, cells)
    peaks = measure_peaks(settings, device, bench.notes, progress) if settings.peak else {}
    models = make_models(settings, device, bench.notes)
    for cell in bench.todo(progress):
        bench.stage("reading prompts")
        timer = choose_timer(settings.clock, device, cell["threads"])
        rounds = settings.rounds
        if cell["phase"] == "prompt":
            variants, rounds = prompt_variants(settings, models), settings.prefill_rounds
        else:
            variants = [
                variant
                for mark, model in models.items()
                for variant in decode_variants(settings, model, cell["batch"], mark)
            ]
        found = measure_cell(
            cell,
            variants,
            baselines=BASELINES,
            rounds=rounds,
            seed=settings.seed,
            timer=timer,
            on_round=bench.on_round,
            warmup=int(cell["phase"] == "decode"),  # a prompt's checks have warmed up
        )
        for row in found["variants"]:
            if cell["phase"] == "prompt":
                row["peak_bytes"] = peaks.get(row["name"])
        bench.add(found)
        del variants
    document = bench.document()
    document["model"] = choices.describe_model(models[""])
    return document


def make_models(settings: Settings, device: str, notes: list[str]) -> dict[str, LoadedModel]:
    """The model by what its rows have behind their names: nothing, and those of `MARKS` that are wanted and can be
    had."""
    models = {"": choices.make_model(settings.model, device)}
    notes += filter(None, [models[""].remark])
    for linear in settings.linear:
        model = choices.make_model(f"{settings.model} linear={linear}", device)
        if model.remark:
            notes.append(f"no {linear} rows: {model.remark}")
        else:
            models[MARKS[linear]] = model
    return models


def own_kinds(settings: Settings) -> dict[str, str]:
    """Names of the rows that are transformers' own, and the cache of each that can be had here."""
    kinds = {OWN: "dynamic"}
    for kind in OWN_CACHES[1:] if settings.quantised else ():
        package = PACKAGES.get(kind.partition("-")[0])
        if package is None or _is_there(package):
            kinds[f"{OWN} {kind}"] = kind
    return kinds


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _own_decoders(settings: Settings, model: LoadedModel) -> dict[str, OwnDecoder]:
    found = {}
    for name, kind in own_kinds(settings).items():
        try:
            found[name] = OwnDecoder(model, kind)
        except ImportError:
            continue  # this transformers has no such cache
    return found


def tolerance(table: dict, model: LoadedModel) -> float:
    """The bound for a model's dtype."""
    return table.get(model.dtype, LOW_PRECISION_TOLERANCE)


def decode_variants(settings: Settings, model: LoadedModel, batch: int, mark: str = "") -> list[Variant]:
    """Every cache filled with the same prompts, ready for the same tokens; `mark` comes behind every name."""
    room = 2 * (settings.rounds + 2) * settings.steps + 2  # the baseline is timed twice in each round
    text = choices.sample_tokens(model, batch, settings.context + room)
    prompts = [tokens[: settings.context] for tokens in text]
    answers = [tokens[settings.context :] for tokens in text]
    variants = []
    for name, own in _own_decoders(settings, model).items():
        own.prefill(prompts)
        variants.append(_variant(name + mark, own, settings, answers))
    if model.device.type == "cuda":
        variants.append(static_variant(settings, model, prompts, answers, settings.context + room))
    for method in settings.methods:
        policy, options = choices.make_cache(method)
        decoder = StoreDecoder(
            model,
            policy,
            rows=batch,
            context=settings.context,
            new_tokens=room,
            kernels=settings.kernels,
            options=options,
        )
        decoder.focus()
        for prompt in prompts:
            decoder.prefill(prompt)
        variant = _variant(method + mark, decoder, settings, answers)
        variant.check = partial(decoder.reference_error, answers[0][0])
        variant.tolerance = tolerance(REFERENCE_TOLERANCE, model)
        variants.append(variant)
    return variants


def static_variant(
    settings: Settings, model: LoadedModel, prompts: list[list[int]], answers: list[list[int]], max_tokens: int
) -> Variant:
    """transformers' static cache with the step in a CUDA graph; refused with the reason where it cannot be captured."""
    try:
        static = StaticDecoder(model, max_tokens)
        static.prefill(prompts)
    except Exception as problem:  # drivers have kinds of their own; the other caches are still measured
        return failed_variant(STATIC, problem)
    return _variant(STATIC, static, settings, answers)


def _variant(name: str, decoder: OwnDecoder | StoreDecoder, settings: Settings, answers: list[list[int]]) -> Variant:
    """`steps` decode steps at a time; every timing goes on where the last one stopped."""
    state = {"at": 0}

    def call(_: int) -> None:
        for _ in range(settings.steps):
            decoder.step([answer[state["at"]] for answer in answers])
            state["at"] += 1

    extra = {"tokens_per_call": len(answers) * settings.steps, "cache_bytes": decoder.cache_bytes()}
    return Variant(name=name, call=call, before_round=decoder.focus, extra=extra)


def prompt_variants(settings: Settings, models: Mapping[str, LoadedModel]) -> list[Variant]:
    """One prompt, read into an empty cache in each timing; the first model's own answer is what all are held to."""
    exact: Tensor | None = None
    variants = []
    for mark, model in models.items():
        text = choices.sample_tokens(model, 1, settings.context + 1)[0]
        prompt, own = text[: settings.context], _own_decoders(settings, model)
        if exact is None:
            own[OWN].prefill([prompt])
            exact = _own_answer(own[OWN]).clone()
        made = [_own_prompt(name + mark, decoder, prompt, exact) for name, decoder in own.items()]
        for method in settings.methods:
            policy, options = choices.make_cache(method)
            decoder = StoreDecoder(
                model, policy, rows=1, context=settings.context, new_tokens=1, kernels=settings.kernels, options=options
            )
            made.append(_store_prompt(method + mark, decoder, prompt, exact))
        for variant in made:
            variant.tolerance = tolerance(FULL_TOLERANCE, model)
        variants += made
    return variants


def _own_answer(decoder: OwnDecoder) -> Tensor:
    """Logits behind the first of the prompts that it read last, fp32 [vocabulary]."""
    assert decoder.logits is not None, "it has read a prompt"
    return decoder.logits[0]


def _own_prompt(name: str, decoder: OwnDecoder, prompt: list[int], exact: Tensor) -> Variant:
    def call(_: int) -> None:
        decoder.prefill([prompt])

    def check() -> float:
        decoder.prefill([prompt])
        return relative(_own_answer(decoder), exact)

    return Variant(name=name, call=call, before_round=decoder.focus, check=check)


def _store_prompt(name: str, decoder: StoreDecoder, prompt: list[int], exact: Tensor) -> Variant:
    def call(_: int) -> None:
        decoder.drop(decoder.prefill(prompt))

    def check() -> float:
        decoder.focus()
        decoder.drop(decoder.prefill(prompt))
        return relative(decoder.logits[-1], exact)  # a prompt's own answer is exact for every method

    return Variant(name=name, call=call, before_round=decoder.focus, check=check)


def measure_peaks(
    settings: Settings, device: str, notes: list[str], progress: report.Progress = report.quiet
) -> dict[str, int]:
    """Bytes that reading one prompt adds at its worst moment, its cache included; each in a fresh process."""
    found = {}
    kinds, ways = own_kinds(settings), {"": "", **{MARKS[linear]: f" linear={linear}" for linear in settings.linear}}
    for name, mark in [(name, mark) for mark in ways for name in [*kinds, *settings.methods]]:
        progress(0, 1, f"peak memory of a prompt, {name}{mark}")
        order = {
            "model": settings.model + ways[mark],
            "device": device,
            "context": settings.context,
            "name": name,
            "kind": kinds.get(name),
            "kernels": settings.kernels,
            "threads": settings.num_threads,
        }
        command = [sys.executable, "-m", "kvbench.bench.peak", json.dumps(order)]
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            found[name + mark] = int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])
        except (ValueError, IndexError, KeyError):
            reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
            notes.append(f"peak memory of {name}{mark} not measured: {reason[0][:200]}")
    return found


if __name__ == "__main__":
    sys.exit(report.main("decode", Settings, QUICK, run, sys.argv[1:], package="kvbench.bench"))
