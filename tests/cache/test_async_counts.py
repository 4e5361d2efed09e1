"""What the device tells the host, late; and what a replayed step tells it again."""

import pytest
import torch

from kvbench.cache.async_counts import AsyncCounts, HostCounts, ReplayLog, Rows


def told(counts: AsyncCounts, into: list, numbers: list[int], name: str = "") -> None:
    """Posts numbers for a receiver that notes them."""
    counts.post(torch.tensor(numbers), lambda: lambda values: into.append((name, values)))


def test_numbers_in_main_memory_are_handed_over_at_once():
    """Nothing is left to send or to collect."""
    counts, found = AsyncCounts(False), []
    told(counts, found, [3, 4])
    assert found == [("", [3, 4])]
    counts.send()
    counts.collect()
    assert len(found) == 1


def test_steps_that_were_sent_last_may_be_left_for_countsr():
    """In order, each to its own receivers; what was posted and not sent is forgotten."""
    counts, found = AsyncCounts(True), []
    for step in range(3):
        told(counts, found, [step], "a")
        told(counts, found, [step, -step], "b")
        counts.send()
    told(counts, found, [9])
    counts.drop()
    counts.collect(leave=2)
    assert found == [("a", [0]), ("b", [0, 0])]
    counts.collect(leave=5)
    assert len(found) == 2
    counts.collect()
    assert found[2:] == [("a", [1]), ("b", [1, -1]), ("a", [2]), ("b", [2, -2])]


def test_every_receiver_gets_its_numbers_before_an_error_is_raised():
    """The first error is the one that is raised, and only once."""
    counts, found = AsyncCounts(True), []

    def refuse(values):
        raise ValueError(f"step {values[0]}")

    for step in (1, 2):
        counts.post(torch.tensor([step]), lambda: refuse)
        told(counts, found, [step])
        counts.send()
    with pytest.raises(ValueError, match="step 1"):
        counts.collect()
    assert [values for _, values in found] == [[1], [2]]
    counts.collect()


def test_a_replay_tells_again_what_the_step_told():
    """Receivers are bound to the state of the host at each replay, the numbers to the device's."""
    counts, found, seen, device = AsyncCounts(True), [], [10], torch.tensor([5])

    def step() -> None:
        seen[0] += 1

        def bind():
            now = seen[0]
            return lambda values: found.append((now, values))

        counts.post(device, bind)
        counts.send()

    counts.log = log = ReplayLog()
    step()
    counts.log = None
    counts.collect()
    assert seen == [11] and found == []  # captured: its numbers are sent once it has run
    counts.resend(log)
    for number in (6, 7):
        seen[0] += 1
        log.numbers.fill_(number)  # the device has run the step again
        counts.resend(log)
    counts.collect()
    assert [now for now, _ in found] == [11, 12, 13] and len(found) == 3


def test_of_a_row_that_was_forgotten_nothing_is_known():
    """A closed row's number is that of another sequence next, whose lists are shorter or longer."""
    counts = HostCounts()
    counts.learner(Rows.of([3, 5], torch.device("cpu")))([7, 9])
    assert counts.longest([3, 5], 0) == 9 and counts.longest([3], 0) == 7
    counts.advance([3], 4)
    counts.copy(3, 6)
    counts.forget(3)
    assert counts.longest([3], 0) is None and counts.longest([3, 5], 0) is None
    assert counts.longest([6], 0) == 11 and counts.longest([5], 0) == 9
