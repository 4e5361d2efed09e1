"""Conversations: each turn is read behind the answer before it, into the same compressed cache."""

from unittest.mock import patch

import pytest
from engine_helpers import NATIVE_METHODS, answers, comparable, engine, own_greedy, own_logits, random_tokens, request
from refusals import refused
from selection import few, in_turn
from test_shared_context import POLICIES

from kvbench.engine.requests import Turn
from kvbench.engine.runner import NotFinite, Runner
from kvbench.methods.full import Full
from kvbench.methods.kv_compress import KVCompress

NATIVE = NATIVE_METHODS["full"]
LENGTH = 7  # tokens of every answer


def turn(tokens: int, seed: int, gold: int = 0) -> Turn:
    """What is said behind an answer, and a gold answer to it."""
    return Turn(tokens=random_tokens(tokens, seed=seed), gold=random_tokens(gold, seed=seed + 50) if gold else ())


def conversation(name: str = "a", *, seed: int = 0, **fields):
    """Three answers behind a prompt of 50 tokens."""
    turns = (turn(5, seed + 1, 4), turn(9, seed + 2, 6))
    fields = {"gold": random_tokens(5, seed=seed + 7), "max_new_tokens": LENGTH} | fields
    return request(name, random_tokens(50, seed=seed), turns=turns, **fields)


def said(outcome) -> list[list[int]]:
    """The tokens of every answer."""
    return [*(one["token_ids"] for one in outcome.turns), outcome.token_ids]


@pytest.mark.parametrize("segments", [1, 2])
def test_answers_are_those_of_a_plain_conversation(loaded, segments):
    """With the full cache, every answer is what transformers' own model says to the whole history, read anew."""
    asked = conversation()
    parts = asked.segments if segments == 1 else (asked.prompt[:31], asked.prompt[31:])
    asked = request("a", *parts, turns=asked.turns, max_new_tokens=LENGTH)
    found = said(answers(loaded, NATIVE, [asked])["a", 0])
    history = list(asked.prompt)
    for place, answer in enumerate(found):
        assert answer == own_greedy(loaded, [history], LENGTH)[0]
        history += answer
        if place < len(asked.turns):
            history += asked.turns[place].tokens
    assert len(found) == 3


def by_hand(loaded, policy, asked) -> tuple[list[list[int]], dict, dict]:
    """A conversation step by step over a runner: its answers, ledger and what was kept, with averages by hand."""
    with engine(loaded, policy, batch_size=1) as running:
        runner = running.runner
        behind = 3 * LENGTH + sum(len(one.tokens) for one in asked.turns)
        runner.reserve(rows=2, prompt_tokens=len(asked.prompt), new_tokens=behind)
        row, read = runner.read(asked.prompt, new_tokens=behind - 1)
        logits, found, bytes_, shares = read[0], [], [], []
        for place in range(3):
            answer = [int(logits.argmax())]
            while len(answer) < LENGTH:
                logits = runner.step([row], answer[-1:])[0]
                answer.append(int(logits.argmax()))
                bytes_.append(runner.bytes(row))
                shares.append(bytes_[-1] / runner.shape.fp16_bytes(int(runner.store.counters.tokens_seen[row])))
            found.append(answer)
            if place < 2:
                logits = runner.append(row, [answer[-1], *asked.turns[place].tokens])
        held, kept = runner.store.ledger.report(row)
        runner.close(row)
        means = {"average_bytes": sum(bytes_) / len(bytes_), "average_ratio": sum(shares) / len(shares)}
        return found, held | means, kept


@pytest.mark.every(2)
@pytest.mark.parametrize("name", list(POLICIES))
def test_every_method_appends_the_turns_to_its_cache(loaded, name):
    """Tokens, bytes and what was kept are those of the same steps by hand; averages are over the answers alone."""
    asked = conversation(gold=())
    outcome = answers(loaded, POLICIES[name], [asked], batch_size=1, fidelity_max_tokens=0)["a", 0]
    found, held, kept = by_hand(loaded, POLICIES[name], asked)
    assert said(outcome) == found
    assert outcome.ledger == pytest.approx(held) and outcome.kept == kept
    assert kept["tokens_seen"] == 50 + 3 * LENGTH + 5 + 9 - 1, "the last token is only predicted"
    assert [one["tokens_seen"] for one in outcome.turns] == [50 + LENGTH - 1, 50 + 2 * LENGTH + 5 - 1]
    assert all(
        one["fp16_bytes"] == one["tokens_seen"] * held["fp16_bytes"] / kept["tokens_seen"] for one in outcome.turns
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("name", few(NATIVE_METHODS, "snapkv", "diffkv", "streaming_llm"))
def test_in_batches_and_sampled(loaded, name):
    """Conversations of several lengths beside plain questions, and three sampled ones of one prompt, as each alone."""
    asked = [conversation("a"), request("b", random_tokens(30), max_new_tokens=20), conversation("c", seed=3)]
    asked.append(conversation("d", seed=5, temperature=0.9, num_samples=3, max_new_tokens=5))
    together = answers(loaded, NATIVE_METHODS[name], asked, batch_size=4)
    for one in asked:
        alone = answers(loaded, NATIVE_METHODS[name], [one], sizing=asked, batch_size=1)
        for key, outcome in alone.items():
            assert said(together[key]) == said(outcome)
    assert len({str(said(together["d", repeat])) for repeat in range(3)}) == 3


def test_an_answer_that_ends_leaves_no_end_behind(loaded, monkeypatch):
    """An end token is not read; what is said next comes right behind the answer."""
    asked = request("a", random_tokens(40), turns=(turn(6, 1),), max_new_tokens=12, min_new_tokens=0)
    free = own_greedy(loaded, [asked.prompt], 12)[0]
    end = next(token for token in free[3:] if token not in free[:3])
    monkeypatch.setattr(type(loaded), "eos_token_ids", (end,))
    outcome = answers(loaded, NATIVE, [asked])["a", 0]
    first = free[: free.index(end)]
    assert (outcome.turns[0]["token_ids"], outcome.turns[0]["finish"]) == (first, "eos")
    assert outcome.turns[0]["tokens_seen"] == 40 + len(first)
    history = [*asked.prompt, *first, *asked.turns[0].tokens]
    assert outcome.token_ids == [*own_greedy(loaded, [history], 12)[0], end][: len(outcome.token_ids)]


@pytest.mark.parametrize(("segments", "own"), in_turn((1, 2), (False, True)))
def test_all_answers_are_forced(loaded, segments, own):
    """Gold answers, or the full cache's own, one behind the other: NLL and KL are those of a pass over it all."""
    asked = conversation()
    parts = asked.segments if segments == 1 else (asked.prompt[:31], asked.prompt[31:])
    asked = request("a", *parts, turns=asked.turns, gold=asked.gold, max_new_tokens=LENGTH)
    outcome = answers(loaded, NATIVE, [asked], own=own, fidelity_per_token=True)["a", 0]
    golds = said(outcome) if own else [asked.gold, *(one.gold for one in asked.turns)]
    text, places = list(asked.prompt), []
    for place, gold in enumerate(golds):
        if place:
            text += asked.turns[place - 1].tokens
        places += range(len(text) - 1, len(text) - 1 + len(gold))
        text += gold
    logp = own_logits(loaded, text, 0).log_softmax(-1)
    tokens = [token for gold in golds for token in gold]
    wanted = [-float(logp[place, token]) for place, token in zip(places, tokens, strict=True)]
    assert outcome.per_token["nll_full"] == pytest.approx(wanted, abs=1e-3)
    assert outcome.per_token["nll"] == pytest.approx(wanted, abs=1e-3)
    assert outcome.fidelity["num_tokens"] == len(tokens) and outcome.fidelity["kl_mean"] < 1e-6
    lossy = answers(loaded, KVCompress(budget=16, obs_window=8, protected=8, block=4), [asked], own=own)["a", 0]
    assert lossy.fidelity["kl_mean"] > 1e-3


def test_what_is_forced_ends_with_the_first_answer_that_is_not_known(loaded):
    """A turn without a gold answer has none behind it either; limits count for each answer."""
    turns = (turn(5, 1, 4), turn(9, 2), turn(3, 3, 2))
    asked = request("a", random_tokens(30), turns=turns, gold=random_tokens(6), max_new_tokens=3)
    assert answers(loaded, NATIVE, [asked])["a", 0].fidelity["num_tokens"] == 3 + 3, "no longer than an answer"
    found = answers(loaded, NATIVE, [asked], fidelity_max_tokens=2)["a", 0]
    assert found.fidelity["num_tokens"] == 2 + 2 and len(found.turns) == 3


def test_conversations_share_a_context(loaded):
    """Two conversations about one document read it once, and are those of separate runs."""
    context, asked = random_tokens(60), []
    for place in range(2):
        turns = (turn(5, 11 + place, 4), turn(4, 21 + place, 3))
        asked.append(request(f"a{place}", context, random_tokens(4 + place, seed=2), turns=turns, max_new_tokens=6))
    for name in ("full", "h2o", "kv_compress"):
        together = answers(loaded, POLICIES[name], asked, batch_size=1)
        assert together["a1", 0].timing["shares_context"]
        for one in asked:
            (alone,) = answers(loaded, POLICIES[name], [one], batch_size=1, sizing=asked).values()
            assert comparable(together[one.sample_id, 0]) == comparable(alone)


def test_a_bad_turn_ends_its_conversation_alone(loaded):
    """Logits that are not finite behind a turn are that sample's outcome."""
    asked = [conversation("a"), conversation("b", seed=3), conversation("c", seed=6)]
    own = Runner.append

    def failing(self, row, tokens):
        if tuple(tokens[1:]) == asked[1].turns[0].tokens:
            raise NotFinite(1)
        return own(self, row, tokens)

    with patch.object(Runner, "append", failing):
        got = answers(loaded, Full(), asked, batch_size=3)
    assert [got[name, 0].status for name in "abc"] == ["ok", "nan", "ok"] and got["b", 0].nan_layer == 1
    alone = answers(loaded, Full(), asked[2:], sizing=asked)
    assert said(got["c", 0]) == said(alone["c", 0])


def test_a_conversation_that_does_not_fit_is_refused(loaded):
    """All of it must fit in the model's context, with answers of full length."""
    turns = (turn(loaded.max_tokens - 80, 1),)
    with refused("prompt-length", None, "50"):
        answers(loaded, Full(), [request("a", random_tokens(50), turns=turns, max_new_tokens=16)])
