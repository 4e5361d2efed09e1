"""Every method through the whole engine on the Triton kernels: in the interpreter, or on a GPU where there is one."""

import os
import re
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from selection import few

from kvbench.config.files import options
from kvbench.engine.requests import Outcome
from kvbench.extensions.bench import check_methods
from kvbench.extensions.bench.check_methods import CASES, SMALL, Case, changes, differing
from kvbench.kernels.cpu.build import find_compiler

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# The interpreter takes seconds per case. These have two tiers with demotions, keys that are rotated on reading with and
# without a ring that flushes, pages that are chosen, and bulk eviction; all tiers empty at least once.
# tests/engine/test_captured_steps.py has the steps of DiffKV and KIVI.
FEW = [
    ("leankv", "an empty tier"),
    ("streaming_llm", "a row that ends early"),
    ("kvquant_style", "one token"),
    ("quest", "an empty tier"),
    ("scissorhands", "one token"),
]
EVERY = [(method, case) for method in options("method") for case in CASES]
WANTED = few(EVERY, *(FEW if DEVICE == "cpu" else EVERY))
# Interpreted kernels compute in numpy, which warns of the NaNs that slots without a token may hold.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# What the kernels do not do yet, by method; everything else runs in kernels from the prompt to the last token.
SLOW = {"kvquant": {"paged_decode", "write_keys", "write_values"}, "cake": {"column_scores"}}  # a mean of columns


@pytest.mark.every(3)
@pytest.mark.parametrize(("method", "case"), WANTED)
def test_a_method_answers_as_the_reference_does(method: str, case: str):
    """Equal tokens, bytes and kept slots on interpreted or compiled kernels and in plain torch; what plain torch did in
    the kernels' place is named, and nothing else was."""
    (finding,) = check_methods.check(DEVICE, "float32", [method], [case])
    assert finding.passed, finding
    slow = re.search(r"\(plain torch: (.*)\)", finding.name)
    fallbacks = set(slow[1].split(", ")) if slow else set()
    assert fallbacks <= SLOW.get(method, set()) | ({"gather_dense"} if case == "segments" else set())


# Methods of which a case, at least, is attended to by the kernels in CUDA C++. MiniKV has a scale per 16 tokens, which
# they do not take; KVQuant's values are read by plain torch.
IN_CUDA = ("diffkv", "diffkv_artifact", "int4", "int8", "int8_per_token_head", "kivi", "leankv", "q_hitter")


@pytest.mark.long
@pytest.mark.skipif(DEVICE != "cpu", reason="the build for a CPU is compared where there is no GPU")
@pytest.mark.parametrize(("method", "case"), few(EVERY, ("kivi", "one token"), ("diffkv", "one token")))
def test_a_method_answers_with_the_kernels_in_cuda(method: str, case: str, monkeypatch: pytest.MonkeyPatch):
    """Likelihoods of given tokens are near the reference's with fp16 queries, on the kernels' build for this CPU; what
    these do not take is Triton's, and said."""
    find_compiler()
    monkeypatch.setattr(check_methods, "LONGER", 4 if method == "diffkv" else 12)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "backend.decode=cuda")
        (finding,) = check_methods.check(DEVICE, "float16", [method], [case], decode="host")
    assert finding.passed, finding
    decodes = re.search(r"\(decode: (.*)\)", finding.name)
    assert (decodes is None) == ("paged_decode" in SLOW.get(method, ()))
    assert ("cuda" in (decodes[1].split("; ") if decodes else ())) == (method in IN_CUDA)


def test_small_settings_belong_to_the_method():
    """Cases shrink what a method has, add nothing, and enlarge nothing."""
    assert changes("diffkv", Case(())) == {"window": SMALL["window"]}
    assert changes("diffkv", Case((), one_tier=True)) == {"window": SMALL["window"], "alpha_h": 0.02}
    assert changes("diffkv", Case((), small=False)) == {}
    assert changes("minikv", Case(())) == {"residual_tokens": SMALL["residual_tokens"]}  # its `recent` is a share
    assert changes("h2o_factory", Case(())) == {"budget": SMALL["budget"]}  # its window is no larger


def test_a_difference_is_counted():
    """An answer that differs in tokens or bytes, or that failed on both sides, does not pass."""
    good = Outcome(sample_id="0", repeat=0, text="", token_ids=[1], finish="length", ledger={"a": 1}, kept={})
    assert differing(good, good) == 0
    assert differing(good, Outcome(**vars(good) | {"token_ids": [2]})) == 1
    assert differing(good, Outcome(**vars(good) | {"ledger": {"a": 2}})) == 1
    failed = SimpleNamespace(**vars(good) | {"status": "oom"})
    assert differing(failed, failed) == 1
    near, far = (Outcome(**vars(good) | {"fidelity": {"nll": x}, "per_token": {"nll": [x]}}) for x in (1.01, 1.4))
    other = Outcome(**vars(good) | {"fidelity": {"nll": 1.0}, "per_token": {"nll": [1.0]}})
    assert differing(near, other) == differing(far, other, 0.3) == 1 > differing(near, other, 0.3)


def test_a_crash_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """A method that ends in an error fails its case by name, and the others are still checked."""
    answer = check_methods.answer

    def crash(model, method, case, backend, capture=None, at_length=False, decode=""):
        if (method, backend) == ("kivi", "triton"):
            raise ZeroDivisionError("integer division or modulo by zero")
        return answer(model, method, case, "torch")

    monkeypatch.setattr(check_methods, "answer", crash)
    monkeypatch.setattr(check_methods, "gpu_backend", lambda device: None)
    words = ["--device", "cpu", "--method", "kivi", "full", "--case", "one token"]
    assert check_methods.main(words) == 1
    said = capsys.readouterr()
    assert "1 passed, 1 failed" in said.out and "FAIL       nan (bound 0e+00)  kivi, one token, float32" in said.out
    assert "ZeroDivisionError: integer division" in said.err
