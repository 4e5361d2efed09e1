"""Tiny models with every kind of rotary embedding."""

from kvbench.models.rotary import RotaryTable

LONG = {"short_factor": [1.0] * 32, "long_factor": [1.0 + i for i in range(32)], "factor": 8.0}
BAND = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
# Each with the tables that it has where the length before scaling is 64, and the context that it reaches then.
ROPES = {
    "default": ({}, (), 64),
    "linear": ({"factor": 4.0}, (), 64),
    "llama3": (BAND | {"original_max_position_embeddings": 32}, (), 64),
    "yarn": ({"factor": 8.0, "original_max_position_embeddings": 64}, (), 512),
    "longrope": (LONG | {"original_max_position_embeddings": 48}, (RotaryTable(48, False),), 64),
    "dynamic": ({"factor": 4.0}, (RotaryTable(64, True),), 256),
}


def settings_of(rope: str, **fields) -> dict:
    """The settings of a tiny model with a kind of rotary embedding, and a context of 64 tokens before scaling."""
    scaling = {"rope_type": rope, "rope_theta": 10000.0} | ROPES[rope][0]
    fields = {"rope_parameters": scaling, "max_position_embeddings": 64} | fields
    return {"kind": "random", "preset": "tiny", "dtype": "float32", "device": "cpu", "overrides": fields}
