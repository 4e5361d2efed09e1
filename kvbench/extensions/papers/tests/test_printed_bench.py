"""Printed speeds and sizes beside what benches measured: the right row and cell, in the printed unit, and never a match
except for counted bytes."""

import pytest

from kvbench.extensions.papers import papers, printed_bench


def document(what, device="AMD EPYC", model="Llama-2-7b-chat-hf", **cells):
    """A document of a bench as far as it is read; a cell for each batch, with the fields of its rows by their names."""
    all_cells = [
        {"cell": {"batch": int(name[1:]), "context": 1024, "phase": "decode", "kv_mb": 64}, "variants": rows}
        for name, rows in cells.items()
    ]
    return {"what": what, "model": {"name": model}, "environment": {"device_name": device}, "cells": all_cells}


def row(name, speed=1.0, **more):
    """A row that is so many times as fast as the full cache."""
    ratio = {"median": speed, "q1": speed - 0.1, "q3": speed + 0.1}
    return {"name": name, "seconds": [1.0] * 3, "ratios": {"full": ratio}} | more


def cells(paper, at, *documents):
    """The cells of an entry by row and metric."""
    known = papers.find(paper)
    all_cells = printed_bench.join(known, known.find(*at.split()), documents)
    return {(cell.row, cell.printed["metric"], cell.printed["value"]): cell for cell in all_cells}


def test_a_speed_has_the_row_and_the_cell_that_it_names():
    """Of two batches that of the printed one; the length is another, which is told; quartiles are no interval of a
    match."""
    bench = document("decode", b1=[row("diffkv", 9.0)], b8=[row("diffkv", 1.4), row("full")])
    by_row = cells("diffkv", "figure 15b", bench)
    cell = by_row["DiffKV K8V4-K4V2", "latency_speedup_vs_vLLM", 1.4]
    assert cell.ours.value == 1.4 and cell.ours.ends == pytest.approx((1.3, 1.5)) and cell.ours.num_samples == 3
    assert cell.verdict == "other machine" and "context: 4096 there, 1024 here; at batch 8" in cell.note
    on_l40 = cells("diffkv", "figure 15b", document("decode", device="NVIDIA L40", b8=[row("diffkv", 1.4)]))
    assert {one.verdict for one in on_l40.values()} == {"other protocol"}, "the baseline is not theirs"


def test_models_and_rows_that_are_not_there():
    """A printed model beside another one; a row that no bench has; a setting of the paper's runs."""
    bench = document("throughput", b1=[row("diffkv", 3.0, batch=7), row("kivi bits=2", 2.0, batch=5)], model="tiny")
    by_row = cells("diffkv", "figure 17", bench)
    speed = by_row["DiffKV K8V4-K4V2", "throughput_vs_vLLM", 5.4]
    assert (speed.verdict, speed.model, speed.ours.value, speed.difference) == (
        "other model",
        "tiny",
        3.0,
        pytest.approx(-2.4),
    )
    assert by_row["DiffKV K8V4-K4V2", "batch_size", 15.9].ours.value == 7
    assert by_row["Quest", "throughput_vs_vLLM", 1.6].verdict == "not run"
    assert by_row["all", "throughput_requests", 1000].verdict == "cannot be"


def test_shares_of_a_step_add_up_round_by_round():
    """The parts that stand for a printed share are added in each round, before the median."""
    parts = {
        "projections": [0.5, 0.2, 0.6],
        "attention": [0.2, 0.5, 0.1],
        "rest": [0.1, 0.1, 0.1],
        "reserving": [0.02] * 3,
    }
    by_row = cells("diffkv", "figure 14", document("parts", b1=[row("diffkv, by parts", parts=parts)]))
    share = by_row["DiffKV K8V4-K4V2", "model_execution_share_of_latency", 92]
    assert share.ours.value == pytest.approx(0.8) and share.difference == pytest.approx(80 - 92)
    assert by_row["DiffKV K8V4-K4V2", "memory_manager_share_of_latency", 0.9].ours.value == pytest.approx(0.02)
    assert by_row["DiffKV K8V4-K4V2", "memory_manager_share_of_latency", 0.2].verdict == "not run", "of prompts"


def test_the_longest_prompt_and_how_far_it_is_above_anothers():
    """In the printed units, K tokens and %."""
    rows = [row("minikv", counted_prompt=4400), row("kivi bits=2 group=16", counted_prompt=4000)]
    by_row = cells("minikv", "figure 11", document("capacity", b1=rows))
    assert by_row["MiniKV 25%+25%", "max_prompt_length", 44].difference == pytest.approx(4.4 - 44)
    assert by_row["MiniKV 25%+25%", "max_prompt_vs_KIVI", 10].difference == pytest.approx(0)


@pytest.mark.parametrize(("held", "verdict"), [(0.331e9, "reproduced"), (0.349e9, "not reproduced")])
def test_counted_bytes_are_reproduced_digit_for_digit(held, verdict):
    """0.33 GB printed: what rounds to it, and what does not; the share that is saved is of the full cache's."""
    rows = [{"method": name, "resident_bytes": str(size)} for name, size in (("full", 2.4e9), ("minikv", held))]
    by_row = cells("minikv", "claim bytes", {"what": "bytes", "rows": rows})
    cell = by_row["MiniKV 25%+25%", "kv_cache_size", 0.33]
    assert cell.verdict == verdict and cell.difference == pytest.approx(held / 1e9 - 0.33)
    assert by_row["MiniKV 25%+25%", "kv_cache_compression", 86].ours.value == pytest.approx(1 - held / 2.4e9)
    assert by_row["H2O 15%", "kv_cache_size", 0.32].verdict == "not run"
