"""Time left: told from what was read and decoded, from the first prompt on."""

import io
import re

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
def test_the_time_left_is_near_from_the_first_prompt_on(clock, others_s):
    """Within 10 s of 540 from the third step of the first group on, at most what it says before an answer ends, and at
    least what it says before; what passes outside the run does not count. Four prompts of each group are read at once:
    an average over samples would say nothing before the first group's end, and count the loading."""
    told = [(left_s([pace]), pace.num_ended, pace.decode_s, left) for pace, left in run(clock, 250, others_s=others_s)]
    assert told[0][0] is None and told[1][0] is not None
    for found, ended, decode_s, left in told[1:]:
        word, seconds = found
        assert word == ("at least " if not decode_s else "at most " if not ended else "")
        if not decode_s:
            assert seconds <= left
        elif decode_s > 2 * STEP_S:
            assert abs(seconds - left) < 10, (seconds, left)
    assert told[-1][0][1] == pytest.approx(0.0, abs=1e-6)


def test_runs_that_have_not_begun_are_told_from_the_others(clock):
    """Of runs that take turns, those that replay prompts are as fast as the fastest, and all decode alike."""
    slow, fast, new = (next(run(clock, 10))[0] for _ in range(3))
    for pace, token_s in ((slow, 0.01), (fast, 0.001)):
        pace.read(TOKENS, 1)
        clock[0] += TOKENS * token_s
        pace.pause()
    word, seconds = left_s([slow, fast, new])
    rest = (ROWS * GROUPS - 1) * TOKENS
    assert (word, seconds) == ("at least ", pytest.approx(rest * 0.011 + ROWS * GROUPS * TOKENS * 0.001))


def test_a_log_tells_the_prompt_and_the_time_left_early(clock):
    """Without a terminal: the first line comes with the first prompt, and then one every ten seconds."""
    target = io.StringIO()
    with Progress("snapkv on trec", ROWS * GROUPS, stream=target) as progress:
        followed = False
        for pace, _ in run(clock, 20):
            if not followed:
                progress.follow(pace)
                followed = True
            progress.show()
    lines = target.getvalue().splitlines()
    assert lines[0] == "snapkv on trec: 24 samples"
    assert re.fullmatch(r"snapkv on trec: 0/24 samples, prompt \d/24(, at least \d min \d\d s left)?", lines[1])
    assert "at least" in lines[2]
    passed = GROUPS * (ROWS * TOKENS * READ_S + 20 * STEP_S)
    assert len(lines) == pytest.approx(passed / PLAIN_EVERY_S, abs=3)
