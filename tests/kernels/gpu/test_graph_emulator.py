"""Steps that a CUDA graph must hold, replayed by an emulator: equal to eager ones, to the last byte."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from triton_helpers import DEVICE

from kvbench.kernels.device_checks import decode_step
from kvbench.kernels.device_inputs import Plan
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.emulator import NotCapturable, record

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="with a GPU, check_device captures a real graph"),
]
STEPS = 6


@pytest.mark.exhaustive
def test_a_replayed_decode_step_is_an_eager_one():
    """Reserving, looking up, writing, attending and adding scores of one layer: outputs after every step, slots and
    page bytes at the end, as `check_device` captures it on a GPU."""
    found = []
    for captured in (False, True):
        step, held, out = decode_step(Plan(DEVICE, Gpu()))
        step()
        outputs = [out.clone()]
        run = record(step) if captured else step
        outputs += [out.clone()] if captured else []
        for _ in range(STEPS - len(outputs)):
            run()
            outputs.append(out.clone())
        held.pool.check()
        found.append((outputs, held.num_slots.clone(), held.pool.pages.clone()))
    (outputs, slots, pages), (again, slots_again, pages_again) = found
    assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True)) and len(outputs) == STEPS
    assert not torch.equal(outputs[0], outputs[-1])
    assert torch.equal(slots, slots_again) and torch.equal(pages, pages_again) and int(slots[0, 0]) == STEPS


def test_a_number_of_the_host_is_frozen():
    """A counter that Python moves on stands still in a replay, as in a graph; one on the device goes on."""
    count, number, device_number = torch.zeros(2), [0], torch.zeros(())

    def step() -> None:
        number[0] += 1
        device_number.add_(1)
        count[0].add_(number[0])
        count[1].add_(device_number)

    replay = record(step)
    for _ in range(2):
        replay()
    assert count.tolist() == [1 + 1 + 1, 1 + 2 + 3]


@pytest.mark.parametrize(
    "step", [lambda x: x[x > 0].sum(), lambda x: int(x.sum()), lambda x: x.nonzero(), lambda x: bool((x > 0).any())]
)
def test_a_step_that_reads_back_is_refused(step):
    """Masks, numbers and sizes that depend on content."""
    with pytest.raises(NotCapturable, match="reads back to the host"):
        record(lambda: step(torch.ones(3)))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.tensor([1, 2]),
        lambda x: torch.tensor(3.0),
        lambda x: x.new_tensor([1]),
        lambda x: torch.as_tensor([1]),
    ],
)
def test_a_step_that_copies_from_the_host_is_refused(step):
    """A GPU would fetch them from memory that is not pinned, which no capture takes."""
    with pytest.raises(NotCapturable, match="numbers of the host become a tensor"):
        record(lambda: step(torch.ones(3)))


def test_a_step_finds_nothing_of_the_replay_before():
    """Other graphs of the pool write where a step allocates: what it reads there before it writes is garbage."""
    total, allocated = torch.zeros(2), []

    def step() -> None:
        allocated.append(torch.empty(2))
        total.copy_(allocated[0])

    replay = record(step)
    allocated[0].fill_(7.0)
    replay()
    assert total.isnan().all()
