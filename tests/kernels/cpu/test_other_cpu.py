"""The C++ kernels on a CPU that this machine is not: compiled for 64-bit ARM and run by an emulator."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvbench.kernels.cpu.abi import ISA_FLAGS, UNITS
from kvbench.kernels.cpu.build import FLAGS, SOURCE_DIR, find_compiler

# The program includes paged.cpp, whose functions it calls.
SOURCES = [Path(__file__).with_name("other_cpu.cpp"), *(SOURCE_DIR / unit for unit in UNITS if unit != "paged.cpp")]
ARM_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def run(compiler: str, flags: tuple[str, ...], runner: list[str], folder: Path) -> dict[str, tuple[str, list[float]]]:
    """Per format: the hash of all page bytes; output, log-sum-exp and scores."""
    binary = folder / f"{Path(compiler).name}.out"
    kept = [flag for flag in FLAGS if flag not in ("-fPIC", "-shared")]
    subprocess.run([compiler, *kept, *flags, *map(str, SOURCES), "-o", str(binary)], check=True)
    lines = subprocess.run([*runner, str(binary)], check=True, capture_output=True, text=True).stdout.splitlines()
    words = [line.split() for line in lines]
    return {" ".join(w[:2]): (w[3], [float(x) for x in w[4:]]) for w in words}


@pytest.mark.exhaustive
def test_arm_writes_the_same_bytes_and_attends_alike(tmp_path: Path):
    """NEON against portable C++ here: every byte of the pages, and attention to 1e-5, which is the rounding of fp32."""
    for tool, package in ((ARM_COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not on PATH; on Debian: apt-get install {package}")
    here = run(find_compiler(), ISA_FLAGS["portable"], [], tmp_path)
    there = run(ARM_COMPILER, ("-static",), [EMULATOR], tmp_path)
    assert len(here) == len(there) == 24
    for name, (pages, values) in here.items():
        assert there[name][0] == pages, name
        assert there[name][1] == pytest.approx(values, rel=0, abs=1e-5), name
