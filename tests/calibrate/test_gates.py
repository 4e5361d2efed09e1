"""The gates of duo_attention, measured on a model's own attention."""

import pytest
import torch
from omegaconf import OmegaConf

from kvbench.calibrate import gates
from kvbench.engine.requests import Request
from kvbench.methods.duo_attention import DuoAttention
from kvbench.policy import read_table


def prompts(count, seed=0):
    """Requests of different lengths with three gold tokens."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(n):
        return tuple(torch.randint(1, 320, (n,), generator=generator).tolist())

    return [
        Request(sample_id=str(i), subset="t", segments=(tokens(9 + i), tokens(11)), gold=tokens(3), max_new_tokens=1)
        for i in range(count)
    ]


def test_gates_are_the_share_of_far_attention(tiny_model):
    """Every gate equals a sum over single attention weights between the sinks and the recent window."""
    model, asked = tiny_model().model, prompts(2)
    found = gates.measure(model, asked, sinks=2, recent=5)
    expected = torch.zeros_like(found)
    model.set_attn_implementation("eager")
    for request in asked:
        tokens = [*request.segments[0], *request.segments[1], *request.gold]
        with torch.no_grad():
            weights = model(input_ids=torch.tensor([tokens[:-1]]), output_attentions=True).attentions
        answers = range(len(tokens) - 4, len(tokens) - 1)
        for layer in range(2):
            for head in range(6):
                far = [weights[layer][0, head, row, column] for row in answers for column in range(2, row - 4)]
                expected[layer, head // 3] += sum(far) / 3 / 3 / 2
    model.set_attn_implementation("sdpa")
    assert found.shape == (2, 2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert found.min() > 0.05
    assert found.max() < 1


def test_gates_bounds(tiny_model):
    """With nothing left out a gate is all attention, with everything recent none; the model's attention is restored."""
    model = tiny_model().model
    before = model.config._attn_implementation
    assert gates.measure(model, prompts(1), 0, 0).sub(1).abs().max() < 1e-5
    assert gates.measure(model, prompts(1), 0, 99).abs().max() == 0
    assert model.config._attn_implementation == before


def test_command_writes_a_table_that_the_method_reads(tiny_model, tmp_path, monkeypatch, capsys):
    """The file of the command is a table of the model's shape for method.table."""
    loaded, out = tiny_model(), tmp_path / "gates.tsv"
    task = type("Task", (), {"name": "t", "requests": prompts(2)})
    parts = type(
        "Parts", (), {"load_model": lambda cfg: loaded, "load_task": lambda *a, **k: task, "check_task": print}
    )
    monkeypatch.setattr(gates, "default_parts", lambda: parts)
    settings = {"gates": {"prompts": 2, "sinks": 2, "recent": 5, "out": str(out)}, "seed": 0}
    cfg = OmegaConf.create(settings | {"model": {}, "task": {}, "protocol": {}})
    assert gates.main(cfg) == 0
    assert f"method.table={out}" in capsys.readouterr().out
    table = torch.tensor(read_table(str(out)))
    torch.testing.assert_close(table, gates.measure(loaded.model, task.requests, 2, 5), atol=5.1e-5, rtol=0)
    DuoAttention(table=str(out)).check_model(2, 2)
    cfg.gates.prompts = 0
    with pytest.raises(ValueError, match="gates.prompts=0 must be a whole number of at least 1"):
        gates.main(cfg)
    task.requests = [Request(sample_id="a", subset="t", segments=((1, 2),), max_new_tokens=1)]
    cfg.gates.prompts = 1
    with pytest.raises(ValueError, match="task=t has no gold answers"):
        gates.main(cfg)
