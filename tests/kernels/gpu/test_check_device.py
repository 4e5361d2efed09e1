"""The check that a GPU machine runs: what it finds, and what it says where it cannot run."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from selection import few
from triton_helpers import DEVICE, many_parts, poisoned_memory  # noqa: F401

from kvbench.kernels import check_device
from kvbench.kernels.device_checks import CHECKS, check_prompts
from kvbench.kernels.device_inputs import FORMATS, QUICK, SHORT, Finding, Plan, differ
from kvbench.kernels.gpu.backend import Gpu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of what slots without a token hold


class OneFormat(Plan):
    """What is checked of each format, at one head dim."""

    def takes(self, name: str) -> bool:
        return name.startswith(("pages", "attend")) and name.endswith(self.kinds[0][2])


def one_format(name: str) -> Plan:
    """The checks of a format; of three head dims one is no power of two."""
    return OneFormat(DEVICE, Gpu(), (((64, 80, 128)[list(FORMATS).index(name) % 3], torch.float32, (name,)),), SHORT)


def wrong(found: Iterator[Finding]) -> list[Finding]:
    """What checks of a device find wrong."""
    return [finding for finding in found if not finding.passed]


# A format per way of coding and per width of a code; the interpreter takes a second for each.
WRITTEN = (
    "k16v16 bf16",
    "k4v2",
    "k3v3",
    "k1v1",
    "k8v4 groups",
    "e4m3 scaled",
    "turboquant 3 bits",
    "mxfp4",
    "kivi 2 bits",
)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", few(FORMATS, *WRITTEN))
def test_every_format_is_written_read_and_moved_as_by_the_reference(name: str):
    """The same bytes, and no others; what has page -1 is passed over."""
    assert wrong(CHECKS["pages"](one_format(name))) == []


@pytest.mark.parametrize("name", few([*FORMATS][4:], "kivi 4 bits, group 24"))
def test_every_format_is_attended_to_as_by_the_reference(name: str):
    """Output, log-sum-exp and scores, returned and added."""
    assert wrong(CHECKS["attention"](one_format(name))) == []


@pytest.mark.parametrize("name", few(FORMATS, "nvfp4"))
def test_every_format_is_attended_to_by_bf16_queries(name: str):
    """With scores, behind a ring and over three tiers where the format is the first of its kind."""
    plan = OneFormat(DEVICE, Gpu(), ((64, torch.bfloat16, (name,)),), SHORT)
    assert wrong(CHECKS["attention"](plan)) == []


@pytest.mark.every(2)
@pytest.mark.parametrize("part", few(range(14), 3, 8))
def test_the_quick_checks_of_a_device_pass(part: int):
    """All operations, of three tiers, rings, prompts, chunks, bounds and many lists, share by share."""
    plan = Plan(DEVICE, Gpu(), QUICK, SHORT, (part, 14))
    assert wrong(finding for check in CHECKS.values() for finding in check(plan)) == []


def test_wrong_results_are_found(capsys: pytest.CaptureFixture):
    """A backend that is off in one operation fails there, with the difference, and passes elsewhere."""

    class Off(Gpu):
        def prompt_scores(self, *args, **options):
            return 1.001 * super().prompt_scores(*args, **options)

    plan = Plan(DEVICE, Off(), QUICK, SHORT)
    assert check_device.report(check_prompts(plan)) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAIL  1.00e-03 (bound 1e-05)  column scores") == 3
    assert "ok  " in printed and "1 passed, 3 failed" in printed


def test_a_difference_that_is_no_number_and_no_findings_at_all_do_not_pass(capsys: pytest.CaptureFixture):
    """NaN is a failure, and so is a check that compared nothing."""
    assert check_device.report(iter([Finding("x", float("nan"), 1.0)])) == 1
    assert check_device.report(iter([])) == 1
    assert check_device.report(iter([Finding("x", 0.0, 0.0)])) == 0
    assert differ(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) != 0.0
    assert differ(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == 0.0


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """No traceback: a sentence and exit status 2, on `cuda` without one and on the CPU without the interpreter."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_device.main([]) == 2
    assert "no GPU: torch" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert check_device.main(["--device", "cpu"]) == 2
    assert "needs an NVIDIA or AMD GPU" in capsys.readouterr().err


def test_shares_are_the_whole():
    """Every check belongs to one share, whatever their number."""
    names = [f"attend {kind} {name}" for kind in range(9) for name in FORMATS]
    for parts in (1, 2, 16):
        plans = [Plan(DEVICE, Gpu(), share=(part, parts)) for part in range(parts)]
        assert all(sum(plan.takes(name) for plan in plans) == 1 for name in names)
    assert len({plan.takes(names[0]) for plan in plans}) == 2


class Process:
    """Stands for a process that has printed something."""

    def __init__(self, command: list[str], **_: object) -> None:
        self.share, self.returncode = command[-1], 0
        self.said = {"0/3": "ok   0.00e+00 one\n1 passed, 0 failed\n", "1/3": "0 passed, 0 failed\n"}.get(
            self.share, ""
        )
        if self.share == "2/3" and broken:
            self.said, self.returncode = "ok   0.00e+00 two\nFAIL 1.00e+00 three\n1 passed, 1 failed\n", 1

    def communicate(self) -> tuple[str, None]:
        return self.said, None


broken: list[bool] = []


def test_processes_that_check_in_parallel_are_added_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """An empty share is no failure; a failed one is, and what it found is printed; nothing at all does not pass."""
    monkeypatch.setattr(check_device.subprocess, "Popen", Process)
    assert check_device.in_shares("module", [], 3) == 0
    assert "1 passed, 0 failed, 0 of 3 processes ended with an error" in capsys.readouterr().out
    monkeypatch.setattr(f"{__name__}.broken", [True])
    assert check_device.in_shares("module", [], 3) == 1
    said = capsys.readouterr().out
    assert "FAIL 1.00e+00 three" in said and "2 passed, 1 failed, 1 of 3 processes" in said
    assert check_device.in_shares("module", [], 1) == 1  # no share of one is known to `Process`
    assert check_device.report(iter([]), may_be_empty=True) == 0
