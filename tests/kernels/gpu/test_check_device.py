"""The check that a GPU machine runs: what it finds, and what it says where it cannot run."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'kvbench[test]')")

from triton_helpers import DEVICE

from kvbench.kernels import check_device
from kvbench.kernels.check_device import Finding, Plan
from kvbench.kernels.gpu.backend import Gpu


def test_wrong_results_are_found(capsys: pytest.CaptureFixture):
    """A backend that is off in one operation fails there, with the difference, and passes elsewhere."""

    class Off(Gpu):
        def prompt_scores(self, *args, **options):
            return 1.001 * super().prompt_scores(*args, **options)

    plan = Plan(DEVICE, Off(), quick=True)
    assert check_device.report(check_device.check_prompts(plan)) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAIL  1.00e-03 (bound 1e-05)  column scores") == 3
    assert "ok  " in printed and "2 passed, 3 failed" in printed


def test_a_difference_that_is_no_number_and_no_findings_at_all_do_not_pass(capsys: pytest.CaptureFixture):
    """NaN is a failure, and so is a check that compared nothing."""
    assert check_device.report(iter([Finding("x", float("nan"), 1.0)])) == 1
    assert check_device.report(iter([])) == 1
    assert check_device.report(iter([Finding("x", 0.0, 0.0)])) == 0
    assert check_device._differ(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) != 0.0
    assert check_device._differ(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == 0.0


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """No traceback: a sentence and exit status 2, on `cuda` without one and on the CPU without the interpreter."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_device.main([]) == 2
    assert "no GPU: torch" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert check_device.main(["--device", "cpu"]) == 2
    assert "needs an NVIDIA or AMD GPU" in capsys.readouterr().err
