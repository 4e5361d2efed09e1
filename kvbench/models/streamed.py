"""Linear layers that read their plain matrix once for all rows of a decode step, by a kernel of kvbench's own.

torch's products of a few rows read a matrix at a fraction of what the core can read. docs/performance.md says what this
gains. Prompts have many rows, and stay torch's; where the processor multiplies no numbers of the model's dtype, so that
torch takes them one by one, they are multiplied as fp32.
"""

import torch
from torch import Tensor

from kvbench.kernels.cpu.abi import load
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.cpu.products import DTYPES, MAX_ROWS, FewRows


class StreamedLinear(torch.nn.Linear):
    """A linear layer that multiplies up to `MAX_ROWS` rows by `FewRows`, and more by torch.

    The matrix stays where and as it is, so that an embedding may share it. A row's result is the same bits whatever
    other rows of a step there are.

    Attributes:
        few_rows: The kernel.
        widens: Many rows are multiplied as fp32, with a copy of the matrix for as long as that takes, and rounded once.
    """

    few_rows: FewRows
    widens: bool

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if type(x) is not Tensor or not x.is_cpu or x.requires_grad:
            return super().forward(x)
        if x.numel() <= MAX_ROWS * self.in_features:
            return self.few_rows(x, self.weight, self.bias)
        if not self.widens:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)


def why_not(dtype: torch.dtype, device: torch.device) -> str:
    """Why the kernel cannot be had here, to follow "because"; empty where it can."""
    if device.type != "cpu":
        return f"the model runs on {device.type}, and these products are for CPUs"
    if dtype not in DTYPES:
        return f"there is no kernel for {str(dtype).removeprefix('torch.')}"
    try:
        load()
    except BuildError as error:
        return str(error)
    return ""


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether torch has products of many rows in this dtype that this processor was made for."""
    ask = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return ask is None or bool(getattr(torch.ops.mkldnn, ask)())


def stream(model: torch.nn.Module) -> int:
    """Has every plain linear layer of a model read its matrix so, a head that is tied to the embedding too.

    Weights that were read quantised stay as they are.

    Args:
        model: On the CPU, in a dtype that `why_not` has no word against.

    Returns:
        How many layers these are.
    """
    found = [
        layer
        for layer in model.modules()
        if type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter and layer.weight.is_contiguous()
    ]
    few_rows = FewRows()
    for layer in found:
        layer.__class__ = StreamedLinear
        assert isinstance(layer, StreamedLinear)
        layer.few_rows, layer.widens = few_rows, not _multiplies(layer.weight.dtype)
    return len(found)
