"""The table of `store.key_offset`: means of a model's own keys, which the store takes."""

from types import SimpleNamespace

import torch
from engine_helpers import answers, random_tokens, request
from omegaconf import OmegaConf
from refusals import refused
from store_helpers import rotated

from kvbench.engine.supported import model_shape
from kvbench.extensions.calibrate import offsets, tables
from kvbench.methods.uniform import Uniform
from kvbench.runs.config import store_options


def test_the_table_is_the_mean_of_rotated_keys(tiny_model, tmp_path, monkeypatch, capsys):
    """Of what the key projection gave, by transformers' own rotary embedding; and a store takes the file as it is."""
    loaded, out = tiny_model("llama", "gqa3", 64), tmp_path / "offsets.tsv"
    requests, seen = [request("0", random_tokens(30)), request("1", random_tokens(11))], [[], []]
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output[0]))
        for layer, kept in zip(loaded.model.model.layers, seen, strict=True)
    ]
    parts = SimpleNamespace(
        load_model=lambda cfg: loaded,
        load_task=lambda *a, **k: SimpleNamespace(name="t", requests=requests),
        check_task=print,
    )
    monkeypatch.setattr(tables, "Loaders", lambda: parts)
    settings = {"offsets": {"prompts": 2, "out": str(out)}, "seed": 0, "model": {}, "task": {}, "protocol": {}}
    assert offsets.offsets(OmegaConf.create(settings)) == 0
    for hook in hooks:
        hook.remove()
    assert f"store.key_offset={out}" in capsys.readouterr().out
    shape, taken = model_shape(loaded.model), store_options({"key_offset": str(out)}).key_offset
    for keys, row in zip(seen, taken, strict=True):
        each = [rotated(k.unflatten(-1, (-1, shape.head_dim)).transpose(0, 1), 0, shape.inv_freq) for k in keys]
        assert torch.allclose(torch.cat(each, 1).mean(1).flatten(), torch.tensor(row), atol=1e-5)
    assert answers(loaded, Uniform(tier="int4"), requests, key_offset=taken)
    with refused("setting-value", "offsets.prompts", "offsets.prompts=0"):
        offsets.offsets(OmegaConf.merge(settings, {"offsets": {"prompts": 0}}))
