"""Tasks of problems that are answered right or wrong.

Requests, graders, and the aggregation of many answers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvbench.engine.requests import Request
from kvbench.errors import FileContent, SettingsConflict
from kvbench.rules import Choice
from kvbench.tasks.lmeval import load_lmeval_tasks, scorer_of
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.sampling_stats import sampling_statistics
from kvbench.tasks.task import Ask, DataDir, Draws, Task, listed, source
from kvbench.tasks.taskset import TaskSet

if TYPE_CHECKING:
    from lm_eval.api.task import Task as LmEvalTask

FIRST, LAST = "first", "last"


@dataclass(frozen=True)
class Instruction:
    """The paragraph at one end of a form's prompts that says how to answer.

    Args:
        stands: End that the form has it at, `first` or `last`.
        moved: Its words at the other end; None for the same.
    """

    stands: str
    moved: str | None = None

    def move(self, prompt: str) -> str:
        """Put it at the other end of a prompt."""
        if self.stands == LAST:
            rest, _, words = prompt.rpartition("\n\n")
            return f"{self.moved or words}\n\n{rest}"
        words, _, rest = prompt.partition("\n\n")
        return f"{rest}\n\n{self.moved or words}"


@dataclass(kw_only=True)
class ProblemSet(TaskSet):
    """A task whose answers are right or wrong; `opened` has the ids of samples whose prompts opened the thoughts."""

    problems: "Problems"
    opened: frozenset[str] = frozenset()

    def _vote(self, record: dict) -> str | None:
        return self.problems.vote(record["text"], record["sample_id"] in self.opened)

    def aggregate(self, records: Iterable[dict]) -> dict:
        """See `TaskSet.aggregate`; adds `sampling` and `groups`.

        `sampling` is avg@n, pass@k, maj@k, only with several answers per problem; `groups` the means by `group_by`.
        """
        records = list(records)
        result = super().aggregate(records)
        vote = self._vote if self.problems.votes else None
        k: Draws = getattr(self.problems, "k", None)
        if sampling := sampling_statistics(records, self.primary, sizes=None if k is None else listed(k), vote=vote):
            result["sampling"] = sampling
        if group_by := self.problems.group_by:
            groups: dict[str, list[dict]] = {}
            for record in records:
                groups.setdefault(str((record.get("meta") or {}).get(group_by)), []).append(record)
            result["groups"] = {name: self._mean(group) for name, group in sorted(groups.items())}
        return result


@dataclass(frozen=True, kw_only=True)
class Problems(Task):
    """A task of problems, made from lm-eval YAMLs.

    Their documents have `context`, `gold`, `index` and the fields of their prompt.

    The class says: `meta_keys`, the fields of a document that its records keep; `group_by`, the one of them whose
    groups are also reported; `votes`, whether several answers to a problem vote; `instructions`, form -> the
    instruction of its prompts, where they have one in addition to the problem; `grading_limit_s` and `grading_workers`,
    see `TaskSet`. Some have a setting `k`: of how many answers pass@k and maj@k are reported, None for 1, 2, 4, ... and
    all.

    Args:
        data_dir: Folder with the files; None for the local caches, then the hub.
        instruction: Position of the instruction, before or after the problem; None for that of the form.

    Raises:
        ValueError: As `Task`, or the form has no instruction to be moved.
    """

    primary: ClassVar[str] = "correct"
    kind: ClassVar[type[TaskSet]] = ProblemSet
    meta_keys: ClassVar[Sequence[str]] = ("answer",)
    group_by: ClassVar[str | None] = None
    votes: ClassVar[bool] = False
    instructions: ClassVar[Mapping[str, Instruction]] = {}
    grading_limit_s: ClassVar[float | None] = 120.0
    grading_workers: ClassVar[int] = 0

    data_dir: DataDir = None
    instruction: Annotated[str | None, Choice((FIRST, LAST))] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        form = self.protocol_notes().get("form")
        if self.instruction is not None and form not in self.instructions:
            raise SettingsConflict(
                f"task.instruction={self.instruction} needs prompts with an instruction beside the problem, and those "
                f"of task={self.name} task.form={form} have none; leave task.instruction=null, or set "
                f"task.form={' or '.join(self.instructions)}",
                setting="task.instruction",
            )

    @property
    def moved(self) -> Instruction | None:
        """The instruction that stands at the other end than the form has it; None where it stays."""
        known = self.instructions.get(self.protocol_notes().get("form", ""))
        return known if known and self.instruction not in (None, known.stands) else None

    def yamls(self) -> list[str]:
        """Names of its YAMLs, one group of problems each; those of one form have the same prompt."""
        return [f"kvbench_{self.name}"]

    def metadata(self, seed: int) -> dict[str, Any]:
        """The settings for the function that reads the data."""
        return {"data_dir": self.data_dir}

    def protocol_notes(self) -> dict[str, Any]:
        """Choices of this task that go into each result row; `form` among them where there are several."""
        return {}

    def vote(self, text: str, opened: bool) -> str | None:
        """The vote of an answer, None for nothing; `opened` says whether its prompt opened the thoughts."""
        raise NotImplementedError(f"answers to {self.name} do not vote")

    def reference(self, doc: dict) -> object:
        """The reference that an answer is scored against, for the fingerprint."""
        return doc["answer"]

    def asks(self, doc: dict) -> bool:
        """Tell whether the settings choose a document; a limit counts those that they do."""
        return True

    def unusable(self, docs: Sequence[dict]) -> Mapping[int, str]:
        """Find documents of a YAML that no answer can be graded against: `index` -> why its row is set aside."""
        return {}

    def data(self, seed: int, protocol: Protocol) -> "dict[str, LmEvalTask]":
        """See `Task`: the tasks of its YAMLs, with their documents."""
        return load_lmeval_tasks(self.folder(), self.yamls(), self.metadata(seed))

    def load(self, ask: Ask) -> TaskSet:
        """See `Task`; with `query_aware=false` the examples in front of a problem are the context."""
        tasks = self.data(ask.seed, ask.protocol)
        requests: list[Request] = []
        scored: dict[str, tuple[LmEvalTask, dict]] = {}
        opened: set[str] = set()
        quarantined: list[dict] = []
        copies: list[dict] = []
        sources: list[dict] = []
        files = self.files()
        builders = [PromptBuilder(ask.model, ask.protocol, PromptRules.from_yaml(t.config)) for t in tasks.values()]
        for at, ((yaml_name, task), builder) in enumerate(zip(tasks.items(), builders, strict=True)):
            rows, part = task.dataset["test"], yaml_name if len(tasks) > 1 else ""
            docs = ask.drawn([doc for doc in task.eval_docs if self.asks(doc)], part or self.name)
            sources.append(source(rows, files[at].rows if len(files) == len(tasks) else 0))
            reasons = self.unusable(docs)
            quarantined += [*rows.quarantined, *(rows.set_aside(index, reason) for index, reason in reasons.items())]
            copies += rows.copies
            for doc in docs:
                if doc["index"] in reasons:
                    continue
                request = self._request(task, builder, doc, part)
                requests.append(request)
                scored[request.sample_id] = (task, doc)
                if builder.opens_thoughts(request):
                    opened.add(request.sample_id)
        if not requests and not quarantined:
            raise SettingsConflict(
                f"task={self.name} has no row among those that limit={ask.limit and ask.limit.setting} and its other "
                "settings choose; choose more of them"
            )
        if not requests:
            first = quarantined[-1]
            raise FileContent(
                f"task={self.name} has no row that answers can be graded against; the last, {first['file']}:"
                f"{first['line']}: {first['reason']}; compare the file with its release, or raise limit"
            )
        first_builder = builders[0]
        rules = {
            "chat_template": first_builder.chat,
            "max_new_tokens": first_builder.max_new_tokens,
            "truncation": "middle",
        }
        return self.task_set(
            ask,
            requests,
            self.protocol_notes()
            | ({"instruction": self.instruction} if self.moved else {})
            | rules
            | {"thinking": first_builder.thinking, "thoughts": "not graded"},
            {key: self.reference(doc) for key, (_, doc) in scored.items()},
            scorer_of(scored),
            quarantined=quarantined,
            copies=copies,
            sources=sources,
            grading_limit_s=self.grading_limit_s,
            grading_workers=self.grading_workers,
            problems=self,
            opened=frozenset(opened),
        )

    def _request(self, task: "LmEvalTask", builder: PromptBuilder, doc: dict, part: str) -> Request:
        prompt, border = task.doc_to_text(doc), len(doc["context"])
        prompt = self.moved.move(prompt) if self.moved else prompt
        if not border and not builder.protocol.query_aware:
            raise SettingsConflict(
                f"protocol.query_aware=false needs a prompt with a context before its question, and the prompts of "
                f"task={self.name} have none in this form; set protocol.query_aware=true, or take a few-shot "
                "form where the task has one",
                setting="protocol.query_aware",
            )
        border = border or len(prompt)
        return builder.build(
            sample_id="/".join(filter(None, [self.name, part, str(doc["index"])])),
            subset=self.name,
            context=prompt[:border],
            question=prompt[border:],
            gold=doc["gold"],
            answers=[doc["answer"]] if "answer" in doc else (),  # else the whole solution
            meta={"index": doc["index"]} | {key: doc[key] for key in self.meta_keys},
        )
