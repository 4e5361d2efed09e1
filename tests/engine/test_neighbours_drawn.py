"""Joined rows against single ones, to the bit, of drawn models, methods, stores and requests."""

import random
from contextlib import suppress

import pytest
from engine_helpers import answers, comparable, request
from ropes import ROPES
from selection import method_of
from test_request_alone import ABSENT

from kvbench.engine.requests import Thoughts, Turn
from kvbench.models.load import load_model

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)

DRAWS = 300
TAKEN = 8  # of the default run, each kind of rotary embedding among them
# Whether a row's bytes are those of a run of its own too, and not only those of the same run one by one.
BYTES_OF_A_RUN_ALONE = True
BORDER = 64
SHAPES = (
    {},
    {"num_key_value_heads": 1},
    {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80},
    {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 96},
    {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "head_dim": 64},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "phi3", "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128},
    {"model_type": "gemma3_text", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
)
METHODS = (
    "full", "snapkv", "pyramidkv", "h2o", "tova", "kivi", "minikv", "diffkv", "streaming_llm", "int4", "knorm", "lagkv",
    "turboquant_4bit", "quest", "think", "cake", "zipcache", "r_kv", "vatp", "keyformer", "scissorhands", "kv_compress",
)  # fmt: skip


def model_of(number: int):
    """One of the models, and what it was made with."""
    dice = random.Random(f"model {number}")
    shape, rope = dict(dice.choice(SHAPES)), [*ROPES][number % len(ROPES)]
    kind, head_dim = shape.get("model_type"), shape.get("head_dim", 64)
    if kind == "gemma3_text" or (kind == "phi3" and rope != "longrope"):
        rope = "default"  # the one has an embedding for each kind of layer, and the other knows no more types
    fields = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "intermediate_size": 96} | shape
    if rope != "default":
        scaling = {"rope_type": rope, "rope_theta": 10000.0} | ROPES[rope][0]
        if rope == "longrope":
            size = head_dim // 2
            scaling |= {"short_factor": [1.0] * size, "long_factor": [1.0 + i for i in range(size)]}
        if "original_max_position_embeddings" in scaling:
            scaling["original_max_position_embeddings"] = BORDER
        fields |= {"rope_parameters": scaling}
    fields |= {"head_dim": head_dim, "max_position_embeddings": BORDER if rope in ("dynamic", "yarn") else 512}
    dtype = dice.choice(["float32", "float32", "bfloat16", "float16"])
    loaded = load_model(
        {"kind": "random", "preset": "tiny", "num_layers": 2, "overrides": fields, "dtype": dtype, "device": "cpu"}
    )
    return loaded, f"{shape} {rope} {dtype}"


def drawn_requests(dice: random.Random, loaded) -> list:
    """Requests of many kinds, with lengths on both sides of every border; those that cross one are left out, which
    `test_neighbours` has."""

    def tokens(count):
        return tuple(dice.randint(1, 319) for _ in range(count))

    found, shared = [], tokens(dice.choice([20, 80]))
    lengths = [BORDER - 6, BORDER, BORDER + 1, *(dice.randint(1, 150) for _ in range(4))]
    tables = loaded.lengths.tables
    for number in range(dice.randint(3, 5)):
        size, new = dice.choice(lengths), dice.choice([1, 2, 5, 9])
        kind = dice.choice(("plain", "plain", "parts", "shared", "turns", "choices", "samples", "thoughts", "forced"))
        parts = {"parts": (tokens(size), tokens(dice.randint(1, 9))), "shared": (shared, tokens(5))}
        fields = {
            "turns": {"turns": (Turn(tokens=tokens(4), gold=tokens(2)),), "gold": tokens(3)},
            "choices": {"choices": (tokens(1), tokens(4))},
            "samples": {"num_samples": 2, "temperature": 0.9, "top_p": dice.choice([1.0, 0.8])},
            "thoughts": {"thoughts": Thoughts(opened=True, budget_tokens=dice.choice([None, 3]), end=tokens(2))},
            "forced": {"gold": tokens(dice.choice([1, 7])), "max_new_tokens": dice.choice([0, 4])},
        }.get(kind, {"gold": tokens(3)} if dice.random() < 0.3 else {})
        fields = {"max_new_tokens": new, "min_new_tokens": 0, "instruction_tokens": 1} | fields
        one = request(f"{kind} {number}", *parts.get(kind, (tokens(size),)), **fields)
        most = one.num_prompt_tokens + 40
        plain = kind in ("plain", "samples", "thoughts") and not one.gold
        if all(most <= each.border or (plain if each.grows else len(one.segments[0]) > each.border) for each in tables):
            found.append(one)
    return found or [request("alone", tokens(20), max_new_tokens=3)]


def outcomes_of(loaded, policy, asked, how) -> dict:
    """Everything that is measured of requests."""
    return {key: comparable(one) for key, one in answers(loaded, policy, asked, **how).items()}


def without_bytes(outcome: dict) -> dict:
    """An outcome without the bytes that a row held."""
    turns = [{key: value for key, value in turn.items() if key != "resident_bytes"} for turn in outcome["turns"]]
    return {name: part for name, part in outcome.items() if name != "ledger"} | {"turns": turns}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < TAKEN else pytest.mark.exhaustive) for seed in range(DRAWS)]
)
def test_a_row_is_the_same_bits_in_any_company(seed):
    """Answers, bytes and every number that is measured: joined and in another order against one by one; in a run of its
    own; and where the pool runs out, of those that fit alone."""
    dice = random.Random(seed)
    loaded, what = model_of(seed)
    chosen, asked = dice.choice(METHODS), drawn_requests(dice, loaded)
    chunk = dice.choice([None, None, 33]) if not loaded.lengths else None
    drawn, plain = {"prefill_chunk": chunk, "rotation": dice.choice(["none", "hadamard"]), "seed": 7}, {"seed": 7}
    drawn["key_offset"] = "prompt" if seed % 2 and chunk is None else "none"
    for name, how in ((chosen, drawn), (chosen, plain), ("full", drawn)):
        try:
            policy = method_of(name)
            alone = outcomes_of(loaded, policy, asked, how | {"batch_size": 1})
            break
        except ValueError:  # the method does not go with the settings, or with the model
            continue
    what = f"{what}: {name} {how} {[one.sample_id for one in asked]}"
    for batch in ("auto", dice.choice([2, 3])):
        listed = dice.sample(asked, len(asked))
        assert outcomes_of(loaded, policy, listed, how | {"batch_size": batch}) == alone, what
    kept = (lambda outcome: outcome) if BYTES_OF_A_RUN_ALONE else without_bytes
    for key, one in outcomes_of(loaded, policy, [dice.choice(asked)], how | {"batch_size": 1}).items():
        assert kept(one) == kept(alone[key]), what
    most = max(one["ledger"].get("resident_bytes", 0) for one in alone.values())
    how |= {"batch_size": "auto", "budget_bytes": int(dice.choice([1.2, 2.0]) * most) + (1 << 16)}
    starved: dict = {}
    with suppress(ValueError):  # the buffers of a method alone are more
        starved = outcomes_of(loaded, policy, asked, how)
    for key, one in starved.items():
        assert one["status"] == "oom" or one == alone[key], what
