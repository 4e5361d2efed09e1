"""torch's global modes: what is changed is named and put back, and what counts is what can change an answer."""

import os

import pytest
import torch

from kvbench.rules import modes

CHANGES = {
    "torch.backends.cuda.flash_sdp_enabled": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "torch.backends.cuda.mem_efficient_sdp_enabled": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "torch.backends.cuda.math_sdp_enabled": lambda: torch.backends.cuda.enable_math_sdp(False),
    "torch.set_autocast_enabled.cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.get_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_default_device": lambda: torch.set_default_device("meta"),
    "torch.get_deterministic_debug_mode": lambda: torch.use_deterministic_algorithms(True),
    "torch.backends.mkldnn.matmul.fp32_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.backends.cuda.matmul.fp32_precision": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "torch.set_flush_denormal": lambda: torch.set_flush_denormal(True),
    "NVIDIA_TF32_OVERRIDE": lambda: os.environ.update(NVIDIA_TF32_OVERRIDE="1"),
}
MOVES_LAST_DIGITS = {
    "torch.is_grad_enabled": lambda: torch.set_grad_enabled(False),
    "torch.get_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("name", [*CHANGES, *MOVES_LAST_DIGITS])
def test_a_changed_mode_is_named_and_put_back(name):
    """Whatever is switched is refused by name, and all modes are as before, whether the code ends well or not."""
    change, who = (CHANGES | MOVES_LAST_DIGITS)[name], "somebody"
    before = modes.counted()
    with pytest.raises(modes.ChangedMode, match=rf"^{who} changed .*{name} from ") as refused, modes.kept(who):
        change()
        assert (name in modes.counted()) == (name in CHANGES)
    assert "put it back" in str(refused.value) and modes.counted() == before
    with pytest.raises(ZeroDivisionError), modes.kept(who):
        change()
        raise ZeroDivisionError
    assert modes.counted() == before


def test_usual_modes_count_in_no_identity():
    """As torch comes, no mode is named, so that the identities of before stay."""
    assert modes.counted() == {}
    with modes.kept("somebody"):
        torch.rand(3)


def test_what_runs_once_is_refused_again(monkeypatch):
    """A module is run at its first import alone; its second import must not pass."""
    monkeypatch.setattr(modes, "_refused", {})
    for change in (lambda: torch.set_default_dtype(torch.float64), lambda: None):
        with pytest.raises(modes.ChangedMode, match="get_default_dtype"), modes.kept("a module", once="mine"):
            change()
