"""Makes a task of the problems of a benchmark: requests, graders, and how the scores of many answers are summed up."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.engine.requests import Request
from kvbench.tasks.draw import Limit, drawn
from kvbench.tasks.lmeval import load_lmeval_tasks, scorer_of
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.sampling_stats import sampling_statistics
from kvbench.tasks.taskset import MetricInfo, TaskSet, fingerprint

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from kvbench.models.load import LoadedModel


@dataclass(kw_only=True)
class ProblemSet(TaskSet):
    """A task whose answers are right or wrong.

    Args:
        group_by: Key of the records' `meta` whose groups are also reported; None for none.
        vote: (answer, whether the prompt opened its thoughts) -> what it votes for, None for nothing; None where
            answers do not vote.
        sizes: The k of pass@k and maj@k; None for 1, 2, 4, ... and all.
        opened: Ids of the samples whose prompts opened the thoughts.
    """

    group_by: str | None = None
    vote: Callable[[str, bool], str | None] | None = None
    sizes: Sequence[int] | None = None
    opened: frozenset[str] = frozenset()

    def _vote(self, record: dict) -> str | None:
        assert self.vote is not None
        return self.vote(record["text"], record["sample_id"] in self.opened)

    def aggregate(self, records: Iterable[dict]) -> dict:
        """As `TaskSet.aggregate`, and further `sampling` (avg@n, pass@k, maj@k; only with several answers per
        problem) and `groups` (the means by `group_by`)."""
        records = list(records)
        result = super().aggregate(records)
        vote = None if self.vote is None else self._vote
        if sampling := sampling_statistics(records, self.primary, sizes=self.sizes, vote=vote):
            result["sampling"] = sampling
        if self.group_by:
            groups: dict[str, list[dict]] = {}
            for record in records:
                groups.setdefault(str((record.get("meta") or {}).get(self.group_by)), []).append(record)
            result["groups"] = {name: self._mean(group) for name, group in sorted(groups.items())}
        return result


def load_problems(
    *,
    name: str,
    folder: Path,
    yaml_names: Sequence[str],
    metadata: Mapping[str, Any],
    model: "LoadedModel",
    limit: Limit | None,
    protocol: Protocol,
    metrics: Mapping[str, MetricInfo],
    primary: str,
    describe: Mapping[str, Any],
    meta_keys: Sequence[str] = (),
    group_by: str | None = None,
    reference: Callable[[dict], object] = lambda doc: doc["answer"],
    unusable: Callable[[Sequence[dict]], Mapping[int, str]] = lambda docs: {},
    grading_limit_s: float | None = 120.0,
    grading_workers: int = 0,
    vote: Callable[[str, bool], str | None] | None = None,
    sizes: Sequence[int] | None = None,
) -> ProblemSet:
    """Build a task from lm-eval YAMLs whose documents have `context`, `gold`, `index` and the fields of their prompt.

    Args:
        name: Name of the task, and of its one subset.
        folder: Folder of the YAMLs.
        yaml_names: Tasks in it; one group of problems each.
        metadata: Passed to the function that reads the data.
        model: Tokenizes the prompts.
        limit: Which problems of each YAML; None for all.
        protocol: How the problems are asked.
        metrics: Name -> meaning of the scores.
        primary: The one that stands for the task; its values are 0 and 1.
        describe: Choices of this task that go into each result row.
        meta_keys: Fields of a document that its records keep.
        group_by: See `ProblemSet`.
        reference: What an answer is scored against, for the fingerprint.
        unusable: Takes the documents of a YAML that will be asked, before anything is generated, and gives the `index`
            of each that no answer can be graded against, with the reason. Its row is set aside, as a broken one is.
        grading_limit_s: See `TaskSet`.
        grading_workers: See `TaskSet`.
        vote: See `ProblemSet`.
        sizes: See `ProblemSet`.

    Raises:
        ValueError: Data is missing or broken, no row is left, or the protocol wants a context where a problem has none.
    """
    tasks = load_lmeval_tasks(folder, yaml_names, metadata)
    requests: list[Request] = []
    scored: dict[str, tuple[Task, dict]] = {}
    opened: set[str] = set()
    quarantined: list[dict] = []
    copies: list[dict] = []
    builders = [PromptBuilder(model, protocol, PromptRules.from_yaml(task.config)) for task in tasks.values()]
    for (yaml_name, task), builder in zip(tasks.items(), builders, strict=True):
        rows = task.dataset["test"]
        docs = [task.eval_docs[at] for at in drawn(len(task.eval_docs), limit, yaml_name if len(tasks) > 1 else name)]
        reasons = unusable(docs)
        quarantined += [*rows.quarantined, *(rows.set_aside(index, reason) for index, reason in reasons.items())]
        copies += rows.copies
        for doc in docs:
            if doc["index"] in reasons:
                continue
            request = _request(name, task, builder, doc, meta_keys, yaml_name if len(tasks) > 1 else "")
            requests.append(request)
            scored[request.sample_id] = (task, doc)
            if builder.opens_thoughts(request):
                opened.add(request.sample_id)
    if not requests:
        first = quarantined[-1]
        raise ValueError(
            f"task={name} has no row that answers can be graded against; the last, {first['file']}:{first['line']}: "
            f"{first['reason']}; compare the file with its release, or raise limit"
        )
    references = {key: reference(doc) for key, (_, doc) in scored.items()}
    asked = builders[0]  # the YAMLs of one form ask alike
    if protocol.chat_setting is not None and not asked.chat:
        raise ValueError(
            f"{protocol.chat_setting} needs a chat, and the prompts of task={name} in this "
            "form are none; take a chat form (task.form=zeroshot or chat), or set protocol.chat_template=always"
        )
    rules = {"chat_template": asked.chat, "max_new_tokens": asked.max_new_tokens, "truncation": "middle"}
    rules |= {"thinking": asked.thinking, "thoughts": "not graded"}
    return ProblemSet(
        name=name,
        protocol=protocol.to_dict() | dict(describe) | rules,
        fingerprint=fingerprint(requests, references, folder),
        requests=requests,
        metrics=dict(metrics),
        primary=primary,
        scorer=scorer_of(scored),
        quarantined=quarantined,
        copies=copies,
        group_by=group_by,
        grading_limit_s=grading_limit_s,
        grading_workers=grading_workers,
        vote=vote,
        sizes=sizes,
        opened=frozenset(opened),
    )


def _request(
    name: str, task: "Task", builder: PromptBuilder, doc: dict, meta_keys: Sequence[str], part: str
) -> Request:
    prompt, border = task.doc_to_text(doc), len(doc["context"])
    if not border:
        if not builder.protocol.query_aware:
            raise ValueError(
                f"protocol.query_aware=false needs a prompt with a context before its question, and the prompts of "
                f"task={name} have none in this form; set protocol.query_aware=true, or take a few-shot "
                "form where the task has one"
            )
        border = len(prompt)
    meta = {"index": doc["index"]} | {key: doc[key] for key in meta_keys}
    return builder.build(
        sample_id="/".join([name, *([part] if part else []), str(doc["index"])]),
        subset=name,
        context=prompt[:border],
        question=prompt[border:],
        gold=doc["gold"],
        answers=[doc["answer"]] if "answer" in doc else (),  # else the whole solution
        meta=meta,
    )
