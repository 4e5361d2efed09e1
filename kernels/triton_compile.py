"""Compiles the Triton kernels for NVIDIA and AMD without a GPU: `python -m kvbench.kernels.triton_compile`.

The operations are called on small tensors in main memory; every launch they would make is taken down with its
arguments' types and compile-time constants, and compiled for the targets by Triton's own compilers.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvbench.kernels.triton_parts import recording

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
_BINARY = {"cuda": "cubin", "hip": "hsaco"}
_TYPES = {
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32", torch.bool: "*i1",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target: its binary's bytes, shared memory in bytes, and the seconds it took."""

    kernel: str
    target: str
    binary_bytes: int
    shared_bytes: int
    seconds_s: float


def _signature(kernel: Callable, arguments: tuple, constants: dict) -> tuple[dict, dict, dict]:
    """Types, constants and alignments of a launch, as Triton itself would infer them."""
    signature, values, alignments = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if index >= len(arguments):
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        value = arguments[index]
        if isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], values[(index,)] = "constexpr", 1
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, Tensor) or (isinstance(value, int) and value != 1 and value % 16 == 0):
            alignments[(index,)] = [["tt.divisibility", 16]]
    return signature, values, alignments


def compile_launches(run: Callable[[], object], target: str) -> Iterator[Compiled]:
    """Compiles every distinct kernel that a call launches.

    Args:
        run: Calls operations of the Triton backend on tensors in main memory; nothing is computed.
        target: A key of `TARGETS`.

    Raises:
        RuntimeError: The kernels were imported under TRITON_INTERPRET=1 and cannot be compiled.
    """
    launches: dict[str, tuple] = {}

    def note(kernel: Callable, _: tuple, arguments: tuple, constants: dict) -> None:
        launches.setdefault(
            f"{kernel.__name__} {_signature(kernel, arguments, constants)}", (kernel, arguments, constants)
        )

    with recording(note):
        run()
    for kernel, arguments, constants in launches.values():
        if not isinstance(kernel, triton.JITFunction):
            raise RuntimeError("kernels imported under TRITON_INTERPRET=1 cannot be compiled; unset it")
        signature, values, alignments = _signature(kernel, arguments, constants)
        options = {name: constants[name] for name in _OPTIONS if name in constants}
        begin = time.perf_counter()
        source = ASTSource(kernel, signature, values, alignments)
        built = triton.compile(source, target=TARGETS[target], options=options)
        binary = built.asm[_BINARY[TARGETS[target].backend]]
        yield Compiled(kernel.__name__, target, len(binary), built.metadata.shared, time.perf_counter() - begin)
