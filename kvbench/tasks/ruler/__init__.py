"""`task=ruler`: the 13 tasks of RULER at any length, made on this machine.

Eight needle tasks, variable tracking, two that count words, and two of question answering. A length is prompt, chat
template and room for the answer together, as RULER counts it. Context, question and the beginning of the answer are
apart, so `protocol.query_aware=false` compresses before the question is seen.

The original fills its haystacks with Paul Graham's essays and takes words from the package wonderwords. Where
`task.data_dir` has no essays, or wonderwords is not installed, text and words of kvbench's own stand in. The protocol
of each row says which, and the fingerprint hashes the prompts, so that the two are never taken for the same.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024; lm-eval 0.4.13,
    tasks/ruler. tests/tasks/test_ruler_original.py compares the prompts with lm-eval's text by text.
Differs: see `needles.make`, `counts`, `chains` and `definitions.write`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.tasks.draw import Limit
from kvbench.tasks.fit import TooShort
from kvbench.tasks.prompts import RETOKENISE_SLACK_TOKENS, PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.ruler.definitions import DEFINITIONS, GENERATED, write
from kvbench.tasks.ruler.document import Document, Job
from kvbench.tasks.ruler.words import QA_FILES, Documents, documents, essays, vocabulary
from kvbench.tasks.settings import DataDir, Items, Lengths, TaskSettings, listed, name_list, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet, fingerprint

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

GROUPS = {"generated": GENERATED, "all": tuple(DEFINITIONS)}
METRICS = {
    "score": MetricInfo(True, "share of the right answers that are in the text; qa_1, qa_2: one of them is (RULER's)")
}
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of the task.

    Args:
        tasks: Names of RULER's tasks, or of `GROUPS`.
        lengths: Of prompt, chat template and answer together.
        items: Of each task and length.
        answer_prefix: The prompt ends with the beginning of the answer.
        data_dir: Folder with the essays and the files of the questions; None for text of kvbench's own.
    """

    tasks: Annotated[str | Sequence[str], names_of(tuple(DEFINITIONS), GROUPS)] = "generated"
    lengths: Lengths = (4096,)
    items: Items = 10
    answer_prefix: bool = True
    data_dir: DataDir = None


SETTINGS = {"ruler": Settings}


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Generate the documents and their requests.

    Args:
        cfg: The settings.
        model: Its tokenizer counts; its context must hold the longest length.
        limit: Items of each task and length when that is fewer.
        seed: Decides the content.
        protocol: How the samples are asked.

    Raises:
        MissingDataError: A task of question answering has no file.
        ValueError: A setting does not fit the model.
    """
    names, lengths = name_list(cfg.tasks, GROUPS), listed(cfg.lengths)
    prefix, data_dir = cfg.answer_prefix, cfg.data_dir
    items = min(cfg.items, limit.count) if limit else cfg.items
    check_lengths(lengths, model, protocol)
    maker = _Maker(model, protocol, essays(data_dir), items, seed, prefix)
    files = {name: documents(name, data_dir) for name in names if name in QA_FILES}
    requests, found = [], {}
    for name in names:
        builder = maker.builder(name)
        for length in lengths:
            for index, document in maker.documents(name, length, builder, files.get(name)):
                request = builder.build(
                    sample_id=f"{name}/{length}/{index}",
                    subset=f"{name}/{length}",
                    context=document.context,
                    question=document.question,
                    prefix=document.prefix if prefix else "",
                    gold=document.gold if prefix else document.prefix + document.gold,
                    answers=document.answers,
                    meta={"task": name, "length": length, "index": index, "answers": list(document.answers)},
                )
                if prefix:
                    builder.check_prefix()
                requests.append(request)
                found[request.sample_id] = (name, document.answers)

    def score(sample_id: str, answer: str) -> dict[str, float]:
        name, answers = found[sample_id]
        return {"score": DEFINITIONS[name].score(answer, answers)}

    return TaskSet(
        name="ruler",
        protocol=protocol.to_dict()
        | {
            "tasks": names,
            "lengths": lengths,
            "items": items,
            "seed": seed,
            "split": "before the question",
            "chat": maker.builder(names[0]).chat,
            "answer_prefix": prefix,
            "essays": maker.essays.origin,
            "words": vocabulary().origin,
        },
        fingerprint=fingerprint(requests, {key: list(answers) for key, (_, answers) in found.items()}, _FOLDER),
        requests=requests,
        metrics=METRICS,
        primary="score",
        scorer=score,
        quarantined=maker.left_out,
        by=("task", "length"),
    )


def check_lengths(lengths: list[int], model: "LoadedModel", protocol: Protocol, answers: int = 1) -> None:
    """Raises ValueError for a length that the model does not hold, beside the thoughts of so many answers."""
    thoughts = answers * (protocol.thinking_tokens or 0)
    if max(lengths) + thoughts > model.max_tokens:
        beside = f" beside {thoughts} of thoughts (protocol.thinking_tokens)" if thoughts else ""
        raise ValueError(
            f"task.lengths={lengths}: {max(lengths)}{beside} does not fit model {model.name}, which holds "
            f"{model.max_tokens} tokens; take shorter lengths"
        )


def uncut(model: "LoadedModel", protocol: Protocol, rules: PromptRules) -> PromptBuilder:
    """A builder for prompts that were made to fit: none is cut while it does."""
    usual = PromptBuilder(model, protocol, rules).max_prompt_tokens
    return PromptBuilder(model, protocol, rules, usual + RETOKENISE_SLACK_TOKENS)


class _Maker:
    """Writes the documents of one load."""

    def __init__(
        self, model: "LoadedModel", protocol: Protocol, text: Any, items: int, seed: int, prefix: bool
    ) -> None:
        self.model, self.protocol, self.essays = model, protocol, text
        self.items, self.seed, self.prefix = items, seed, prefix
        self.left_out: list[dict] = []

    def builder(self, name: str) -> PromptBuilder:
        rules = PromptRules(max_new_tokens=DEFINITIONS[name].answer_tokens, chat_template=True)
        return uncut(self.model, self.protocol, rules)

    def documents(
        self, name: str, length: int, builder: PromptBuilder, source: Documents | None
    ) -> Iterator[tuple[int, Document]]:
        """The items of one task at one length; a question whose own documents do not fit is left out and named.

        Raises:
            ValueError: None fits.
        """
        guess, needed, written = None, 0, 0
        for index in Limit(self.items).of(len(source.questions), f"ruler/{name}") if source else range(self.items):
            job = Job(
                seed=f"kvbench/ruler/{self.seed}/{name}/{index}",
                length=length,
                vocabulary=vocabulary(),
                essays=self.essays,
                documents=source,
                index=index,
            )
            try:
                document, guess = write(name, job, builder, guess, self.prefix)
            except TooShort as error:
                needed = max(needed, error.needed)
                if source is not None:
                    reason = f"its documents take {error.needed} tokens of {length}"
                    self.left_out.append({"file": source.file, "line": index + 1, "reason": f"question: {reason}"})
                continue
            written += 1
            yield index, document
        if not written:
            raise ValueError(
                f"task.lengths={length} is too short for {name}: its shortest prompt and the room for the answer take "
                f"{needed} tokens; raise the length, or leave {name} out of task.tasks"
            )
