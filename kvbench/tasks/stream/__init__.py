"""`task=stream`: perplexity of a text that is read token by token through the compressed cache.

A stream begins with a prompt, which is read at once and compressed as every prompt is. All that follows is forced, one
token after the other, through the cache: what a method does while decoding decides what it holds. Nothing is answered.
With `task.past_context=true` a stream may go on beyond the model's context, where a cache of fixed size shows whether
it carries on for ever.

Source: Xiao et al. 2023 (StreamingLLM, arXiv 2309.17453), perplexity of long texts; llama.cpp's `perplexity`.
Differs: the text's first part is a prompt, so that methods that choose by a prompt's attention have one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from kvbench.engine.requests import Outcome, Request
from kvbench.errors import SettingsConflict, SettingValue
from kvbench.rules import Text, Whole
from kvbench.stats.intervals import Estimate
from kvbench.tasks.passages import LongText, check_no_question, passages, read_text
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.task import MAX_ITEMS, Ask, Task
from kvbench.tasks.taskset import MetricInfo, TaskSet


@dataclass(kw_only=True)
class TextSet(TaskSet):
    """Texts that are forced; each is judged by what was measured of its tokens."""

    def score_outcome(self, request: Request, outcome: Outcome) -> dict[str, float]:
        """See `TaskSet`."""
        return {"accuracy": float((outcome.fidelity or {})["gold_argmax_share"])}

    def aggregate(self, records: Iterable[dict]) -> dict:
        """See `TaskSet`, without answers."""
        result = super().aggregate(records)
        result.pop("answers", None)
        return result


@dataclass(kw_only=True)
class StreamSet(TextSet):
    """Streams."""

    def aggregate(self, records: Iterable[dict]) -> dict:
        """See `TextSet`; `tokens` have what the texts cost by word and by byte, too."""
        records = list(records)
        result = super().aggregate(records)
        if "tokens" in result:
            result["tokens"] |= {name: asdict(Estimate(value=value)) for name, value in by_words(records).items()}
        return result


def by_words(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The cost of texts by the word and by the byte, whatever the tokenizer; the first token after a prompt counts.

    Source: lm-eval's word_perplexity and bits_per_byte.
    """
    done = [record for record in records if record["status"] == "ok" and record.get("per_token")]
    nats = sum(math.fsum(record["per_token"]["nll"]) for record in done)
    words, size = (sum(record["meta"][name] for record in done) for name in ("words", "bytes"))
    per_word = nats / max(1, words)
    return {"word_perplexity": math.exp(min(per_word, 700.0)), "bits_per_byte": nats / math.log(2) / max(1, size)}


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """A task that forces texts and has no questions."""

    metrics: ClassVar = {"accuracy": MetricInfo(True, "share of the measured tokens that are the model's first choice")}
    primary: ClassVar = "accuracy"

    file: Annotated[str | None, Text()] = None

    def data(self, seed: int, protocol: Protocol) -> LongText:
        check_no_question(self.name, protocol)
        if protocol.num_samples > 1 or protocol.temperature or protocol.max_new_tokens:
            raise SettingsConflict(
                f"task={self.name} answers nothing; leave protocol.temperature, protocol.num_samples and "
                "protocol.max_new_tokens as they are"
            )
        return read_text(self.file)


@dataclass(frozen=True, kw_only=True)
class Stream(TextTask):
    """The task; no chat template is used, there is no question, and nothing is answered.

    Args:
        file: The text; None for the documentation that ships with Python.
        prompt_tokens: Tokens of each stream that are read at once.
        tokens: Tokens after them, read one by one.
        items: Streams; None for as many as the text has.
        past_context: Streams may go on beyond the model's context.
    """

    kind: ClassVar = StreamSet

    prompt_tokens: Annotated[int, Whole(1, unit="tokens")] = 256
    tokens: Annotated[int, Whole(2, unit="tokens")] = 1024
    items: Annotated[int | None, Whole(1, MAX_ITEMS, unit="streams")] = 8
    past_context: bool = False

    def load(self, ask: Ask) -> TaskSet:
        text, model = self.data(ask.seed, ask.protocol), ask.model
        prompt_tokens, tokens, past = self.prompt_tokens, self.tokens, self.past_context
        if prompt_tokens >= model.max_tokens or (prompt_tokens + tokens > model.max_tokens and not past):
            raise SettingValue(
                f"task.tokens={tokens} behind task.prompt_tokens={prompt_tokens} does not fit model {model.name}, "
                f"which holds {model.max_tokens} tokens; take fewer, or task.past_context=true to go on beyond it",
                setting="task.tokens",
            )
        items = ask.items(self.items or MAX_ITEMS) if ask.limit else self.items
        requests = [
            Request(
                sample_id=f"stream/{index}",
                subset="stream",
                segments=(piece.ids[:prompt_tokens],),
                gold=piece.ids[prompt_tokens:],
                max_new_tokens=0,
                num_prompt_tokens_untruncated=prompt_tokens,
                past_context=past,
                meta={"index": index, "seen": prompt_tokens, "words": piece.num_words, "bytes": piece.num_bytes},
            )
            for index, piece in enumerate(passages(model, text, prompt_tokens, tokens, items))
        ]
        notes = {"tokens": tokens, "prompt_tokens": prompt_tokens, "items": len(requests), "text": text.origin}
        return self.task_set(ask, requests, notes | {"chat": False, "past_context": past})
