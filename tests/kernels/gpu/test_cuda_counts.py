"""Registers, spills and instructions of the compiled decode kernel in CUDA C++."""

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.gpu import cuda_build
from kvbench.kernels.gpu.compile import nvidia_tool
from kvbench.kernels.gpu.cuda_counts import BARS, GOALS, OTHERS, Code, form_named, usage

try:
    cuda_build.nvrtc()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)
if not nvidia_tool("nvdisasm", "--version", binary=b""):
    pytest.skip("triton's package has no nvdisasm here", allow_module_level=True)


@pytest.mark.parametrize(("name", "dim", "more"), GOALS)
def test_timed_forms_keep_their_bars(name: str, dim: int, more: dict):
    """At most 104 registers, no spill, at most 20 instructions per token, on sm_90."""
    found = usage(form_named(name, dim, **more), "sm_90")
    assert found.spilled == 0
    assert found.registers <= BARS["registers"] and found.per_token <= BARS["per_token"]
    # Each product of 16 x 16 codes with a turn's queries, 16 per 32 tokens and 128 channels and side, is in a turn.
    assert found.per_token > found.in_turns > dim / 128


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("name", "dim", "more"), [pytest.param(*form, marks=pytest.mark.every(9)) for form in OTHERS])
def test_no_form_spills(name: str, dim: int, more: dict, target: str):
    """Rings, scores, two tiers and 256 channels."""
    assert usage(form_named(name, dim, **more), target).spilled == 0


def test_a_path_goes_where_the_work_is():
    """Of a loop with a part that is passed over, its products are counted, and no more than they need."""
    text = "\n".join(
        [
            ".text.kernel:",
            ".L_x_0:",
            "/*0000*/ LDS R1, [R2] ;",
            "/*0010*/ @P0 BRA `(.L_x_1) ;",
            "/*0020*/ SHFL R1, R1 ;",
            "/*0030*/ FADD R1, R1, R1 ;",
            ".L_x_1:",
            "/*0040*/ HMMA.16816.F32 R0, R0, R0, R0 ;",
            "/*0050*/ @P1 BRA `(.L_x_0) ;",
            "/*0060*/ EXIT ;",
        ]
    )
    code = Code.of(text, "kernel")
    assert code.loops == [(0, 5)]
    for wanted, steps in ((("HMMA",), 4), (("HMMA", "SHFL"), 6)):
        found = [any(word in line for word in wanted) for line in code.lines]
        assert code.path((0, 5), lambda at, found=found: (found[at], -1))[-1] == -steps


def test_a_build_is_kept_and_checked(monkeypatch, tmp_path):
    """A cubin comes from the cache when nothing changed, and is made again where its bytes did."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    form = form_named("K4V4", 64)
    built = cuda_build.compiled(form, "sm_90")
    (path,) = (tmp_path / "kernels").glob("decode-sm_90-*.cubin")
    made = []
    real = cuda_build._compile
    monkeypatch.setattr(cuda_build, "_compile", lambda *given: made.append(given) or real(*given))
    assert cuda_build.compiled(form, "sm_90") == built and not made
    path.write_bytes(path.read_bytes()[:-1])
    assert cuda_build.compiled(form, "sm_90") == built and len(made) == 1


def test_a_source_that_does_not_compile_is_said():
    """With the target and the end of the compiler's output."""
    with pytest.raises(BuildError, match="expected an expression"):
        cuda_build._compile({"decode.cu": '#include "form.h"\nint x = ;', "form.h": ""}, "sm_90")
