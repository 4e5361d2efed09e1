"""Scores by lm-eval's own filters and metrics, one document at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsFloat

from kvbench.engine.requests import OUT_OF_TIME, Request
from kvbench.errors import Unsupported
from kvbench.tasks.answers import after_thinking
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task


@dataclass
class Doc:
    """One document and what lm-eval needs to score it."""

    leaf: str  # the name of its task
    task: "Task"
    doc: dict
    instances: "list[Instance]"  # lm-eval's requests for it, in order
    chat: bool = False  # its answer may hold thoughts
    opened: bool = False  # and the prompt opened them

    def score_text(self, text: str) -> dict[str, Any]:
        """The metrics of one answer; see `results`."""
        return self.results([(after_thinking(text, self.opened) or "") if self.chat else text])

    def score_choices(self, choices: list[dict]) -> dict[str, Any]:
        """The metrics of the choices' log-likelihoods, in order; see `results`."""
        return self.results([(choice["loglikelihood"], choice["greedy"]) for choice in choices])

    def results(self, responses: list[object]) -> dict[str, Any]:
        """Run lm-eval's filters and metrics on the responses to this document alone.

        A metric with a named filter is called `metric,filter`.
        """
        for instance, response in zip(self.instances, responses, strict=True):
            instance.resps, instance.filtered_resps = [response], {}
        results: dict[str, Any] = {}
        for ensemble in self.task._filters:
            ensemble.apply(self.instances)
            filtered = [instance.filtered_resps[ensemble.name] for instance in self.instances]
            scored = self.task.process_results(self.doc, filtered)
            results |= {_key(metric, ensemble.name): value for metric, value in scored.items()}
        return results


def _key(metric: str, filter_name: str) -> str:
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def _means(task: "Task") -> dict[str, bool]:
    """The metrics that are means over documents -> whether higher is better."""
    from lm_eval.api.metrics import mean

    better = task.higher_is_better()
    names = [name for name, function in task.aggregation().items() if function is mean]
    return {_key(name, ensemble.name): bool(better.get(name, True)) for ensemble in task._filters for name in names}


def common_metrics(tasks: "Mapping[str, Task]") -> dict[str, MetricInfo]:
    """The metrics that every task of a group reports as a mean over documents.

    Raises:
        ValueError: There is none.
    """
    each = [_means(task) for task in tasks.values()]
    names = [name for name in each[0] if all(name in scores for scores in each)] if each else []
    if not names:
        reported = sorted({name for task in tasks.values() for name in task.aggregation()})
        raise Unsupported(
            f"the tasks {', '.join(list(tasks)[:5])} share no metric that is a mean over documents (they report "
            f"{', '.join(reported)}); choose one task, or run `kvbench lm_eval --model kvbench --tasks ...`. RULER's "
            "are made and scored by task=ruler",
            setting="task.name",
        )
    return {name: MetricInfo(each[0][name], f"lm-eval's {name}") for name in names}


@dataclass(kw_only=True)
class HarnessTaskSet(TaskSet):
    """A task of lm-eval.

    Args:
        docs: Sample id -> what scores it.
    """

    docs: dict[str, Doc] = field(default_factory=dict)

    def score(self, request: Request, text: str) -> dict[str, float]:
        return self._take(request, self.docs[request.sample_id].score_text(text))

    def score_choices(self, request: Request, choices: list[dict]) -> dict[str, float]:
        return self._take(request, self.docs[request.sample_id].score_choices(choices))

    def _take(self, request: Request, measured: Mapping[str, Any]) -> dict[str, float]:
        scores = {}
        for name in self.metrics:
            value = measured.get(name)
            if not isinstance(value, SupportsFloat):
                raise Unsupported(
                    f"lm-eval gives no number for {name} of {request.sample_id}, but {value!r}", setting="task.name"
                )
            scores[name] = float(value)
            if not 0 <= scores[name] <= 1:
                raise Unsupported(
                    f"{name} of {request.sample_id} is {scores[name]}; kvbench's intervals hold for metrics between 0 "
                    "and 1 only. `kvbench lm_eval --model kvbench --tasks ...` runs this task",
                    setting="task.name",
                )
        return scores

    def aggregate(self, records: Iterable[dict]) -> dict:
        """See `TaskSet.aggregate`, and further `lm_eval`: task -> metric -> what lm-eval itself would report.

        Metrics of a whole corpus (F1, Matthews correlation, BLEU, perplexity) are only there.
        """
        records = list(records)
        collected: dict[str, dict[str, list]] = {}
        for record in records:
            if record.get("status", "ok") != "ok" or record.get("repeat", 0) or OUT_OF_TIME in record.get("flags", ()):
                continue  # the last would take as long once more
            doc = self.docs[record["sample_id"]]
            scores = doc.score_choices(record["choices"]) if record.get("choices") else doc.score_text(record["text"])
            for name, value in scores.items():
                collected.setdefault(doc.leaf, {}).setdefault(name, []).append(value)
        return super().aggregate(records) | {
            "lm_eval": {leaf: self._reported(leaf, c) for leaf, c in collected.items()}
        }

    def _reported(self, leaf: str, collected: Mapping[str, list]) -> dict[str, float | None]:
        task = next(doc.task for doc in self.docs.values() if doc.leaf == leaf)
        functions = task.aggregation()
        result = {}
        for name, values in collected.items():
            function = functions.get(name.partition(",")[0])
            try:
                result[name] = None if function is None else float(function(values))
            except (ValueError, ZeroDivisionError, ImportError, TypeError):
                result[name] = None  # too few documents for a corpus metric, or a package that is not installed
        return result
