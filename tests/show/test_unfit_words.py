"""Full-cache runs that nothing can be judged by, and what is said of them."""

import io

import pytest
from rich.console import Console
from stored import sample

from kvbench.results.measures import NLL, score
from kvbench.results.record import Metric, RunRecord
from kvbench.show.table import render
from kvbench.show.unfit import flag_notes, unfit

EXACT = score("exact")


FOUR = {"choices": [{"loglikelihood": 0.0}] * 4}


def records(values, **more):
    """A record for each score."""
    return [sample(number, "a", value, **more) for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "more", "words"),
    [
        (
            [0] * 8,
            {"finish": "length", "protocol": {"max_new_tokens": 128}},
            "8 of 8 answers were cut by the length limit of 128 tokens and scored nothing. To mend it, raise",
        ),
        ([0] * 5 + [1] * 3, {"finish": "length"}, "5 of 8 answers were cut by the length limit and"),
        ([0] * 8, {}, "exact is 0.0 % over 8 answers, and 0 % is the worst there is"),
        ([0, 0, 1, 0], FOUR | {"finish": "length"}, "exact is 25.0 % over 4 answers, and 25 % is chance"),
        ([1] * 8, {"finish": "length"}, ""),
        ([0] * 4 + [1] * 4, {"finish": "length"}, ""),
        ([0] * 7 + [1], {}, ""),
        ([0, 1, 1, 0], FOUR, ""),
        ([0] * 8, {"status": "oom"}, ""),
    ],
)
def test_a_full_cache_that_nothing_can_be_judged_by(values, more, words) -> None:
    """Cut and wrong, at the worst or at chance; what was cut and is right took no harm, and forced answers never do."""
    found = unfit(records(values, **more), EXACT)
    assert words in found if words else not found
    assert found.startswith("NO STANDING by exact: ") is bool(words)
    assert not unfit(records(values, **more), NLL)


def test_answers_without_anything_to_grade() -> None:
    """More than half of them."""
    found = records([0] * 5 + [1] * 3)
    for record in found:
        record["scores"]["parsed"] = record["scores"]["exact"]
    assert "5 of 8 answers hold nothing to grade. To mend it, read some" in unfit(found, EXACT)
    assert not unfit(found[1:], score("exact", higher_is_better=False)) and not unfit(found[2:], EXACT)


def test_how_answers_were_graded_is_counted_by_run() -> None:
    """One note for each way, with the runs that have such answers."""
    runs = {"full": records([1] * 4), "snapkv": [*records([1] * 3), *records([0], flags=["fallback"])]}
    (note,) = flag_notes(runs)
    assert "last number" in note and note.endswith("(`fallback`): snapkv 1 of 4")


def test_the_table_of_a_run_says_it_first() -> None:
    """From run.json alone."""
    run = RunRecord(task="toy", model="tiny", method="full", protocol={"max_new_tokens": 128})
    run.metrics = {"exact": Metric(value=0.125, num_samples=8, primary=True, higher_is_better=True)}
    run.task_aggregate = {"answers": {"num_answers": 8, "mean_tokens": 128.0, "cut_share": 1.0}}
    shown = io.StringIO()
    Console(width=100, file=shown).print(render([run]))
    assert shown.getvalue().startswith("! NO STANDING by exact: of the full cache, 7 of 8 answers were cut by the")
    run.task_aggregate["answers"]["cut_share"] = 0.0
    assert "NO STANDING" not in str(render([run]).renderables[0])
