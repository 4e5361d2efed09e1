"""The log-sum-exp of a prompt's attention on its way to the scores."""

import pytest
import torch
from engine_helpers import engine, random_tokens

from kvbench.cache.replay_check import ReplayCheck
from kvbench.kernels.backend import Backend
from kvbench.kernels.operands import PLAIN, ColumnSums
from kvbench.methods.h2o import H2O
from kvbench.methods.snapkv import SnapKV


class OnePass(Backend):
    """Plain torch whose column sums need the log-sum-exp, and which counts how often it is made."""

    takes_lse = True

    def __init__(self) -> None:
        super().__init__()
        self.attended = self.summed = 0

    def prefill_attention_with_lse(self, q, k, v, scale, softmax=PLAIN):
        self.attended += 1
        return super().prefill_attention_with_lse(q, k, v, scale)

    def column_scores(self, q, k, scale, columns, lse=None, softmax=PLAIN):
        if lse is None:
            return super().column_scores(q, k, scale, columns)
        self.summed += 1
        assert columns == ColumnSums(queries=-1)
        logits = q @ k.repeat_interleave(len(q) // len(k), 0).mT * scale
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        return ((logits - lse[..., None]).exp() * seen).sum(1)


@pytest.fixture
def loaded(tiny_model):
    """The tiny Llama with three query heads per KV head, in fp32."""
    return tiny_model("llama", "gqa3", 64)


def kept(loaded, policy, backend, ahead=(), cut=False):
    """Positions and stored scores of all layers after a prompt, and the logits behind it."""
    with engine(loaded, policy, backend="torch", track=("score", "pos")) as running:
        runner = running.runner
        runner.backend = backend
        runner.reserve(rows=1, prompt_tokens=80, new_tokens=8)
        if cut:  # as from a prompt cache, which has the queries and not what attention gave beside them
            plain = runner.store.prefill_layer
            runner.store.prefill_layer = lambda *given, lse=None: plain(*given)
        row, logits = runner.read(random_tokens(80), ahead)
        slots = runner.store.view(torch.tensor([row])).slots(0)
        return slots.pos[slots.valid], slots.score[slots.valid], logits


@pytest.mark.parametrize("cut", [False, True])
def test_scores_of_all_queries_take_it(loaded, cut, monkeypatch):
    """H2O's scores are the same by one pass, once per layer, with tokens ahead that do not count; where it is not at
    hand it is made again."""
    monkeypatch.setattr(ReplayCheck, "of", lambda *_, **__: None)  # which would be asked, too
    one, policy = OnePass(), H2O(budget=30)
    got, want = (kept(loaded, policy, own, (5, 6, 7), cut) for own in (one, Backend()))
    assert one.summed == 2 and one.attended == (4 if cut else 2)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)


def test_a_window_does_without(loaded):
    """A few last queries are scored anew in no time, so nothing is asked of the attention."""
    one = OnePass()
    kept(loaded, SnapKV(budget=40, window=8), one)
    assert one.summed == one.attended == 0
