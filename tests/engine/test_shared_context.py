"""Many questions to one context: it is read, compressed and held once, and the answers are those of separate runs."""

from unittest.mock import patch

import pytest
import torch
from engine_helpers import NATIVE_METHODS, answers, comparable, random_tokens, request
from selection import few

from kvbench.engine.runner import Runner
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.kivi import Kivi
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.quest import Quest
from kvbench.methods.snapkv import SnapKV

# 16-bit and quantised, deciding in the prompt, in every step, in bulk, by reading less, behind a residual buffer.
POLICIES = {
    "full": Full(),
    "snapkv": SnapKV(budget=0.5, window=8, tier="k8v4"),
    "h2o": H2O(budget=30, window=8),
    "kivi": Kivi(bits=2, group=8, residual_tokens=16),
    "diffkv": DiffKV(alpha_h=2.0, alpha_l=0.5, window=16),
    "kv_compress": KVCompress(budget=40, obs_window=8, protected=8, block=4, continual=True),
    "quest": Quest(read_budget=24, page_tokens=8, dense_layers=0),
}


def questions(count: int = 8, **fields) -> list:
    """Questions of several lengths about one context, and one about another between two more about a third."""
    context, other, third = random_tokens(70), random_tokens(50, seed=1), random_tokens(33, seed=2)
    asked = [request(f"a{i}", context, random_tokens(3 + i, seed=3), **fields) for i in range(count)]
    asked.append(request("b", other, random_tokens(4, seed=4), **fields))
    return asked + [request(f"c{i}", third, random_tokens(5, seed=5 + i), **fields) for i in range(2)]


CASES = [(name, 1) for name in POLICIES] + [(name, size) for name in NATIVE_METHODS for size in (3, 8)]
# Each way of holding tokens once, one by one or in batches that a context is spread over.
TAKEN = [(name, 1) for name in ("h2o", "kivi", "kv_compress", "quest")]
TAKEN += [(name, 3) for name in ("full", "snapkv", "diffkv", "streaming_llm")]


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "batch_size"), few(CASES, *TAKEN))
def test_answers_are_those_of_separate_runs(loaded, name, batch_size):
    """Tokens, bytes and what was kept, with questions of one context in one batch and over several; one by one,
    fidelity too, to the last bit."""
    policy = (POLICIES if batch_size == 1 else NATIVE_METHODS)[name]
    asked = questions(5, max_new_tokens=7, gold=random_tokens(4, seed=9))
    together = answers(loaded, policy, asked, batch_size=batch_size)
    for one in asked:
        (alone,) = answers(loaded, policy, [one], batch_size=1).values()
        found, want = comparable(together[one.sample_id, 0]), comparable(alone)
        if batch_size > 1:
            assert found.pop("fidelity") == pytest.approx(want.pop("fidelity"), abs=1e-4)
        assert found == want
    shared = [one.sample_id for one in asked if together[one.sample_id, 0].timing.get("shares_context")]
    assert shared == [f"a{i}" for i in range(1, 5)] + ["c1"]


def test_a_context_costs_once(loaded):
    """Of eight questions, the context is read once, and its pages are held once while they are answered."""
    asked, seen, read = questions()[:8], [], []
    own = Runner.read

    def reading(self, prompt, *more):
        read.append(len(prompt))
        return own(self, prompt, *more)

    def look(running, step):
        rows = torch.tensor(running.runner.open_rows)
        pages = int(running.store.pages.num_pages(rows).sum()) * running.store.pages.pool.page_bytes
        seen.append((step["cache_bytes"], pages, running.store.ledger.shared_bytes))

    with patch.object(Runner, "read", reading):
        answers(loaded, Full(), asked, on_step=look, page_bytes=2048)
    assert read == [70]
    held, billed, shared = seen[0]
    assert held < 0.4 * billed, "eight rows of nine pages and more a list, of which eight are the context's"
    assert shared == (billed - held) // 2048 * (2048 + 4), "the ledger says how much less that is than the rows' sum"


def test_a_bad_question_leaves_the_context_to_the_others(loaded):
    """A question whose logits are not finite is recorded as such; the next ones still share the context."""
    asked = questions()[:4]
    own, calls = Runner.append, []

    def failing(self, row, tokens):
        calls.append(len(tokens))
        found = own(self, row, tokens)
        if len(calls) == 2:
            from kvbench.engine.runner import NotFinite

            raise NotFinite(1)
        return found

    with patch.object(Runner, "append", failing):
        got = answers(loaded, Full(), asked, batch_size=2)
    assert [got[f"a{i}", 0].status for i in range(4)] == ["ok", "nan", "ok", "ok"]
    alone = answers(loaded, Full(), asked[3:], sizing=asked)
    assert got["a3", 0].token_ids == alone["a3", 0].token_ids
