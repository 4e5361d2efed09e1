"""What the interpreter does not run: NVIDIA's instructions, how work is cut for a GPU, and what old compilers take."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from kvbench.kernels.gpu import coding, decode

SHAPED = {"zeros", "full", "reshape", "zeros_like", "broadcast_to", "view"}


def run(asm: str, word: int) -> list[float]:
    """The fp16 numbers that instructions make of a word of four bytes, by their definition in NVIDIA's PTX ISA."""
    held = {"$2": word}

    def value(name: str) -> int:
        return held[name] if name in held else int(name, 0)

    def halves(name: str) -> np.ndarray:
        return np.array([value(name)], dtype=np.uint32).view(np.float16).astype(np.float64)

    for line in asm.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        names = [part.strip() for part in rest.split(",")]
        if name == "mov.b32":
            held[names[0]] = value(names[1])
        elif name == "and.b32":
            held[names[0]] = value(names[1]) & value(names[2])
        elif name == "prmt.b32":
            each = (value(names[2]) << 32 | value(names[1])).to_bytes(8, "little")
            chosen = [each[value(names[3]) >> (4 * i) & 7] for i in range(4)]
            held[names[0]] = int.from_bytes(bytes(chosen), "little")
        elif name == "fma.rn.f16x2":
            made = (halves(names[1]) * halves(names[2]) + halves(names[3])).astype(np.float16)
            held[names[0]] = int(made.view(np.uint32)[0])
        else:
            assert name in (".reg", ""), line
    return [*halves("$0"), *halves("$1")]


@pytest.mark.parametrize(("bits", "plane"), [(b, p) for b in (1, 2, 4, 8) for p in range(8 // b)])
def test_instructions_make_numbers_of_codes(bits: int, plane: int):
    """All bytes, all planes."""
    asm = coding._unpacked(bits, plane)
    for first in range(0, 256, 4):
        word = int.from_bytes(bytes(range(first, first + 4)), "little")
        assert run(str(asm), word) == [byte >> (bits * plane) & (2**bits - 1) for byte in range(first, first + 4)]


def test_floats_of_eight_bits_with_five_of_exponent_are_the_upper_halves_of_fp16():
    """Numbers of both signs, the smallest and the largest."""
    word = int.from_bytes(bytes([0x3C, 0xC0, 0x01, 0x7B]), "little")
    assert run(coding._E5M2_HALVES.value, word) == [1.0, -2.0, 2.0**-16, 57344.0]


@pytest.mark.parametrize(
    ("lists", "most", "at_once", "parts"),
    [
        (64, 64, 1056, 16),  # one wave
        (64, 10, 1056, 10),  # no more than there are
        (8, 64, 1056, 64),
        (500, 64, 792, 3),  # two waves of thirds end before one of wholes
        (2000, 64, 1056, 1),  # two waves anyhow: parts would only add to what is merged
        (0, 64, 1056, 64),
        (64, 0, 1056, 1),
    ],
)
def test_lists_are_cut_so_that_no_wave_is_hardly_begun(lists: int, most: int, at_once: int, parts: int):
    """What is counted are waves per part."""
    assert decode._num_parts(lists, most, at_once) == parts


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "fit"),
    [
        (168, 18_440, 1, 11),  # by shared memory
        (201, 19_464, 1, 8),  # by registers: a quarter of them holds two such warps, and half of a third
        (128, 6_152, 1, 16),
        (128, 6_152, 2, 8),
        (32, 0, 1, 32),
        (255, 200_000, 8, 1),
    ],
)
def test_programs_that_a_multiprocessor_holds(
    monkeypatch: pytest.MonkeyPatch, registers: int, shared: int, warps: int, fit: int
):
    """Source: NVIDIA, CUDA C++ Programming Guide, "Technical specifications per compute capability", 9.0."""
    built = SimpleNamespace(
        n_regs=registers, metadata=SimpleNamespace(shared=shared), _init_handles=lambda: asked.append("loaded")
    )
    kernel = SimpleNamespace(__name__="kernel", warmup=lambda *_, grid, **constants: asked.append(grid) or built)
    has = {"shared_memory_per_multiprocessor": 228 << 10, "warp_size": 32}
    device = SimpleNamespace(**has, max_threads_per_multi_processor=2048)
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(decode, "_resident", {})
    for _ in range(2):  # it is compiled and asked once
        assert decode.programs_per_processor(kernel, [torch.zeros(1), 3], {"num_warps": warps}) == fit
    assert asked == [(1,), "loaded"]


@pytest.mark.parametrize("path", sorted(Path(decode.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_no_shape_in_a_kernel_has_an_attribute(path: Path):
    """triton 3.6 makes a plain number of it, and does not compile the kernel: the name of a constant stands there."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and re.fullmatch(r"tl\.(\w+)", ast.unparse(node.func)):
            if node.func.attr not in SHAPED:
                continue
            shapes = [argument for argument in node.args if isinstance(argument, ast.List)]
            layouts = [
                part
                for shape in shapes
                for part in ast.walk(shape)
                if isinstance(part, ast.Attribute) and part.attr.isupper()
            ]
            assert not layouts, f"line {node.lineno}: {ast.unparse(node)}"
