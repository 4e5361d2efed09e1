"""Soft-capped logits and sinks in every backend, against full matrices in float64."""

from itertools import product

import pytest
import torch
from page_helpers import Cache, tier_format
from selection import few

from kvbench.kernels.backend import Backend
from kvbench.kernels.cpu.backend import Cpu
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.operands import PLAIN, ColumnSums, HeadScores, Ring, Softmax, TierPages

try:
    from kvbench.kernels.gpu import decode
    from kvbench.kernels.gpu.backend import Gpu
except ImportError:  # triton is an extra
    Gpu = None

HEADS, GROUP, DIM = 2, 3, 32
SINKS = torch.tensor([0.5, float("-inf"), 4.0, -3.0, 60.0, 1.5])  # one head has none, and one gives nearly all away
KINDS = {"both": Softmax(2.0, SINKS), "cap": Softmax(2.0), "sinks": Softmax(0.0, SINKS)}
# Sums of fp32, and of the cap tanh to 2e-7 of its 2.
CLOSE = {"rtol": 0, "atol": 5e-6}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what Triton passes over, in numpy


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A backend by its class; in Triton's interpreter, lists are cut into parts of a page or two."""
    if request.param is Gpu:
        monkeypatch.setattr(decode, "_num_processors", lambda device: 2)
        monkeypatch.setattr(decode, "_LEAST_SLOTS", 1)
    try:
        return request.param()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def how(request: pytest.FixtureRequest) -> Softmax:
    """A softmax by its name."""
    return KINDS[request.param]


CLASSES = [kind for kind in (Backend, Cpu, Gpu) if kind is not None]
QUICK = [*product((Backend, Cpu), KINDS), *product(CLASSES[2:], ["both"])]  # Triton's interpreter takes seconds
CASES = pytest.mark.parametrize(("backend", "how"), few(product(CLASSES, KINDS), *QUICK), indirect=True)
EACH = pytest.mark.parametrize("backend", CLASSES, indirect=True)


def attention(logits: torch.Tensor, how: Softmax, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [..., n] of one query head and the log-sum-exp [...], of logits float64 with -inf where masked."""
    if how.cap:
        logits = torch.where(logits.isinf(), logits, how.cap * torch.tanh(logits / how.cap))
    sink = torch.tensor(float("-inf") if how.sinks is None else float(how.sinks[head]), dtype=torch.float64)
    total = torch.logaddexp(logits.logsumexp(-1), sink)
    return (logits - total[..., None]).exp(), total


@CASES
def test_decode_attention_and_its_scores(backend: Backend, how: Softmax):
    """Two tiers over several parts of unequal lists: output, log-sum-exp, and scores whose group is reduced after the
    sinks took their share."""
    counts = [[[70, 3]], [[9, 30]]]
    cache = Cache([tier_format("8,4", DIM), tier_format("16,16", DIM)], counts, DIM)
    q = 3 * torch.randn(1, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(1))
    out, lse, scores = backend.paged_decode(q, cache.pages, cache.tiers, None, 0.2, power=2, group="max", softmax=how)
    for s in range(1):
        for h in range(HEADS):
            keys, values = (x.double() for x in cache.dense(s, h))
            found = []
            for head in range(h * GROUP, (h + 1) * GROUP):
                prob, total = attention(keys @ q[s, head].double() * 0.2, how, head)
                torch.testing.assert_close(out[s, head].double(), prob @ values, **CLOSE)
                torch.testing.assert_close(lse[s, head].double(), total, rtol=0, atol=1e-5)
                found.append(prob**2)
            wanted = torch.stack(found).amax(0).split([tier[s][h] for tier in counts])
            for tier, part in zip(scores, wanted, strict=True):
                torch.testing.assert_close(tier[s, h, : len(part)].double(), part, **CLOSE)
                assert not tier[s, h, len(part) :].any()
    assert backend.fallbacks == set()


@CASES
def test_decode_attention_behind_a_ring(backend: Backend, how: Softmax):
    """Entries of a buffer that hold nothing stay masked behind a cap, which would else make a finite logit of them."""
    fmt = tier_format("2,2", DIM, k_channel_group=32, v_groups=2)
    cache = Cache([fmt], [[[32, 32]]], DIM)
    make = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, HEADS, 40, DIM, generator=make) for _ in range(2))
    ring = Ring(k, v, torch.tensor([[45, 60]]))
    q = 3 * torch.randn(1, HEADS * GROUP, DIM, generator=make)
    out, lse, _ = backend.paged_decode(q, cache.pages, cache.tiers, ring, 0.2, softmax=how)
    for h, held in enumerate((45, 60)):
        at = torch.arange(32, held) % 40
        keys, values = (
            torch.cat([x, buffer[0, h, at]]).double() for x, buffer in zip(cache.dense(0, h), (k, v), strict=True)
        )
        for head in range(h * GROUP, (h + 1) * GROUP):
            prob, total = attention(keys @ q[0, head].double() * 0.2, how, head)
            torch.testing.assert_close(out[0, head].double(), prob @ values, **CLOSE)
            torch.testing.assert_close(lse[0, head].double(), total, rtol=0, atol=1e-5)


@EACH
def test_a_list_that_holds_nothing_is_all_sink(backend: Backend):
    """Where no key is seen, a head with a sink gives nothing, and one without has no value."""
    fmt, none = tier_format("8,4", DIM), torch.zeros(1, 1, dtype=torch.int64)
    tier = TierPages(fmt, torch.zeros(1, 1, 1, dtype=torch.int64), none, none)
    pages = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
    how = Softmax(0.0, torch.tensor([0.5, float("-inf")]))
    out, lse, _ = backend.paged_decode(torch.ones(1, 2, DIM), pages, [tier], None, 0.2, softmax=how)
    assert not out[0, 0].any() and bool(out[0, 1].isnan().all())
    assert lse.tolist() == [[0.5, float("-inf")]]


def prompt(length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a prompt."""
    make = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(heads, length, DIM, generator=make) for heads in (HEADS * GROUP, HEADS, HEADS))
    return (3 * q).to(dtype), k.to(dtype), v.to(dtype)


def matrix(q: torch.Tensor, k: torch.Tensor, head: int, live: torch.Tensor | None = None) -> torch.Tensor:
    """Logits float64 [n, M + n] of a query head; -inf for later keys, and where the history is not live."""
    keys = k[head // GROUP].double()
    past = len(keys) - q.shape[1]
    hidden = torch.ones(q.shape[1], len(keys), dtype=torch.bool).triu(past + 1)
    if live is not None:
        hidden[:, :past] |= ~live[head // GROUP]
    return (q[head].double() @ keys.T * 0.2).masked_fill(hidden, float("-inf"))


@CASES
def test_prompt_attention(backend: Backend, how: Softmax):
    """A whole prompt, and its log-sum-exp where the backend gives one; in fp32, and in bf16, which rounds what comes
    out to 8 bits."""
    for dtype in (torch.float32, torch.bfloat16):
        check_prompt(backend, how, dtype)


def check_prompt(backend: Backend, how: Softmax, dtype: torch.dtype) -> None:
    """The same in one type."""
    q, k, v = prompt(40, dtype)
    close = CLOSE if dtype is torch.float32 else {"rtol": 0, "atol": 2e-2}
    both, lse = backend.prefill_attention_with_lse(q, k, v, 0.2, how)
    out = backend.prefill_attention(q, k, v, 0.2, how)
    assert out.dtype == both.dtype == dtype and (lse is None or backend.takes_lse)
    for head in range(HEADS * GROUP):
        prob, total = attention(matrix(q, k, head), how, head)
        for found in (out, both):
            torch.testing.assert_close(found[head].double(), prob @ v[head // GROUP].double(), **close)
        if lse is not None:
            torch.testing.assert_close(lse[head].double(), total, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2)


@CASES
def test_chunk_attention(backend: Backend, how: Softmax):
    """A chunk over a history of which some is not live, and over itself, over more queries than one block."""
    q, k, v = prompt(65)
    past_k, past_v = (torch.randn(HEADS, 33, DIM, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    live = torch.rand(HEADS, 33, generator=torch.Generator().manual_seed(3)) < 0.7
    out = backend.chunk_attention(q, k, v, (past_k, past_v, live), 0.2, how)
    for head in range(HEADS * GROUP):
        keys, values = (torch.cat(pair, 1) for pair in ((past_k, k), (past_v, v)))
        prob, _ = attention(matrix(q, keys, head, live), how, head)
        torch.testing.assert_close(out[head].double(), prob @ values[head // GROUP].double(), **CLOSE)


@CASES
def test_scores_of_a_prompt_are_those_of_its_attention(backend: Backend, how: Softmax):
    """Column sums of what the model attends with, of all queries and of the last ones, from the log-sum-exp of the
    attention where that is taken; and how many queries give a key less than an equal share."""
    q, k, v = prompt(70)
    _, lse = backend.prefill_attention_with_lse(q, k, v, 0.2, how)
    probs = torch.stack([attention(matrix(q, k, head), how, head)[0] for head in range(HEADS * GROUP)])
    for queries, power in ((-1, 1), (9, 2)):
        columns = ColumnSums(queries=queries, power=power)
        wanted = (probs[:, -queries if queries > 0 else 0 :] ** power).sum(1).unflatten(0, (HEADS, GROUP)).amax(1)
        for known in (None, lse):
            found = backend.prompt_scores(q, k, 0.2, columns, HeadScores(group="max"), known, how)
            torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)
    share = probs * torch.arange(1, 71)[:, None]
    most, least = (-((share < limit) & (probs > 0)).sum(1).double() for limit in (1 + 1e-4, 1 - 1e-4))
    seen = (torch.arange(70)[:, None] >= torch.arange(70)).sum(0)
    found = backend.prompt_low_counts(q, k, 0.2, queries=-1, skip_near=0, group="max", softmax=how)
    assert bool((found <= least.unflatten(0, (HEADS, GROUP)).amax(1)).all())
    assert bool((found >= torch.maximum(most, -seen.double()).unflatten(0, (HEADS, GROUP)).amax(1)).all())


@EACH
def test_what_is_no_softmax_is_refused(backend: Backend):
    """Caps below 0, sinks of another number of heads and of another type: kernels would read past their end."""
    q, k, v = prompt(5)
    for how, message in (
        (Softmax(-1.0), "cap"),
        (Softmax(float("inf")), "cap"),
        (Softmax(0.0, SINKS[:2]), "sinks"),
        (Softmax(0.0, SINKS.bfloat16()), "sinks"),
    ):
        with pytest.raises(AssertionError, match=message):
            backend.chunk_attention(q, k, v, (k[:, :0], v[:, :0], None), 0.2, how)
        with pytest.raises(AssertionError, match=message):
            backend.column_scores(q, k, 0.2, ColumnSums(queries=-1), None, how)


def test_layers_have_their_own_sinks():
    """A layer's softmax is a row of all layers' sinks, and the cap of all."""
    both = Softmax(2.0, torch.stack([SINKS, SINKS + 1]))
    assert both.of_layer(1).sinks.equal(SINKS + 1) and both.of_layer(1).cap == 2.0
    assert PLAIN.of_layer(3).is_plain and not both.is_plain
