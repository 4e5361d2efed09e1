"""Eviction against an independent oracle: the same methods as attention masks over transformers' own dense cache.

Nothing of kvbench takes part in the oracle: it runs eager attention in an attention function of its own, scores and
chooses by the papers' formulas, and hides what is evicted from later queries. It is how we know that a method that does
badly does so by its own choice, not by a fault of the store.
"""

from contextlib import contextmanager

import pytest
import torch
from engine_helpers import answers, request
from selection import few
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from kvbench.methods.h2o import H2O
from kvbench.methods.knorm import KeyNorm
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.methods.tova import TOVA
from kvbench.tasks import load_task

BUDGET = 0.25


class Masks:
    """Which tokens each KV head still sees, by layer; one prompt, then one token at a time.

    Args:
        choose: (attention of the prompt [H, G, N, N], keys [H, N, D], budget) -> kept bool [H, N].
        evict: (attention so far [H, n], kept [H, n], budget) -> kept, before a new token comes; None = never.
        newest: The attention so far is that of the newest query alone, not the sum over all.
    """

    def __init__(self, choose, evict=None, newest=False):
        self.choose, self.evict, self.newest = choose, evict, newest
        self.kept, self.mass = {}, {}

    def attend(self, module, query, key, value, mask, scaling=None, **named):
        """Eager attention over everything that is not hidden."""
        layer, (_, num_q, n, dim), num_kv = module.layer_idx, query.shape, key.shape[1]
        grouped = query[0].reshape(num_kv, num_q // num_kv, n, dim)
        logits = torch.einsum("hgnd,hmd->hgnm", grouped, key[0]) * scaling
        total = key.shape[2]
        if n == total:
            logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
            weights = logits.softmax(-1)
            self.kept[layer] = self.choose(weights, key[0], int(BUDGET * n))
            self.mass[layer] = weights[:, :, -1].sum(1) if self.newest else weights.sum((1, 2))
            self.budget = int(BUDGET * n)
        else:
            if self.evict:
                self.kept[layer] = self.evict(self.mass[layer], self.kept[layer], self.budget)
            new = torch.ones(num_kv, 1, dtype=torch.bool)
            self.kept[layer] = torch.cat([self.kept[layer], new], 1)
            weights = logits.masked_fill(~self.kept[layer][:, None, None], -torch.inf).softmax(-1)
            before = torch.cat([self.mass[layer], torch.zeros(num_kv, 1)], 1)
            self.mass[layer] = weights.sum((1, 2)) + (0 if self.newest else before)
        out = torch.einsum("hgnm,hmd->hgnd", weights, value[0])
        return out.reshape(1, num_q, n, dim).transpose(1, 2), None


def keep(num_heads, num_tokens, *chosen):
    """Kept tokens [H, N] from index lists, each [H, n] or a range."""
    kept = torch.zeros(num_heads, num_tokens, dtype=torch.bool)
    for index in chosen:
        kept.scatter_(1, torch.as_tensor(index).expand(num_heads, -1), True)
    return kept


def h2o_choose(weights, keys, budget):
    """The most attended tokens of all queries, and half the budget of recent ones."""
    heads, _, n, _ = weights.shape
    recent = budget // 2
    mass = weights.sum((1, 2))[:, : n - recent]
    return keep(heads, n, mass.topk(budget - recent).indices, range(n - recent, n))


def h2o_evict(mass, kept, budget):
    """Drops the lightest token that is not recent, once more than the budget are held."""
    kept = kept.clone()
    for head in range(len(kept)):
        if kept[head].sum() > budget:
            light = mass[head].masked_fill(~kept[head], torch.inf)
            light[kept.shape[1] - budget // 2 :] = torch.inf
            kept[head, light.argmin()] = False
    return kept


def snapkv_choose(weights, keys, budget, window=32):
    """The tokens the window attends to most after max pooling, and the window."""
    heads, _, n, _ = weights.shape
    score = weights[:, :, n - window :, : n - window].sum(2).mean(1)
    pooled = torch.nn.functional.max_pool1d(score, 7, stride=1, padding=3)
    # Pooling makes plateaus; of equal scores the earlier token stays, here as there.
    order = pooled.argsort(dim=-1, descending=True, stable=True)
    return keep(heads, n, order[:, : budget - window], range(n - window, n))


def sinks_choose(weights, keys, budget):
    """The first four tokens and the last ones."""
    heads, _, n, _ = weights.shape
    return keep(heads, n, range(4), range(n - budget + 4, n))


def sinks_evict(mass, kept, budget):
    """Drops the oldest token behind the sinks."""
    kept = kept.clone()
    for head in range(len(kept)):
        held = kept[head].nonzero()[:, 0]
        if len(held) >= budget:
            kept[head, held[4]] = False
    return kept


def tova_choose(weights, keys, budget):
    """The tokens the last query attends to most, the same in all heads."""
    heads, _, n, _ = weights.shape
    return keep(heads, n, weights[:, :, -1].mean((0, 1)).topk(budget).indices)


def tova_evict(mass, kept, budget):
    """Drops the token of all heads that the newest query attended to least."""
    kept = kept.clone()
    if kept[0].sum() > budget:
        kept[:, mass.sum(0).masked_fill(~kept[0], torch.inf).argmin()] = False
    return kept


def knorm_choose(weights, keys, budget):
    """The tokens with the smallest keys."""
    heads, n, _ = keys.shape
    return keep(heads, n, keys.square().sum(-1).topk(budget, largest=False).indices)


METHODS = {
    "h2o": (H2O(budget=BUDGET, tier="native"), h2o_choose, h2o_evict),
    "snapkv": (SnapKV(budget=BUDGET, tier="native"), snapkv_choose, None),
    "tova": (TOVA(budget=BUDGET, tier="native"), tova_choose, tova_evict),
    "knorm": (KeyNorm(budget=BUDGET, tier="native"), knorm_choose, None),
    "streaming_llm": (StreamingLLM(budget=BUDGET, position_mode="absolute", tier="native"), sinks_choose, sinks_evict),
}


@contextmanager
def masked(model, masks):
    """The model with the oracle's attention."""
    AttentionInterface.register("masks_of_a_test", masks.attend)
    AttentionMaskInterface.register("masks_of_a_test", lambda *arguments, **named: None)
    model.set_attn_implementation("masks_of_a_test")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@torch.no_grad()
def masked_nll(model, prompt, gold, masks):
    """Mean negative log-likelihood of the gold tokens behind the first, read one by one."""
    with masked(model, masks):
        cache = DynamicCache()
        model(torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        total = torch.zeros(())
        for index, token in enumerate(gold[:-1]):
            place = torch.tensor([[len(prompt) + index]])
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True, position_ids=place)
            total = total - out.logits[0, -1].log_softmax(-1)[gold[index + 1]]
    return float(total) / (len(gold) - 1)


@pytest.mark.parametrize("name", few(METHODS, "tova"))
def test_eviction_equals_masks(embedded_model, name):
    """A quarter of the cache gives the likelihood that a mask over the same tokens gives, on the embedded model."""
    policy, choose, evict = METHODS[name]
    cfg = {"name": "longctx", "kinds": ["multikey"], "length": 320, "items": 1}
    task = load_task(cfg, embedded_model, limit=None, seed=3, protocol=None)
    for item in task.requests:
        prompt = [token for segment in item.segments for token in segment]
        want = masked_nll(embedded_model.model, prompt, item.gold, Masks(choose, evict, newest=name == "tova"))
        asked = request(item.sample_id, tuple(prompt), max_new_tokens=1, gold=item.gold)
        got = answers(embedded_model, policy, [asked])[item.sample_id, 0].fidelity
        # fp32 on both sides: the sums differ in order only.
        assert got["nll"] == pytest.approx(want, abs=2e-4)
        assert abs(got["nll"] - got["nll_full"]) > 0.01  # a method that evicts nothing would pass otherwise
