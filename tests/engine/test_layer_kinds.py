"""Models whose layers are not all alike: windows, chunks, and full layers on which the methods act."""

import dataclasses
import os
from itertools import product
from math import ceil

import pytest
import torch
import transformers
from decoders import GEMMA_4, SSM
from engine_helpers import NATIVE_METHODS, answers, engine, own_greedy, own_steps, random_tokens, request
from omegaconf import OmegaConf
from places import CONF, ROOT
from refusals import refused
from selection import few, in_turn

from kvbench.config.settings import read_config, read_settings
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.runner import Runner
from kvbench.errors import UnsupportedModel
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.kvzip import KVzip
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.think import ThinK
from kvbench.models.fetched import Source
from kvbench.models.load import load_model

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "initializer_range": 0.15,
}
EVERY_OTHER = ["sliding_attention", "full_attention"] * 2
SLIDING = {"sliding_window": 24, "layer_types": EVERY_OTHER}
KINDS = {
    "qwen2": SLIDING | {"use_sliding_window": True, "max_window_layers": 0},
    "gemma3_text": SLIDING | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "pad_token_id": 0},
    "cohere2": SLIDING | {"pad_token_id": 0},
    "llama4_text": {
        "attention_chunk_size": 24,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "no_rope_layers": [1, 0, 1, 0],
    },
    "qwen3_next": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "pad_token_id": 0,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_ff_dim": 64,
        "pad_token_id": 0,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
        "pad_token_id": 0,
    },
    "gemma4_text": GEMMA_4 | {"sliding_window": 24, "attention_k_eq_v": True, "vocab_size_per_layer_input": 320},
    "falcon_h1": SSM | {"pad_token_id": 0},
    "deepseek_v3": {
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16),
        **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "pad_token_id": 0,
    },
}
WINDOW = 24
PROMPT = 58  # more than two windows, and no multiple of one
# Logits of the model's own dtype differ by the order of sums alone; those of 16-bit pages by their rounding, some 1e-3
# of the logits' spread.
TOLERANCE = {"native": 1e-4, "fp16": 1e-2}


@pytest.fixture(scope="module")
def small(tiny_model):
    """Makes random models of four layers, whose windows are shorter than the prompts."""
    made = {}

    def make(kind, **fields):
        key = kind, str(fields)
        if key not in made:
            config = transformers.CONFIG_MAPPING[kind](**(SMALL | KINDS.get(kind, {}) | fields))
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
            model.generation_config.eos_token_id = 0
            loaded = tiny_model("llama", "gqa3", 64)
            made[key] = dataclasses.replace(loaded, model=model, name=kind, fingerprint=str(key), max_tokens=256)
        return made[key]

    return make


def prompts_of(rows: int) -> list[tuple[int, ...]]:
    """Prompts of one length."""
    return [random_tokens(PROMPT, seed) for seed in range(rows)]


def runner_logits(loaded, policy, tokens, num_prompt, chunk=None, **how):
    """Logits [rows, steps + 1, vocabulary] of kvbench's cache, and the bytes of each row."""
    try:
        runner = Runner(loaded, policy, chunk=chunk, **how)
        runner.reserve(rows=len(tokens), prompt_tokens=num_prompt, new_tokens=tokens.shape[1] - num_prompt + 1)
        read = [runner.read(row[:num_prompt]) for row in tokens.tolist()]
        rows, found = [row for row, _ in read], [torch.stack([logits[-1] for _, logits in read])]
        for step in range(num_prompt, tokens.shape[1]):
            found.append(runner.step(rows, tokens[:, step].tolist()).clone())
        return torch.stack(found, 1), runner, rows
    finally:
        loaded.model.set_attn_implementation("sdpa")


def difference(found, wanted):
    """The largest difference of logits, beside their spread."""
    return float((found - wanted).abs().max() / wanted.std())


@pytest.mark.every(3)
@pytest.mark.parametrize(("kind", "how"), in_turn(sorted(KINDS), [(3, "native"), (1, "fp16")]))
def test_lossless_settings_give_the_models_own_tokens(small, kind, how):
    """Over 40 steps behind a prompt that no window holds, alone and three at a time."""
    loaded, rows, policy = small(kind), how[0], Full(tier=how[1])
    prompts = prompts_of(rows)
    tokens = torch.tensor([[*a, *b] for a, b in zip(prompts, own_greedy(loaded, prompts, 40), strict=True)])
    wanted = own_steps(loaded, tokens, PROMPT)
    found, _, _ = runner_logits(loaded, policy, tokens, PROMPT)
    assert difference(found, wanted) < TOLERANCE[policy.tier]
    if policy.tier == "native":
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_gemma_3_goes_on_as_with_its_own_cache():
    """A real model with windows of 512: 200 greedy tokens behind a prompt of 2,000, in 16 bits."""
    settings = OmegaConf.to_container(read_config(CONF / "model" / "gemma-3-270m.yaml"))
    settings |= {"kind": "gguf", "path": os.environ.get("KVBENCH_TEST_GEMMA"), "device": "cpu", "dtype": "float32"}
    if not settings["path"] and not read_settings(Source, settings["fetch"], "").path.exists():
        pytest.skip("gemma-3-270m is not in the cache (`python -m kvbench model=gemma-3-270m` fetches it)")
    loaded = load_model({key: value for key, value in settings.items() if key != "defaults"})
    text = "".join((ROOT / "docs" / name).read_text() for name in ("run.md", "read.md"))
    prompt = loaded.tokenizer.encode(text)[:2000]
    tokens = torch.tensor([[*prompt, *own_greedy(loaded, [prompt], 200)[0]]])
    found, runner, (row,) = runner_logits(loaded, Full(), tokens, 2000)
    assert found[0, :-1].argmax(-1).tolist() == tokens[0, 2000:].tolist()
    ledger, _ = runner.report(row)
    assert 0.5 < ledger["window_bytes"] / ledger["resident_bytes"] < 0.6  # 15 windows of 512, 3 times 2,200


@pytest.mark.parametrize("name", sorted(NATIVE_METHODS))
def test_methods_that_keep_everything_are_the_models_own(small, name):
    """Every way of holding tokens, at settings that leave nothing out."""
    policies = {
        "snapkv": SnapKV(budget=1.0, window=8, tier="native"),
        "streaming_llm": StreamingLLM(budget=500, tier="native"),
        "diffkv": dataclasses.replace(NATIVE_METHODS["diffkv"], alpha_h=0.0, alpha_l=0.0),
    }
    loaded, policy = small("qwen2"), policies.get(name, NATIVE_METHODS[name])
    tokens = torch.tensor(prompts_of(2))
    wanted = own_steps(loaded, tokens, 30)
    found, _, _ = runner_logits(loaded, policy, tokens, 30)
    assert difference(found, wanted) < TOLERANCE["native"]


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (SnapKV(budget=0.25, window=8), "qwen2"),
        (NATIVE_METHODS["kivi"], "gemma3_text"),
        (NATIVE_METHODS["diffkv"], "cohere2"),
        (KVCompress(budget=0.5), "qwen2"),
        (H2O(budget=24), "llama4_text"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_windows_are_billed_as_a_walk_over_their_pages_counts(small, policy, kind):
    """The items of the ledger sum to what the allocator holds, and a window never holds more than its tokens."""
    loaded, steps = small(kind), 20
    tokens = torch.tensor([random_tokens(PROMPT + steps, seed) for seed in range(2)])
    _, runner, rows = runner_logits(loaded, policy, tokens, PROMPT)
    store, (windows,) = runner.store, runner.store.other_kinds
    held, seen = {}, PROMPT + steps
    for row in rows:
        ledger, kept = runner.report(row)
        table, lists = windows.pages.table, windows.pages.lists_of(torch.tensor([row]))
        slots = table.num_slots[0, lists]
        size = (seen - 1) % WINDOW + 1 if kind == "llama4_text" else WINDOW
        assert slots.tolist() == [size] * len(lists)
        pages = len(lists) * ceil(size / windows.pages.formats[0].tokens_per_page)
        each = windows.pages.pool.page_bytes + windows.pages.pool.free_list.element_size()
        fixed = table.allocated_bytes // len(rows) + windows.counters.row_bytes
        assert ledger["window_bytes"] == pages * each + fixed
        held[row] = ledger["resident_bytes"]
        items = [value for name, value in store.ledger.itemise(row).items() if name != "resident_bytes"]
        assert sum(items) == held[row] == ledger["full_layers_bytes"] + ledger["window_bytes"] + ledger["state_bytes"]
        width = 4 * windows.shape.num_kv_heads * 16
        assert ledger["fp16_bytes"] == width * (len(store.shape.numbers) * seen + windows.shape.num_layers * WINDOW)
        assert ledger["full_layers_fp16_bytes"] == width * len(store.shape.numbers) * seen
        assert kept["lists"] == store.shape.num_layers * 2
    free = sum(each.pages.pool.num_free * (each.pages.pool.page_bytes + 4) for each in (store, windows))
    assert sum(held.values()) + free == store.allocated_bytes
    runner.close_all()
    assert windows.pages.pool.num_used == store.pages.pool.num_used == 0


@pytest.mark.parametrize(
    ("kind", "chunk"),
    few(
        [*product(sorted({*KINDS} - {"gemma4_text"}), (16, 40))],
        *(("gemma3_text", 16), ("gemma3_text", 40), ("llama4_text", 40), ("qwen3_next", 40), ("deepseek_v3", 16)),
    ),
)
def test_prompts_in_chunks_see_the_same_windows_and_states(small, kind, chunk):
    """Chunks shorter and longer than the window, over what earlier ones left in pages."""
    loaded = small(kind)
    tokens = torch.tensor([random_tokens(110, seed) for seed in range(2)])
    found, runner, rows = runner_logits(loaded, Full(tier="native"), tokens, 100, chunk)
    assert difference(found, own_steps(loaded, tokens, 100)) < TOLERANCE["native"]
    for windows in runner.store.other_kinds:
        slots = windows.pages.table.num_slots[0, windows.pages.lists_of(torch.tensor(rows))]
        assert int(slots.max()) <= WINDOW


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", few(sorted(KINDS), "gemma4_text", "qwen2", "llama4_text", "qwen3_next", "lfm2"))
def test_forks_questions_and_choices_are_the_models_own(small, kind):
    """A question behind a compressed context, several answers of one prompt, and likelihoods of choices are those of
    the model's own cache, whoever shares pages."""
    loaded = small(kind)
    context, question = random_tokens(50, 1), random_tokens(9, 2)
    asked = request("a", context, question, max_new_tokens=12, num_samples=1, choices=(random_tokens(5, 3),))
    again = dataclasses.replace(asked, sample_id="b")
    found = answers(loaded, Full(tier="native"), [asked, again], batch_size=2)
    (want,) = own_greedy(loaded, [context + question], 12)
    assert found["a", 0].token_ids == found["b", 0].token_ids == want
    tokens = torch.tensor([[*context, *question, *asked.choices[0]]])
    nll = torch.log_softmax(own_steps(loaded, tokens, 59)[0, :-1], -1)
    own = sum(float(nll[place, token]) for place, token in enumerate(asked.choices[0]))
    assert found["a", 0].choices[0]["loglikelihood"] == pytest.approx(own, abs=1e-3)


def test_layers_that_share_keys_see_second_passes_and_no_chunks(small):
    """A probe reads behind the whole prompt, of which such layers see everything; and chunks are refused by name."""
    loaded, prompt = small("gemma4_text"), prompts_of(1)[0]
    tokens = torch.tensor([[*prompt, 5, 6, 7]])
    found, runner, (row,) = runner_logits(loaded, KVzip(budget=1.0, tier="native", part=30), tokens, PROMPT)
    assert difference(found, own_steps(loaded, tokens, PROMPT)) < TOLERANCE["native"]
    assert runner.report(row)[0]["peak_bytes"] > runner.report(row)[0]["resident_bytes"]
    with pytest.raises(UnsupportedModel, match="prefill.chunk=16: gemma4_text has layers that share the keys"):
        runner_logits(loaded, Full(), tokens, PROMPT, 16)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Full(tier="turboquant_4bit"), "turns keys; of a model with latent attention keys and values are the same"),
        (ThinK(), "has channels or tables of codes for keys alone"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_latent_attention_cannot_hold_is_refused(small, policy, message):
    """Formats and methods that treat keys and values in different ways, before anything is read."""
    with pytest.raises(ValueError, match=message):
        Runner(small("deepseek_v3"), policy)


@pytest.mark.parametrize("kind", ["gemma3_text", "granitemoehybrid"])
def test_a_replayed_prompt_is_the_one_that_was_read(small, kind):
    """Another setting takes windows and states from the prompt cache as they were."""
    loaded, prompt = small(kind), prompts_of(1)[0]
    cache = PromptCache(1 << 24, keeps_queries=True)
    try:
        found = []
        for policy in (SnapKV(budget=0.5, window=8), SnapKV(budget=0.5, window=8), H2O(budget=30)):
            runner = Runner(loaded, policy, prompts=cache)
            runner.reserve(rows=1, prompt_tokens=PROMPT, new_tokens=8)
            row, _ = runner.read(prompt)
            found.append(torch.stack([runner.step([row], [token])[0] for token in (5, 6, 7)]))
        fresh = Runner(loaded, H2O(budget=30))
        fresh.reserve(rows=1, prompt_tokens=PROMPT, new_tokens=8)
        row, _ = fresh.read(prompt)
        alone = torch.stack([fresh.step([row], [token])[0] for token in (5, 6, 7)])
    finally:
        loaded.model.set_attn_implementation("sdpa")
    assert (cache.num_read, cache.num_reused) == (1, 2)
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], alone)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", "granitemoehybrid"])
def test_states_are_billed_and_follow_their_rows(small, kind):
    """Every row has the bytes of its own states, whoever it is read, forked, decoded or closed with, and gives the
    logits that it gives alone."""
    loaded, steps = small(kind), (7, 8, 9)
    own = torch.tensor([[*prompt, *steps] for prompt in prompts_of(3)])
    want = own_steps(loaded, own, PROMPT)[:, 1:]
    try:
        runner = Runner(loaded, Full(tier="native"))
        runner.reserve(rows=4, prompt_tokens=PROMPT, new_tokens=8)
        rows = [runner.read(prompt)[0] for prompt in prompts_of(3)]
        first = runner.step(rows, [7] * 3)
        fork = runner.fork(rows[1])
        second = runner.step([rows[2], rows[1], rows[0]], [8] * 3)  # in another order
        runner.close(rows[0])
        third = runner.step([rows[1], rows[2]], [9] * 2)
        late = torch.stack([runner.step([fork], [token])[0] for token in (8, 9)])
        for row in rows[1:]:
            ledger, _ = runner.report(row)
            assert ledger["state_bytes"] == runner.states.held_bytes(row) > 0
            whole = len(runner.shape.numbers) * (PROMPT + 3) * 4 * 2 * 16
            assert ledger["fp16_bytes"] == whole + ledger["state_bytes"]
            assert ledger["full_layers_bytes"] + ledger["state_bytes"] == ledger["resident_bytes"]
        with pytest.raises(ValueError, match="3 tokens ahead cannot be read with a prompt where layers hold a state"):
            runner.read(prompts_of(1)[0], lookahead=(1, 2, 3))
    finally:
        loaded.model.set_attn_implementation("sdpa")
    found = torch.stack([first[1], second[1], third[0]]), torch.stack([first[2], second[0], third[1]])
    for row, logits in zip((1, 2), found, strict=True):
        assert difference(logits, want[row]) < TOLERANCE["native"]
    assert difference(late, want[1, 1:]) < TOLERANCE["native"]
    assert runner.states.held_bytes(rows[0]) == 0


def test_a_budget_in_bytes_is_of_the_whole_cache(small):
    """What the windows hold is no part of what the method may spend."""
    loaded, prompt = small("gemma3_text"), random_tokens(120)
    whole = answers(loaded, Full(), [request("a", prompt, max_new_tokens=8)])["a", 0].ledger
    assert whole["window_bytes"] > 0.4 * whole["resident_bytes"]
    budget = int(0.7 * whole["resident_bytes"])
    held = answers(loaded, SnapKV(budget=f"{budget}B", window=8), [request("a", prompt, max_new_tokens=8)])
    assert 0.9 * budget < held["a", 0].ledger["resident_bytes"] <= budget
    assert held["a", 0].ledger["window_bytes"] == whole["window_bytes"]
    with (
        engine(loaded, Full(), budget_bytes=1 << 14) as small_pool,
        refused("setting-value", "store.budget_bytes", "store.budget_bytes=16384"),
    ):
        small_pool.runner.reserve(rows=2, prompt_tokens=120, new_tokens=8)


def test_a_model_of_windows_alone_leaves_a_method_nothing(small):
    """It is refused by name, with what would help."""
    model = small("mistral", sliding_window=24).model
    with pytest.raises(UnsupportedModel, match="mistral: sliding_window=24 in every layer leaves none .* null"):
        Runner(dataclasses.replace(small("qwen2"), model=model), Full())
