"""What kernels take of a GPU, compiled without one, in the forms that runs have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from kvbench.kernels.bench.attention import Settings
from kvbench.kernels.gpu import registers

SASS = """
\t.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IADD3 R0, R0, 0x1, RZ ;
.L_x_2:
        /*0020*/                   HMMA.16816.F32 R4, R4, R2, R8 ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0040*/                   HGMMA.64x64x16.F32 R4, gdesc[UR4], R8 ;
        /*0050*/                   FADD R0, R0, R4 ;
        /*0060*/               @P1 BRA `(.L_x_3) ;
        /*0070*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*0080*/                   FADD R0, R0, R4 ;
        /*0090*/               @P1 BRA `(.L_x_4) ;
        /*00a0*/                   BRA `(.L_x_0) ;
"""


def test_the_innermost_loops_with_products_are_counted():
    """Neither what lies around them nor a loop without a product."""
    assert [len(lines) for lines in registers.loops(SASS.replace("\t.L", ".L", 1))] == [2, 3]
    assert registers.loops("") == []


def test_every_form_of_the_bench_is_counted():
    """Its formats at each head dim, in both 16-bit types: with scores as well, behind a ring where keys have groups."""
    found = registers.forms()
    assert {form.formats for form in found} == {*Settings().formats, "columns"}
    assert {(form.dim, form.kind) for form in found} == {(d, k) for d in (64, 128, 256) for k in ("bf16", "fp16")}
    for form in found:
        grouped = form.formats != "columns" and any(fmt.slot.channel_keys for fmt in registers.page_formats(form))
        assert form.ring == grouped
    assert {form.scores for form in found if form.formats == "K8V4+K4V2"} == {False, True}


def table(tmp_path: Path, *words: str) -> dict[str, list[float]]:
    """What the command prints: of a form and its kernel the registers, spilled bytes, shared bytes, programs on a
    multiprocessor, and instructions."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.kernels.gpu.registers", *words],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[4:]]
    return {f"{form} {kernel}": [float(cell or "nan") for cell in cells] for form, kernel, *cells in rows}


# Most instructions of the main loop, by head dim: of a warp for a slot, behind a ring, and of a thread for a pair of
# query and key of column scores. As compiled by triton 3.7 they are a tenth below; with a division and masks in every
# turn, columns took 23 to 31.
MOST = {64: (25, 32, 7.5), 128: (31, 53, 9), 256: (65, 107, 19)}
SPILLED = 16  # bytes that a thread may keep in memory


def held_to(found: dict[str, list[float]]) -> None:
    """Asserts the bounds of rows that the command printed."""
    for name, (registers_, spilled, _, programs, instructions) in found.items():
        form, kernel = name.rsplit(" ", 1)
        plain, ring, columns = MOST[int(form.split("D=")[1].split(",")[0])]
        assert spilled <= SPILLED and registers_ <= 255, name
        if kernel == "_finish":
            assert registers_ <= 96 and programs >= 5, name
        else:
            most = columns if kernel == "_sum_columns" else ring if "ring" in form else plain
            assert 0 < instructions <= most, name


@pytest.mark.long
def test_kernels_of_a_form_stay_within_their_bounds(tmp_path: Path):
    """Of the column scores and one format; the table of all forms is exhaustive."""
    kernels = ["--kernels", "_sum_columns", "_attend"]
    found = table(tmp_path, "--dims", "64", "--kinds", "bf16", "--formats", "columns", "K2V2", *kernels)
    assert [name.split(",")[0] for name in found] == ["K2V2", "K2V2 scores", "columns"]
    held_to(found)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dim", registers.DIMS)
def test_kernels_of_all_forms_stay_within_their_bounds(tmp_path: Path, dim: int):
    """Every form of a head dim, in both types of queries."""
    found = table(tmp_path, "--dims", str(dim))
    assert len(found) == 2 * (2 * 16 + 1)
    held_to(found)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_columns_fit_older_cards(tmp_path: Path, target: str):
    """Within the shared memory of a card of 8.9, which has least, and without a spill."""
    found = table(tmp_path, "--target", target, "--kinds", "bf16", "--formats", "columns")
    assert len(found) == 3
    assert all(spilled == 0 and shared <= 99 << 10 for _, spilled, shared, *_ in found.values())
