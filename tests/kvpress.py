"""A stand-in for the package of this name, which the tests do not install: the part of it that `methods/kvpress.py`
calls, with scorers of its own."""

from dataclasses import dataclass

import torch


@dataclass
class BasePress:
    """The class of all."""

    def post_init_from_model(self, model):
        """Prepares nothing."""


@dataclass
class ScorerPress(BasePress):
    """The class of those that keep their best scores."""

    compression_ratio: float = 0.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        raise NotImplementedError

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        raise NotImplementedError


@dataclass
class KeyDiffPress(ScorerPress):
    """Ranks by the first channel of a key, which is enough for tests that only want a method."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[..., 0]


@dataclass
class ProjectedPress(ScorerPress):
    """Ranks by what the layer's own projection makes of its input, and looks at all that a scorer gets."""

    factor: float = 1.0
    name: str = "q"

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert attentions is None and hidden_states.shape[:2] == kwargs["position_embeddings"][0].shape[:2]
        positions = torch.arange(keys.shape[2])[None]
        cos, _ = module.rotary_emb(hidden_states, positions)
        assert torch.equal(cos, kwargs["position_embeddings"][0]) and self.name == "q"
        projected = module.q_proj(hidden_states).view(*hidden_states.shape[:2], keys.shape[1], -1)
        return self.factor * projected.sum(-1).transpose(1, 2) + values.sum(-1)


@dataclass
class RatioPress(ScorerPress):
    """Looks at its compression ratio: keeps the first tokens that it leaves."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        kept = round(keys.shape[2] * (1 - self.compression_ratio))
        return (torch.arange(keys.shape[2]) < kept).float().expand(keys.shape[:3])


@dataclass
class DrawingPress(ScorerPress):
    """Draws lots."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.rand(keys.shape[:3])


@dataclass
class WindowPress(ScorerPress):
    """Cannot score short prompts."""

    window_size: int = 64

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert keys.shape[2] > self.window_size, "too short"
        return keys[..., 0]


@dataclass
class NamedPress(ScorerPress):
    """Loads what was trained for a model of that name, as KVzapPress and QFilterPress do: a vector per KV head."""

    loaded = []  # names, of all objects

    def post_init_from_model(self, model):
        name = model.config.name_or_path.split("/")[-1]
        if not name:
            raise OSError("no such repository")
        self.loaded.append(name)
        self.filters = torch.arange(64, dtype=model.dtype)

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -(self.filters * keys).sum(-1)


@dataclass
class PreparedPress(ScorerPress):
    """Prepares itself from the model's weights."""

    def post_init_from_model(self, model):
        self.weights = model.model.layers


@dataclass
class ChoosingPress(ScorerPress):
    """Chooses otherwise than by its scores."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys, values
