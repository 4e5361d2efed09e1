"""Requests that keep coming: what a fixed amount of KV memory serves per second, and within which latency."""

import itertools
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.bench import choices
from kvbench.bench.decode import Methods
from kvbench.cache.layout import StoreOptions
from kvbench.config.files import FULL
from kvbench.engine.engine import Engine
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.waiting import Waiting
from kvbench.kernels.bench.bench import Bench, main, setting
from kvbench.kernels.bench.rounds import Variant
from kvbench.models.load import LoadedModel
from kvbench.policy import Policy

ALL, POISSON, BURST = "all", "poisson", "burst"
SHARES = (50, 95, 99)  # percentiles of the latencies of requests
POINTS = 100  # of the pages over time
Load = list[tuple[float, int, int]]  # arrival in seconds, prompt tokens, answer tokens


@dataclass(kw_only=True)
class Settings(Methods):
    """Requests that keep coming, in a fixed amount of KV memory."""

    what = "serve"
    quick = {"rounds": 1, "kv_mb": 32, "requests": 8, "rates": [1.0, 4.0], "prompts": [32, 96], "answers": [4, 12]}

    methods: list[str] = setting(
        [FULL, "snapkv budget=0.25", "diffkv", "kivi bits=2"], "Choices of method=, as in decode."
    )
    kv_mb: int = setting(256, "MB (10^6 bytes) for everything that a cache holds: pages, tables, buffers.", 1)
    arrivals: str = setting(POISSON, "all, poisson, burst, or a file of ARRIVAL_S,PROMPT_TOKENS,ANSWER_TOKENS.")
    rates: list[float] = setting([0.5, 1.0, 2.0, 4.0, 8.0], "Requests per second, each a cell.")
    requests: int = setting(24, "Requests of a cell; of a file its first ones.", 1)
    burst: int = setting(8, "Requests that come together with arrivals=burst.", 1)
    prompts: list[int] = setting([64, 256], "Shortest and longest prompt, in tokens.", 1)
    answers: list[int] = setting([16, 48], "Shortest and longest answer, in tokens.", 2)
    max_batch: int = setting(32, "Requests at once at most.", 1)
    chunk: int = setting(0, "Tokens of a prompt that are read between two steps, for methods that can; 0 = all.", 0)
    ttft_s: float = setting(10.0, "Latency target: seconds to the first token.")
    tpot_s: float = setting(1.0, "Latency target: seconds per output token behind it.")

    def check(self) -> None:
        super().check()
        numbers = {"ttft_s": [self.ttft_s], "tpot_s": [self.tpot_s], "rates": self.rates}
        for name, values in numbers.items():
            if not values or not all(type(each) in (int, float) and 0 < each < float("inf") for each in values):
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        for name in ("prompts", "answers"):
            if len(span := getattr(self, name)) != 2 or span[0] > span[1]:
                raise ValueError(f"{name}={span} must be the shortest and the longest, for example {name}=[64,256]")
        self.load(1.0)

    def load(self, rate: float) -> Load:
        """The requests of a cell, in the order in which they come; alike for all methods, and of one seed."""
        dice = random.Random(self.seed)
        if self.arrivals not in (ALL, POISSON, BURST):
            return read_trace(Path(self.arrivals), self.requests, rate)
        gap = {ALL: lambda _: 0.0, POISSON: lambda _: dice.expovariate(rate)}.get(
            self.arrivals, lambda place: 0.0 if place % self.burst else dice.expovariate(rate / self.burst)
        )
        times = itertools.accumulate(gap(place) for place in range(self.requests))
        return [(at, dice.randint(*self.prompts), dice.randint(*self.answers)) for at in times]

    def cells(self, threads: list[int]) -> list[dict]:
        rates = [{}] if self.arrivals == ALL else [{"rate": rate} for rate in self.rates]
        return [{"arrivals": self.arrivals, **rate, "kv_mb": self.kv_mb, "threads": threads[-1]} for rate in rates]

    def prepare(self, bench: Bench) -> None:
        self._model = choices.make_model(self.model, bench.device)
        bench.more["model"] = choices.describe_model(self._model)
        bench.notes += filter(None, [self._model.remark])

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        return {"baselines": [FULL], "rounds": 1, "warmup": 0}  # a load of requests is many of both

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        load = self.load(cell.get("rate", 1.0))
        texts = choices.sample_tokens(self._model, len(load), max(tokens for _, tokens, _ in load))
        found = []
        for name in self.methods:
            serving = Serving(self, self._model, name, load, texts, bench.notes)
            extra = {"runs": serving.runs, "most_requests": serving.most_requests}
            found.append(Variant(name=name, call=serving.answer, before_round=serving.open, extra=extra))
        return found

    def finish(self, found: dict) -> None:
        """Puts latencies and rates in the place of each run's own times."""
        for row in found["variants"]:
            row |= figures(row.pop("runs"), self.ttft_s, self.tpot_s)


def read_trace(path: Path, most: int, rate: float) -> Load:
    """The first requests of a file, whose arrivals are stretched so that as many come per second in the mean."""
    found: Load = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"arrivals={path} is neither all, poisson nor burst, nor a file: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        words = line.split(",")
        try:
            at, prompt, answer = float(words[0]), *map(int, words[1:])
        except ValueError:
            at = prompt = answer = -1
        if at < 0 or prompt < 1 or answer < 2 or at != at or (found and at < found[-1][0]):
            raise ValueError(
                f"{path}:{number}: {line!r} is no ARRIVAL_S,PROMPT_TOKENS,ANSWER_TOKENS with arrivals that ascend, a "
                "prompt of at least 1 token and an answer of at least 2"
            )
        found.append((at, prompt, answer))
    found = found[:most]
    if not found:
        raise ValueError(f"arrivals={path} has no line")
    begin, span = found[0][0], found[-1][0] - found[0][0]
    stretch = (len(found) - 1) / rate / span if span else 0.0
    return [(stretch * (at - begin), prompt, answer) for at, prompt, answer in found]


class Serving:
    """A method that answers a load of requests, again for every call.

    Attributes:
        runs: Of each call: seconds to the first token and per further one of each request that was answered, its
            tokens, the seconds that all took, `oom`, preemptions, rows of every step, and bytes of pages over time.
        most_requests: Requests at once at most.
    """

    def __init__(
        self, settings: Settings, model: LoadedModel, method: str, load: Load, texts: list[list[int]], notes: list[str]
    ) -> None:
        policy, options = choices.make_cache(method)
        self._load, self.runs = load, list[dict]()
        self._requests = [
            Request(
                sample_id=str(number),
                subset="serve",
                segments=(tuple(text[:prompt]),),
                max_new_tokens=answer,
                min_new_tokens=answer,
            )
            for number, ((_, prompt, answer), text) in enumerate(zip(load, texts, strict=True))
        ]
        chunk = settings.chunk if settings.chunk and policy.in_chunks else None
        if settings.chunk and chunk is None:
            notes.append(f"{method} reads whole prompts: it cannot read them in chunks")
        self._given: dict[str, Any] = {"seed": settings.seed, "backend": settings.kernels, "fidelity_max_tokens": 0}
        self._given |= {"prefill_chunk": chunk}
        self.most_requests, budget_bytes = self._shares(settings, model, policy, options)
        options = replace(options, budget_bytes=budget_bytes)
        self._engine = Engine(model, policy, store=options, batch_size=self.most_requests, **self._given)

    def _shares(self, settings: Settings, model: LoadedModel, policy: Policy, options: StoreOptions) -> tuple[int, int]:
        """Requests at once, of which tables and buffers take at most half of the memory, and bytes for pages."""
        engine = Engine(model, policy, store=options, batch_size=1, **self._given)
        engine.open_batch(Waiting(self._requests), on_outcome=print)
        held = int(settings.kv_mb * 1e6)
        row = max(1, sum(engine.store.ledger.fixed_row_bytes()))
        most = max(1, min(settings.max_batch, held // 2 // row))
        return most, max(engine.store.pages.pool.page_bytes, held - most * row)

    def open(self) -> None:
        """Makes an empty cache, before the clock runs."""
        self._engine.runner.focus()
        self._waiting = Waiting(self._requests, arrivals_s=[at for at, _, _ in self._load])
        self._ended: dict[str, tuple[float, int]] = {}
        self._rows: list[int] = []
        self._pages: list[tuple[float, int]] = []
        self._batch = self._engine.open_batch(self._waiting, on_outcome=self._keep, on_step=self._note)

    def answer(self, _: int) -> None:
        """Answers all requests, each no sooner than it comes."""
        for _request in self._batch.answer():
            pass
        took = self._waiting.elapsed_s()
        arrived = {request.sample_id: at for request, (at, _, _) in zip(self._requests, self._load, strict=True)}
        first = self._waiting.read_s
        every = max(1, -(-len(self._pages) // POINTS))
        self.runs.append(
            {
                "ttft_s": [first[name] - arrived[name] for name in self._ended],
                "tpot_s": [(at - first[name]) / (tokens - 1) for name, (at, tokens) in self._ended.items()],
                "tokens": sum(tokens for _, tokens in self._ended.values()),
                "took_s": took,
                "oom": len(self._requests) - len(self._ended),
                "preemptions": self._batch.preemptions,
                "rows": self._rows,
                "pages": self._pages[::every],
            }
        )

    def _keep(self, outcome: Outcome) -> None:
        if outcome.status == "ok":
            self._ended[outcome.sample_id] = self._waiting.elapsed_s(), len(outcome.token_ids)

    def _note(self, step: dict) -> None:
        self._rows.append(step["live_rows"])
        self._pages.append((self._waiting.elapsed_s(), step["cache_bytes"]))


def figures(runs: list[dict], ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """What a row of the table says of its runs: percentiles of both latencies, rates per second, how many of the
    requests that were answered within both targets (`goodput_per_s`), and pages over time of the first run."""

    def every(name: str) -> list:
        return [each for run in runs for each in run[name]]

    def total(name: str) -> float:
        return sum(run[name] for run in runs)

    ttft, tpot, rows = every("ttft_s"), every("tpot_s"), every("rows")
    within = sum(first <= ttft_s and later <= tpot_s for first, later in zip(ttft, tpot, strict=True))
    return {
        **{f"ttft_p{share}_s": float(np.percentile(ttft, share)) if ttft else None for share in SHARES},
        **{f"tpot_p{share}_s": float(np.percentile(tpot, share)) if tpot else None for share in SHARES},
        "requests_per_s": len(ttft) / total("took_s"),
        "tokens_per_s": total("tokens") / total("took_s"),
        "goodput_per_s": within / total("took_s"),
        "mean_batch": sum(rows) / len(rows) if rows else 0.0,
        "preemptions": total("preemptions") / len(runs),
        "oom": total("oom") / len(runs),
        "pages": runs[0]["pages"],
    }


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
