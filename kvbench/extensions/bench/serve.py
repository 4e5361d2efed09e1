"""Serving benchmark: throughput and latency of a stream of requests within a fixed amount of KV memory.

Idle time is skipped: the clock jumps to the next arrival, and counts as if it had waited.
"""

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.cache.options import StoreOptions
from kvbench.config.files import FULL
from kvbench.engine.engine import Engine
from kvbench.engine.request_queue import Clock, RequestQueue
from kvbench.engine.requests import Outcome, Request
from kvbench.errors import FileContent, FileMissing, SettingsConflict, SettingValue
from kvbench.extensions.bench import times
from kvbench.extensions.bench.decode import PEER, Methods
from kvbench.extensions.bench.simulated import Here, Simulated
from kvbench.kernels.bench.bench import Bench, main, setting
from kvbench.kernels.bench.rounds import Variant, failed_variant, spread
from kvbench.policy import Policy
from kvbench.runs import choices
from kvbench.sizing.project import run

ALL, POISSON, BURST = "all", "poisson", "burst"
SHARES = (50, 95, 99)  # latency percentiles
POINTS = 100  # samples of pages over time
LOAD = ("arrivals", "requests", "burst", "prompts", "answers", "max_batch", "seed", "chunk")  # of a load
Load = list[tuple[float, int, int]]  # arrival in seconds, prompt tokens, answer tokens


@dataclass(kw_only=True)
class Settings(Methods):
    """A stream of requests, served within a fixed amount of KV memory."""

    what = "serve"
    quick = {"rounds": 1, "kv_mb": 32, "requests": 8, "rates": [1.0, 4.0], "prompts": [32, 96], "answers": [4, 12]}

    methods: list[str] = setting(
        [FULL, "snapkv budget=0.25", "diffkv", "kivi bits=2"], "Choices of method=, as in decode."
    )
    kv_mb: int = setting(96, "MB (10^6 bytes) for everything that a cache holds: pages, tables, buffers.", 1)
    arrivals: str = setting(POISSON, "all, poisson, burst, or a file of ARRIVAL_S,PROMPT_TOKENS,ANSWER_TOKENS.")
    rates: list[float] = setting([0.125, 0.25, 0.375, 0.5, 0.75], "Requests per second, each a cell.")
    requests: int = setting(16, "Requests of a cell; of a file its first ones.", 1)
    burst: int = setting(8, "Requests that come together with arrivals=burst.", 1)
    prompts: list[int] = setting([256, 768], "Shortest and longest prompt, in tokens.", 1)
    answers: list[int] = setting([64, 160], "Shortest and longest answer, in tokens.", 2)
    max_batch: int = setting(32, "Requests at once at most.", 1)
    chunk: int = setting(0, "Tokens of a prompt that are read between two steps, for methods that can; 0 = all.", 0)
    ttft_s: float = setting(5.0, "Latency target: seconds to the first token.")
    tpot_s: float = setting(1.0, "Latency target: seconds per output token behind it.")
    peers: bool = setting(True, "Also transformers' own continuous batching.")
    times: list[str] = setting(
        [], "Simulate with times from such files, a bench.json of serve, or of decode at some contexts and batches."
    )

    def check(self) -> None:
        super().check()
        if self.times and self.chunk:
            raise SettingsConflict(
                f"chunk={self.chunk}: times are of whole prompts; set chunk=0, or times=[]", setting="serve.chunk"
            )
        numbers = {"ttft_s": [self.ttft_s], "tpot_s": [self.tpot_s], "rates": self.rates}
        for name, values in numbers.items():
            if not values or not all(type(each) in (int, float) and 0 < each < float("inf") for each in values):
                raise SettingValue(f"{name}={getattr(self, name)} must be above 0", setting=f"serve.{name}")
        for name in ("prompts", "answers"):
            if len(span := getattr(self, name)) != 2 or span[0] > span[1]:
                raise SettingValue(
                    f"{name}={span} must be the shortest and the longest, for example {name}=[64,256]",
                    setting=f"serve.{name}",
                )
        self.load(1.0)

    def load(self, rate: float) -> Load:
        """Requests of a cell, by arrival; equal for all methods, from one seed."""
        dice = random.Random(self.seed)
        if self.arrivals not in (ALL, POISSON, BURST):
            return read_trace(Path(self.arrivals), self.requests, rate)
        gap = {ALL: lambda _: 0.0, POISSON: lambda _: dice.expovariate(rate)}.get(
            self.arrivals, lambda index: 0.0 if index % self.burst else dice.expovariate(rate / self.burst)
        )
        moments = itertools.accumulate(gap(index) for index in range(self.requests))
        return [(at, dice.randint(*self.prompts), dice.randint(*self.answers)) for at in moments]

    def cells(self, threads: list[int]) -> list[dict]:
        rates = [{}] if self.arrivals == ALL else [{"rate": rate} for rate in self.rates]
        return [{"arrivals": self.arrivals, **rate, "kv_mb": self.kv_mb, "threads": threads[-1]} for rate in rates]

    @property
    def reported_rounds(self) -> int:
        return len(self.methods) + (self.peers and not self.times)

    def prepare(self, bench: Bench) -> None:
        self._machines: dict[str, Here | Simulated] = {}
        if self.times:
            self._measured = times.read_times([Path(path) for path in self.times])
            bench.more["times_of"] = self._measured.device_name
            self._max_tokens = self._measured.max_tokens
            return
        self._model = choices.make_model(self.model, bench.device)
        self._max_tokens = self._model.max_tokens
        bench.more["model"] = choices.describe_model(self._model)
        bench.notes += filter(None, [self._model.remark])

    @cached_property
    def shares(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Results of `Serving` for each method and memory: concurrent requests and bytes of pages, over all rates."""
        return {}

    def timing(self, bench: Bench, cell: dict) -> dict[str, Any]:
        # A load of requests needs neither rounds nor a warm-up.
        return {"baselines": [FULL], "rounds": 1, "warmup": 0, "twice": False, "on_round": lambda: None}

    def variants(self, bench: Bench, cell: dict) -> list[Variant]:
        load = self.load(cell.get("rate", 1.0))
        longest = max(prompt + answer for _, prompt, answer in load)
        if longest > self._max_tokens:
            raise SettingValue(
                f"a prompt with its answer has {longest} tokens, and the model holds {self._max_tokens}",
                setting="serve.prompts",
            )
        texts = [[0] * prompt for _, prompt, _ in load]
        if not self.times:
            texts = choices.sample_tokens(self._model, len(load), max(map(len, texts)))
        variants = []
        for name in self.methods:
            try:
                if name not in self._machines:
                    machine = Simulated(self._measured, name) if self.times else Here(self._model, self.clock)
                    self._machines[name] = machine
                serving = Serving(self, bench, name, load, texts, self._machines[name])
            except ValueError as problem:
                variants.append(failed_variant(name, problem))
                continue
            extra = {"runs": serving.runs, "most_requests": serving.most_requests}
            if self.times:
                extra["measured"] = self._as_measured(cell, name)
            variants.append(Variant(name=name, call=serving.answer, before_round=serving.open, extra=extra))
        return [*variants, self._peer(bench, load, texts)] if self.peers and not self.times else variants

    def _peer(self, bench: Bench, load: Load, texts: list[list[int]]) -> Variant:
        """Continuous batching of transformers; refused with the reason where it is unavailable."""
        try:
            if self.clock == "cpu":
                raise ValueError("it works in a thread of its own, whose time clock=cpu does not count; set clock=wall")
            from kvbench.extensions.bench.continuous import ContinuousServing

            peer = ContinuousServing(self._model, load, texts, int(self.kv_mb * 1e6), self.max_batch)
        except (ImportError, ValueError) as problem:
            return failed_variant(PEER, problem)

        def call(index: int) -> None:
            peer.answer(index)
            bench.advance()

        extra = {"runs": peer.runs, "most_requests": self.max_batch}
        return Variant(name=PEER, call=call, before_round=peer.open, extra=extra)

    def _as_measured(self, cell: dict, method: str) -> dict | None:
        """Row of the measured documents for the same load, or None."""
        wanted = {"threads": None, **{name: getattr(self, name) for name in LOAD}}
        for settings, there in self._measured.cells:
            if {**settings, **there["cell"], "threads": None}.items() >= (wanted | cell | {"threads": None}).items():
                for row in there["variants"]:
                    if row["name"] == method:
                        return {name: row[name] for name in ("tokens_per_s", "ttft_p50_s", "tpot_p50_s")}
        return None

    def finish(self, cell: dict) -> None:
        """Replaces the recorded runs of each row by latencies and rates; `seconds` are those of the load."""
        for row in cell["variants"]:
            runs = row.pop("runs")
            row["seconds"] = [run["took_s"] for run in runs]
            row |= spread(row["seconds"]) | figures(runs, self.ttft_s, self.tpot_s)


def read_trace(path: Path, most: int, rate: float) -> Load:
    """First requests of a trace file, with arrivals scaled to a mean of `rate` per second."""
    load: Load = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise FileMissing(
            f"arrivals={path} is neither all, poisson nor burst, nor a file: {error.strerror}", setting="serve.arrivals"
        ) from error
    for number, line in enumerate(lines, 1):
        words = line.split(",")
        try:
            at, prompt, answer = float(words[0]), *map(int, words[1:])
        except ValueError:
            at = prompt = answer = -1
        if at < 0 or prompt < 1 or answer < 2 or at != at or (load and at < load[-1][0]):
            raise FileContent(
                f"{path}:{number}: {line!r} is no ARRIVAL_S,PROMPT_TOKENS,ANSWER_TOKENS with arrivals that ascend, a "
                "prompt of at least 1 token and an answer of at least 2",
                setting="serve.arrivals",
            )
        load.append((at, prompt, answer))
    load = load[:most]
    if not load:
        raise FileContent(f"arrivals={path} has no line", setting="serve.arrivals")
    begin, span = load[0][0], load[-1][0] - load[0][0]
    stretch = (len(load) - 1) / rate / span if span else 0.0
    return [(stretch * (at - begin), prompt, answer) for at, prompt, answer in load]


class Serving:
    """Answers a load of requests with one method; each call repeats the whole load.

    Args:
        machine: Makes the engine, and measures or simulates the duration of work.

    Attributes:
        runs: Per call: seconds to the first token and per further one of each answered request, its tokens, total
            seconds, `oom`, preemptions, compressions when pages ran out, rows of every step, bytes of pages over time,
            and the times of steps and prompts (`times.summary`).
        most_requests: Most concurrent requests.
    """

    def __init__(
        self,
        settings: Settings,
        bench: Bench,
        method: str,
        load: Load,
        texts: list[list[int]],
        machine: Here | Simulated,
    ) -> None:
        policy, options = choices.make_cache(method)
        self._load, self._bench, self._method, self._machine, self.runs = load, bench, method, machine, list[dict]()
        self._requests = [
            Request(sample_id=str(number), subset="serve", segments=(tuple(text[:prompt]),), max_new_tokens=answer)
            for number, ((_, prompt, answer), text) in enumerate(zip(load, texts, strict=True))
        ]
        chunk = settings.chunk if settings.chunk and policy.in_chunks else None
        if settings.chunk and chunk is None:
            bench.notes.append(f"{method} reads whole prompts: it cannot read them in chunks")
        engine_options: dict[str, Any] = {
            "seed": settings.seed,
            "backend": settings.kernels,
            "fidelity_max_tokens": 0,
            "prefill_chunk": chunk,
            "shares_pool": True,
        }
        shared = f"{method}: what a request keeps depends on its neighbours, which share the pool with it"
        if policy.compaction is not None and policy.compaction.when_full and shared not in bench.notes:
            bench.notes.append(shared)
        self._is_whole, make = chunk is None, partial(machine.engine, policy, **engine_options)
        memory = method, settings.kv_mb
        if memory not in settings.shares:
            settings.shares[memory] = self._shares(settings, make, policy, options)
        self.most_requests, budget_bytes = settings.shares[memory]
        options = replace(options, budget_bytes=budget_bytes)
        self._make = partial(make, store=options, batch_size=self.most_requests)

    def _shares(
        self, settings: Settings, make: Callable[..., Engine], policy: Policy, options: StoreOptions
    ) -> tuple[int, int]:
        """Concurrent requests, and bytes for their pages.

        As many as the memory holds with all of an average request, or, where that is more, with tables and buffers in
        half of it, since few requests are at their end at once.
        """
        engine = make(store=options, batch_size=1)
        engine.open_batch(RequestQueue(self._requests), on_outcome=print)
        held = int(settings.kv_mb * 1e6)
        row = max(1, self._machine.row_bytes(engine))
        prompt, answer = (-(-sum(each) // len(self._load)) for each in list(zip(*self._load, strict=True))[1:])
        shape = self._machine.shape_of(engine)
        whole = max(run(policy, shape, prompt, answer, options, is_even=even).resident_bytes for even in (False, True))
        most = max(1, min(settings.max_batch, max(held // 2 // row, held // whole)))
        return most, max(engine.store.pages.pool.page_bytes, held - most * row)

    def open(self) -> None:
        """Makes an empty cache, before the clock runs."""
        self._bench.stage(self._method)
        self._engine = self._make()
        self._clock = Clock(self._machine.tick)
        self._queue = _Noting(
            self._requests, arrivals_s=[at for at, _, _ in self._load], clock=self._clock, on_read=self._note_prompt
        )
        self._ended: dict[str, tuple[float, int]] = {}
        self._steps: list[tuple[int, int, float]] = []
        self._prompts: list[tuple[int, float]] = []
        self._ends: list[tuple[int, int, int]] = []
        self._pages: list[tuple[float, float]] = []
        self._busy_s = 0.0
        self._engine.end_ids = ()  # an answer has the length given by the load
        self._batch = self._engine.open_batch(self._queue, on_outcome=self._keep, on_step=self._note_step)
        self._engine.steps.warm_up(self._batch.most, max((each.prompt for each in self._requests), key=len))

    def answer(self, _: int) -> None:
        """Answers all requests, none before its arrival."""
        for _request in self._batch.answer():
            self._bench.stage(f"{self._method}, {len(self._ended)} of {len(self._requests)} requests")
        took = self._clock.now_s()
        arrived = {request.sample_id: at for request, (at, _, _) in zip(self._requests, self._load, strict=True)}
        first = self._queue.read_s
        every = max(1, -(-len(self._pages) // POINTS))
        self.runs.append(
            {
                "ttft_s": [first[name] - arrived[name] for name in self._ended],
                "tpot_s": [(at - first[name]) / (tokens - 1) for name, (at, tokens) in self._ended.items()],
                "tokens": sum(tokens for _, tokens in self._ended.values()),
                "took_s": took,
                "oom": len(self._requests) - len(self._ended),
                "preemptions": self._batch.preemptions,
                "compressions": self._batch.compressions,
                "rows": [rows for rows, _, _ in self._steps],
                "pages": self._pages[::every],
                "times": times.summary(self._steps, self._prompts, self._ends) if self._is_whole else None,
            }
        )
        del self._engine, self._batch  # the next method needs the memory
        self._bench.advance()

    def _keep(self, outcome: Outcome) -> None:
        if outcome.status == "ok":
            answered = len(outcome.token_ids)
            self._ended[outcome.sample_id] = self._clock.now_s(), answered
            self._ends.append((outcome.num_prompt_tokens, answered - 1, outcome.ledger["resident_bytes"]))

    def _lap(self) -> float:
        """Seconds of work since the last step or prompt; work between them counts for the next one."""
        before, self._busy_s = self._busy_s, self._clock.busy_s()
        return self._busy_s - before

    def _note_prompt(self, request: Request) -> None:
        self._prompts.append((request.num_prompt_tokens, self._lap()))

    def _note_step(self, step: dict) -> None:
        store, made, rows = self._engine.store, step["steps"], self._engine.runner.open_rows
        tokens = sum(store.counters.seen[row] for row in rows) - len(rows) * (made - 1) // 2  # in the middle of a run
        self._steps += [(step["live_rows"], tokens, self._lap() / made)] * made
        self._pages.append((self._clock.now_s(), step["cache_bytes"] * self._machine.share))


class _Noting(RequestQueue):
    """Queue of requests that reports when the prompt of one was read."""

    def __init__(self, *args: Any, on_read: Callable[[Request], None], **named: Any) -> None:
        super().__init__(*args, **named)
        self._on_read = on_read

    def note_read(self, request: Request) -> None:
        super().note_read(request)
        self._on_read(request)


def figures(runs: list[dict], ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """Figures of a row of the table.

    Percentiles of both latencies, rates per second, requests per second within both targets (`goodput_per_s`), and
    pages over time of the first run.
    """

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
        "mean_batch": sum(rows) / len(rows) if rows else None,
        "preemptions": None if None in (run["preemptions"] for run in runs) else total("preemptions") / len(runs),
        "compressions": sum(run.get("compressions", 0) for run in runs) / len(runs),
        "oom": total("oom") / len(runs),
        "pages": runs[0]["pages"],
        "times": runs[0]["times"],
    }


if __name__ == "__main__":
    sys.exit(main(Settings, sys.argv[1:]))
