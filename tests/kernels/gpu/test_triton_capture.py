"""What a CUDA graph needs of the Triton operations: nothing is read back, and no size depends on what tensors hold."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from no_data import NothingOnTheHost, without_data
from page_helpers import PAGE_BYTES, tier_format

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.gpu import pages as triton_pages
from kvbench.kernels.gpu import parts as triton_parts
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.operands import ColumnSums, HeadScores, Ring, TierPages
from kvbench.kernels.pool import PagePool
from kvbench.kernels.table import PageTable

TRACK = ("score", "pos")
SYNCS = (RuntimeError, NotImplementedError, AssertionError)


@pytest.fixture
def device():
    """Gives tensors without data, of which nothing can be read back. Launches are counted and not run."""
    launches = []

    def note(kernel, grid, arguments, constants) -> None:
        assert all(isinstance(x, int) for x in grid)
        assert not any(isinstance(x, torch.Tensor) and x.device.type != "meta" for x in arguments)
        launches.append(kernel.__name__)

    def make(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with without_data(), triton_parts.recording(note):
        yield SimpleNamespace(make=make, launches=launches)


def tiers_of(make, *formats) -> list[TierPages]:
    """One layer of three sequences and two KV heads, four pages per list."""
    return [TierPages(fmt, make(3, 2, 4), make(3, 2), make(3, 2)) for fmt in formats]


@pytest.mark.parametrize("accumulate", [False, True])
def test_attention_reads_nothing_back(device, accumulate: bool):
    """Two tiers with scores: one launch attends over both, and one merges and makes the scores of both."""
    make = device.make
    tiers = tiers_of(make, tier_format("8,4", 64, track=TRACK), tier_format("4,2", 64, track=TRACK))
    pages, q = make(9, PAGE_BYTES, dtype=torch.uint8), make(3, 6, 64, dtype=torch.float16)
    with NothingOnTheHost():
        out, lse, scores = Gpu().paged_decode(q, pages, tiers, None, 0.125, group="max", accumulate=accumulate)
    assert out.shape == (3, 6, 64) and lse.shape == (3, 6) and len(scores) == (0 if accumulate else 2)
    assert device.launches == ["_attend", "_finish"]


def test_more_lists_than_a_grid_s_second_axis_takes(device):
    """2,049 sequences of 32 KV heads: their scores are made, added, and added alone."""
    make, fmt = device.make, tier_format("8,4", 64, track=TRACK)
    pages, tier = make(9, PAGE_BYTES, dtype=torch.uint8), TierPages(fmt, make(2049, 32, 4), *[make(2049, 32)] * 2)
    with NothingOnTheHost():
        q = make(2049, 64, 64, dtype=torch.float16)
        (scores,) = Gpu().paged_decode(q, pages, [tier], None, 0.125, group="max")[2]
        Gpu().paged_decode(q, pages, [tier], None, 0.125, group="max", accumulate=True)
        Gpu().add_scores(pages, tier, scores)
        Gpu().write_keys(pages, fmt, make(2049 * 32), make(2049 * 32), make(2049 * 32, 64, dtype=torch.float16))
    assert device.launches == ["_attend", "_finish", "_attend", "_finish", "_add_scores", "_write_side"]


def test_attention_behind_a_ring_and_rotated_reads_nothing_back(device):
    """The residual buffers' token counts stay on the device; so do the angles of rotated keys."""
    make = device.make
    pages, q = make(9, PAGE_BYTES, dtype=torch.uint8), make(3, 6, 64, dtype=torch.bfloat16)
    buffer = make(3, 2, 40, 64, dtype=torch.bfloat16)
    tiers = tiers_of(make, tier_format("2,2", 64, k_channel_group=32, v_groups=2))
    with NothingOnTheHost():
        Gpu().paged_decode(q, pages, tiers, Ring(buffer, buffer, make(3, 2)), 0.125)
        (tier,) = tiers_of(make, tier_format("16,16", 64, track=TRACK))
        tier.rotation = make(3, 4 * tier.fmt.tokens_per_page, 32, dtype=torch.float32)
        Gpu().paged_decode(q, pages, [tier], None, 0.125, group="sum", accumulate=True)
        Gpu().add_scores(pages, tier, make(3, 2, 4 * tier.fmt.tokens_per_page, dtype=torch.float32))
    attended = ["_attend", "_finish"]
    assert device.launches == [*attended, *attended, "_add_scores"]


def test_pages_are_chosen_without_reading_back(device):
    """One launch for the bounds of all lists, and one for the choice. Another one where keys are written."""
    slot = SlotFormat(head_dim=64, k_bits=16, v_bits=16)
    fmt, make = PageFormat(slot, 16 * int(slot.slot_bytes) + 256, bounds=True), device.make
    (tier,), pages = tiers_of(make, fmt), make(9, fmt.page_bytes, dtype=torch.uint8)
    with NothingOnTheHost():
        chosen = Gpu().choose_pages(make(3, 6, 64, dtype=torch.float16), pages, tier, make(3), 2, "max")
        for distinct in (True, False):
            Gpu().widen_bounds(pages, fmt, make(6), make(6), make(6, 64, dtype=torch.float16), distinct=distinct)
    assert chosen.ids.shape == (3, 2, 2) and device.launches[:2] == ["_bound_pages", "_choose_pages"]
    assert device.launches[2:] == ["_widen_pages", "_widen_pages"]


def test_a_chunk_of_a_prompt_is_attended_to_without_reading_back(device):
    """What a layer holds is read back, a launch for each side of a tier; then one for the chunk."""
    make = device.make
    (tier,), pages = tiers_of(make, tier_format("8,4", 64)), make(9, PAGE_BYTES, dtype=torch.uint8)
    with NothingOnTheHost():
        keys, values, live = Gpu().gather_dense(pages, [tier], None)
        own = [make(heads, 40, 64, dtype=torch.float16) for heads in (6, 2, 2)]
        out = Gpu().chunk_attention(*own, (keys[0], values[0], live[0]), 0.1)
    assert out.shape == (6, 40, 64) and device.launches == ["_read_side", "_read_side", "_attend_chunk"]


def test_a_replay_is_torch_s_own_attention(device):
    """Behind a whole prompt no kernel is launched for 16 bits; for fp32, and where a part is not live, one is."""
    q, k, past = (device.make(*shape, 64, dtype=torch.float16) for shape in ((6, 40), (2, 40), (2, 99)))
    assert Gpu().chunk_attention(q, k, k, (past, past, None), 0.1).dtype == torch.float16 and not device.launches
    q, k, past = (x.float() for x in (q, k, past))
    assert Gpu().chunk_attention(q, k, k, (past, past, None), 0.1).shape == (6, 40, 64)
    assert device.launches == ["_attend_chunk"]


def test_pages_are_written_read_demoted_and_moved_without_reading_back(device):
    """Every operation on slots, the tracked fields' included."""
    make, backend = device.make, Gpu()
    fmt, lower = tier_format("8,4", 64, track=TRACK), tier_format("4,2", 64, track=TRACK)
    channel = tier_format("2,2", 64, k_channel_group=32, track=TRACK)
    pages, page, slot = make(9, PAGE_BYTES, dtype=torch.uint8), make(64), make(64)
    x = make(64, 64, dtype=torch.float16)
    triton_pages.byte_map(fmt, TRACK, pages.device)  # made at the first call of a format: not during a capture
    with NothingOnTheHost():
        for form in (fmt, channel):
            backend.write_keys(pages, form, page, slot, x)
            backend.write_values(pages, form, page, slot, x)
            backend.read_slots(pages, form, page, slot)
        backend.write_tracked(pages, fmt, page, slot, 0.0, slot)
    backend.demote(pages, fmt, lower, page, slot, page, slot)
    backend.move_slots(pages, fmt, page, slot, page, slot)
    assert device.launches.count("_write_side") == 3 and device.launches.count("_move_bytes") == 1
    assert device.launches.count("_demote_both") == 1


def test_prompts_are_scored_without_reading_back(device):
    """Column sums, pooling and reduction."""
    make, backend = device.make, Gpu()
    q, k = make(6, 300, 64, dtype=torch.bfloat16), make(2, 300, 64, dtype=torch.bfloat16)
    with NothingOnTheHost():
        scores = backend.prompt_scores(
            q,
            k,
            0.125,
            ColumnSums(queries=32, skip_near=2, power=2),
            HeadScores(pool="avg", pool_kernel=5, pool_stage="after_group", pool_region="all", group="max"),
        )
    assert scores.shape == (2, 300)
    assert device.launches == ["_sum_queries", "_sum_columns"]


def test_pages_of_all_lists_are_managed_without_reading_back(device):
    """One launch to take or return and three to compact for 40 lists; three and five for 30,000."""
    fmt = tier_format("4,2", 64, track=TRACK)
    for num_lists in (40, 30_000):
        del device.launches[:]
        shape = (num_lists, 1, 1)
        _, pages = Gpu().tables(PAGE_BYTES, 64, (8, fmt.tokens_per_page), shape, 4, "meta")
        lists, keep = device.make(num_lists), device.make(num_lists, 100, dtype=torch.bool)
        with NothingOnTheHost():
            first = pages.reserve(lists, 0, lists, at_most=0)
            pages.lookup(lists, 0, first)
            pages.page_ids(lists, 1, 3)
            pages.truncate(lists, 0, lists)
        pages.compact(lists, 1, keep, fmt)
        change = ["_change_at_once"] if num_lists < 100 else ["_sum_pages_needed", "_assign", "_commit"]
        assert device.launches == [*change, "_lookup", *change, "_pair_moves", "_move_listed", *change]


def test_the_checks_see_what_synchronises(device):
    """The reference's own operations, which choose by content or count on the host, do not pass."""
    make = device.make
    (tier,) = tiers_of(make, tier_format("4,2", 64, track=TRACK))
    pages = make(9, PAGE_BYTES, dtype=torch.uint8)
    with pytest.raises(SYNCS):
        REFERENCE.add_scores(pages, tier, make(3, 2, 4 * tier.fmt.tokens_per_page, dtype=torch.float32))
    with pytest.raises(SYNCS):
        PageTable(PagePool(32, 9, "meta"), (8,), 3, 1, 1, 4).reserve(make(3), 0, make(3))
    with pytest.raises(SYNCS), NothingOnTheHost():
        make(3).cpu()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # a minute on an idle machine, over 300 s on a core that others share
def test_kernels_compile_for_nvidia_and_amd_without_a_gpu(tmp_path):
    """One kernel of every kind, to machine code of NVIDIA's last generations and of gfx942, within the shared memory of
    each; the command alone compiles many more."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    from kvbench.kernels.gpu.compile import TARGETS

    cases = ["pages", "bounds", "prompts", "chunks", "step", "many-lists"]
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.kernels.gpu.compile", "--quick", "--case", *cases],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 cases failed, 0 kernels spill, 0 need more shared memory" in done.stdout
    for target in TARGETS:
        kernels = {line.split()[2] for line in done.stdout.splitlines() if line.split()[1] == target}
        assert kernels >= {
            "_attend",
            "_finish",
            "_bound_pages",
            "_choose_pages",
            "_find_extreme",
            "_find_leaving",
            "_settle",
            "_locate",
            "_lookup",
            "_count_rows",
            "_tracked_slots",
            "_change_at_once",
            "_demote_both",
            "_write_key_groups",
            "_write_side",
            "_move_bytes",
            "_sum_pages_needed",
            "_assign",
            "_commit",
            "_pair_moves",
            "_move_listed",
            "_sum_queries",
            "_sum_columns",
            "_attend_chunk",
            "_write_both",
            "_write_fields",
            "_append_ring",
            "_copy_pages",
        }
