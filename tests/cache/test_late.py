"""What the device tells the host, late; and what a replayed step tells it again."""

import pytest
import torch

from kvbench.cache.late import Late, Tape


def told(late: Late, into: list, numbers: list[int], name: str = "") -> None:
    """Posts numbers for a receiver that notes them."""
    late.post(torch.tensor(numbers), lambda: lambda values: into.append((name, values)))


def test_numbers_in_main_memory_are_handed_over_at_once():
    """Nothing is left to send or to collect."""
    late, found = Late(False), []
    told(late, found, [3, 4])
    assert found == [("", [3, 4])]
    late.send()
    late.collect()
    assert len(found) == 1


def test_steps_that_were_sent_last_may_be_left_for_later():
    """In order, each to its own receivers; what was posted and not sent is forgotten."""
    late, found = Late(True), []
    for step in range(3):
        told(late, found, [step], "a")
        told(late, found, [step, -step], "b")
        late.send()
    told(late, found, [9])
    late.drop()
    late.collect(leave=2)
    assert found == [("a", [0]), ("b", [0, 0])]
    late.collect(leave=5)
    assert len(found) == 2
    late.collect()
    assert found[2:] == [("a", [1]), ("b", [1, -1]), ("a", [2]), ("b", [2, -2])]


def test_every_receiver_gets_its_numbers_before_an_error_is_raised():
    """The first error is the one that is raised, and only once."""
    late, found = Late(True), []

    def refuse(values):
        raise ValueError(f"step {values[0]}")

    for step in (1, 2):
        late.post(torch.tensor([step]), lambda: refuse)
        told(late, found, [step])
        late.send()
    with pytest.raises(ValueError, match="step 1"):
        late.collect()
    assert [values for _, values in found] == [[1], [2]]
    late.collect()


def test_a_replay_does_again_what_the_host_noted():
    """Effects and receivers are bound to the state of the host at each replay, the numbers to the device's."""
    late, found, seen, device = Late(True), [], [10], torch.tensor([5])

    def step() -> None:
        late.also(lambda: seen.__setitem__(0, seen[0] + 1))

        def bind():
            now = seen[0]
            return lambda values: found.append((now, values))

        late.post(device, bind)
        late.send()

    late.tape = tape = Tape()
    step()
    late.tape = None
    late.collect()
    assert seen == [11] and found == []  # captured: its numbers are sent once it has run
    late.send_again(tape, with_effects=False)
    for number in (6, 7):
        tape.numbers.fill_(number)  # the device has run the step again
        late.send_again(tape)
    late.collect()
    assert [now for now, _ in found] == [11, 12, 13] and len(found) == 3
