"""Task -> direction of its metrics, its primary metric and its weights.

These facts decide which of two runs is better; the claims of a `run.json` are checked against them.

A record may come from anybody, and one wrong boolean turns every loss into a gain. The classes of the tasks declare the
same facts (a test compares them); importing those takes readers of results a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvbench.stats.strata import Weighting


@dataclass(frozen=True)
class Declared:
    """The facts of one task."""

    primary: str
    """The metric that tables and plots show."""
    metrics: Mapping[str, bool]
    """Metric -> higher is better."""
    weighting: Weighting = "subset"


_SCORE = Declared("score", {"score": True})
_SOLVED = Declared("correct", dict.fromkeys(("correct", "parsed"), True))
_FORCED = Declared("accuracy", {"accuracy": True})
_PROGRAM = Declared("plus", dict.fromkeys(("plus", "base", "parsed"), True))
TASKS: Mapping[str, Declared] = {
    **dict.fromkeys(("longbench", "longbench_v2", "infinitebench", "scbench", "ruler", "needle", "custom"), _SCORE),
    "longctx": Declared("score", dict.fromkeys(("score", "exact", "partial"), True)),
    "instructions": Declared("score", dict.fromkeys(("score", "first", "second", "content"), True)),
    "tools": Declared("score", dict.fromkeys(("score", "tool", "arguments", "valid"), True)),
    "similar": Declared("score", dict.fromkeys(("score", "exact"), True)),
    "drift": Declared("repetition", dict.fromkeys(("repetition", "loop", "early_stop"), False)),
    **dict.fromkeys(("stream", "perplexity"), _FORCED),
    **dict.fromkeys(("gsm8k", "math500", "math", "aime24", "aime25", "aime26"), _SOLVED),
    **dict.fromkeys(("humaneval_plus", "mbpp_plus"), _PROGRAM),
}
HARNESS = "lm_eval_"  # how the names of lm-eval's tasks begin in a record
# lm-eval's registered metrics -> higher is better. A task of the user's may say otherwise, or have others.
REGISTERED: Mapping[str, bool] = {
    **dict.fromkeys(("acc", "acc_norm", "acc_mutual_info", "acc_bytes", "acc_all", "exact_match", "likelihood"), True),
    **dict.fromkeys(("bypass", "mcc", "f1", "bleu", "chrf", "chrf++"), True),
    **dict.fromkeys(("brier_score", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"), False),
    "ter": False,
}


def direction(higher_is_better: bool) -> str:
    """The direction of a metric in words."""
    return f"{'higher' if higher_is_better else 'lower'} is better"


def contradiction(task: str, metrics: Mapping[str, tuple[bool, bool]], weighting: str) -> str:
    """Describe where the claims of a record contradict its task, with both values.

    Empty where none does, and for a task that kvbench does not declare.

    Args:
        task: Name of the task, as the identity has it.
        metrics: Metric -> higher is better, is the primary one; of a run that has only begun there are none.
        weighting: Units of equal weight in a mean.
    """
    primaries = [name for name, (_, is_primary) in metrics.items() if is_primary]
    if metrics and len(primaries) != 1:
        return f"claims {len(primaries)} primary metrics ({', '.join(primaries) or 'none'}), and a task has one"
    known = TASKS.get(task)
    if known is None or not metrics:
        return ""
    for name, (is_higher, _) in metrics.items():
        if name not in known.metrics:
            return f"claims the metric {name}, and task {task} has {', '.join(known.metrics)}"
        if is_higher != known.metrics[name]:
            return f"claims {name}: {direction(is_higher)}, and task {task} declares: {direction(not is_higher)}"
    if primaries != [known.primary]:
        return f"claims the primary metric {primaries[0]}, and that of task {task} is {known.primary}"
    if weighting != known.weighting:
        return f"claims that each {weighting} weighs the same, and of task {task} each {known.weighting} does"
    return ""


def unchecked(task: str, metrics: Mapping[str, bool]) -> str:
    """Note on unchecked claims of a record: those of lm-eval's tasks, which only lm-eval can look up.

    Empty for other tasks.

    Args:
        task: Name of the task.
        metrics: Metric -> higher is better; `metric,filter` is a metric with a named filter.
    """
    if not task.startswith(HARNESS) or not metrics:
        return ""
    said = (
        f"{task}: which scores are better, and what they weigh, is as run.json claims; lm-eval's task is not read here"
    )
    odd = [name for name, is_higher in metrics.items() if REGISTERED.get(name.split(",")[0], is_higher) != is_higher]
    return said + "".join(f". It claims {name}: {direction(metrics[name])}, unlike lm-eval's own" for name in odd)
