"""A model and a compressed cache: rows of tokens in, logits out.

The engine answers requests on top of it; benches, tests and other decode loops use it directly.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.async_counts import to_device
from kvbench.cache.options import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.engine import hf
from kvbench.engine.long_logits import PIECE, Logits, read_long
from kvbench.engine.probe import Uncompressed, plan_passes
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.sessions import Decode, Dense, Prefill, PromptChunk, Replay, Segment, Session
from kvbench.engine.states import States
from kvbench.engine.supported import backend_of, check_fit, layer_kinds
from kvbench.errors import Unsupported
from kvbench.kernels import memory
from kvbench.kernels.backend import Backend
from kvbench.kernels.names import TRITON
from kvbench.models.load import LoadedModel
from kvbench.models.rotary import Lengths, forget_lengths
from kvbench.policy import Policy

LEAST_SHARE = 1e-3  # of a GPU's free memory, for the page pool


class NotFinite(ArithmeticError):
    """Logits were NaN or infinite.

    `layer` is the first layer whose attention output was not finite, -1 when none was.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(f"logits are not finite (first bad attention layer: {layer if layer >= 0 else 'none'})")
        self.layer = layer


def finite_rows(logits: Tensor, *, waits: bool = False, out: Tensor | None = None) -> Tensor:
    """Mask bool [S] of the finite rows of logits [S, vocabulary], by their extremes.

    Reading each number takes a tenth of a small model's step with many rows. Callers that may wait (`waits`) get it on
    a CPU from the sums first, which take half as long: a finite sum is of finite numbers. `out`, of integers, receives
    0 and 1.
    """
    if waits and logits.device.type == "cpu":
        finite = torch.isfinite(logits.sum(1))
        if bool(finite.all()):
            return finite
    low, high = torch.aminmax(logits, dim=1)
    return torch.lt(torch.sub(high, low, alpha=0), torch.inf, out=out)  # 0 times what is not finite is no number


class Runner:
    """Runs a model over a compressed cache, one prompt at a time in, many rows at once on, no padding anywhere.

    Call `reserve` first; a row then lives from `read` or `fork` to `close`.

    Args:
        model: A loaded model; its attention is routed through kvbench from here on (see `focus`).
        policy: The method.
        options: Memory layout.
        backend: `auto` or a backend's name.
        decode: Kernel for the attention of decode steps on a GPU, as of `backend_of`.
        prompts: Shared by runners that read the same prompts of one model under other settings; None reads every one.
        chunk: Tokens of a prompt that are read at once; the method drops or quantises what it will before it reads on.
            None = all: the prompt is read with everything before it uncompressed.
        shares_pool: A row's kept tokens may depend on other rows, for methods that evict where pages run out.

    Attributes:
        probe_s: Seconds that the second pass over the last prompt took, compression included; 0 without one.
        spare_bytes: Bytes of a GPU that the next cache's pool leaves free where its size follows from free memory.
        lengths: The model's rotary tables that depend on a row's length.

    Raises:
        UnsupportedModel: The model's attention cannot be held in the store.
        ValueError: The policy does not fit the model, or the backend cannot run here.
    """

    lengths = Lengths()
    spare_bytes = 0

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        *,
        options: StoreOptions | None = None,
        backend: str = "auto",
        decode: str = TRITON,
        prompts: PromptCache | None = None,
        chunk: int | None = None,
        shares_pool: bool = False,
    ) -> None:
        self.loaded, self.policy, self.options, self.chunk = model, policy, options or StoreOptions(), chunk
        self.prompts = prompts or PromptCache()
        shape = check_fit(model, policy, self.options, chunk, shares_pool)
        self.states, self.lengths = States(model.model, layer_kinds(model.model.config).states), model.lengths
        self.focus()
        self.shape = replace(shape, state_bytes=self.states.row_bytes)
        self.device = self.shape.device
        self.backend: Backend = backend_of(backend, self.device, decode)
        self.open_rows: list[int] = []
        self.probe_s = 0.0
        self._store: CompressedStore | None = None

    @property
    def store(self) -> CompressedStore:
        """The cache that `reserve` made."""
        if self._store is None:
            raise RuntimeError("no cache was made yet; call reserve(rows=..., prompt_tokens=..., new_tokens=...) first")
        return self._store

    def focus(self) -> None:
        """Routes the model's attention through kvbench; needed again where others used the same model in between."""
        hf.attach(self.loaded.model)

    def reserve(self, *, rows: int, prompt_tokens: int, new_tokens: int) -> None:
        """Makes an empty cache for sequences held at once, the longest prompt, and most tokens added after a prompt."""
        options = self.options
        self.open_rows, self._store = [], None  # the old cache goes before the new one comes
        self.states.clear()
        if self.spare_bytes and (free := memory.free_bytes(self.device)) is not None:
            share = max(LEAST_SHARE, 1 - self.spare_bytes / free)
            options = replace(options, memory_share=min(options.memory_share, share))
        self._store = CompressedStore(
            self.policy,
            self.shape,
            rows=rows,
            options=options,
            backend=self.backend,
            max_prompt_tokens=prompt_tokens,
            max_new_tokens=new_tokens,
        )
        self._store.enable_replay_check()

    # Rows.

    def read(
        self,
        prompt: Sequence[int],
        lookahead: Sequence[int] = (),
        new_tokens: int | None = None,
        instruction_tokens: int = 0,
        closing: Sequence[int] = (),
    ) -> tuple[int, Logits]:
        """Reads a prompt into a new row.

        Args:
            prompt: Token ids; they are compressed and kept.
            lookahead: Token ids after the prompt that are read in the same pass and not kept. They attend to the
                uncompressed prompt, so their logits are those of the full cache.
            new_tokens: Most tokens that will follow the prompt, which a budget in bytes has to have room for; None = as
                many as were reserved.
            instruction_tokens: First tokens of the prompt that are its instruction, for methods that need it.
            closing: Token ids that close the user's text and open the answer, for methods with a probe; empty outside
                of chats.

        Returns:
            The row, and logits fp32 [1 + len(lookahead), vocabulary]: after the prompt and after each token ahead; of
            many they are made when they are looked at.

        Raises:
            NotFinite: A logit is not finite; no row is open.
            PoolExhausted: No room; no row is open.
            ValueError: Tokens ahead of a prompt that is read in chunks, which is nowhere uncompressed, or of a model
                whose layers hold a state.
        """
        if lookahead and self.states.row_bytes:
            raise Unsupported(
                f"{len(lookahead)} tokens ahead cannot be read with a prompt where layers hold a state, which would be "
                "the one behind them; take full_logits for them"
            )
        if lookahead and self.reads_in_chunks(prompt):
            raise Unsupported(
                f"{len(lookahead)} tokens ahead cannot be read with a prompt of {len(prompt)} tokens in chunks of "
                f"{self.chunk}, which is nowhere uncompressed; take full_logits for them"
            )
        if self.reads_in_chunks(prompt):
            *_, row_and_logits = self.read_chunks(prompt, new_tokens, instruction_tokens)
            assert row_and_logits is not None, "it comes with the last chunk"
            return row_and_logits
        row = self._opened(self.store.open_row(new_tokens, min(instruction_tokens, len(prompt))))
        held = Uncompressed(self.store) if self.policy.score.probe is not None else None
        session = Prefill(self.store, row, len(prompt), held)
        session.states = self.states.of([row])
        try:
            logits = self._read(session, [*prompt, *lookahead], len(lookahead) + 1, tuple(closing) if held else ())
            if self.chunk is not None:
                self.store.ledger.note_whole(row)
            return row, logits
        except BaseException:
            self.close(row)
            raise

    def reads_in_chunks(self, prompt: Sequence[int]) -> bool:
        """True if a prompt is longer than a chunk."""
        return self.chunk is not None and len(prompt) > self.chunk

    def read_chunks(
        self, prompt: Sequence[int], new_tokens: int | None = None, instruction_tokens: int = 0
    ) -> Iterator[tuple[int, Tensor] | None]:
        """Reads a prompt into a new row chunk by chunk, as `read` does; other rows may make steps in between.

        Yields None after every chunk but the last, then the result of `read`; after an early close no row is open.

        The first chunk is the shorter one where the prompt is no multiple, so that the last queries, which many methods
        rank by, are a whole chunk's. No prompt cache is used: the tokens that a chunk sees depend on the method's plans
        for those before.
        """
        assert self.chunk is not None
        row = self._opened(self.store.open_row(new_tokens, min(instruction_tokens, len(prompt))))
        try:
            self.probe_s = 0.0
            self.store.open_chunks(row, len(prompt))
            begin, end = 0, len(prompt) % self.chunk or self.chunk
            while begin < len(prompt):
                if begin:
                    yield None
                session = PromptChunk(self.store, row)
                session.states = self.states.of([row])
                logits = self._forward(session, [list(prompt[begin:end])], [begin], num_logits=1)[0]
                begin, end = end, end + self.chunk
        except BaseException:
            self.close(row)
            raise
        yield row, logits

    def full_logits(self, tokens: Sequence[int], num_logits: int) -> Logits:
        """Logits fp32 [num_logits, vocabulary] at the end of a text that is read with the full cache.

        Keeps nothing, and raises NotFinite.
        """
        session = Dense(self.store)
        session.states = self.states.anew()
        return self._read(session, list(tokens), num_logits)

    def append(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Reads more tokens into a row: at once where the policy only appends, else one by one like an answer.

        Returns logits fp32 [vocabulary] after the last of them; raises NotFinite.
        """
        if self.store.takes_chunks:
            session = Segment(self.store, row)
            session.states = self.states.of([row])
            seen = self.store.counters.seen[row]
            return self._forward(session, [list(tokens)], [seen], num_logits=1)[0, 0]
        for token in tokens:
            logits = self.step([row], [token])
        return logits[0]

    def step(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Feeds one token to every row. Returns logits fp32 [S, vocabulary] after them; raises NotFinite."""
        logits, bad = self.try_step(rows, tokens)
        if bad:
            raise NotFinite(min(bad.values()))
        return logits

    def try_step(self, rows: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, dict[int, int]]:
        """Makes a `step` in which rows with non-finite logits do not stop the others.

        Also returns their index in `rows` and the first layer whose attention output was not finite (-1: none was).
        """
        if len(parts := self.apart(rows)) > 1:
            return self._steps(parts, rows, tokens)
        self.store.begin_step(rows)
        session = Decode(self.store)
        session.states = self.states.of(rows)
        positions = [self.store.counters.seen[row] for row in rows]
        logits = self._forward(session, [[token] for token in tokens], positions, num_logits=1, check=False)[:, 0]
        self.store.end_step()
        finite = finite_rows(logits, waits=True)
        if bool(finite.all()):
            return logits, {}
        return logits, {i: session.first_bad_layer(i) for i in (~finite).nonzero()[:, 0].tolist()}

    def apart(self, rows: Sequence[int]) -> list[list[int]]:
        """Divides rows, by index, into those whose next tokens one pass may read.

        Others would use each other's rotary tables. Almost every model reads all of them together.
        """
        parts: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(rows):
            kind = self.lengths.kind(self.store.counters.seen[row] + 1) if self.lengths else ()
            parts.setdefault(kind, []).append(index)
        return list(parts.values())

    def _steps(
        self, parts: list[list[int]], rows: Sequence[int], tokens: Sequence[int]
    ) -> tuple[Tensor, dict[int, int]]:
        """Result of `try_step`, by one pass for each part."""
        by_row: dict[int, Tensor] = {}
        bad: dict[int, int] = {}
        for part in parts:
            logits, wrong = self.try_step([rows[index] for index in part], [tokens[index] for index in part])
            by_row.update(zip(part, logits, strict=True))
            bad.update({part[at]: layer for at, layer in wrong.items()})
        return torch.stack([by_row[index] for index in range(len(rows))]), bad

    def compact(self, rows: Sequence[int]) -> None:
        """Evicts in bulk from rows, where the method does so once pages run out (`CompressedStore.compact`)."""
        self.store.compact(rows)

    def fork(self, row: int, *, share: bool = True) -> int:
        """Opens a row that holds what another one holds; `share` as in `CompressedStore.fork_row`."""
        fork = self._opened(self.store.fork_row(row, share=share))
        self.states.fork(row, fork)
        return fork

    def close(self, row: int) -> None:
        """Forgets a row and returns its pages."""
        self.store.close_row(row)
        self.states.close(row)
        self.open_rows.remove(row)

    def close_all(self) -> None:
        """Forgets every open row."""
        for row in list(self.open_rows):
            self.close(row)

    def bytes(self, row: int) -> int:
        """Bytes that a row really holds."""
        return self.store.ledger.row_bytes(row)

    def report(self, row: int) -> tuple[dict, dict]:
        """The bytes of a row and the tokens it kept, as `Ledger.report` gives it."""
        return self.store.ledger.report(row)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, list[int]]:
        """Greedy continuation of one prompt, token by token, up to the model's end token.

        Returns the row, still open, and the new token ids.
        """
        row, logits = self.read(prompt)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < max_new_tokens and tokens[-1] not in self.loaded.eos_token_ids:
            tokens.append(int(self.step([row], tokens[-1:])[0].argmax()))
        return row, tokens

    # Forward passes.

    def _opened(self, row: int) -> int:
        self.open_rows.append(row)
        return row

    def _read(self, session: Dense, tokens: list[int], num_logits: int, closing: tuple[int, ...] = ()) -> Logits:
        """Reads a prompt, or takes it from the prompt cache; logits fp32 [num_logits, vocabulary]."""
        self.probe_s = 0.0

        def forward() -> Logits:
            # Later, other processes would not make theirs; layers that share keys may read the last tokens alone.
            if num_logits <= PIECE or self.shape.ranks.size > 1 or self.shape.shared:
                logits: Logits = self._forward(session, [tokens], [0], num_logits)[0]
            else:
                logits = read_long(self.loaded.model, num_logits, lambda: self._forward(session, [tokens], [0], 1))
                if not logits.is_finite:
                    raise NotFinite(session.first_bad_layer(0))
            if session.uncompressed is not None:
                self._probe(session, tokens[: session.num_prompt_tokens], closing)
            return logits

        return self.prompts.read(session, (self.loaded.decides, num_logits, *tokens), forward, closing)

    def probe_room(self, prompt: Sequence[int]) -> int:
        """Tokens that a prompt and a pass after it may have together."""
        return min(self.loaded.max_tokens, self.lengths.limit(len(prompt)))

    def _probe(self, session: Dense, prompt: list[int], closing: tuple[int, ...]) -> None:
        """Makes the passes of the policy's probe, and then compresses the prompt."""
        probe, held, begin = self.policy.score.probe, session.uncompressed, time.perf_counter()
        assert probe is not None and held is not None
        passes = plan_passes(probe, self.loaded.tokenizer, prompt, closing, self.probe_room(prompt))
        for each in passes:
            held.part = each.first, each.end
            replay = Replay(self.store, held)
            replay.states = self.states.copied(session.row)
            self._forward(replay, [list(each.tokens)], [len(prompt)], num_logits=1)
        session.replay_tokens = sum(len(each.tokens) for each in passes)
        session.held_bytes = held.compress(session.row, session.replay_tokens)
        self.probe_s = time.perf_counter() - begin

    def _forward(
        self, session: Session, tokens: list[list[int]], first: list[int], num_logits: int, check: bool = True
    ) -> Tensor:
        """Runs the model; `first` is each row's first position. Raises NotFinite when `check`."""
        ids = to_device(tokens, self.device)
        positions = to_device(first, self.device)[:, None] + torch.arange(ids.shape[1], device=self.device)
        if self.lengths:
            forget_lengths(self.loaded.model)
        logits = hf.forward(self.loaded.model, session, ids, positions, max(first), num_logits)
        if check and not bool(finite_rows(logits.flatten(0, 1), waits=True).all()):
            raise NotFinite(session.first_bad_layer(0))
        return logits
