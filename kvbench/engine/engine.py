"""Generation through the compressed store: one prompt at a time in, many rows at once on, no padding anywhere."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Literal

from kvbench.cache.options import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.engine.admission import Admission
from kvbench.engine.batch import Batch
from kvbench.engine.cross_run_batch import Step, can_join
from kvbench.engine.decode_loop import DecodeLoop
from kvbench.engine.probe import plan_passes
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.reading import Reader
from kvbench.engine.request_queue import RequestQueue
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.room import PromptRoom
from kvbench.engine.rows import Sample
from kvbench.engine.runner import Runner
from kvbench.engine.supported import backend_of
from kvbench.engine.tensor_parallel import make_runner
from kvbench.errors import SettingsConflict, SettingValue, no_sys_exit
from kvbench.kernels import memory
from kvbench.kernels.bench import machine
from kvbench.kernels.graphs import Capture
from kvbench.kernels.memory import first_line, is_out_of_memory
from kvbench.kernels.names import TRITON
from kvbench.models.load import LoadedModel
from kvbench.policy import Policy

AUTO = "auto"
GROUP = 4  # requests that are answered together where nobody says how many and an answer may hang on its neighbours
FREE = "free"  # in a run's identity: rows come and go, and an answer's last bits may hang on those next to it
GPU_ROWS = 256  # of a GPU, if memory holds them
AUTO_ROWS = (
    32  # results/history/performance.md has the curve: more rows make a step of a CPU's hardly cheaper per token
)


def grouped(
    model: LoadedModel, backend: str, batch_size: int | Literal["auto"]
) -> tuple[int | Literal["auto"], int | None]:
    """Settings `batch_size` and `group` of an engine whose answers are kept.

    Groups only where the last bits of a row's products depend on the rows of its pass, which then have to be the same
    every time. On a GPU, where few rows leave it idle, `auto` has no groups all the same, and the run is `FREE`. Rows
    that would use each other's rotary tables never share a pass (`Runner.apart`).
    """
    if model.rows_are_alone and backend_of(backend, model.device).rows_are_alone:
        return batch_size, None
    if batch_size == AUTO and model.device.type != "cpu":
        return batch_size, None
    size = GROUP if batch_size == AUTO else int(batch_size)
    return size, size


class Engine:
    """Answers requests under one policy, with a loaded model whose attention is routed through kvbench from here on.

    Args:
        batch_size: Requests whose answers are decoded together at most; `auto` = `AUTO_ROWS` (of a GPU
            `GPU_ROWS`), or what memory takes.
        decode: Kernel for the attention of decode steps on a GPU, as of `backend_of`.
        group: Requests that are answered together before the next ones begin, so that neighbours are always the same;
            None = a request joins as soon as another one ends.
        seed: Base of every answer's own random numbers.
        fidelity_max_tokens: Tokens to force per sample at most, None for all; 0 switches teacher forcing off.
        fidelity_per_token: Outcomes hold the measurements of each forced token.
        prompts: Shared by engines that run the same prompts of one model under other settings; None reads every prompt.
        prefill_chunk: Tokens of a prompt that are read before the method compresses; None = all.
        capture: Capture of decode steps; `auto` = a CUDA graph on a GPU, and none elsewhere; None = none.
        make: Makes the runner; a simulation has one that runs no model.
        shares_pool: The tokens that a request keeps may depend on its neighbours, for methods that evict where pages
            run out.

    Attributes:
        gives_steps: Also yield decode steps from `running`, so that a caller can batch them across engines; only where
            no answer depends on its neighbours.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        *,
        store: StoreOptions,
        batch_size: int | Literal["auto"],
        seed: int,
        backend: str = "auto",
        decode: str = TRITON,
        group: int | None = None,
        fidelity_max_tokens: int | None = 256,
        fidelity_per_token: bool = False,
        prompts: PromptCache | None = None,
        prefill_chunk: int | None = None,
        capture: Capture | Literal["auto"] | None = "auto",
        make: Callable[..., Runner] = make_runner,
        shares_pool: bool = False,
    ) -> None:
        if isinstance(batch_size, int) and batch_size < 1:
            raise SettingValue(f"batch_size={batch_size} must be >= 1", setting="batch_size")
        how: dict[str, Any] = {"options": store, "backend": backend, "decode": decode, "prompts": prompts}
        self.runner = make(model, policy, chunk=prefill_chunk, shares_pool=shares_pool, **how)
        self.loaded, self.policy = model, policy
        self.batch_size, self.seed, self.fidelity_max_tokens = batch_size, seed, fidelity_max_tokens
        self.fidelity_per_token, self.group = fidelity_per_token, group
        self.backend, self.shape = self.runner.backend, self.runner.shape
        self.end_ids = tuple(model.eos_token_ids)
        self.steps, self.gives_steps = DecodeLoop(self.runner, capture), False
        self.room = PromptRoom(self.runner)

    @property
    def store(self) -> CompressedStore:
        return self.runner.store

    @property
    def graphs(self) -> dict[str, int]:
        """The ways in which decode steps were made (`DecodeLoop.counts`); empty without graphs, or without a step."""
        return self.steps.counts if self.steps.runs and any(self.steps.counts.values()) else {}

    @property
    def is_free(self) -> bool:
        """True if the last bits of an answer may depend on the rows that come and go."""
        return self.group is None and not (self.loaded.rows_are_alone and self.backend.rows_are_alone)

    @property
    def most_requests(self) -> int:
        """Requests at once at most."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        return AUTO_ROWS if memory.free_bytes(self.shape.device) is None else GPU_ROWS

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, special tokens shown."""
        return str(self.loaded.tokenizer.decode(list(ids)))

    @no_sys_exit()
    def run(
        self,
        requests: Sequence[Request],
        *,
        on_outcome: Callable[[Outcome], None],
        on_step: Callable[[dict], None] | None = None,
        sizing: Sequence[Request] | None = None,
        force_generated: bool = False,
    ) -> None:
        """Answers requests, in their order as far as there is room (`engine.batch`).

        Where requests that follow one another begin with the same segment, it is read and compressed once, and each of
        them goes on from there in a fork: their answers are those of separate runs.

        Args:
            on_outcome: Called once per (sample, repeat), as soon as the sample is finished.
            on_step: Called after every decode step or run of steps (`engine.decode_loop`) with `decode_tokens_per_s`,
                `cache_bytes`, `live_rows`, and how many `steps` it was.
            sizing: Requests that the page tables are sized for, when `requests` is only a part of a run: a resumed run
                must count the same bytes as an uninterrupted one.
            force_generated: Force the first answer that each request gets here, in place of its gold answer; for the
                full cache, whose answer other methods are then forced to give.
        """
        for _ in self.running(
            requests, on_outcome=on_outcome, on_step=on_step, sizing=sizing, force_generated=force_generated
        ):
            pass

    def running(
        self,
        requests: Sequence[Request],
        *,
        on_outcome: Callable[[Outcome], None],
        on_step: Callable[[dict], None] | None = None,
        sizing: Sequence[Request] | None = None,
        force_generated: bool = False,
    ) -> Generator[Request | Step]:
        """Does the work of `run`, and yields before each prompt that it reads.

        Several engines that share their prompts then take turns. With `gives_steps` it also yields each decode step,
        which may be made with those of others.
        """
        queue = RequestQueue(requests, group=self.group)
        batch = self.open_batch(
            queue, on_outcome=on_outcome, on_step=on_step, sizing=sizing, force_generated=force_generated
        )
        yield from batch.answer()

    def open_batch(
        self,
        queue: RequestQueue,
        *,
        on_outcome: Callable[[Outcome], None],
        on_step: Callable[[dict], None] | None = None,
        sizing: Sequence[Request] | None = None,
        force_generated: bool = False,
    ) -> Batch:
        """A new cache, and the batch that answers the requests that wait; the other arguments are those of `run`.

        Raises:
            ValueError: A request does not fit the model or the method.
        """
        requests, everything = queue.requests, list(sizing or queue.requests)
        forces = self.fidelity_max_tokens != 0
        runner = self.runner
        admission = Admission(
            self.loaded, self.fidelity_max_tokens, force_generated and forces, runner.lengths, runner.chunk
        )
        self._check(everything, admission)
        self.steps.shared = self.gives_steps and self.group is None and can_join(self.runner)
        reader = Reader(self.runner, self.steps, admission, requests, self.end_ids, self.seed)
        batch = Batch(
            self.runner,
            self.steps,
            reader,
            queue,
            forced_tokens=self.fidelity_max_tokens,
            per_token=self.fidelity_per_token,
            on_outcome=on_outcome,
            on_step=on_step,
            make_room=self._make_room,
            restore_room=self._restore_room,
        )
        if not everything:
            return batch
        self._measure_prompts(everything, admission, reader)
        batch.most, batch.reason = self._reserve(everything, admission, reader.contexts.num_rows)
        if not batch.reason and self.policy.byte_budget is not None:
            for request in requests:  # a budget that is too small for one stops the run before the first is read
                self.store.budget.solve(len(request.segments[0]), admission.new_tokens(request))
        return batch

    def _check(self, requests: Sequence[Request], admission: Admission) -> None:
        """Refuses requests that do not fit the model or the method."""
        for request in requests:
            admission.check(request)
        if self.policy.needs_instruction and not all(request.instruction_tokens for request in requests):
            raise SettingsConflict(
                "the method protects the instruction before the user's text, and prompts of this task begin without "
                "one; use a model with a chat template, with protocol.chat_template=auto, or protect something else",
                setting="method.protect",
            )
        if (probe := self.policy.score.probe) is not None:  # a prompt without room for it stops the run here
            for each in requests:
                prompt = each.segments[0]
                plan_passes(probe, self.loaded.tokenizer, prompt, each.closing, self.runner.probe_room(prompt))

    def _measure_prompts(self, requests: Sequence[Request], admission: Admission, reader: Reader) -> None:
        """Reads the longest prompt, where a GPU's pool has to leave room for it, into a cache for one request."""
        rows = max(admission.rows(request) for request in requests) + reader.contexts.num_rows
        sizes = self._sizes(requests, admission)
        if not self.room.applies or not self.room.begin((rows, *sizes.values())):
            return

        def read(request: Request) -> None:
            sample = Sample(request)
            try:
                for _ in reader.open(sample):
                    pass
            finally:
                reader.close(sample)
                reader.contexts.close()

        try:
            self._make_cache(rows, sizes)
        except Exception as error:
            if memory.is_out_of_memory(error):
                return  # which `_reserve` says
            raise
        self.room.measure(requests, read)

    @staticmethod
    def _sizes(requests: Sequence[Request], admission: Admission) -> dict[str, int]:
        """The longest prompt, and most tokens after one."""
        return {
            "prompt_tokens": max(request.num_prompt_tokens for request in requests),
            "new_tokens": max(admission.most_behind(request) for request in requests),
        }

    def _make_cache(self, rows: int, sizes: dict[str, int]) -> None:
        """Makes the cache for so many rows."""
        self.steps.forget()
        self._made = partial(self.runner.reserve, rows=rows, **sizes)
        self._made()

    def _make_room(self) -> bool:
        """Makes the cache anew, with a smaller pool; False where that cannot help."""
        if not self.room.shrink():
            return False
        self.steps.forget()
        self._made()
        return True

    def _restore_room(self) -> None:
        """Makes the cache anew, with its first pool, where it has a smaller one."""
        if self.room.restore():
            self.steps.forget()
            self._made()

    def _reserve(self, requests: Sequence[Request], admission: Admission, further_rows: int) -> tuple[int, str]:
        """Allocates the cache, for fewer requests at once where there is no memory for `batch_size` of them.

        Returns how many, and why not even one fits (empty: it does).
        """
        rows_of = max(admission.rows(request) for request in requests)
        sizes = self._sizes(requests, admission)
        size = self.most_requests if isinstance(self.batch_size, int) else self._that_fit(rows_of, sizes)
        size = min(size, len(requests))  # never more rows than there is to answer
        while True:
            try:
                self._make_cache(rows_of * size + further_rows, sizes)
                return size, ""
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    return size, first_line(error)
            size //= 2

    def _that_fit(self, rows_of: int, sizes: dict[str, int]) -> int:
        """Default number of concurrent requests: as many as make steps cheaper, and no more than fit.

        Each counts at its greatest length, against a GPU's pool, or against half of the free main memory, where the
        pool grows.
        """
        most, device = max(1, self.most_requests // rows_of), self.shape.device
        on_gpu = memory.free_bytes(device) is not None
        if self.runner.options.budget_bytes is not None or not (on_gpu or device.type == "cpu"):
            return most
        self._make_cache(1, sizes)
        fits = [most]
        row_bytes = 0
        for part in self.store.holding.parts:
            pages = part.pages
            part_bytes = pages.lists_per_row * pages.table.max_pages * pages.pool.page_bytes
            row_bytes += part_bytes
            if on_gpu:
                free = (memory.free_bytes(part.shape.device) or 0) + pages.pool.allocated_bytes
                room = min(self.runner.options.memory_share * free, free - self.runner.spare_bytes)
                fits.append(int(room // (part_bytes * rows_of)))
        if not on_gpu and (free_bytes := machine.available_bytes("cpu")) is not None:
            fits.append(free_bytes // 2 // (row_bytes * rows_of))
        return max(1, min(fits))
