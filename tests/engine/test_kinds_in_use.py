"""What people do with a model whose layers are of several kinds: it runs, or is refused before the model is loaded."""

from unittest.mock import Mock

import pytest
import torch
import transformers
from engine_helpers import answers, own_greedy, random_tokens, request
from fake_parts import altered
from refusals import refused
from selection import few
from test_layer_kinds import KINDS, SMALL, difference, runner_logits, small  # noqa: F401 - a fixture

import kvbench
from kvbench.cache.options import StoreOptions
from kvbench.config.methods import method_settings
from kvbench.engine.runner import Runner
from kvbench.kernels.backend import REFERENCE
from kvbench.lm import KvbenchLM
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.snapkv import SnapKV
from kvbench.models.load import load_model
from kvbench.models.random_weights import byte_tokenizer
from kvbench.runs.config import RunConfig
from kvbench.runs.experiment import load_method
from kvbench.runs.parts import Loaders

SLIDING, CHUNKED, STATES, BOTH, SHARED, LATENT = USED = (
    *("gemma3_text", "llama4_text", "qwen3_next", "falcon_h1", "gemma4_text", "deepseek_v3"),
)
PROMPT, NEW = 50, 8


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Saves random models with a tokenizer of bytes; no token ends an answer."""
    made = {}

    def folder(kind):
        if kind not in made:
            fields = SMALL | KINDS[kind] | {"max_position_embeddings": 512, "eos_token_id": None}
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**fields))
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
            byte_tokenizer(320).save_pretrained(made[kind])
        return str(made[kind])

    return folder


def settings_of(folder: str) -> dict:
    """A model group of a folder, by the command line's names."""
    return {"model.path": folder, "model.device": "cpu", "model.dtype": "float32"}


@pytest.fixture
def never_loaded(monkeypatch):
    """Fails the test where weights are asked for."""
    refused = Mock(side_effect=AssertionError("the model was loaded"))
    monkeypatch.setattr("kvbench.models.load.load_model", refused)
    yield
    kvbench.release()


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", few(sorted(KINDS), *USED))
def test_generate_and_a_further_turn_are_the_models_own(kind, folder_of):
    """`model.generate` under `kvbench.compress`: a batch that is padded at its left, and what is said behind it, which
    shares the cache, give each row what it gives alone."""
    loaded = load_model({key[6:]: value for key, value in settings_of(folder_of(kind)).items()} | {"kind": "hf"})
    prompts = [random_tokens(PROMPT, 1), random_tokens(PROMPT - 9, 2)]
    ids, mask = torch.zeros(2, PROMPT, dtype=torch.int64), torch.zeros(2, PROMPT, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, PROMPT - len(prompt) :], mask[row, PROMPT - len(prompt) :] = torch.tensor(prompt), 1
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    turn = torch.tensor([random_tokens(5, 3)] * 2)
    own = [own_greedy(loaded, [prompt], NEW)[0] for prompt in prompts]
    heard = [[*prompt, *said, *turn[0].tolist()] for prompt, said in zip(prompts, own, strict=True)]
    with torch.no_grad(), kvbench.compress(loaded.model, "full", tier="native", room_tokens=4 * NEW) as cache:
        first = loaded.model.generate(ids, attention_mask=mask, **asked)
        held = cache.bytes()
        more, shown = torch.cat([first, turn], 1), torch.cat([mask, torch.ones(2, NEW + 5, dtype=torch.int64)], 1)
        second = loaded.model.generate(more, attention_mask=shown, past_key_values=cache, **asked)
    assert first[:, PROMPT:].tolist() == own
    assert second[:, -NEW:].tolist() == [own_greedy(loaded, [text], NEW)[0] for text in heard]
    items = [value for name, value in held.items() if name not in ("resident_bytes", "fp16_bytes")]
    assert sum(items) == held["resident_bytes"] > 0


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", few(sorted(KINDS), SLIDING, STATES, SHARED))
def test_lm_eval_scores_as_the_model_does(kind, folder_of):
    """Likelihoods behind a prompt that two requests share, and of a whole text, are those of a plain pass."""
    from lm_eval.api.instance import Instance

    lm = KvbenchLM(model="hf", method="full", batch_size=2, **settings_of(folder_of(kind)))
    plain, tokenizer = load_model(dict(lm.config.model)).model, lm.model.tokenizer
    context, ends = "The cat sat on the mat, and the mat lay on the floor", (" of a house", " there")
    pairs = [Instance("loglikelihood", {}, (context, end), place) for place, end in enumerate(ends)]
    whole = [Instance("loglikelihood_rolling", {}, (context,), 0)]

    def likelihood(ids: list[int], scored: int) -> float:
        with torch.no_grad():
            nll = plain(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return sum(float(nll[at - 1, ids[at]]) for at in range(len(ids) - scored, len(ids)))

    texts = [(tokenizer.encode(context + end), len(tokenizer.encode(end))) for end in ends]
    found = [total for total, _ in lm.loglikelihood(pairs)]
    assert found == pytest.approx([likelihood(*text) for text in texts], abs=1e-3)
    ids = tokenizer.encode(context)
    assert lm.loglikelihood_rolling(whole) == pytest.approx([likelihood([0, *ids], len(ids))], abs=2e-3)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", few(sorted(KINDS), CHUNKED, BOTH, SHARED, LATENT))
def test_contexts_in_chunks_are_shared_or_refused(kind, small):  # noqa: F811
    """Two questions behind one context that is read in chunks and compressed once; each is answered as by itself. Where
    layers share keys, chunks are refused, and the context is read at once."""
    loaded, context = small(kind), random_tokens(90, 1)
    asked = [request(str(place), context, random_tokens(7, place), max_new_tokens=6) for place in range(2)]
    chunk = None if kind == SHARED else 40
    for policy in (H2O(budget=48), SnapKV(budget=48, window=32)):
        found = answers(loaded, policy, asked, prefill_chunk=chunk)
        alone = [answers(loaded, policy, [each], prefill_chunk=chunk) for each in asked]
        for place, one in enumerate(alone):
            assert found[str(place), 0].token_ids == one[str(place), 0].token_ids
            ledger = found[str(place), 0].ledger
            assert ledger == one[str(place), 0].ledger and ledger["resident_bytes"] < ledger["fp16_bytes"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [STATES, SLIDING])
def test_a_sweep_runs_on_a_model_of_several_kinds(kind, folder_of, tmp_path):
    """As `suite` makes it: from files to tables, over prompts in chunks whose questions come behind the context."""
    asked = {"task.items": 1, "task.kinds": ["passkey"], "task.length": 256, "protocol.query_aware": False}
    asked |= {"protocol.max_new_tokens": 4, "fidelity.max_tokens": 4, "reference": "none", "prefill.chunk": 40}
    asked |= settings_of(folder_of(kind))
    try:
        found = kvbench.sweep(["snapkv", "h2o"], budget=[48], model="hf", results_dir=tmp_path, settings=asked)
    finally:
        kvbench.release()
    assert [each.record.status for each in found] == ["complete"] * 2
    assert "full laye" in repr(found)  # a column of a narrow table


SWA = {"sliding_window": 24}
REFUSED = [
    (SHARED, {}, {"prefill": {"chunk": 16}}, ("model-unsupported", "prefill.chunk", "prefill.chunk=16", "gemma4_text")),
    (SHARED, {"tensor_parallel": 2}, {}, ("model-unsupported", None, "gemma4_text", "share keys")),
    (STATES, {"tensor_parallel": 2}, {}, ("model-unsupported", "model.tensor_parallel", "qwen3_next")),
    (LATENT, {"device": ["cpu", "cpu"]}, {}, ("model-unsupported", None, "deepseek_v3", "latent")),
    (LATENT, {}, {"method": "think"}, ("unsupported", None, "ThinK")),
    (
        LATENT,
        {},
        {"store": {"rotation": "hadamard"}},
        ("settings-conflict", "store.rotation", "store.rotation=hadamard"),
    ),
    (
        SLIDING,
        {},
        {"method": "kivi", "store": {"windows": "method"}},
        ("settings-conflict", "store.windows", "store.windows=method"),
    ),
    ("mistral", {}, SWA, ("model-unsupported", None, "sliding_window=24")),
    (
        "minimax",
        {},
        {"layer_types": ["linear_attention", "full_attention"]},
        ("model-unsupported", None, "MiniMaxCache"),
    ),
    ("mimo_v2_flash", {}, {"v_head_dim": 8}, ("model-unsupported", None, "mimo_v2_flash", "64")),
    ("diffllama", {}, {}, ("model-unsupported", None, "layer 0", "calls")),
    ("doge", {}, {}, ("model-unsupported", None, "layer 0", "mask")),
    (
        "llama",
        {},
        {"method": "streaming_llm", "budget": 9999},
        ("setting-value", "method.budget", "method.budget=9999"),
    ),
]


@pytest.mark.parametrize(("kind", "model", "asked", "message"), REFUSED)
def test_a_refusal_comes_before_the_weights(kind, model, asked, message, folder_of, never_loaded):
    """By the configuration alone, in the words that a loaded model gets."""
    own = {key: asked[key] for key in ("prefill", "store") if key in asked}
    fields = {key: value for key, value in asked.items() if key not in (*own, "method", "budget")}
    group = {"kind": "random", "preset": "tiny", "overrides": {"model_type": kind} | fields}
    if kind in KINDS:
        group = {"kind": "hf", "path": folder_of(kind)}
    method = dict(method_settings(asked.get("method", "full"))) | {k: asked[k] for k in ("budget",) if k in asked}
    config = RunConfig.read({"model": group | model, "method": method} | own)
    with refused(*message):
        load_method(config, altered(Loaders(), check_task=lambda config: None), print)


def window_of(runner, row):
    """What a row's windows hold, as plain torch reads it: the format, keys and values."""
    (windows,) = runner.store.other_kinds
    pages, fmt = windows.pages, windows.pages.formats[0]
    lists = pages.lists_of(torch.tensor([row])).flatten()
    count = int(pages.table.num_slots[0, lists[0]])
    places = pages.table.lookup(lists.repeat_interleave(count), 0, torch.arange(count).repeat(len(lists)))
    return fmt, REFERENCE.read_slots(pages.pool.pages, fmt, *places)


@pytest.mark.parametrize(
    ("kind", "policy"), [(SLIDING, Full(tier="fp8")), (CHUNKED, SnapKV(budget=0.5, window=8, tier="int8"))]
)
def test_windows_take_the_precision_of_a_method_that_is_asked_to(small, kind, policy):  # noqa: F811
    """Behind a prompt, which is read exactly, a window holds what that format makes of the exact one's tokens; steps
    overwrite them one by one, and a slot has fewer bytes."""
    loaded, tokens = small(kind), torch.tensor([random_tokens(PROMPT + 8, 1)])
    _, exact, (row,) = runner_logits(loaded, Full(tier="native"), tokens[:, :PROMPT], PROMPT)
    _, coded, _ = runner_logits(loaded, policy, tokens[:, :PROMPT], PROMPT, options=StoreOptions(windows="method"))
    (_, (k, v)), (fmt, found) = window_of(exact, row), window_of(coded, row)
    scratch = torch.zeros(len(k) // fmt.tokens_per_page + 1, fmt.page_bytes, dtype=torch.uint8)
    slots = torch.arange(len(k))
    places = slots // fmt.tokens_per_page, slots % fmt.tokens_per_page
    REFERENCE.write_keys(scratch, fmt, *places, k)
    REFERENCE.write_values(scratch, fmt, *places, v)
    for one, other in zip(found, REFERENCE.read_slots(scratch, fmt, *places), strict=True):
        assert torch.equal(one, other) and not torch.equal(one, k)
    (want, sixteen, _), (logits, fewer, _) = (
        runner_logits(loaded, policy, tokens, PROMPT, options=StoreOptions(windows=how)) for how in ("exact", "method")
    )
    most, least = sixteen.report(row)[0], fewer.report(row)[0]
    assert fmt.slot.slot_bytes < 0.8 * sixteen.store.other_kinds[0].pages.formats[0].slot.slot_bytes
    assert least["full_layers_bytes"] == most["full_layers_bytes"]
    assert 0 < difference(logits, want) < 0.5


@pytest.mark.parametrize(
    ("policy", "reason"),
    [(DiffKV(), "DiffKV has several precisions"), (Kivi(), "Kivi quantises tokens once they leave a residual buffer")],
    ids=("diffkv", "kivi"),
)
def test_windows_cannot_take_every_precision(small, policy, reason):  # noqa: F811
    """A window's slots are overwritten one by one, at one precision; the reason is named."""
    with pytest.raises(ValueError, match=f"store.windows=method: {reason}, and in a window .*store.windows=exact"):
        Runner(small(SLIDING), policy, options=StoreOptions(windows="method"))


@pytest.mark.parametrize("policy", [Full(tier="native"), Kivi(group=8, residual_tokens=16), DiffKV(window=8)])
def test_compiled_kernels_read_latent_pages(small, policy):  # noqa: F811
    """Steps over pages, rings and tiers of latent vectors are plain torch's, which stands in for nothing."""
    loaded, tokens = small(LATENT), torch.tensor([random_tokens(PROMPT + 8, seed) for seed in range(2)])
    (want, _, _), (found, runner, _) = (
        runner_logits(loaded, policy, tokens, PROMPT, backend=backend) for backend in ("torch", "cpu")
    )
    assert difference(found, want) < 1e-3  # sums in another order, then 16 bits
    assert not runner.backend.fallbacks
