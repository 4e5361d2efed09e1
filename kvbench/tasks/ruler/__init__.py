"""`task=ruler`: the 13 tasks of RULER at any length, made on this machine.

Eight needle tasks, variable tracking, two that count words, and two of question answering. A length is prompt, chat
template and room for the answer together, as RULER counts it. Context, question and the beginning of the answer are
apart, so `protocol.query_aware=false` compresses before the question is seen.

The original fills its haystacks with Paul Graham's essays and takes words from the package wonderwords. Where
`task.data_dir` has no essays, or wonderwords is not installed, text and words of kvbench's own stand in. The protocol
of each row says which, and the fingerprint hashes the prompts, so that the two are never taken for the same.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024; lm-eval 0.4.13,
    tasks/ruler. tests/tasks/test_ruler_original.py compares the prompts with lm-eval's text by text.
Differs: see `makers` and `definitions.write`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvbench.errors import SettingValue
from kvbench.tasks.fill import TooShort
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.ruler.definitions import DEFINITIONS, GENERATED, write
from kvbench.tasks.ruler.document import Job, check_lengths, uncut
from kvbench.tasks.ruler.words import ESSAYS, QA_FILES, Documents, Essays, documents, essays, has_files, vocabulary
from kvbench.tasks.task import Ask, DataDir, Items, Lengths, Limit, Task, listed, name_list, names_of
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.engine.requests import Request

GROUPS = {"generated": GENERATED, "all": tuple(DEFINITIONS)}


@dataclass(frozen=True, kw_only=True)
class Ruler(Task):
    """The task.

    Args:
        tasks: Names of RULER's tasks, or of `GROUPS`.
        lengths: Tokens of prompt, chat template and answer together.
        items: Items per task and length.
        answer_prefix: The prompt ends with the beginning of the answer.
        data_dir: Folder with the essays and the files of the questions; None for text of kvbench's own.
    """

    metrics: ClassVar = {
        "score": MetricInfo(
            True, "share of the right answers that are in the text; qa_1, qa_2: one of them is (RULER's)"
        )
    }

    tasks: Annotated[str | Sequence[str], names_of(tuple(DEFINITIONS), GROUPS)] = "generated"
    lengths: Lengths = (4096,)
    items: Items = 10
    answer_prefix: bool = True
    data_dir: DataDir = None

    def data(self, seed: int, protocol: Protocol) -> tuple[Essays, dict[str, Documents]]:
        names = name_list(self.tasks, GROUPS)
        qa_names = [name for name in names if name in QA_FILES]
        return essays(self.data_dir, needed=not qa_names), {name: documents(name, self.data_dir) for name in qa_names}

    @classmethod
    def reads_folder(cls, folder: str) -> bool:
        return has_files(folder, [*ESSAYS, *(name for listed in QA_FILES.values() for name in listed)])

    def load(self, ask: Ask) -> TaskSet:
        names, lengths, items = name_list(self.tasks, GROUPS), listed(self.lengths), ask.items(self.items)
        check_lengths(lengths, ask)
        text, files = self.data(ask.seed, ask.protocol)
        requests: list[Request] = []
        answers: dict[str, tuple[str, tuple[str, ...]]] = {}
        left_out: list[dict] = []
        for name in names:
            builder = uncut(ask, DEFINITIONS[name].answer_tokens)
            for length in lengths:
                subset, source, guess, needed, before = f"{name}/{length}", files.get(name), None, 0, len(requests)
                indices = Limit(items).of(len(source.questions), f"ruler/{name}") if source else range(items)
                for index in indices:
                    job = Job(f"kvbench/ruler/{ask.seed}/{name}/{index}", length, text, source, index)
                    try:
                        document, guess = write(name, job, builder, guess, self.answer_prefix)
                    except TooShort as error:
                        needed = max(needed, error.needed)
                        if source is not None:  # the other questions are asked
                            reason = f"question: its documents take {error.needed} tokens of {length}"
                            left_out.append({"file": source.file, "line": index + 1, "reason": reason})
                        continue
                    meta = {"task": name, "length": length, "index": index}
                    requests.append(document.request(builder, f"{subset}/{index}", subset, meta))
                    answers[f"{subset}/{index}"] = (name, document.answers)
                if len(requests) == before:
                    raise SettingValue(
                        f"task.lengths={length} is too short for {name}: its shortest prompt and the room for the "
                        f"answer take {needed} tokens; raise the length, or leave {name} out of task.tasks",
                        setting="task.lengths",
                    )

        def score(sample_id: str, answer: str) -> dict[str, float]:
            name, right = answers[sample_id]
            return {"score": DEFINITIONS[name].score(answer, right)}

        notes: dict[str, Any] = {"tasks": names, "lengths": lengths, "items": items, "seed": ask.seed}
        notes |= {"split": "before the question", "chat": builder.chat, "answer_prefix": self.answer_prefix}
        return self.task_set(
            ask,
            requests,
            notes | {"essays": text.origin, "words": vocabulary().origin},
            {key: list(right) for key, (_, right) in answers.items()},
            score,
            quarantined=left_out,
            by=("task", "length"),
        )
