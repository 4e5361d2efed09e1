"""Generation through the compressed store: one prompt at a time in, many rows at once on, no padding anywhere."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.cache import ledger
from kvbench.cache.layout import StoreOptions
from kvbench.cache.store import CompressedStore, PoolExhausted
from kvbench.engine import hf
from kvbench.engine.fidelity import ChoiceMeter, FidelityMeter
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.rows import NotFinite, Row, Sample
from kvbench.engine.sampling import Answer, row_generator
from kvbench.kernels.dispatch import get_backend
from kvbench.policy import Policy

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel


class Engine:
    """Answers requests under one policy.

    Args:
        model: A loaded model; its attention is routed through kvbench from here on.
        policy: The method.
        store: Memory layout.
        batch_size: Requests whose answers are decoded together.
        seed: Base of every answer's own random generator.
        backend: `auto` or a backend's name.
        fidelity_max_tokens: Gold tokens to force per sample at most; 0 switches teacher forcing off.
        prompts: Shared by engines that run the same prompts of one model under other settings; None reads every prompt.

    Raises:
        UnsupportedModel: The model's attention cannot be held in the store.
        ValueError: batch_size < 1, or the policy does not fit the model.
    """

    def __init__(
        self,
        model: "LoadedModel",
        policy: Policy,
        *,
        store: StoreOptions,
        batch_size: int,
        seed: int,
        backend: str = "auto",
        fidelity_max_tokens: int = 64,
        prompts: PromptCache | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be >= 1")
        self.loaded, self.policy, self.options = model, policy, store
        self.batch_size, self.seed, self.fidelity_max_tokens = batch_size, seed, fidelity_max_tokens
        self.prompts = prompts or PromptCache()
        hf.attach(model.model)
        self.shape = hf.model_shape(model.model)
        self.device = self.shape.device
        self.backend = get_backend(backend, self.device)
        self.end_ids = tuple(model.eos_token_ids)

    def run(
        self,
        requests: Sequence[Request],
        *,
        on_outcome: Callable[[Outcome], None],
        on_step: Callable[[dict], None] | None = None,
        sizing: Sequence[Request] | None = None,
    ) -> None:
        """Answers requests in groups of `batch_size`, in order.

        Args:
            requests: What to answer.
            on_outcome: Called once per (sample, repeat), as soon as the sample is finished.
            on_step: Called after every decode step with `decode_tokens_per_s`, `cache_bytes`, `live_rows`.
            sizing: Requests that the page tables are sized for, when `requests` is only a part of a run: a resumed run
                must count the same bytes as an uninterrupted one.

        Raises:
            ValueError: A prompt is empty or longer than the model.
        """
        everything = list(sizing or requests)
        for request in everything:
            if not 0 < request.num_prompt_tokens < self.loaded.max_tokens or not all(request.segments):
                raise ValueError(
                    f"{request.sample_id}: a prompt of {request.num_prompt_tokens} tokens (segments "
                    f"{[len(s) for s in request.segments]}) must be > 0 and < the model's {self.loaded.max_tokens}; "
                    "truncate it in the task"
                )
        if not everything:
            return
        rows_of = [r.num_samples + bool(self._gold(r)) + len(r.choices) for r in everything]
        self.store = CompressedStore(
            self.policy,
            self.shape,
            rows=max(rows_of) * self.batch_size,
            options=self.options,
            backend=self.backend,
            max_prompt_tokens=max(r.num_prompt_tokens for r in everything),
            max_new_tokens=max(max(r.max_new_tokens, *map(len, (self._gold(r), *r.choices))) for r in everything),
        )
        self._on_outcome, self._on_step = on_outcome, on_step
        for begin in range(0, len(requests), self.batch_size):
            self._run_group(list(requests[begin : begin + self.batch_size]))

    # Groups and rows ----

    def _run_group(self, group: list[Request]) -> None:
        """Runs a group; when memory runs out, its unfinished requests run again in halves, and a single one is recorded
        as `oom`."""
        finished: set[str] = set()
        self._open: list[int] = []
        try:
            self._decode(self._prefill_group(group, finished), finished)
        except (PoolExhausted, MemoryError, torch.OutOfMemoryError) as error:
            for row in self._open:
                self.store.close_row(row)
            left = [r for r in group if r.sample_id not in finished]
            if len(left) == 1:
                self._fail(left[0], "oom", str(error) or type(error).__name__, None)
                return
            half = len(left) // 2
            self._run_group(left[:half])
            self._run_group(left[half:])

    def _prefill_group(self, group: list[Request], finished: set[str]) -> list[tuple[Row, Sample]]:
        """Prefills every request of a group on its own and opens its rows."""
        rows: list[tuple[Row, Sample]] = []
        for request in group:
            begin = time.perf_counter()
            row = self._open_row()
            try:
                logits, reference = self._prefill(row, request)
            except NotFinite as error:
                self._close(row)
                self._fail(request, "nan", str(error), error.layer)
                finished.add(request.sample_id)
                continue
            num_rows = request.num_samples + (reference is not None) + len(request.choices)
            prefill_s = None if self.prompts.limit_bytes else time.perf_counter() - begin  # replays take no prefill
            sample = Sample(request, prefill_s, num_rows)
            for repeat in range(request.num_samples):
                own = row if repeat == 0 else self._open_row(row)
                answer = Answer(request, self.loaded.tokenizer, self.end_ids, self._room(request))
                random = row_generator(self.seed, request.sample_id, repeat, self.device)
                generator = random if request.temperature > 0 else None
                rows.append((Row(own, request, repeat, logits, answer, generator=generator), sample))
            if reference is not None:
                meter = FidelityMeter(self._gold(request), reference, exact_first=len(request.segments) == 1)
                rows.append((Row(self._open_row(row), request, -1, logits, meter=meter), sample))
            for index, tokens in enumerate(request.choices):
                forced = Row(self._open_row(row), request, -1, logits, meter=ChoiceMeter(tokens), choice=index)
                rows.append((forced, sample))
        return rows

    def _prefill(self, row: int, request: Request) -> tuple[Tensor, Tensor | None]:
        """Fills a row with a prompt; returns next-token logits [vocabulary] and the full cache's log-probabilities of
        the gold tokens."""
        gold, head, *rest = self._gold(request), *request.segments
        ahead = gold[:-1] if not rest else ()
        # Gold tokens behind the prompt attend to the uncompressed prompt in the same pass: their logits are the
        # full-cache reference.
        session = hf.Session(self.store, "prefill", row, num_prompt_tokens=len(head), traces=[])
        logits = self._read(session, [*head, *ahead], num_logits=len(ahead) + 1)
        reference = logits if gold and not rest else None
        logits = logits[0]
        for segment in rest:
            logits = self._append(row, segment)
        if gold and rest:
            everything = [token for segment in request.segments for token in segment] + list(gold[:-1])
            reference = self._read(hf.Session(self.store, "dense", traces=[]), everything, num_logits=len(gold))
        meter = self.store.meters[row]
        # Averages are over the answer, not over a question fed token by token.
        meter.sum_bytes = meter.sum_ratio = meter.steps = 0
        return logits, None if reference is None else torch.log_softmax(reference, -1)

    def _read(self, session: hf.Session, tokens: list[int], num_logits: int) -> Tensor:
        """Reads a prompt, or takes it from the prompt cache; logits fp32 [num_logits, vocabulary]."""
        forward = partial(self._forward, session, [tokens], [0], num_logits)
        return self.prompts.read(session, (self.loaded.fingerprint, num_logits, *tokens), forward)[0]

    def _append(self, row: int, segment: tuple[int, ...]) -> Tensor:
        """Feeds a later prompt segment: at once where the policy only appends, else token by token like an answer."""
        if not (self.policy.acts_in_decode or self.policy.compact_every or self.store.residual is not None):
            session = hf.Session(self.store, "chunk", row, traces=[])
            return self._forward(session, [list(segment)], [int(self.store.tokens_seen[row])], num_logits=1)[0, 0]
        for token in segment:
            logits, _ = self._step([row], [token], raise_nan=True)
        return logits[0]

    def _decode(self, rows: list[tuple[Row, Sample]], finished: set[str]) -> None:
        """Decodes all rows together until each is over."""
        while rows:
            live, tokens = [], []
            for state, sample in rows:
                token = state.next_token()
                if token is None:
                    self._finish(state, sample, finished)
                else:
                    live.append((state, sample))
                    tokens.append(token)
            rows = live
            if not rows:
                return
            begin = time.perf_counter()
            logits, bad = self._step([state.row for state, _ in rows], tokens)
            elapsed = time.perf_counter() - begin
            for index, (state, _) in enumerate(rows):
                state.logits = logits[index]
                state.timing["decode_s"] += elapsed
                state.timing["decode_share_s"] += elapsed / len(rows)
                state.timing["decode_tokens"] += 1
                state.timing["row_steps"] += len(rows)
            if bad:
                rows = self._drop_bad(rows, bad, finished)
            if self._on_step:
                used = self.store.pool.num_used * self.store.pool.page_bytes
                self._on_step(
                    {"decode_tokens_per_s": len(tokens) / elapsed, "cache_bytes": used, "live_rows": len(tokens)}
                )

    def _drop_bad(
        self, rows: list[tuple[Row, Sample]], bad: dict[int, int], finished: set[str]
    ) -> list[tuple[Row, Sample]]:
        """Ends every sample that has a row with non-finite logits; `bad` maps row index to layer."""
        spoiled = {rows[index][0].request.sample_id: layer for index, layer in bad.items()}
        for state, sample in rows:
            if state.request.sample_id in spoiled:
                self._close(state.row)
                if sample.request.sample_id not in finished:
                    layer = spoiled[state.request.sample_id]
                    self._fail(sample.request, "nan", str(NotFinite(layer)), layer)
                    finished.add(sample.request.sample_id)
        return [(state, sample) for state, sample in rows if state.request.sample_id not in spoiled]

    def _finish(self, state: Row, sample: Sample, finished: set[str]) -> None:
        """Records a finished row, and hands out the sample's outcomes once all its rows are over."""
        if state.meter is not None:
            sample.take(state)
        else:
            steps = state.timing.pop("row_steps")
            state.timing["batch_rows"] = steps / state.timing["decode_tokens"] if state.timing["decode_tokens"] else 0.0
            held, kept = ledger.report(self.store, state.row)
            sample.outcomes[state.repeat] = Outcome(
                sample_id=state.request.sample_id,
                repeat=state.repeat,
                text=state.answer.text,
                token_ids=state.answer.token_ids,
                finish=state.answer.finish,
                num_prompt_tokens=state.request.num_prompt_tokens,
                ledger=held,
                kept=kept,
                timing={"prefill_s": sample.prefill_s, **state.timing},
            )
        self._close(state.row)
        sample.open_rows -= 1
        if sample.open_rows == 0:
            finished.add(sample.request.sample_id)
            for outcome in sample.outcomes.values():
                outcome.fidelity = sample.fidelity
                outcome.choices = [sample.choices[index] for index in sorted(sample.choices)]
                self._on_outcome(outcome)

    # One forward pass ----

    def _step(self, rows: list[int], tokens: list[int], raise_nan: bool = False) -> tuple[Tensor, dict[int, int]]:
        """One decode step; logits fp32 [S, vocabulary] and, for rows that are not finite, index -> first bad layer."""
        index = torch.tensor(rows, device=self.device)
        self.store.begin_step(index)
        session = hf.Session(self.store, "decode", traces=[])
        positions = self.store.tokens_seen[index].tolist()
        logits = self._forward(session, [[t] for t in tokens], positions, num_logits=1, check=False)[:, 0]
        self.store.end_step()
        finite = torch.isfinite(logits).all(1)
        if bool(finite.all()):
            return logits, {}
        bad = {i: session.first_bad_layer(i) for i in (~finite).nonzero()[:, 0].tolist()}
        if raise_nan:
            raise NotFinite(min(bad.values()))
        return logits, bad

    def _forward(
        self, session: hf.Session, tokens: list[list[int]], first: list[int], num_logits: int, check: bool = True
    ) -> Tensor:
        """Runs the model; `first` is each row's first position. Raises NotFinite when `check`."""
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.tensor(first, device=self.device)[:, None] + torch.arange(ids.shape[1], device=self.device)
        logits = hf.forward(self.loaded.model, session, ids, positions, max(first), num_logits)
        if check and not bool(torch.isfinite(logits).all()):
            raise NotFinite(session.first_bad_layer(0))
        return logits

    # Small things ----

    def _gold(self, request: Request) -> tuple[int, ...]:
        """The gold tokens that are forced; never beyond the model's context."""
        return tuple(request.gold[: min(self.fidelity_max_tokens, self._room(request) - 1)])

    def _room(self, request: Request) -> int:
        """Tokens that fit behind the prompt; the last one is only predicted, never read."""
        return self.loaded.max_tokens - request.num_prompt_tokens + 1

    def _open_row(self, source: int | None = None) -> int:
        row = self.store.open_row() if source is None else self.store.fork_row(source)
        self._open.append(row)
        return row

    def _close(self, row: int) -> None:
        self.store.close_row(row)
        self._open.remove(row)

    def _fail(self, request: Request, status: str, message: str, layer: int | None) -> None:
        for repeat in range(request.num_samples):
            failed = Outcome(sample_id=request.sample_id, repeat=repeat, status=status, message=message)
            failed.nan_layer, failed.num_prompt_tokens = layer, request.num_prompt_tokens
            self._on_outcome(failed)
