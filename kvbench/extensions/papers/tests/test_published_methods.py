"""The methods of the papers' rows answer on a model that they were never meant for."""

import shlex

from engine_helpers import answers, random_tokens, request
from selection import FULL

from kvbench.config.compose import compose
from kvbench.extensions.papers import papers
from kvbench.runs.parts import make_policy
from kvbench.runs.verdict import complaint


def test_every_published_method_runs(tiny_model):
    """Each method of a paper's row, once for the same settings with other values, answers prompts of any length on a
    model it was never meant for, and finds its own work done."""
    loaded, seen = tiny_model("llama", "gqa3", 64, narrow=True), set()
    lengths = (1, 2, 9, 160) if FULL else (160,)  # tests/methods/test_conformance.py takes every method to short ones
    requests = [request(str(n), random_tokens(n), max_new_tokens=3) for n in lengths]
    entries = [entry for paper in papers.every() for entry in paper.entries if entry.tasks]
    for line in dict.fromkeys(line for entry in entries for line in entry.rows().values()):
        words = shlex.split(line)
        kind = tuple(word if FULL or "." not in word else word.partition("=")[0] for word in words)
        if kind in seen or "{results}" in line:  # a table that the entry's own commands make
            continue
        seen.add(kind)
        policy = make_policy(compose(words).method)
        for (length, _), outcome in answers(loaded, policy, requests).items():
            assert outcome.status == "ok", (line, length, outcome.message)
            assert complaint(policy, vars(outcome)) is None, (line, length)
    assert len(seen) > 20
