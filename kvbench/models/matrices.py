"""Ways in which a model's own matrices lie and are multiplied (`model.linear`): plain, packed, streamed or fused.

A decode step reads every matrix for a few rows of numbers, and torch's products of a few rows read a plain one at a
fraction of the core's bandwidth. `packed` has oneDNN put each matrix once, when it is loaded, into the order that a CPU
reads fastest. `streamed` reads the plain one once for all rows, by a kernel of kvbench's own, whose answer to a row
does not depend on the others; norms, feed-forward layers and the three products of attention are one call each.
results/history/performance.md says what each gains. `fused` is for GPUs: layers in few launches (`fused`; docs/gpu.md).
"""

import ctypes
import importlib.util
import os
import platform
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kvbench.errors import SettingsConflict, check_name
from kvbench.kernels.cpu.abi import chosen_isa, load
from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.cpu.products import DTYPES, RowProducts
from kvbench.models.names import AUTO, FUSED, LINEAR, PACKED, PLAIN, STREAMED

# Rows for which oneDNN chooses the order, which then serves any number of them. The order for 1 row is slower with 4
# rows in fp32 and with a prompt's in bf16, and no faster with 1; those for 4 to 64 rows are alike.
ROWS = 16
# Of torch's element-wise operations: what a thread is given at least, and a whole number of its vectors of any dtype.
GRAIN, EVEN = 32_768, 64
MEASURED = 512  # outputs of a matrix, at its end, of which it is measured whether rows depend on each other
_X86 = {"x86_64", "amd64", "i386", "i686"}


def read_linear(value: object, quantisation: str | None, processes: int) -> str:
    """`model.linear`, once it is known that it goes with the other settings."""
    value = check_name("model.linear", value, (AUTO, *LINEAR))
    other = f"model.quantisation={quantisation}" if quantisation else ""
    if processes > 1:
        other = f"model.tensor_parallel={processes}"
    if value == AUTO and other:
        return PLAIN
    if value != PLAIN and other:
        raise SettingsConflict(
            f"model.linear={value} takes whole plain matrices, and {other} leaves other ones; set "
            f"model.linear=plain, or {other.partition('=')[0]}=null",
            setting="model.linear",
        )
    return str(value)


def lay(model: torch.nn.Module, linear: str, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """Lays a model's matrices out as `model.linear` says, where possible.

    Returns the layout, one of `LINEAR`, and the reason why it is another one, in a sentence; empty where it is not.
    `AUTO` takes `STREAMED` where its kernel is faster than torch's products, which portable C++ is not.
    """
    if linear == AUTO:
        linear = PLAIN if why_not(STREAMED, dtype, device) or chosen_isa() == "portable" else STREAMED
    if linear == PLAIN:
        return PLAIN, ""
    if reason := why_not(linear, dtype, device):
        return PLAIN, f"model.linear={linear} was not done, because {reason}"
    if linear == FUSED:
        from kvbench.models.fused import fuse

        done, of = fuse(model)
        if done < of or not done:
            return PLAIN, f"model.linear={FUSED} was done to {done} of {of} layers: the others are no such layers"
        return FUSED, ""
    (pack if linear == PACKED else stream)(model)
    return linear, ""


def identity(linear: str) -> str:
    """The part of a way that decides the bits of a product: its name, and the instructions that its own kernel uses."""
    return f"{linear} {chosen_isa()}" if linear == STREAMED else linear


def kernels(linear: str) -> tuple[str, ...]:
    """The backends whose compiled kernels a way runs, whatever backend a run has."""
    return {STREAMED: ("cpu",), FUSED: ("triton",)}.get(linear, ())


def why_not(linear: str, dtype: torch.dtype, device: torch.device) -> str:
    """Reason why matrices cannot be `PACKED`, `STREAMED` or `FUSED` here, to follow "because"; empty where they can."""
    name = str(dtype).removeprefix("torch.")
    if linear == FUSED:
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"the model runs on {device.type}, and its kernels are for GPUs"
        return ""
    if device.type != "cpu":
        what = "packing is" if linear == PACKED else "these products are"
        return f"the model runs on {device.type}, and {what} for CPUs"
    if linear == STREAMED:
        if dtype not in DTYPES:
            return f"there is no kernel for {name}"
        try:
            load()
        except BuildError as error:
            return str(error)
        return ""
    if platform.machine().lower() not in _X86:
        return f"this processor is {platform.machine()}, and packing was measured on x86 alone"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN (mkldnn)"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN multiplies bfloat16 only where the processor has AVX-512"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"matrices are packed in float32 and bfloat16, not in {name}"
    return ""


def _is_plain(layer: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """True for a linear layer of torch's own with plain weights; those that were read quantised stay as they are."""
    return type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter


class PackedLinear(torch.nn.Module):
    """Linear layer whose only matrix is in oneDNN's order.

    Sums are formed in another order than in the plain layer, which is on the CPU, in fp32 or bf16; so results differ
    from its in the last bits.
    """

    bias: Tensor | None

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # An opaque tensor: kept outside the parameters, where nothing tries to move or to cast it.
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._matrix, self.bias, "none", [], "")
        return product

    @property
    def weight(self) -> Tensor:
        """A plain copy [out, in] of the matrix, the same bits; for occasional looks at weights."""
        plain: Tensor = self._matrix.to_dense()
        return plain

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix, with what pads its tiles."""
        return int(torch.ops.mkldnn._nbytes(self._matrix))

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


def pack(model: torch.nn.Module) -> int:
    """Puts a packed layer in place of every linear one, each plain matrix going before the next is packed; how many.

    Matrices that other modules use too stay plain: a head that is tied to the embedding, from which single rows are
    read, would have to be held twice. The model is on the CPU, in a dtype that `why_not` has no word against, without
    gradients.
    """
    linears = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items() if child]
    users = Counter(id(weight) for _, _, child in linears for weight in child.parameters(recurse=False))
    packed = [(parent, name) for parent, name, child in linears if _is_plain(child) and users[id(child.weight)] == 1]
    del linears  # it holds the plain layers
    for parent, name in packed:
        setattr(parent, name, PackedLinear(getattr(parent, name)))
    for weight in model.parameters():  # one that lies in a mapped file would keep all of the file in memory
        weight.data = weight.data.clone()
    # The C library would keep the memory of the plain matrices for later; glibc can return it.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return len(packed)


class StreamedLinear(torch.nn.Linear):
    """Linear layer that multiplies by `RowProducts`.

    The matrix is neither moved nor changed, so that an embedding may share it. A row's result is the same bits whatever
    other rows there are.
    """

    products: RowProducts
    joint: "Joint | None" = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if not _is_ours(x):
            return super().forward(x)
        return self.joint.product(self, x) if self.joint else self.products(x, self.weight, self.bias)


JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Joint:
    """Linear layers of a module with the same input rows, one after the other.

    The first one's call multiplies by all of their matrices, since waking the other threads takes as long as a small
    matrix does; the others read their results. Each is the same bits as alone.

    Args:
        layers: Layers in the order in which they are called.
    """

    def __init__(self, layers: list[StreamedLinear]) -> None:
        self.layers = layers
        self._x: Tensor | None = None
        self._left: dict[StreamedLinear, Tensor] = {}

    def product(self, layer: StreamedLinear, x: Tensor) -> Tensor:
        """The rows x times a layer's matrix."""
        if layer is not self.layers[0]:
            if x is self._x and (product := self._left.pop(layer, None)) is not None:
                self._x = x if self._left else None
                return product
        elif self._left:  # this model gives them other rows
            self._x, self._left = None, {}
            for each in self.layers:
                each.joint = None
        else:
            first, *others = layer.products.of(x, [(each.weight, each.bias) for each in self.layers])
            self._x, self._left = x, dict(zip(self.layers[1:], others, strict=True))
            return first
        return layer.products(x, layer.weight, layer.bias)


def _join(module: torch.nn.Module) -> None:
    """Join the layers of a module that get the same rows, so that they multiply them in one call."""
    for names in JOINT:
        layers = [layer for name in names if isinstance(layer := module._modules.get(name), StreamedLinear)]
        if len(layers) == len(names) and len({(layer.in_features, layer.weight.dtype) for layer in layers}) == 1:
            joint = Joint(layers)
            for layer in layers:
                layer.joint = joint


def _is_ours(x: Tensor) -> bool:
    """True for tensors that the kernels support; dispatch modes must see torch's operations."""
    is_plain = type(x) is Tensor and x.is_cpu and not x.requires_grad and x.dtype in DTYPES
    return is_plain and _get_current_dispatch_mode() is None


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _norm(module: Any, products: RowProducts, x: Tensor) -> Tensor:
    """The forward pass of a root-mean-square norm, as `_quicken` puts it into the module itself."""
    if not _is_ours(x) or module.weight.dtype != x.dtype:
        usual: Tensor = type(module).forward(module, x)
        return usual
    return products.norm(x, module.weight, _epsilon(module))


def _gated(module: Any, products: RowProducts, x: Tensor) -> Tensor:
    """The forward pass of a feed-forward layer with a gate, in the same way."""
    if not _is_ours(x):
        usual: Tensor = type(module).forward(module, x)
        return usual
    gate, up, down = ((layer.weight, layer.bias) for layer in (module.gate_proj, module.up_proj, module.down_proj))
    return products.gated(x, gate, up, down)


def _quicken(module: torch.nn.Module, products: RowProducts) -> None:
    """Lets a norm or a feed-forward layer run as one call, in place of three to seven of torch's, if it does the same.

    Models use one name for both, so the behaviour is tested: on rows of usual size, and on one where a norm's epsilon,
        or a clamp of the gate, would show.
    """
    if "forward" in vars(module):  # somebody has put another one there
        return
    weights = dict(module.named_parameters())
    layers = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    if type(module).__name__.endswith("RMSNorm") and list(weights) == ["weight"] and type(_epsilon(module)) is float:
        quick, weight, size = _norm, weights["weight"], 1e-3
    elif all(isinstance(layer, StreamedLinear) for layer in layers):
        quick, weight, size = _gated, weights["gate_proj.weight"], 100.0
    else:
        return
    if weight.dtype not in DTYPES or not weight.is_cpu:
        return
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        x = (torch.randn(3, weight.shape[-1]) * torch.tensor([[1.0], [1.0], [size]])).to(weight.dtype)
        try:
            usual = type(module).forward(module, x).float()
        except TypeError:  # it takes more
            return
        quicker = quick(module, products, x).float()
    allowed = (1e-4 if weight.dtype == torch.float32 else 0.02) * usual.abs().amax(-1, keepdim=True)
    if usual.shape == quicker.shape and bool(((quicker - usual).abs() <= allowed).all()):
        module.forward = partial(quick, module, products)


class Even(torch.nn.Module):
    """An element-wise function on the CPU whose result for a number does not depend on where that lies.

    torch has one approximation for whole vectors, and another for the remainder where a thread's part ends.
    So it is given as many numbers as leave nothing.
    """

    def __init__(self, function: torch.nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        if not x.is_cpu or x.requires_grad:
            return self.function(x)
        size, missing = x.numel(), _missing(x.numel(), torch.get_num_threads())
        if not missing:
            return self.function(x.contiguous())
        out: Tensor = self.function(torch.nn.functional.pad(x.reshape(-1), (0, missing)))
        return out[:size].view(x.shape)


def _missing(size: int, threads: int) -> int:
    """Numbers without which torch would not divide `size` of them into whole vectors for every thread."""
    whole, before = size, -1
    while whole != before:
        parts = EVEN * max(1, min(threads, -(-whole // GRAIN)))
        whole, before = -(-size // parts) * parts, whole
    return whole - size


def stream(model: torch.nn.Module) -> int:
    """Streams the matrices of all plain linear layers of a model; returns their number.

    A head that is tied to the embedding is one too. Usual norms and feed-forward layers run as one call each, and
    activations give the same bits wherever a number is.
    """
    from transformers.activations import ACT2CLS

    layers = [layer for layer in model.modules() if _is_plain(layer) and layer.weight.is_contiguous()]
    products = RowProducts()
    for layer in layers:
        layer.__class__ = StreamedLinear
        assert isinstance(layer, StreamedLinear)
        layer.products = products
    kinds = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and type(child) in kinds:
                parent._modules[name] = Even(child)
    for module in model.modules():
        _join(module)
        _quicken(module, products)
    return len(layers)


def rows_are_alone(model: torch.nn.Module) -> bool:
    """True if no row's results depend on the others, by construction and by measurement.

    Everything that multiplies the rows is streamed; and of every matrix, norm and activation of a kind, one row gives
    the same bits alone as with four. Takes milliseconds.
    """
    alone = [layer for layer in model.modules() if isinstance(layer, StreamedLinear | torch.nn.Embedding)]
    known = {id(weight) for layer in alone for weight in layer.parameters(recurse=False)}
    return all(weight.ndim < 2 or id(weight) in known for weight in model.parameters()) and _alone_measured(model)


def _alone_measured(model: torch.nn.Module) -> bool:
    """True if one row of random numbers gives the same bits alone as with other rows.

    Measured in each kind of part that a model has between its attention.
    """
    tried: set[tuple] = set()
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        for part in model.modules():
            weights = list(part.parameters(recurse=False))
            run: Callable[[Tensor], Tensor] = part
            if isinstance(part, StreamedLinear):
                some = part.weight[-MEASURED:]
                width, run = part.in_features, partial(part.products, weight=some)
            elif isinstance(part, Even):
                width = MEASURED + 1
            elif len(weights) == 1 and weights[0].ndim == 1 and not part._modules:
                width = len(weights[0])
            else:
                continue
            kind = type(part), type(getattr(part, "function", None)), width, weights[0].shape if weights else ()
            if kind in tried:
                continue
            tried.add(kind)
            x = torch.randn(5, 1, width).to(next(model.parameters()).dtype)
            try:
                batched = run(x)
            except Exception:  # it takes something else, such as scores of experts
                continue
            if not all(torch.equal(run(x[row : row + 1]), batched[row : row + 1]) for row in (0, 3, 4)):
                return False
    return True
