"""`task=custom`: questions of the user's own, from a JSONL file, graded by a metric chosen by name.

A row has `context`, `question` and `answers`, or `messages` and `answers`. Models with a chat template get a chat
(`protocol.chat_template=never` for none). With `turns`, further questions and their answers, a row is a
conversation: each question is read into the compressed cache after the answer before it. With
`protocol.query_aware=false` the context is compressed before the question is seen; of messages, the last one is the
question and the others are the context. A broken row is named by file and line, and the rest run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvbench.errors import Unsupported
from kvbench.rules import Choice, Several, Text, Whole
from kvbench.tasks.chat import render_chat, system_messages
from kvbench.tasks.choices import ChoiceSet, choice_request
from kvbench.tasks.custom.dataset import read_file
from kvbench.tasks.custom.metrics import ABSENT, CHOICE, CHOICE_MEANING, METRICS, REGEX, SCORES, grade
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.rows import Rows
from kvbench.tasks.task import Ask, Task
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.engine.requests import Request


# Settings whose names rows carry to say where they are from.
_FREE_FIELDS = ("name", "file", "date")


@dataclass(frozen=True, kw_only=True)
class Custom(Task):
    """The task; a prompt that is too long for the model loses its middle.

    Args:
        file: The JSONL file.
        metric: Metric of the answers.
        separator: Between context and question.
        answer_prefix: Beginning of the answer.
        max_new_tokens: Length limit of an answer.
        stop: Texts that end an answer.
    """

    kind: ClassVar = ChoiceSet

    file: Annotated[str, Text()]
    metric: Annotated[str, Choice(METRICS)] = "f1"
    separator: Annotated[str, Text(empty=True)] = "\n\n"
    answer_prefix: Annotated[str, Text(empty=True)] = ""
    max_new_tokens: Annotated[int, Whole(1, unit="tokens")] = 128
    stop: Annotated[str | Sequence[str] | None, Several(Text(), alone=Text(), least=0)] = ()

    def data(self, seed: int, protocol: Protocol) -> Rows:
        named = [("task", item.name) for item in fields(self)] + [("protocol", item.name) for item in fields(protocol)]
        settings = [f"{group}.{name}" for group, name in named if name not in _FREE_FIELDS]
        return read_file(self.file, self.metric, requires_context=not protocol.query_aware, settings=settings)

    def load(self, ask: Ask) -> TaskSet:
        rows, metric = self.data(ask.seed, ask.protocol), self.metric
        asker = _Asker(ask, self)
        subsets: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            subsets.setdefault(row["subset"], []).append(row)
        chosen = [row for name, some in subsets.items() for row in ask.drawn(some, name)]
        requests = [asker.choices(row) if metric == CHOICE else asker.answer(row) for row in chosen]
        rows_by_id = {request.sample_id: row for request, row in zip(requests, chosen, strict=True)}

        def score_turn(sample_id: str, turn: int, answer: str) -> dict[str, float]:
            row = rows_by_id[sample_id]
            answers = row["turns"][turn - 1]["answers"] if turn else row["answers"]
            return {"score": grade(metric, answer, answers)}

        notes: dict[str, Any] = {"file": Path(rows.file).name, "metric": metric, "split": "before the question"}
        notes |= {"chat": asker.chat, "separator": self.separator, "answer_prefix": self.answer_prefix}
        return self.task_set(
            ask,
            requests,
            notes | {"truncation": "middle", "thoughts": "not graded"},
            {key: [metric, row["answers"], row["turns"]] for key, row in rows_by_id.items()},
            lambda sample_id, answer: score_turn(sample_id, 0, answer),
            metrics={"score": MetricInfo(True, CHOICE_MEANING if metric == CHOICE else SCORES[metric][1])},
            turn_scorer=score_turn,
            rows=[rows],
            right={key: row["choices"].index(row["answers"][0]) for key, row in rows_by_id.items() if row["choices"]},
        )


class _Asker:
    """Makes the requests of rows; answers that are patterns, or may not be given, are not forced."""

    def __init__(self, ask: Ask, task: Custom) -> None:
        self.model, self.protocol, self.forces = ask.model, ask.protocol, task.metric not in (REGEX, ABSENT)
        self.separator, self.prefix = task.separator, task.answer_prefix
        stop = (task.stop,) if isinstance(task.stop, str) else tuple(task.stop or ())
        rules = PromptRules(max_new_tokens=task.max_new_tokens, stop=stop, chat_template=True)
        self.texts = PromptBuilder(ask.model, ask.protocol, rules)
        self.chat = self.texts.chat
        self.rendered = PromptBuilder(ask.model, ask.protocol, rules, rendered=True)

    def answer(self, row: dict[str, Any]) -> "Request":
        """The request whose answer is written by the model."""
        builder, context, question = self.texts, *self._parts(row)
        if self.chat and row["messages"] is not None:
            builder = self.rendered
        return builder.build(
            **_known(row),
            **self._right(row),
            context=context,
            question=question,
            turns=[
                builder.turn(turn["question"], **self._right(turn), separator=self.separator) for turn in row["turns"]
            ],
        )

    def _right(self, row: dict[str, Any]) -> dict[str, Any]:
        """Beginning of the answer to a row or turn, and the right answers."""
        answers = row["answers"]
        return {"prefix": self.prefix, "answers": answers, "gold": answers[0] if self.forces else ""}

    def choices(self, row: dict[str, Any]) -> "Request":
        """The request whose choices are scored."""
        context, question = self._parts(row)
        if self.chat and row["messages"] is None:
            context, question = self._rendered([{"role": "user", "content": context + question}], question)
        prefix = self.prefix.lstrip() if (context + question)[-1:].isspace() else self.prefix
        space = "" if (context + question + prefix)[-1:].isspace() else " "
        if not self.chat and self.protocol.system is not None:
            context = f"{self.protocol.system}\n\n{context}"
        if self.protocol.query_aware:
            context, question = context + question, ""
        return choice_request(
            self.model,
            **_known(row),
            context=context if question else context + prefix,
            question=question + prefix if question else "",
            continuations=[space + choice for choice in row["choices"]],
            rendered=self.chat,
            gold=row["choices"].index(row["answers"][0]),
        )

    def _parts(self, row: dict[str, Any]) -> tuple[str, str]:
        """Context and question as they stand in the prompt; messages as the chat template writes them."""
        messages = row["messages"]
        if messages is None:
            return (row["context"], self.separator + row["question"]) if row["context"] else ("", row["question"])
        if self.chat:
            return self._rendered(messages, messages[-1]["content"])
        *before, last = [message["content"] for message in messages]
        return (self.separator.join(before), self.separator + last) if before else ("", last)

    def _rendered(self, messages: list[dict[str, str]], question: str) -> tuple[str, str]:
        system = system_messages(self.protocol)
        if system and messages[0]["role"] == "system":  # templates take one
            system[0]["content"] += "\n\n" + messages[0]["content"]
            messages = messages[1:]
        text = render_chat(self.model, [*system, *messages], self.protocol)
        start = text.rfind(question.strip())
        if start < 0:
            if not self.protocol.query_aware:
                raise Unsupported(
                    f"protocol.query_aware=false needs the question inside the chat template unchanged, but the "
                    f"template of model {self.model.name} alters it; set protocol.chat_template=never",
                    setting="protocol.query_aware",
                )
            start = len(text)
        return text[:start], text[start:]


def _known(row: dict[str, Any]) -> dict[str, Any]:
    """Id of a request, and the fields of the row that its record keeps."""
    kept = {key: row[key] for key in ("index", "id", "answers")}
    return {"sample_id": f"{row['subset']}/{row['index']}", "subset": row["subset"], "meta": kept}
