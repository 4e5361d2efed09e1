"""A task ready to run: its requests, how answers are scored, and how scores are put together."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from kvbench.config.code import hash_files, libraries, reached
from kvbench.engine.requests import FLAGS, Outcome, Request
from kvbench.stats.strata import Weighting
from kvbench.tasks.answers import graded_text
from kvbench.tasks.sampling_stats import answer_statistics
from kvbench.tasks.token_statistics import token_statistics


@dataclass(frozen=True)
class MetricInfo:
    """The meaning of a score.

    Args:
        higher_is_better: Direction of improvement.
        description: One sentence for tables and documentation.
    """

    higher_is_better: bool
    description: str


@dataclass(kw_only=True)
class TaskSet:
    """Requests, references and scores of a task, for one experiment.

    Args:
        name: Name of the task.
        protocol: Every choice of how the task is posed and scored, as JSON types; it goes into each result row.
        fingerprint: 64 hex digits over prompts, reference answers and the code that makes and scores them.
        requests: Requests, subset by subset.
        quarantined: Rows that were set aside: `file`, `line`, `reason`.
        copies: Rows that are the same as earlier ones, or have the same id, as `file` and `line`; they are prompted and
            counted again.
        unused: Fields of the rows that nothing reads, as `file: field, field`, a text for each file.
        sources: Where the rows were read: `file` (its name and folder), how many `rows` it had, and `of` how many that
            of the benchmark has, where it is known.
        missing: Subsets that were left out, as their data is not at hand.
        weighting: Unit of equal weight in the mean over subsets: `subset` or `sample`.
        metrics: Name -> meaning of every score that `score` returns.
        primary: The metric that stands for the task.
        scorer: (sample id, answer without its thoughts) -> scores.
        turn_scorer: (sample id, which answer of the conversation from 0, answer without its thoughts) -> scores; for
            tasks whose requests have turns.
        grading_limit_s: Longest time to grade one answer, wall time; None for a grader that has limits of its own.
        grading_workers: Most answers graded at a time while the model goes on with the next; for a grader
            that waits for other processes and may be called from several threads. 0: each where it comes up.
        by: Keys of the records' `meta` by which the scores are also reported, for example `length`. Conversations are
            reported by turn, too.
    """

    name: str
    protocol: dict
    fingerprint: str
    requests: list[Request]
    metrics: dict[str, MetricInfo]
    primary: str
    scorer: Callable[[str, str], Mapping[str, float]]
    turn_scorer: Callable[[str, int, str], Mapping[str, float]] | None = None
    quarantined: list[dict] = field(default_factory=list)
    copies: list[dict] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    sources: list[dict] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    grading_limit_s: float | None = 120.0
    grading_workers: int = 0
    weighting: Weighting = "subset"
    by: tuple[str, ...] = ()

    def score(self, request: Request, text: str) -> dict[str, float]:
        """Score one generated answer: metric -> value in [0, 1].

        For every name in `metrics`, and 1 for each of `FLAGS` that the scorer set.
        """
        scores = self.scorer(request.sample_id, graded_text(request, text))
        return {name: float(scores[name]) for name in (*self.metrics, *(flag for flag in FLAGS if scores.get(flag)))}

    def score_outcome(self, request: Request, outcome: Outcome) -> dict[str, float]:
        """Score an answer by its text, or a conversation by the mean over its answers; as `score`."""
        if not request.turns:
            return self.score(request, outcome.text)
        texts = [*(turn["text"] for turn in outcome.turns), outcome.text]
        each = [self.score_turn(request, number, text) for number, text in enumerate(texts)]
        return {name: fmean(scores[name] for scores in each) for name in self.metrics}

    def score_turn(self, request: Request, turn: int, text: str) -> dict[str, float]:
        """Score one answer of a conversation; `turn` counts them from 0, the rest as for `score`."""
        if self.turn_scorer is None:
            raise NotImplementedError(f"task {self.name} has no conversations")
        scores = self.turn_scorer(request.sample_id, turn, graded_text(request, text))
        return {name: float(scores[name]) for name in self.metrics}

    def score_choices(self, request: Request, choices: list[dict]) -> dict[str, float]:
        """Score a request's choices, as in `Outcome.choices`; only tasks whose requests have some need it."""
        raise NotImplementedError(f"task {self.name} asks for no choices")

    def aggregate(self, records: Iterable[dict]) -> dict:
        """Put journal records together the way the benchmark does.

        Args:
            records: Journal records; those whose `status` is not `ok` are counted, not scored. Several answers to one
                sample are averaged first.

        Returns:
            `subsets`: name -> `num_samples`, `num_failed`, and the mean of each metric (None without samples);
            `overall`: the mean over subsets with the task's weights; `by`: key -> value -> the same numbers;
            `length_buckets`, for subsets that have them: name -> bucket -> the same numbers; `answers`: their length,
            the shares that the limit cut and that end in a loop, parse failures; `tokens`, where records say what was
            measured of each forced token: perplexity and nearness to the full cache over all of them.
        """
        records = list(records)
        subsets = {name: self._mean(group) for name, group in _group(records, lambda r: r["subset"]).items()}
        result: dict = {"subsets": subsets, "overall": {}}
        for metric in self.metrics:
            result["overall"][metric] = self._over(subsets.values(), metric)
        if answers := answer_statistics(records):
            result["answers"] = answers
        if tokens := token_statistics(records):
            result["tokens"] = tokens
        if self.by:
            result["by"] = {key: self._by(records, key) for key in self.by}
        if any(request.turns for request in self.requests):
            result["by"] = result.get("by", {}) | {"turn": self._by_turn(records)}
        bucketed = [record for record in records if (record.get("meta") or {}).get("length_bucket")]
        if bucketed:
            result["length_buckets"] = {
                subset: {
                    bucket: self._mean(inner)
                    for bucket, inner in sorted(_group(group, lambda r: r["meta"]["length_bucket"]).items())
                }
                for subset, group in _group(bucketed, lambda r: r["subset"]).items()
            }
        return result

    def _by(self, records: list[dict], key: str) -> dict[str, dict]:
        """Mean scores by a key of `meta`, over several subsets weighted as over all."""
        groups = {}
        for name, some in _group(records, lambda r: str(r["meta"][key])).items():
            groups[name] = whole = self._mean(some)
            subsets = [self._mean(group) for group in _group(some, lambda r: r["subset"]).values()]
            whole |= {metric: self._over(subsets, metric) for metric in self.metrics}
        return groups

    def _over(self, subsets: Iterable[dict], metric: str) -> float | None:
        """The mean of a metric over subsets with the task's weights; None without samples."""
        known = [numbers for numbers in subsets if numbers[metric] is not None]
        weights = [numbers["num_samples"] if self.weighting == "sample" else 1 for numbers in known]
        return fmean((numbers[metric] for numbers in known), weights) if known else None

    def _by_turn(self, records: list[dict]) -> dict[str, dict]:
        by_id = {request.sample_id: request for request in self.requests}
        turns: dict[str, list[dict]] = {}
        for record in records:
            request, failed = by_id[record["sample_id"]], record.get("status", "ok") != "ok"
            texts = [*(turn["text"] for turn in record.get("turns", ())), record["text"]]
            for number in range(len(request.turns) + 1):
                scores = {} if failed else self.score_turn(request, number, texts[number])
                turns.setdefault(str(number + 1), []).append(record | {"scores": scores})
        return {turn: self._mean(group) for turn, group in turns.items()}

    def _mean(self, records: list[dict]) -> dict:
        by_sample = _group([r for r in records if r.get("status", "ok") == "ok"], lambda r: r["sample_id"])
        numbers: dict = {
            "num_samples": len(by_sample),
            "num_failed": len({r["sample_id"] for r in records} - set(by_sample)),
        }
        for metric in self.metrics:
            values = [fmean(record["scores"][metric] for record in group) for group in by_sample.values()]
            numbers[metric] = fmean(values) if values else None
        return numbers


def _group(records: Iterable[dict], key: Callable[[dict], str]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def fingerprint(requests: Iterable[Request], references: Mapping[str, object], folder: Path) -> str:
    """Hash the inputs and the code of a task's answers and scores.

    Args:
        requests: Their prompts, gold tokens, limits and stop rules count.
        references: Sample id -> what its answer is scored against, as JSON types.
        folder: The benchmark's folder; its Python and YAML files count, except for the cage of programs, and so do the
            modules of other folders of tasks that they import, at any remove. The versions of the libraries that
            all these import count too.
    """
    paths = [*folder.rglob("*.py"), *folder.rglob("*.yaml")]
    counted = {
        path for path in (*paths, *reached(paths, "kvbench.tasks", folder.parent)) if "cage" not in path.parts[-2:-1]
    }
    files = {path.relative_to(folder.parent).as_posix(): path for path in sorted(counted)}
    digest = hashlib.sha256(hash_files(files).encode())
    digest.update(json.dumps(libraries(files.values())).encode())
    for request in requests:
        questions = [
            request.sample_id,
            request.subset,
            request.segments,
            request.gold,
            request.warmup_tokens,
            request.choices,
            request.max_new_tokens,
            request.min_new_tokens,
            request.stop,
            request.stop_token_ids,
            request.temperature,
            request.top_p,
            request.num_samples,
            request.past_context,
            [dataclasses.astuple(turn) for turn in request.turns],
            request.thoughts and dataclasses.astuple(request.thoughts),
            references[request.sample_id],
        ]
        digest.update(json.dumps(questions, sort_keys=True).encode())
    return digest.hexdigest()
