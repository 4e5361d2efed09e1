"""transformers' own continuous batching, as a method of `bench what=serve`."""

import time
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvbench.engine.supported import model_shape
from kvbench.models.load import LoadedModel

PAGE_TOKENS = 32  # of its pages, whose default of 256 would leave half of a memory of megabytes empty
BATCH_TOKENS = 512  # of prompts and answers in one pass, of which its attention makes a mask over the whole cache
WAIT_S = 60.0  # for a result, before its thread is looked at


class ContinuousServing:
    """Answers a load of requests (arrival, prompt tokens, answer tokens) in the manager's thread.

    Every call makes a cache of `num_bytes` bytes in the model's dtype.

    Attributes:
        runs: As `serve.Serving` has them, without fields that its manager does not report: rows, pages, preemptions.
    """

    def __init__(
        self,
        model: LoadedModel,
        load: Sequence[tuple[float, int, int]],
        texts: Sequence[list[int]],
        kv_bytes: int,
        max_batch: int,
    ) -> None:
        self._model, self._load, self._texts, self.runs = model, load, texts, list[dict[str, Any]]()
        shape = model_shape(model.model)
        page_bytes = 2 * PAGE_TOKENS * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
        if kv_bytes < page_bytes:
            raise ValueError(f"{kv_bytes / 1e6:g} MB are less than a page of {page_bytes / 1e6:.1f} MB")
        self._config: dict[str, Any] = {
            "page_size": PAGE_TOKENS,
            "num_blocks": kv_bytes // page_bytes,
            "allow_block_sharing": False,
        }
        self._config |= {"max_requests_per_batch": max_batch, "max_batch_tokens": BATCH_TOKENS}

    def open(self) -> None:
        """Makes an empty cache, before the clock runs."""
        self._model.model.set_attn_implementation("sdpa")
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = ContinuousBatchingConfig(**self._config)
        model: Any = self._model.model
        self._manager = model.init_continuous_batching(generation, config)
        self._manager.warmup()

    def answer(self, _: int) -> None:
        """Answers all requests, each no sooner than it comes."""
        manager, moments, begin = self._manager, dict[int, list[float]](), time.perf_counter()
        manager.start()
        try:
            for number, ((at, prompt, answer), text) in enumerate(zip(self._load, self._texts, strict=True)):
                time.sleep(max(0.0, begin + at - time.perf_counter()))
                options: dict[str, Any] = {"request_id": str(number), "record_timestamps": True}
                manager.add_request(text[:prompt], max_new_tokens=answer, **options)
            ended = 0
            while ended < len(self._load):
                result = manager.get_result(timeout=WAIT_S)
                if result is None and not manager.is_running():
                    raise RuntimeError(f"its thread ended after {ended} of {len(self._load)} requests")
                if result is not None and result.is_finished():
                    ended += 1
                    if result.error is None and result.timestamps:
                        moments[int(result.request_id)] = [moment - begin for moment in result.timestamps]
        finally:
            manager.stop(block=True)
            manager.destroy()
            del self._manager
        self.runs.append(
            {
                "ttft_s": [each[0] - self._load[number][0] for number, each in moments.items()],
                "tpot_s": [(each[-1] - each[0]) / (len(each) - 1) for each in moments.values()],
                "tokens": sum(map(len, moments.values())),
                "took_s": max((each[-1] for each in moments.values()), default=time.perf_counter() - begin),
                "oom": len(self._load) - len(moments),
                "preemptions": None,
                "rows": [],
                "pages": [],
                "times": None,
            }
        )
