"""Second passes over a prompt: what is read, what does not fit, and replays from a prompt cache."""

import dataclasses

from engine_helpers import answers, comparable, engine, random_tokens, request
from refusals import refused

from kvbench.engine import hf
from kvbench.engine.probe import plan_passes
from kvbench.engine.prompt_cache import PromptCache
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kvzip import KVzip
from kvbench.policy import Probe


class Letters:
    """A tokenizer of one token per letter."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


PROBE = Probe(ask="ab", go_on="c", part_tokens=40, overlap_tokens=3)
PROMPT = list(range(1000, 1100))


def test_every_token_is_repeated_once():
    """Three parts behind their requests, the later ones behind the last tokens of the part before."""
    found = plan_passes(PROBE, Letters(), PROMPT, (7,), 4096)
    assert [(each.first, each.end) for each in found] == [(0, 40), (40, 80), (80, 100)]
    assert found[0].tokens == (97, 98, 7, *PROMPT[:40])
    assert found[2].tokens == (99, *PROMPT[77:80], 7, *PROMPT[80:])


def test_parts_shrink_to_what_the_context_has_room_for():
    """Behind 100 prompt tokens, 4 of a request and 1 that closes the turn: no pass goes beyond the context, and where
    fewer than 32 tokens fit, the prompt is refused."""
    for context, parts in ((145, 3), (144, 3), (137, 4)):
        found = plan_passes(PROBE, Letters(), PROMPT, (7,), context)
        assert len(found) == parts and max(100 + len(each.tokens) for each in found) <= context
        assert [token for each in found for token in each.tokens[-(each.end - each.first) :]] == PROMPT
    with refused("prompt-length", None, "100", "31", "136"):
        plan_passes(PROBE, Letters(), PROMPT, (7,), 136)
    assert len(plan_passes(PROBE, Letters(), PROMPT[:3], (), 10)) == 1  # a short prompt needs no more than itself


def test_a_prompt_without_room_stops_the_run_before_the_first_is_read(tiny_model):
    """The second prompt is too long, and the first one is not answered either."""
    loaded = dataclasses.replace(tiny_model("llama", "gqa3", 64), max_tokens=300)
    asked = [request("a", random_tokens(20), max_new_tokens=2), request("b", random_tokens(290), max_new_tokens=2)]
    with refused("prompt-length", None, "290", "300"):
        answers(loaded, KVzip(), asked)


def test_replays_serve_other_budgets_and_other_methods(tiny_model, monkeypatch):
    """From one prompt cache three budgets read and probe a prompt once, and the records are those of fresh runs to the
    bit; methods without a probe go on from the same entry. What closes a turn counts."""
    loaded, passes = tiny_model("llama", "gqa3", 64), []
    plain = hf.forward

    def counted(model, session, *arguments):
        passes.append(type(session).__name__.lower())
        return plain(model, session, *arguments)

    monkeypatch.setattr(hf, "forward", counted)
    asked = [request("a", random_tokens(70), max_new_tokens=3), request("b", random_tokens(33), max_new_tokens=3)]
    other = [dataclasses.replace(asked[0], closing_tokens=4), asked[1]]
    prompts = PromptCache(2**30, keeps_queries=True)

    def run(policy, requests, cache=None):
        found = []
        with engine(loaded, policy, batch_size=2) as running:
            running.runner.prompts = cache or PromptCache()
            running.run(requests, on_outcome=found.append)
        return {outcome.sample_id: comparable(outcome) for outcome in found}

    settings = [KVzip(budget=0.5, part=30), KVzip(budget=0.2, part=30, allocation="uniform"), H2O(budget=0.5), Full()]
    swept = [run(policy, asked, prompts) for policy in settings]
    assert passes.count("prefill") == 2 and passes.count("replay") == 3 + 2
    assert swept == [run(policy, asked) for policy in settings]
    passes.clear()
    assert run(settings[0], other, prompts)["a"]["kept"]["replay_tokens"] == swept[0]["a"]["kept"]["replay_tokens"] + 12
    assert passes.count("prefill") == 1 and passes.count("replay") == 3
