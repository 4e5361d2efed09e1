"""Time left: computed from what was read and decoded, from the first step of decoding on."""

import io
import re
from itertools import pairwise

import pytest

from kvbench.show.pace import Pace, left_s
from kvbench.show.progress import PLAIN_EVERY_S, Progress

READ_S, STEP_S, TOKENS, ROWS, GROUPS = 0.01, 0.2, 1000, 4, 6  # per token, per step; of a prompt; of a group; groups


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is moved."""
    now = [1000.0]
    monkeypatch.setattr("kvbench.show.pace.time.monotonic", lambda: now[0])
    return now


def run(clock, steps, read_s=READ_S, others_s=0.0):
    """A run of groups whose answers take so many steps; gives its pace and the seconds that are really left, after each
    prompt and each step. Loading before it and other runs' turns before each prompt pass on the clock alone."""
    clock[0] += 500.0
    pace = Pace(prompts=ROWS * GROUPS, prompt_tokens=ROWS * GROUPS * TOKENS, answers=ROWS * GROUPS, most_steps=steps)
    left = GROUPS * (ROWS * TOKENS * read_s + steps * STEP_S)
    for _ in range(GROUPS):
        for _ in range(ROWS):
            pace.pause()
            yield pace, left
            clock[0] += others_s
            pace.read(TOKENS, 1)
            clock[0] += TOKENS * read_s
            left -= TOKENS * read_s
        for _ in range(steps):
            clock[0] += STEP_S
            left -= STEP_S
            pace.step(ROWS / STEP_S, ROWS)
            yield pace, left
        for _ in range(ROWS):
            pace.end()
    yield pace, left


@pytest.mark.parametrize("others_s", [0.0, 70.0])
def test_the_time_left_is_near_from_the_first_step_on(clock, others_s):
    """Nothing is said while the first prompts are read: what decoding takes is unknown then. Within 10 s of 540 from
    the third step of the first group on, at most what it says before an answer ends; what passes outside the run does
    not count. Four prompts of each group are read at once: an average over samples would count the loading."""
    told = [(left_s([pace]), pace.num_ended, pace.decode_s, left) for pace, left in run(clock, 250, others_s=others_s)]
    for found, ended, decode_s, left in told:
        if not decode_s:
            assert found is None
            continue
        word, seconds = found
        assert word == ("at most " if not ended else "")
        if decode_s > 2 * STEP_S:
            assert abs(seconds - left) < 10, (seconds, left)
    assert told[-1][0][1] == pytest.approx(0.0, abs=1e-6)


def test_short_answers_that_end_first_promise_nothing(clock):
    """One answer of 8 ends after 10 steps, the others after 500: it stays `at most` until as many have ended as are
    under way, and what it says later never grows beyond what it said before."""
    pace = Pace(prompts=8, prompt_tokens=8 * TOKENS, answers=8, most_steps=500)
    for _ in range(8):
        pace.read(TOKENS, 1)
        clock[0] += 1.0
    said = []
    for step in range(1, 500):
        clock[0] += STEP_S
        pace.step(1 / STEP_S, 1)
        if step == 10:
            pace.end()
        if step > 20:
            said.append(left_s([pace]))
    assert {word for word, _ in said} == {"at most "}
    steps = 500 * STEP_S
    assert all(later <= before + steps for (_, before), (_, later) in pairwise(said))


def test_runs_that_have_not_begun_are_told_from_the_others(clock):
    """Of runs that take turns, those that replay prompts are as fast as the fastest, and all decode alike."""
    slow, fast, new = (next(run(clock, 10))[0] for _ in range(3))
    for pace, token_s in ((slow, 0.01), (fast, 0.001)):
        pace.read(TOKENS, 1)
        clock[0] += TOKENS * token_s
        pace.pause()
    assert left_s([slow, fast, new]) is None
    slow.go_on(0.0)
    clock[0] += 10 * STEP_S
    slow.step(1 / STEP_S, 1)
    slow.end()
    rest, answers = (ROWS * GROUPS - 1) * TOKENS, ROWS * GROUPS
    reading = rest * 0.011 + answers * TOKENS * 0.001
    decoding = 10 * STEP_S * (3 * answers - 1)
    assert left_s([slow, fast, new]) == ("", pytest.approx(reading + decoding))


def test_a_log_has_a_line_for_each_stage_and_tenth(clock):
    """Without a terminal: a line when the first answers are begun, and one with each further tenth; half a minute of
    the same stage says nothing."""
    target = io.StringIO()
    with Progress("snapkv on trec", ROWS * GROUPS, stream=target) as progress:
        followed, ended = False, 0
        for pace, _ in run(clock, 200):
            if not followed:
                progress.follow(pace)
                followed = True
            progress.done += pace.num_ended - ended
            ended = pace.num_ended
            progress.show()
    lines = target.getvalue().splitlines()
    assert lines[0] == "snapkv on trec: 24 samples"
    assert re.fullmatch(r"snapkv on trec: 0/24 samples, prompt 4/24, at most \d min \d\d s left", lines[1])
    assert not any("at least" in line or " 0 s left" in line for line in lines)
    assert len(lines) == 2 + GROUPS  # as many samples as a group end at once; the last is said at the end
    passed = GROUPS * (ROWS * TOKENS * READ_S + 200 * STEP_S)
    assert passed > 4 * len(lines) * PLAIN_EVERY_S
