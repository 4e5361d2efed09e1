"""Small engines over small models, for the tests of generation."""

from contextlib import contextmanager

import torch
from transformers import DynamicCache

from kvbench.cache.options import StoreOptions
from kvbench.engine.engine import Engine
from kvbench.engine.requests import Request
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.full import Full
from kvbench.methods.kivi import Kivi
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM

# Every way of holding tokens, in the model's own dtype, at settings that drop or move tokens of short prompts. They are
# for tests that compare runs whose batches differ: there the model's matrix products differ in the last bit, which a
# quantiser's rounding may turn into another token.
NATIVE_METHODS = {
    "full": Full(tier="native"),
    "snapkv": SnapKV(budget=0.5, window=8, tier="native"),
    "kivi": Kivi(group=8, residual_tokens=16, native=True),
    "diffkv": DiffKV(alpha_h=2.0, alpha_l=0.5, window=16, high="native", low="native"),
    "streaming_llm": StreamingLLM(budget=40, tier="native"),
}


def random_tokens(num_tokens: int, seed: int = 0, vocabulary: int = 320) -> tuple[int, ...]:
    """Returns token ids of the tiny models, without their end token 0."""
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return tuple(torch.randint(1, vocabulary, (num_tokens,), generator=generator).tolist())


def request(name: str, *segments: tuple[int, ...], max_new_tokens: int = 24, **fields) -> Request:
    """Returns a request that, unless told otherwise, gives exactly `max_new_tokens` tokens."""
    fields = {"min_new_tokens": max_new_tokens} | fields
    return Request(sample_id=name, subset="test", segments=segments, max_new_tokens=max_new_tokens, **fields)


@contextmanager
def engine(
    loaded,
    policy,
    *,
    batch_size=8,
    group=None,
    seed=0,
    backend="auto",
    fidelity_max_tokens=64,
    fidelity_per_token=False,
    prefill_chunk=None,
    capture="auto",
    shares_pool=False,
    **store,
):
    """Gives an Engine, and takes its attention out of the model again, which other tests share."""
    try:
        yield Engine(
            loaded,
            policy,
            store=StoreOptions(**store),
            batch_size=batch_size,
            group=group,
            seed=seed,
            backend=backend,
            fidelity_max_tokens=fidelity_max_tokens,
            fidelity_per_token=fidelity_per_token,
            prefill_chunk=prefill_chunk,
            capture=capture,
            shares_pool=shares_pool,
        )
    finally:
        loaded.model.set_attn_implementation("sdpa")


def answers(loaded, policy, requests, *, on_step=None, sizing=None, own=False, counts=None, **settings) -> dict:
    """Runs requests; returns (sample_id, repeat) -> Outcome, after checking that every page and row came back; and
    tells a dict, if there is one, how the steps were made."""
    outcomes = {}

    def keep(outcome):
        key = (outcome.sample_id, outcome.repeat)
        assert key not in outcomes, f"{key} was answered twice"
        outcomes[key] = outcome

    with engine(loaded, policy, **settings) as running:
        watch = (lambda step: on_step(running, step)) if on_step else None
        running.run(requests, on_outcome=keep, on_step=watch, sizing=sizing, force_generated=own)
        if counts is not None:
            counts |= running.steps.counts
        store = running.store
        assert store.pages.pool.num_used == 0
        assert sorted(store.pages.pool.free_ids().tolist()) == list(range(store.pages.pool.num_pages))
        assert sorted(store._free_rows) == list(range(store.pages.shape[0] - store.backend.keeps_tables))
    assert set(outcomes) == {(r.sample_id, i) for r in requests for i in range(r.num_samples)}
    return outcomes


def comparable(outcome) -> dict:
    """Returns everything of an outcome that two identical runs must agree on."""
    fields = vars(outcome).copy()
    del fields["timing"], fields["drift"]  # sums of what `fidelity` has the means of
    return fields


def forced_logits(loaded, policy, prompts, continuations, reports=None) -> list[torch.Tensor]:
    """Feeds continuations of equal length through the store, one token of every row per step.

    Args:
        reports: A list to append each row's (ledger, kept) to.

    Returns:
        Per row, logits fp32 [1 + continuation, vocabulary]: after the prompt and after each token.
    """
    steps = len(continuations[0])
    with engine(loaded, policy) as running:
        runner = running.runner
        runner.reserve(rows=len(prompts), prompt_tokens=max(map(len, prompts)), new_tokens=steps)
        read = [runner.read(prompt) for prompt in prompts]
        rows, logits = [row for row, _ in read], [[found[0]] for _, found in read]
        for step in range(steps):
            for kept, row in zip(logits, runner.step(rows, [c[step] for c in continuations]), strict=True):
                kept.append(row)
        for row in rows:
            if reports is not None:
                reports.append(runner.store.ledger.report(row))
            runner.close(row)
        assert runner.store.pages.pool.num_used == 0
    return [torch.stack(kept) for kept in logits]


@torch.no_grad()
def own_logits(loaded, tokens, first: int) -> torch.Tensor:
    """Returns transformers' own logits fp32 [n, vocabulary] from position `first` on, without kvbench."""
    assert loaded.model.config._attn_implementation == "sdpa"
    return loaded.model(torch.tensor([tokens])).logits[0, first:].float()


@torch.no_grad()
def own_greedy(loaded, prompts, num_tokens: int) -> list[list[int]]:
    """Returns what transformers' own generate() with its own cache continues prompts of one length with."""
    assert loaded.model.config._attn_implementation == "sdpa"
    ids = torch.tensor(prompts)
    settings = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[:, ids.shape[1] :].tolist()


@torch.no_grad()
def own_steps(loaded, tokens: torch.Tensor, num_prompt_tokens: int) -> torch.Tensor:
    """Logits [rows, steps + 1, vocabulary] of transformers' own cache: a prompt at once, other tokens one by one."""
    cache = DynamicCache(config=loaded.model.config)
    first = loaded.model(tokens[:, :num_prompt_tokens], past_key_values=cache, logits_to_keep=1).logits[:, -1]
    later = [
        loaded.model(tokens[:, step : step + 1], past_key_values=cache).logits[:, -1]
        for step in range(num_prompt_tokens, tokens.shape[1])
    ]
    return torch.stack([first, *later], 1).float()
