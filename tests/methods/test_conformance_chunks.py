"""Every method of conf/method/ with prompts that are read in chunks: it works, or says in a sentence why it cannot."""

import pytest
import torch
from conformance_helpers import cases, lossless_of, policy_of, protected
from engine_helpers import engine, random_tokens
from selection import per_path
from store_helpers import held_positions

from kvbench.cache.ledger import ITEMS
from kvbench.engine.runner import Runner
from kvbench.policy import check_chunk
from kvbench.runs.verdict import complaint

CHUNK, LENGTH, STEPS = 64, 200, 3  # 8 + 3 x 64
REFUSED = {
    "kvzip": "KVzip, which reads the whole prompt a second time",
    "kvpress": "KVPress, which measures tokens by PressScore",
    "minikv": "MiniKV, which drops tokens whose keys share scales",
    "think": "ThinK, which decides once",
    "simlayerkv": "SimLayerKV, which decides once",
    "fastgen": "FastGen, which measures tokens by Profile",
    "keyformer": "Keyformer, which measures tokens by GumbelAttention",
    "zipcache": "ZipCache, which measures tokens by ProbedSaliency",
    "qaq": "QAQ, which measures tokens by NeededBits",
}
# Of an observation window longer than the chunk, and those whose budget is larger than this prompt.
SMALLER = {
    "dms": {"window": 64},
    "scissorhands": {"history": 64},
    "streaming_llm": {"budget": 60},
    "duo_attention": {"sinks": 4, "recent": 20},
}


def chunked(case: str):
    """The method of a case at settings that evict from a prompt of this length."""
    return policy_of(case, **SMALLER.get(case.split()[0], {}))


COMPOSED = [
    "snapkv chunk=4",
    "snapkv chunk=4 cut_chunk=false",
    "keydiff value_aware=true",
    "snapkv allocation=global",
    "knorm allocation=ada chunk=4 tier=k8v4",
    "h2o protect=sinks",
]
WORKS = [case for case in [*cases(), *COMPOSED] if case.split()[0] not in REFUSED]


@pytest.fixture
def loaded(tiny_model):
    """The tiny Llama with three query heads per KV head, in fp32."""
    return tiny_model("llama", "gqa3", 64)


@pytest.mark.parametrize("case", [case for case in cases() if case.split()[0] in REFUSED])
def test_who_cannot_says_so_in_one_sentence(case):
    """The number, the method, the rule and the remedy."""
    message = f"prefill.chunk={CHUNK} does not go with {REFUSED[case.split()[0]]}.*; .*prefill.chunk=null"
    with pytest.raises(ValueError, match=message):
        check_chunk(policy_of(case), CHUNK)


@pytest.mark.every(3)
@pytest.mark.parametrize("case", WORKS)
def test_a_method_reads_in_chunks(loaded, case):
    """The budget is met, promised tokens stay, and after every chunk the items sum to the pages in use."""
    policy = chunked(case)
    with engine(loaded, policy, prefill_chunk=CHUNK, track=() if policy.residual else ("pos",)) as running:
        runner, seen = running.runner, []
        runner.reserve(rows=1, prompt_tokens=LENGTH, new_tokens=STEPS)
        pages = runner.store.pages
        plain = runner._forward

        def watched(*arguments, **named):
            logits = plain(*arguments, **named)
            row = runner.open_rows[0]
            items = runner.store.ledger.itemise(row)
            in_use = pages.pool.num_used * (pages.pool.page_bytes + pages.pool.free_list.element_size())
            assert sum(items[name] for name in ITEMS) == items["resident_bytes"]
            assert items["resident_bytes"] == in_use + sum(runner.store.ledger.fixed_row_bytes())
            assert len(pages.table.used_page_ids().unique()) == pages.pool.num_used
            seen.append(runner.store.counters.seen[row])
            return logits

        runner._forward = watched
        row, logits = runner.read(random_tokens(LENGTH))
        assert seen == [8, 72, 136, 200] and torch.isfinite(logits).all()
        if policy.residual is None and len(policy.tiers) == 1:
            for positions in held_positions(runner.store, row):
                assert positions == sorted(set(positions)), "slots of a prompt lie in the order of their positions"
                assert set(positions) >= protected(policy, LENGTH, LENGTH)
        del runner._forward
        for token in random_tokens(STEPS, seed=1):
            logits = runner.step([row], [token])[0]
        assert torch.isfinite(logits).all()
        ledger, kept = runner.store.ledger.report(row)
        assert complaint(policy, {"ledger": ledger, "kept": kept}) is None
        assert kept["prompt_chunks"] == 4 and kept["prompt_tokens"] == LENGTH
        assert ledger["peak_bytes"] >= ledger["resident_bytes"] and ledger["one_shot_peak_bytes"]
        runner.close(row)
        assert pages.pool.num_used == 0


@pytest.mark.parametrize("case", per_path([case for case in WORKS if lossless_of(case) and " " not in case], policy_of))
def test_where_nothing_is_lost_chunks_change_nothing(loaded, case):
    """Chunked or at once, the logits are those of the model itself where a method's settings lose nothing."""
    policy = policy_of(case, **lossless_of(case))
    prompt, found = random_tokens(LENGTH), []
    for chunk in (None, max(CHUNK, policy.score.prefill_queries)):
        with engine(loaded, policy, prefill_chunk=chunk) as running:
            running.runner.reserve(rows=1, prompt_tokens=LENGTH, new_tokens=STEPS)
            row, logits = running.runner.read(prompt)
            steps = [running.runner.step([row], [token])[0] for token in random_tokens(STEPS, seed=1)]
            found.append(torch.stack([logits[0], *steps]))
    assert (found[0] - found[1]).abs().max() < 2e-3 * found[0].abs().max()


@pytest.mark.parametrize("case", ["snapkv", "h2o", "diffkv", "kivi"])
def test_a_chunk_as_long_as_the_prompt_is_the_whole_prompt(loaded, case):
    """To the bit: bytes, kept tokens and logits."""
    found = []
    for chunk in (None, LENGTH):
        runner = Runner(loaded, policy_of(case), chunk=chunk)
        runner.reserve(rows=1, prompt_tokens=LENGTH, new_tokens=STEPS)
        row, logits = runner.read(random_tokens(LENGTH))
        step = runner.step([row], [7])
        ledger, kept = runner.store.ledger.report(row)
        ledger.pop("one_shot_peak_bytes", None)
        found.append((ledger, kept, logits.tolist(), step.tolist()))
    loaded.model.set_attn_implementation("sdpa")
    assert found[0] == found[1]
