"""The table of triattention, measured on a model's own queries."""

import pytest
import torch
from engine_helpers import random_tokens, request
from omegaconf import OmegaConf

from kvbench.calibrate import centres
from kvbench.methods.triattention import TriAttention
from kvbench.policy import read_table


def test_centres_are_means_of_projected_queries(tiny_model):
    """Every number equals a mean over what the layer's query projection gave, before any rotation; the model's
    attention is restored."""
    loaded = tiny_model("llama", "gqa3", 64)
    asked = [request("0", random_tokens(9), random_tokens(4)), request("1", random_tokens(30))]
    before, seen = loaded.model.config._attn_implementation, [[], []]
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, out, own=own: own.append(out[0]))
        for layer, own in zip(loaded.model.model.layers, seen, strict=True)
    ]
    found = centres.measure(loaded, asked)
    for hook in hooks:
        hook.remove()
    assert loaded.model.config._attn_implementation == before
    for layer, parts in enumerate(seen):
        queries = torch.cat(parts).double().unflatten(-1, (6, 64)).transpose(0, 1)
        assert queries.shape[1] == 43
        length = torch.hypot(queries[..., :32], queries[..., 32:]).mean(1)
        want = torch.cat([queries.mean(1), length], -1).flatten()
        assert found[layer].shape == want.shape and (found[layer] - want).abs().max() < 1e-5


def test_command_writes_a_table_that_the_method_reads(tiny_model, tmp_path, monkeypatch, capsys):
    """The file of the command is a table of the model's shape for method.centres."""
    loaded, out = tiny_model("llama", "gqa3", 64), tmp_path / "centres.tsv"
    task = type("Task", (), {"name": "t", "requests": [request("0", random_tokens(20))]})
    parts = type(
        "Parts", (), {"load_model": lambda cfg: loaded, "load_task": lambda *a, **k: task, "check_task": print}
    )
    monkeypatch.setattr(centres, "default_parts", lambda: parts)
    settings = {"centres": {"prompts": 2, "out": str(out)}, "seed": 0, "model": {}, "task": {}, "protocol": {}}
    cfg = OmegaConf.create(settings)
    assert centres.main(cfg) == 0
    assert f"method.centres={out}" in capsys.readouterr().out
    table = torch.tensor(read_table(str(out)), dtype=torch.float64)
    torch.testing.assert_close(table, centres.measure(loaded, task.requests), atol=5.1e-5, rtol=0)
    TriAttention(centres=str(out)).check_model(2, 2)
    cfg.centres.prompts = 0
    with pytest.raises(ValueError, match="centres.prompts=0 must be a whole number of at least 1"):
        centres.main(cfg)
