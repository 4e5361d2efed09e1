"""`task=perplexity`: perplexity and KL of a text in llama.cpp's own protocol, through the compressed cache.

The text is cut into chunks of `n_ctx` tokens, each of which begins anew. All of a chunk goes through the cache token by
token, so that every token attends to compressed ones; its second half is measured, so that each measured token has at
least half a chunk before it.

Source: llama.cpp's `perplexity` with `--kl-divergence` (tools/perplexity/perplexity.cpp, `first = n_ctx/2`).
Differs: the full cache's logits are not rounded to 16 bits, as they are in the file of `--kl-divergence-base`; the
full cache is in the model's own type, not in f16.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from kvbench.engine.requests import Request
from kvbench.errors import SettingValue
from kvbench.rules import Whole
from kvbench.tasks.passages import begin_ids
from kvbench.tasks.stream import TextSet, TextTask
from kvbench.tasks.task import MAX_ITEMS, Ask
from kvbench.tasks.taskset import TaskSet


@dataclass(frozen=True, kw_only=True)
class Perplexity(TextTask):
    """The task; no chat template is used, there is no question, and nothing is answered.

    Args:
        file: The text; None for the documentation that ships with Python.
        chunk_tokens: Tokens of each chunk, the special token that begins it included; llama.cpp's `-c`.
        chunks: Chunks from the beginning of the text; None for as many as it has; llama.cpp's `--chunks`.
    """

    kind: ClassVar = TextSet

    chunk_tokens: Annotated[int, Whole(4, unit="tokens")] = 512
    chunks: Annotated[int | None, Whole(1, MAX_ITEMS, unit="chunks")] = 8

    def load(self, ask: Ask) -> TaskSet:
        text, model, size = self.data(ask.seed, ask.protocol), ask.model, self.chunk_tokens
        if size > model.max_tokens:
            raise SettingValue(
                f"task.chunk_tokens={size} does not fit model {model.name}, which holds {model.max_tokens} tokens; "
                "take fewer",
                setting="task.chunk_tokens",
            )
        begin = begin_ids(model)
        ids = [*begin, *model.tokenizer.encode(text.content, add_special_tokens=False)]
        wanted = ask.items(self.chunks or MAX_ITEMS) if ask.limit else self.chunks
        count = min(len(ids) // size, wanted or MAX_ITEMS)
        if count < (wanted or 1):
            raise SettingValue(
                f"the text {text.origin} has {len(ids)} tokens, and {wanted or 1} chunks of {size} take "
                f"{(wanted or 1) * size}; lower task.chunks or task.chunk_tokens, or give a longer text as task.file",
                setting="task.chunks",
            )
        requests = []
        for index in range(count):
            chunk = [*begin, *ids[index * size + len(begin) : (index + 1) * size]]  # which replace the text's, as there
            requests.append(
                Request(
                    sample_id=f"chunk/{index}",
                    subset="chunk",
                    segments=(tuple(chunk[:1]),),
                    gold=tuple(chunk[1:]),
                    warmup_tokens=size // 2,
                    max_new_tokens=0,
                    num_prompt_tokens_untruncated=1,
                    meta={"index": index, "seen": 1},
                )
            )
        notes = {"chunk_tokens": size, "chunks": count, "text": text.origin, "chat": False}
        return self.task_set(ask, requests, notes | {"measured": "second half of each chunk"})
