"""Full-cache runs that are unfit as a reference.

Most answers were cut off or have nothing to grade, or all have the worst score. A method may look better than such a
run, and the comparison is meaningless.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from kvbench.results.measures import SCORE, Measure, score
from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord

MOST = 0.5  # share of the answers
FLAGS = {
    "fallback": "graded by the last number, since no final answer is marked",
    "several": "with several unlike numbers marked as the answer",
    "out_of_time": "not judged in time, and wrong",
}


def unfit(records: Iterable[SampleRecord], what: Measure) -> str:
    """Reason, with values and remedy, why the full cache is unfit as a reference; empty where it is fit.

    Args:
        records: Those of the full cache's run.
        what: Teacher-forced measures need no answers and are never unfit.
    """
    if what.part != SCORE.part:
        return ""
    worst = 0.0 if what.higher_is_better else 1.0
    values, cut, unparsed, chances = [], 0, 0, []
    limit = None
    for record in filter(what.is_of, records):
        value = record["scores"].get(what.key) if record["status"] == "ok" else None
        if value is None:
            continue
        values.append(value)
        limit = limit or record["protocol"].get("max_new_tokens")
        choices = len(record.get("choices", ()))
        # One that was cut and is right took no harm, and a letter that is chosen by its likelihood is never cut.
        cut += value == worst and record["finish"] == "length" and not choices
        unparsed += value == worst and record["scores"].get("parsed") == 0
        chances.append(1 / choices if choices > 1 else 0.0)
    if not values:
        return ""
    mean, chance = sum(values) / len(values), sum(chances) / len(values)
    return _words(what, len(values), mean, chance=chance, cut=cut, unparsed=unparsed, limit=limit)


def unfit_run(record: RunRecord) -> str:
    """See `unfit`, from `run.json` alone, with fewer checks."""
    metric, answers = record.metrics.get(record.primary), record.task_aggregate.get("answers", {})
    if metric is None or metric.value is None or not metric.num_samples:
        return ""
    count = answers.get("num_answers") or metric.num_samples
    bad = 1 - metric.value if metric.higher_is_better else metric.value  # at least so many score something
    cut = round(count * max(0.0, (answers.get("cut_share") or 0.0) + bad - 1))
    limit = record.protocol.get("max_new_tokens")
    what = score(record.primary, metric.higher_is_better)
    return _words(what, count, metric.value, cut=cut, unparsed=answers.get("num_unparsed", 0), limit=limit)


def _words(
    what: Measure, count: int, mean: float, *, chance: float = 0.0, cut: int, unparsed: int, limit: object
) -> str:
    """The sentence for the worst of what was counted among so many answers; empty where nothing is the matter."""
    floor = chance if what.higher_is_better else 1 - chance
    if cut > MOST * count:
        size = f" of {limit} tokens" if isinstance(limit, int) else ""
        why = f"{cut} of {count} answers were cut by the length limit{size} and scored nothing"
        remedy = "raise protocol.max_new_tokens"
    elif unparsed > MOST * count:
        why = f"{unparsed} of {count} answers hold nothing to grade"
        remedy = "read some with `kvbench show`, and take another task.form, or a model that ends with an answer"
    elif abs(mean - floor) <= what.margin or (mean < floor) == what.higher_is_better:
        bound = f"{what.scale * floor:.3g} % is {'chance' if chance else 'the worst there is'}"
        why = f"{what.title} is {what.scale * mean:.1f} % over {count} answers, and {bound}: nothing can be lost"
        remedy = "take an easier task or a stronger model, or metric=nll, which needs no right answers"
    else:
        return ""
    return f"NO STANDING by {what.title}: of the full cache, {why}. To mend it, {remedy}"


def flag_notes(runs: Mapping[str, Iterable[SampleRecord]]) -> list[str]:
    """Notes on answers of some runs, by label, that were graded in an unusual way; a sentence for each way."""
    notes = []
    for flag, words in FLAGS.items():
        counts = {
            label: Counter(flag in record.get("flags", ()) for record in records) for label, records in runs.items()
        }
        each = [f"{label} {counter[True]} of {counter.total()}" for label, counter in counts.items() if counter[True]]
        notes += [f"answers {words} (`{flag}`): {', '.join(each)}"] if each else []
    return notes
