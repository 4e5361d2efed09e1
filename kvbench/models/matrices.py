"""How a model's own matrices lie and are multiplied: `model.linear`."""

import torch

from kvbench.errors import unknown_name
from kvbench.kernels.cpu.abi import chosen_isa
from kvbench.models import packed, streamed

PLAIN, PACKED, STREAMED = "plain", "packed", "streamed"
LINEAR = (PLAIN, PACKED, STREAMED)


def read_linear(value: object, quantisation: str | None, processes: int) -> str:
    """`model.linear`, once it is known that it goes with the other settings.

    Args:
        value: plain, packed or streamed.
        quantisation: What the weights are quantised to, or None.
        processes: Among how many the model is cut.

    Raises:
        ValueError: It is something else, or the matrices are not plain ones.
    """
    if value not in LINEAR:
        raise unknown_name("model.linear", value, LINEAR)
    other = f"model.quantisation={quantisation}" if quantisation else ""
    if processes > 1:
        other = f"model.tensor_parallel={processes}"
    if value != PLAIN and other:
        raise ValueError(
            f"model.linear={value} takes whole plain matrices, and {other} leaves other ones; set "
            f"model.linear=plain, or {other.partition('=')[0]}=null"
        )
    return str(value)


def lay(model: torch.nn.Module, linear: str, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """Does to a model's matrices what `model.linear` asks for, where that can be had.

    Args:
        model: Without gradients.
        linear: As `read_linear` gives it.
        dtype: The model's.
        device: Its first one.

    Returns:
        What was done, one of `LINEAR`, and why it is not what was asked for, in a sentence; empty where it is.
    """
    if linear == PLAIN:
        return PLAIN, ""
    if reason := packed.why_not(dtype, device) if linear == PACKED else streamed.why_not(dtype, device):
        return PLAIN, f"model.linear={linear} was not done, because {reason}"
    if linear == PACKED:
        packed.pack(model)
    else:
        streamed.stream(model)
    return linear, ""


def identity(linear: str) -> str:
    """What of a way decides the bits of a product: its name, and the instructions that its own kernel uses."""
    return f"{linear} {chosen_isa()}" if linear == STREAMED else linear


def kernels(linear: str) -> tuple[str, ...]:
    """The backends whose compiled kernels a way runs, whatever backend a run has."""
    return ("cpu",) if linear == STREAMED else ()
