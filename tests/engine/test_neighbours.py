"""Rows of unlike lengths on models whose rotary table looks at the longest row of a pass: each has its own."""

import pytest
import torch
from engine_helpers import answers, comparable, engine, random_tokens, request
from refusals import refused
from ropes import settings_of
from test_request_alone import ABSENT

import kvbench
from kvbench.engine.requests import Turn
from kvbench.methods.full import Full
from kvbench.methods.snapkv import SnapKV
from kvbench.models.load import load_model

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)

NATIVE = Full(tier="native")
LENGTHS = (150, 20, 90, 30, 66)  # with answers of 9 tokens and borders of 48 and 64, on both sides of these


@pytest.fixture(scope="module", params=["longrope", "dynamic"])
def looking(request):
    """A tiny model whose table changes behind 48 tokens, or with every token behind 64."""
    fields = {"max_position_embeddings": 512} if request.param == "longrope" else {}
    loaded = load_model(settings_of(request.param, **fields))
    assert loaded.rows_are_alone and loaded.max_tokens >= 256
    return loaded


def own_tokens(loaded, prompt, count):
    """The tokens of transformers' own generate, on a model that has read nothing else."""
    loaded.model.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt])
    loaded.model(ids[:, :1])
    how = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("policy", [NATIVE, SnapKV(budget=0.5, window=8)], ids=["full", "snapkv"])
def test_a_short_row_is_the_same_bits_with_a_long_one(looking, policy):
    """Answers, bytes and, where the table may be forced on, fidelity, joined in any order and one by one."""
    forced = looking.lengths.tables[0].grows
    asked = [
        request(str(n), random_tokens(n), max_new_tokens=9, gold=() if forced else random_tokens(5, 1)) for n in LENGTHS
    ]
    alone = {key: comparable(one) for key, one in answers(looking, policy, asked, batch_size=1).items()}
    for listed in (asked, asked[::-1]):
        found = answers(looking, policy, listed, batch_size=8)
        assert {key: comparable(one) for key, one in found.items()} == alone
    if policy is NATIVE and not forced:
        assert all(one["fidelity"]["kl_mean"] < 1e-5 for one in alone.values()), "full against itself"


def test_tokens_are_those_of_transformers(looking):
    """Of prompts on both sides of the border, `dynamic` across it too, whatever was read before."""
    crossing = (60,) if looking.lengths.tables[0].grows else ()
    asked = [request(str(n), random_tokens(n), max_new_tokens=9) for n in (*LENGTHS, *crossing)]
    wanted = {str(n): own_tokens(looking, random_tokens(n), 9) for n in (*LENGTHS, *crossing)}
    found = answers(looking, NATIVE, asked, batch_size=8, fidelity_max_tokens=0)
    assert {name: one.token_ids for (name, _), one in found.items()} == wanted


def test_rows_that_give_way_begin_again_alike(looking):
    """A pool for about two of five requests: who gives way between the passes of a step has the same answer."""
    asked = [request(str(n), random_tokens(n), max_new_tokens=24) for n in (150, 20, 90, 16, 12)]
    policy = Full(tier="fp16")
    alone = answers(looking, policy, asked, batch_size=1, fidelity_max_tokens=0)
    budget = 2 * max(one.ledger["resident_bytes"] for one in alone.values())
    found = answers(looking, policy, asked, batch_size=8, fidelity_max_tokens=0, budget_bytes=budget)
    assert {key: one.token_ids for key, one in found.items()} == {key: one.token_ids for key, one in alone.items()}


CROSSING = {
    "an answer": ("longrope", {"max_new_tokens": 9}, {}, "to 3, or set model.max_tokens=48"),
    "forced tokens": ("longrope", {"max_new_tokens": 1, "gold": random_tokens(7)}, {}, "fidelity.max_tokens to 3"),
    "a chunk": ("longrope", {"max_new_tokens": 1}, {"prefill_chunk": 32, "length": 90}, "set prefill.chunk=null"),
    "a question": ("longrope", {"max_new_tokens": 1}, {"more": 5}, "set protocol.query_aware=true"),
    "forced behind a growing table": ("dynamic", {"gold": random_tokens(30)}, {}, "set fidelity.max_tokens=0"),
    "a turn": ("dynamic", {"turns": (Turn(tokens=random_tokens(20)),)}, {}, "set model.max_tokens=64"),
}


@pytest.mark.parametrize("case", CROSSING)
def test_what_crosses_a_border_is_refused(case):
    """Before anything is read, with the remedy; below the border the same is answered."""
    rope, fields, how, remedy = CROSSING[case]
    loaded = load_model(settings_of(rope, **({"max_position_embeddings": 512} if rope == "longrope" else {})))
    length, more = how.pop("length", 46), how.pop("more", 0)

    def asked(length):
        parts = (random_tokens(length), random_tokens(more)) if more else (random_tokens(length),)
        return [request("a", *parts, **{"max_new_tokens": 9, "min_new_tokens": 0} | fields)]

    with refused("prompt-length", None, loaded.lengths.tables[0].border, remedy):
        answers(loaded, NATIVE, asked(length), **how)
    assert answers(loaded, NATIVE, asked(20), **how)["a", 0].status == "ok"


def test_a_shorter_context_takes_what_would_cross():
    """With model.max_tokens at the border every text has one table."""
    loaded = load_model(settings_of("longrope", max_position_embeddings=512) | {"max_tokens": 48})
    assert answers(loaded, NATIVE, [request("a", random_tokens(46), max_new_tokens=9, min_new_tokens=0)])["a", 0].text


def test_generate_and_compress_obey_the_same_rule(looking):
    """A text's answer is the one that it has alone; what would cross is refused, or has no room where no length is
    said."""
    tokenizer, border = looking.tokenizer, looking.lengths.tables[0].border
    tokenizer.padding_side = "left"
    texts, how = ["short", "a longer text " * 9], {"method": "full", "tier": "native", "max_new_tokens": 9}
    both = kvbench.generate(looking.model, tokenizer, texts, **how)
    ones = [kvbench.generate(looking.model, tokenizer, text, **how) for text in texts]
    assert both.tokens == [one.tokens[0] for one in ones]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with kvbench.compress(looking.model, "full", tier="native"):
        found = looking.model.generate(**inputs, max_new_tokens=9, min_new_tokens=9, do_sample=False)
    assert [row[: len(one)] for row, one in zip(found[:, -9:].tolist(), both.tokens, strict=True)] == both.tokens
    if looking.lengths.tables[0].grows:
        return
    prompt = {name: each[:, -border + 3 :] for name, each in tokenizer(texts[1:], return_tensors="pt").items()}
    with refused("prompt-length", None, "protocol.max_new_tokens"):
        kvbench.generate(looking.model, tokenizer, "x" * (border - 3), **how)
    with kvbench.compress(looking.model, "full") as cache:
        with refused("prompt-length", None, "max_new_tokens"):
            looking.model.generate(**prompt, max_new_tokens=9)
        with pytest.raises(ValueError, match="3 more tokens|1 more tokens"):
            looking.model.generate(**prompt, max_new_tokens=9, past_key_values=cache)


def test_one_place_says_which_rows_pass_together(looking):
    """Every step of a runner goes by it: rows on one side of a border together, behind a growing one by length."""
    with engine(looking, NATIVE) as running:
        runner = running.runner
        runner.reserve(rows=4, prompt_tokens=90, new_tokens=3)
        rows = [runner.read(random_tokens(n))[0] for n in (90, 20, 80, 30)]
        grows = looking.lengths.tables[0].grows
        assert runner.apart(rows) == ([[0], [1, 3], [2]] if grows else [[0, 2], [1, 3]])
        together, bad = runner.try_step(rows, [5, 6, 7, 8])
        assert not bad
        runner.close_all()
        for index, n in enumerate((90, 20, 80, 30)):
            row, _ = runner.read(random_tokens(n))
            assert torch.equal(runner.step([row], [5 + index])[0], together[index])
            runner.close(row)
