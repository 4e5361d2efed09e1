"""`model.linear=fused`: decoder layers on a GPU in few launches.

Matrices that are given the same rows are one product, a product adds its residual, and norms and the gate are one
launch each. The rotary embedding is left to the attention (`TURN`), which rotates a step's token on writing.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TURN = "_kvbench_turn"  # the attribute of a query tensor whose rotation is still to be made, with that of its keys
TAKES_TURNS = "kvbench"  # the attention function that makes it
_NORMS = ("input_layernorm", "post_attention_layernorm")
_INTO = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
_PARTS = {*_NORMS, "self_attn", "mlp"}
# Bound on the rounding of a layer's output, relative to its largest number: matrices are summed up in another order,
# and sums with the residual and rotated numbers are rounded once where transformers rounds them twice.
ALLOWED = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

Turn = tuple[Tensor, Tensor]


class Turns:
    """Halves of the cosines and sines of one pass, which all layers of a model share."""

    def __init__(self) -> None:
        self._of: Turn | None = None
        self._halves: Turn | None = None

    def __call__(self, angles: Turn) -> Turn:
        """[B, n, D] each, whose halves are alike, to [B * n, D / 2]; those of `_angles` are that already."""
        if angles[0].dim() == 2:
            return angles
        if self._halves is None or self._of is not angles:
            cos, sin = (x[..., : x.shape[-1] // 2].flatten(0, 1).contiguous() for x in angles)
            self._of, self._halves = angles, (cos, sin)
        return self._halves


def rotated(query: Tensor, key: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """Queries [B, Hq, n, D] and keys [B, H, n, D] with their rotation."""
    from kvbench.kernels.gpu.rows import turn_rows

    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key)]
    whole = [x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in flat]
    cos, sin = (x.expand(len(whole[0]) // len(x), *x.shape).flatten(0, 1) for x in turn)
    q, k = turn_rows(whole[0], whole[1], cos, sin)
    batch = len(query)
    return q.unflatten(0, (batch, -1)).transpose(1, 2), k.unflatten(0, (batch, -1)).transpose(1, 2)


def fuse(model: torch.nn.Module) -> tuple[int, int]:
    """Fuse the decoder layers of a model whose results stay the same; returns how many of how many."""
    layers = [layer for layer in model.modules() if hasattr(layer, "self_attn") and hasattr(layer, "mlp")]
    turns = Turns()
    done = sum([_fuse_layer(layer, turns) for layer in layers])
    base: Any = model.base_model
    rotary = base._modules.get("rotary_emb")
    if done == len(layers) and rotary is not None and _is_fixed(rotary):
        rotary.forward = partial(_angles, rotary)
    last: Any = base._modules.get("norm") if done else None
    if last is not None and type(last) is type(layers[0]._modules[_NORMS[0]]):  # as those that were tried
        vars(last)["forward"] = partial(_last_norm, last)
    return done, len(layers)


def _is_fixed(rotary: Any) -> bool:
    """True if angles are positions times frequencies whatever a row's length; tried, far out as well."""
    frequencies, scale = getattr(rotary, "inv_freq", None), getattr(rotary, "attention_scaling", None)
    if not isinstance(frequencies, Tensor) or frequencies.dim() != 1 or not isinstance(scale, float):
        return False
    if getattr(rotary, "rope_type", "") in ("dynamic", "longrope"):
        return False
    position = torch.tensor([[0, 3, 5000]], device=frequencies.device)
    try:
        usual = type(rotary).forward(rotary, torch.zeros(1, 3, 1, device=position.device), position)
    except (TypeError, AttributeError, RuntimeError):  # it takes something else
        return False
    angle = position[0, :, None] * frequencies.float()
    return all(
        x.shape == (1, 3, 2 * len(frequencies))
        and torch.allclose(x[0], torch.cat([expected, expected], -1) * scale, atol=1e-4)
        for x, expected in zip(usual, (angle.cos(), angle.sin()), strict=True)
    )


def _is_step(position_ids: Tensor) -> bool:
    """True for a decode step of the engine, whose angles only the layers use."""
    return position_ids.shape[1] == 1 and torch.is_inference_mode_enabled()


def _angles(rotary: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Turn:
    """Cosines and sines for the layers of a decode step, which take halves [B * n, D / 2].

    Those of a prompt may be read by others.
    """
    if args or kwargs or not _is_step(position_ids) or not _is_ours(x):
        usual: Turn = type(rotary).forward(rotary, x, position_ids, *args, **kwargs)
        return usual
    from kvbench.kernels.gpu.rows import angles

    position = position_ids.expand(len(x), 1).reshape(-1)
    return angles(position, rotary.inv_freq, rotary.attention_scaling, x.dtype)


def _last_norm(norm: Any, x: Tensor) -> Tensor:
    return _normed(norm, x) if _is_ours(x) else type(norm).forward(norm, x)


def _linears(owner: torch.nn.Module, names: tuple[str, ...]) -> list[torch.nn.Linear]:
    """Plain linear layers of these names; empty where they are none, or differ in dtype, width or bias."""
    modules = [owner._modules.get(name) for name in names]
    layers = [each for each in modules if type(each) is torch.nn.Linear and type(each.weight) is torch.nn.Parameter]
    same = {(each.in_features, each.weight.dtype, each.weight.device, each.bias is None) for each in layers}
    return layers if len(layers) == len(names) and len(same) == 1 else []


def _join(owner: torch.nn.Module, name: str) -> None:
    """Lays the matrices of layers in one, of which theirs are parts from here on."""
    layers = _linears(owner, _INTO[name])
    weight = torch.cat([each.weight.detach() for each in layers])
    bias = None if layers[0].bias is None else torch.cat([each.bias.detach() for each in layers])
    sizes = [each.out_features for each in layers]
    for each, part in zip(layers, weight.split(sizes), strict=True):
        each.weight.data = part
    for each, part in zip(layers, () if bias is None else bias.split(sizes), strict=False):
        each.bias.data = part
    owner.register_buffer(f"{name}_weight", weight, persistent=False)
    owner.register_buffer(f"{name}_bias", bias, persistent=False)


def _product(owner: Any, name: str, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, getattr(owner, f"{name}_weight"), getattr(owner, f"{name}_bias"))


def _plus_product(residual: Tensor, x: Tensor, layer: torch.nn.Linear) -> Tensor:
    """The residual, which goes, plus rows times a matrix."""
    flat = residual.view(-1, residual.shape[-1])
    return flat.addmm_(x.reshape(len(flat), -1), layer.weight.t()).view(residual.shape)


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def _normed(norm: Any, x: Tensor) -> Tensor:
    from kvbench.kernels.gpu.rows import norm_rows

    return norm_rows(x, norm.weight, _eps(norm))


def _is_ours(x: Tensor) -> bool:
    return not x.requires_grad and not torch.is_grad_enabled() and x.dtype in ALLOWED


def _attention(
    module: Any, turns: Turns, hidden_states: Tensor, position_embeddings: Turn | None = None,
    attention_mask: Tensor | None = None, *, residual: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The forward pass of attention; with the residual, the sum with it comes back, and it goes."""
    kind = module.config._attn_implementation
    if not _is_ours(hidden_states) or position_embeddings is None or kind not in ALL_ATTENTION_FUNCTIONS:
        out, weights = type(module).forward(
            module, hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
        )
        return (out if residual is None else residual + out), weights
    shape, dim = hidden_states.shape[:-1], module.head_dim
    sizes = [module._modules[name].out_features for name in _INTO["qkv"]]
    parts = _product(module, "qkv", hidden_states).split(sizes, -1)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in parts)
    for name in ("q_norm", "k_norm"):
        if (norm := module._modules.get(name)) is not None:
            q, k = (_normed(norm, q), k) if name == "q_norm" else (q, _normed(norm, k))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    turn = turns(position_embeddings)
    if kind == TAKES_TURNS:
        setattr(q, TURN, turn)
    else:
        q, k = rotated(q, k, turn)
    cache = kwargs.pop("cache", None)
    if (older := kwargs.pop("past_key_values", None)) is not None:
        cache = older
    if cache is not None:
        k, v = cache.update(k, v, module.layer_idx)
    if (window := getattr(module, "sliding_window", None)) is not None:
        kwargs["sliding_window"] = window
    attend = ALL_ATTENTION_FUNCTIONS[kind]
    out, weights = attend(module, q, k, v, attention_mask, dropout=0.0, scaling=module.scaling, **kwargs)
    out = out.reshape(*shape, -1)
    return (module.o_proj(out) if residual is None else _plus_product(residual, out, module.o_proj)), weights


def _layer(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a decoder layer, whose input goes."""
    from kvbench.kernels.gpu.rows import gate_rows

    if args or not _is_ours(hidden_states):
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    first, second = (layer._modules[name] for name in _NORMS)
    hidden = hidden_states.contiguous()
    hidden, _ = layer.self_attn(hidden_states=_normed(first, hidden), residual=hidden, **kwargs)
    gated = gate_rows(_product(layer.mlp, "gate_up", _normed(second, hidden)))
    return _plus_product(hidden, gated, layer.mlp.down_proj)


def _is_candidate(layer: torch.nn.Module) -> bool:
    """True if the parts of a layer have the names and kinds that `_layer` takes."""
    parts, heads = layer._modules, layer._modules["self_attn"]
    if set(parts) != _PARTS or "forward" in vars(layer) or heads is None or parts["mlp"] is None:
        return False
    for norm in (parts[name] for name in _NORMS):
        if norm is None or [name for name, _ in norm.named_parameters()] != ["weight"] or not _eps(norm):
            return False
    rest = {*_INTO["qkv"], "o_proj", "q_norm", "k_norm"}
    out, down = heads._modules.get("o_proj"), parts["mlp"]._modules.get("down_proj")
    plain = all(type(each) is torch.nn.Linear and each.bias is None for each in (out, down))
    has_linears = _linears(heads, _INTO["qkv"]) and _linears(parts["mlp"], _INTO["gate_up"])
    return bool(plain and has_linears and set(heads._modules) <= rest and hasattr(heads, "scaling"))


def _fuse_layer(layer: torch.nn.Module, turns: Turns) -> bool:
    """Fuses a layer if it does the same: on random rows it is compared with itself."""
    if not _is_candidate(layer):
        return False
    heads: Any = layer.self_attn
    weight, dim, kind = heads.q_proj.weight, heads.head_dim, heads.config._attn_implementation
    make = torch.Generator().manual_seed(0)
    angle = torch.rand(1, 3, dim // 2, generator=make).repeat(1, 1, 2)
    angles = angle.cos().to(weight), angle.sin().to(weight)
    rows = torch.randn(1, 3, weight.shape[1], generator=make).to(weight)
    inputs = {"position_embeddings": angles, "attention_mask": None}
    fused, usual = None, torch.zeros(0)
    try:
        heads.config._attn_implementation = "sdpa"
        with torch.no_grad():
            usual = type(layer).forward(layer, rows.clone(), **inputs).float()
            _join(heads, "qkv")
            _join(cast(torch.nn.Module, layer.mlp), "gate_up")
            heads.forward = partial(_attention, heads, turns)
            layer.forward = partial(_layer, layer)
            fused = layer(rows.clone(), **inputs).float()
    except (TypeError, AttributeError, RuntimeError, AssertionError, KeyError):  # its layers take something else
        pass
    finally:
        heads.config._attn_implementation = kind
    allowed = ALLOWED.get(weight.dtype, 0.0) * float(usual.abs().max())
    if fused is not None and usual.shape == fused.shape and float((fused - usual).abs().max()) <= allowed:
        return True
    for part in (heads, layer):
        vars(part).pop("forward", None)
    return False
