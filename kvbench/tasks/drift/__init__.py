"""`task=drift`: long answers, and how far a compressed cache strays from the full one along them.

The full cache goes on from a piece of text for so many tokens; nothing ends it before. Every method is then forced to
give the same tokens, and each token's KL, first choice and NLL are kept (`conf/task/drift.yaml` sets `fidelity` so).
Every method also answers freely, which shows its repetitions, and how often it would have ended before.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, ClassVar

from kvbench.engine.requests import Outcome, Request
from kvbench.errors import SettingValue
from kvbench.rules import Number, Text, Whole
from kvbench.stats.intervals import estimate
from kvbench.stats.repetition import GRAM, longest_loop, repeated_share
from kvbench.tasks.passages import LongText, check_no_question, passages, read_text
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.task import Ask, Items, Task
from kvbench.tasks.taskset import MetricInfo, TaskSet


@dataclass(kw_only=True)
class DriftSet(TaskSet):
    """The task; answers are judged by their tokens and their end tokens."""

    def score_outcome(self, request: Request, outcome: Outcome) -> dict[str, float]:
        """See `TaskSet`."""
        ids = outcome.token_ids
        return {
            "repetition": repeated_share(ids),
            "loop": longest_loop(ids) / len(ids) if ids else 0.0,
            "early_stop": float(outcome.first_end is not None),
        }

    def aggregate(self, records: Iterable[dict]) -> dict:
        """See `TaskSet`, and `free`: each score over the free answers."""
        records = list(records)
        result = super().aggregate(records)
        by_metric: dict[str, dict[str, list[float]]] = {name: {} for name in self.metrics}
        for record in records:
            if record["status"] == "ok":
                for name in self.metrics:
                    by_metric[name].setdefault(record["sample_id"], []).append(record["scores"][name])
        result["free"] = {
            name: asdict(estimate({"": [sum(v) / len(v) for v in values.values()]}, bounds=(0.0, 1.0)))
            for name, values in by_metric.items()
            if values
        }
        return result


@dataclass(frozen=True, kw_only=True)
class Drift(Task):
    """The task; no chat template is used, and there is no question.

    Args:
        tokens: Tokens of an answer.
        prompt_tokens: Tokens of the text that an answer continues.
        items: Answers.
        file: The text; None for the documentation that ships with Python.
        temperature: Temperature of the answers, where the protocol is greedy.
        top_p: As `temperature`, for nucleus sampling.
    """

    metrics: ClassVar = {
        "repetition": MetricInfo(False, f"share of the answer's {GRAM}-grams of tokens that stand earlier in it, too"),
        "loop": MetricInfo(
            False, "share of the answer in its longest loop: the same tokens three times in a row or more"
        ),
        "early_stop": MetricInfo(False, "the answer would have ended before its length"),
    }
    primary: ClassVar = "repetition"
    kind: ClassVar = DriftSet

    tokens: Annotated[int, Whole(2, unit="tokens")] = 1024
    prompt_tokens: Annotated[int, Whole(2, unit="tokens")] = 256
    items: Items = 8
    file: Annotated[str | None, Text()] = None
    temperature: Annotated[float, Number(1e-3, 100, unit="the logits' units", also=(0,))] = 0.7
    top_p: Annotated[float, Number(1e-9, 1, unit="probability mass")] = 0.95

    def data(self, seed: int, protocol: Protocol) -> LongText:
        check_no_question("drift", protocol)
        return read_text(self.file)

    def load(self, ask: Ask) -> TaskSet:
        text = self.data(ask.seed, ask.protocol)
        if ask.protocol.temperature == 0:
            ask = replace(ask, protocol=replace(ask.protocol, temperature=self.temperature, top_p=self.top_p))
        protocol, model = ask.protocol, ask.model
        tokens, prompt_tokens = protocol.max_new_tokens or self.tokens, self.prompt_tokens
        if prompt_tokens + tokens > model.max_tokens:
            raise SettingValue(
                f"task.tokens={tokens} behind task.prompt_tokens={prompt_tokens} does not fit model {model.name}, "
                f"which holds {model.max_tokens} tokens; take fewer",
                setting="task.tokens",
            )
        items = ask.items(self.items)
        requests = [
            Request(
                sample_id=f"text/{index}",
                subset="text",
                segments=(piece.ids,),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                temperature=protocol.temperature,
                top_p=protocol.top_p,
                num_samples=protocol.num_samples,
                num_prompt_tokens_untruncated=len(piece.ids),
                meta={"index": index},
            )
            for index, piece in enumerate(passages(model, text, prompt_tokens, 0, items))
        ]
        notes = {"tokens": tokens, "prompt_tokens": prompt_tokens, "items": items, "text": text.origin, "chat": False}
        return self.task_set(ask, requests, notes | {"end": "not before the last token"})
