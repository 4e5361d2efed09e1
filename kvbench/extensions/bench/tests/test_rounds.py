"""Interleaved timing: order, ratios, refusals, bandwidth share, from synthetic timers."""

import itertools
import math
import time
from unittest.mock import Mock

import pytest

from kvbench.kernels.bench.bench import plain_table
from kvbench.kernels.bench.rounds import Variant, choose_timer, measure_cell, ratios, spread, time_rounds

WALL = choose_timer("wall", "cpu")


def counting(names, log):
    """Variants that write their name and buffer into a log."""
    return [
        Variant(name=name, call=lambda i, name=name: log.append((name, i)), num_buffers=2 + index)
        for index, name in enumerate(names)
    ]


def test_every_variant_runs_once_per_round_over_all_buffers():
    """Each round holds each variant exactly once, goes over its buffers in turn; the warm-up is not counted."""
    log, rounds = [], []
    times_of = time_rounds(counting("abc", log), rounds=6, seed=3, timer=WALL, on_round=lambda: rounds.append(len(log)))
    assert {name: len(times) for name, times in times_of.items()} == {"a": 6, "b": 6, "c": 6}
    assert rounds == [9 * (i + 1) for i in range(7)]
    orders = []
    for begin in range(0, len(log), 9):
        turn = log[begin : begin + 9]
        runs = [(name, [i for _, i in group]) for name, group in itertools.groupby(turn, key=lambda entry: entry[0])]
        assert dict(runs) == {"a": [0, 1], "b": [0, 1, 2], "c": [0, 1, 2, 3]}
        orders.append("".join(name for name, _ in runs))
    assert len(set(orders)) > 1, "the order never changed"


def test_orders_follow_the_seed():
    """The same seed gives the same orders, another seed others; two variants of one name would be mixed up."""
    logs = [[], [], []]
    for log, seed in zip(logs, (1, 1, 2), strict=True):
        time_rounds(counting("abcd", log), rounds=5, seed=seed, timer=WALL)
    assert logs[0] == logs[1] != logs[2]
    with pytest.raises(AssertionError, match="same name"):
        time_rounds(counting("aa", []), rounds=1, seed=0, timer=WALL)


def test_ratios_are_formed_within_rounds():
    """A drift that is far larger than the difference leaves the ratio exact, because both meet it in the same round."""
    sink = []
    table = {"slow": 6.0, "fast": 2.0}
    variants = [Variant(name=name, call=lambda i, c=c: sink.append(c)) for name, c in table.items()]
    done = {"count": 0}

    def timer(work):
        sink.clear()
        work()
        done["count"] += 1
        return sink[0] * 1.5 ** ((done["count"] - 1) // 3)  # two variants, and the baseline again

    cell = measure_cell({"n": 1}, variants, baselines=["slow"], rounds=9, seed=0, timer=timer)
    rows = {row["name"]: row for row in cell["variants"]}
    assert rows["fast"]["q3"] > 2 * rows["fast"]["q1"]  # the times themselves are spread
    assert rows["fast"]["ratios"]["slow"] == pytest.approx({"median": 3.0, "q1": 3.0, "q3": 3.0})
    assert rows["slow"]["ratios"]["slow"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}


def test_the_baseline_is_timed_twice_and_names_the_noise():
    """The first baseline runs a second time in every round, in a place of its own; how far it is from itself is the
    noise, and it is no row of the table."""
    log = []
    names = ("slow", "fast")
    variants = [Variant(name=name, call=lambda _, name=name: log.append(name)) for name in names]
    turns = iter(range(10**6))

    def timer(work):
        work()
        return 1.0 + 0.2 * (next(turns) % 2)

    cell = measure_cell({}, variants, baselines=["absent", "fast"], rounds=8, seed=0, timer=timer)
    assert log.count("fast") == 2 * log.count("slow") == 18  # a warm-up and eight rounds
    assert [row["name"] for row in cell["variants"]] == list(names)
    twice = cell["twice"]
    assert twice["name"] == "fast" and twice["q1"] <= twice["median"] <= twice["q3"]
    assert twice["noise"] == max(abs(twice["q1"] - 1), abs(twice["q3"] - 1)) > 0
    still = measure_cell({}, variants, baselines=["fast"], rounds=4, seed=0, timer=lambda work: work() or 1.0)
    assert still["twice"]["noise"] == 0.0
    alone = measure_cell({}, variants[:1], baselines=[], rounds=2, seed=0, timer=lambda work: work() or 1.0)
    assert alone["twice"]["name"] == "slow"
    log.clear()
    once = measure_cell({}, variants, baselines=["fast"], rounds=2, seed=0, timer=timer, twice=False)
    assert once["twice"] is None and log.count("fast") == log.count("slow") == 3


def test_every_table_says_its_noise():
    """The plain table names the A/A pair of each cell; older documents have none."""
    cell = measure_cell({"n": 1}, counting("ab", []), baselines=["a"], rounds=3, seed=0, timer=WALL)
    document = {"what": "prefill", "cells": [cell], "settings": {}, "notes": []}
    assert "A/A: a timed twice is" in plain_table(document) and "are noise" in plain_table(document)
    del cell["twice"]
    assert "A/A" not in plain_table(document)


def test_spread_is_median_and_inclusive_quartiles():
    """Five numbers in any order; one number is its own quartiles."""
    assert spread([5, 1, 3, 2, 4]) == {"median": 3, "q1": 2, "q3": 4}
    assert spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0}
    assert ratios([2.0, 8.0, 9.0], [1.0, 2.0, 3.0]) == {"median": 3.0, "q1": 2.5, "q3": 3.5}


def test_bandwidth_share_is_of_the_same_round():
    """Bytes per second over what the probe reached; time per call is a sweep divided by its buffers."""
    costs = {"probe": 10.0, "half": 40.0}
    sink = []
    half = Variant(name="half", call=lambda i: sink.append("half"), num_buffers=4, bytes_per_call=50)
    probe = Variant(name="probe", call=lambda i: sink.append("probe"), bytes_per_call=100)

    def timer(work):
        sink.clear()
        work()
        return costs[sink[0]]

    cell = measure_cell({}, [half], baselines=[], rounds=3, seed=0, timer=timer, probe=probe)
    (row,) = cell["variants"]
    assert row["median"] == 10.0 and row["bytes_per_s"] == 5.0
    assert row["bandwidth_share"]["median"] == pytest.approx(0.5)
    assert cell["probe"]["bytes_per_s"] == 10.0
    assert cell["reuse_distance_bytes"] == 300


@pytest.mark.parametrize("error", [0.2, math.nan, math.inf, RuntimeError("launch failed"), AssertionError("bad page")])
def test_wrong_results_are_not_timed(error):
    """A variant whose output is off, NaN or fails is named and never called by the clock; the right one is timed, and
    one with nothing to compare."""
    calls, check = [], Mock(side_effect=[error])
    bad = Variant(name="bad", call=lambda i: calls.append(i), check=check, tolerance=0.1)
    good = Variant(name="good", call=lambda i: None, check=lambda: 0.05, tolerance=0.1)
    free = Variant(name="free", call=lambda i: None)
    cell = measure_cell({}, [bad, good, free], baselines=["bad"], rounds=2, seed=0, timer=WALL)
    assert [row["name"] for row in cell["variants"]] == ["good", "free"] and not calls
    assert cell["variants"][0]["max_error"] == 0.05 and cell["variants"][0]["ratios"] == {}
    (refused,) = cell["refused"]
    assert refused["name"] == "bad" and refused["reason"].startswith(("wrong: error", "failed: "))


def test_clock_that_cannot_tell_is_refused():
    """CPU time of one thread says nothing about a GPU."""
    with pytest.raises(ValueError, match="clock=cpu counts one thread, but the work is done by cuda"):
        choose_timer("cpu", "cuda")


def test_thread_clock_does_not_count_sleep():
    """clock=cpu counts work of this thread, wall counts waiting too."""
    wait = Variant(name="wait", call=lambda i: time.sleep(0.02))
    seconds = {
        clock: min(time_rounds([wait], rounds=2, seed=0, timer=choose_timer(clock, "cpu"))["wait"])
        for clock in ("wall", "cpu")
    }
    assert seconds["wall"] >= 0.02 > 5 * seconds["cpu"]


def test_a_replay_is_timed_instead_of_the_calls():
    """Each variant's sweep over its buffers is captured once, after it was found right, and so is the baseline's second
    one; what cannot be captured is timed as it is and says why."""
    done: list[str] = []

    def capture(work):
        work()
        taken = len(done)
        if "stubborn" in done[-1]:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return lambda: done.append(f"replay of {taken}")

    variants = [
        Variant(name=name, call=lambda index, name=name: done.append(f"{name} {index}"), num_buffers=2, check=check)
        for name, check in (("plain", lambda: 0.0), ("stubborn", lambda: 0.0), ("wrong", lambda: 1.0))
    ]
    cell = measure_cell({}, variants, baselines=[], rounds=3, seed=0, timer=WALL, warmup=0, capture=capture)
    rows = {row["name"]: row for row in cell["variants"]}
    assert set(rows) == {"plain", "stubborn"}
    assert rows["plain"]["graph"] is True and "no_graph" not in rows["plain"]
    assert rows["stubborn"]["graph"] is False
    assert rows["stubborn"]["no_graph"] == "RuntimeError: operation not permitted when stream is capturing"
    assert done.count("plain 0") == 2 and done.count("stubborn 0") == 4 and done.count("wrong 0") == 0
    assert sum(line.startswith("replay") for line in done) == 6
