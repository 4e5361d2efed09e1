"""The model's own matrices, re-ordered once by oneDNN into the order that a CPU reads fastest, in place of the plain.

A decode step reads every matrix for a few rows of numbers, and torch's products read a plain one at a fraction of the
core's bandwidth. oneDNN puts a matrix into tiles once, when it is loaded. docs/performance.md says what that gains.
"""

import ctypes
import platform
from collections import Counter

import torch
from torch import Tensor

# Rows for which oneDNN chooses the order, which then serves any number of them. The order for 1 row is slower with 4
# rows in fp32 and with a prompt's in bf16, and no faster with 1; those for 4 to 64 rows are alike.
ROWS = 16
_X86 = {"x86_64", "amd64", "i386", "i686"}


class PackedLinear(torch.nn.Module):
    """A linear layer whose matrix lies in oneDNN's order and nowhere else.

    Sums are formed in another order than in the plain layer, so results differ from its in the last bits.

    Args:
        linear: The plain layer, on the CPU, in fp32 or bf16, without gradients.
    """

    bias: Tensor | None

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # An opaque tensor: kept beside the parameters, where nothing tries to move or to cast it.
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._matrix, self.bias, "none", [], "")
        return found

    @property
    def weight(self) -> Tensor:
        """A plain copy [out, in] of the matrix, the same bits; for whoever looks at weights now and then."""
        plain: Tensor = self._matrix.to_dense()
        return plain

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix, with what pads its tiles."""
        return int(torch.ops.mkldnn._nbytes(self._matrix))

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def why_not(dtype: torch.dtype, device: torch.device) -> str:
    """Why matrices cannot be packed here, to follow "because"; empty where they can."""
    if device.type != "cpu":
        return f"the model runs on {device.type}, and packing is for CPUs"
    if platform.machine().lower() not in _X86:
        return f"this processor is {platform.machine()}, and packing was measured on x86 alone"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN (mkldnn)"
    if dtype == torch.bfloat16 and not _multiplies_bf16():
        return "oneDNN multiplies bfloat16 only where the processor has AVX-512"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"matrices are packed in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    return ""


def _multiplies_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(model: torch.nn.Module) -> int:
    """Puts a packed layer in place of every linear one, each plain matrix going before the next is packed.

    What other modules use too stays plain: a head that is tied to the embedding, from which single rows are read, would
    have to be held twice. Weights that were read quantised stay as they are.

    Args:
        model: On the CPU, in a dtype that `why_not` has no word against, without gradients.

    Returns:
        How many layers were packed.
    """
    places = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items() if child]
    users = Counter(id(weight) for _, _, child in places for weight in child.parameters(recurse=False))
    found = [
        (parent, name)
        for parent, name, child in places
        if type(child) is torch.nn.Linear and type(child.weight) is torch.nn.Parameter and users[id(child.weight)] == 1
    ]
    del places  # it holds the plain layers
    for parent, name in found:
        setattr(parent, name, PackedLinear(getattr(parent, name)))
    for weight in model.parameters():  # one that lies in a mapped file would keep all of the file in memory
        weight.data = weight.data.clone()
    _give_back()
    return len(found)


def _give_back() -> None:
    """Has the C library return the memory of the plain matrices, which it would keep for later."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's alone
        trim(0)
