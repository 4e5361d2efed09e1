"""The tables of long answers: which runs have them, what is in the cells."""

import re

from rich.console import Console

from kvbench.results.record import RunRecord
from kvbench.show.table import long_tables


def estimate(value, low=None, high=None):
    """As `run.json` has it."""
    return {"value": value, "low": low, "high": high, "num_samples": 9, "interval": "", "num_nonfinite": 0}


def test_tables_of_tokens_and_of_free_answers() -> None:
    """A column for each run, a dash for what a run lacks; runs of other tasks have no such table."""
    tokens = {"perplexity": estimate(12.345, 11.0, 13.0), "kl_max": estimate(2.5), "same_first_choice": estimate(0.9)}
    free = {"repetition": estimate(0.25, 0.2, 0.3), "early_stop": estimate(None)}
    full = RunRecord(method="full", hash="a", task_aggregate={"tokens": tokens, "free": free})
    other = RunRecord(method="h2o", hash="b", task_aggregate={"tokens": {}, "free": {}})
    tables = long_tables([full, other])
    console = Console(width=120, record=True)
    for table in tables:
        console.print(table)
    lines = [re.split(r"\s{2,}", line.strip()) for line in console.export_text().splitlines()]
    cells = {line[0]: line[1:] for line in lines}
    assert cells["perplexity"] == ["12.3 [11, 13]", "-"] and cells["KL max"] == ["2.5", "-"]
    assert cells["same first choice, %"] == ["90.0", "-"] and cells["4-grams said before, %"] == [
        "25.0 [20.0, 30.0]",
        "-",
    ]
    assert cells["would have ended before, %"] == ["-", "-"]
    assert long_tables([RunRecord(method="full"), other]) == []
