"""Weights that are quantised as they are read: what is asked of transformers, what is refused, and what comes out."""

import importlib.util

import pytest
import torch
import transformers
from refusals import refused

from kvbench.models import quantised
from kvbench.models.checkpoint import How, read_weights
from kvbench.models.devices import Devices
from kvbench.models.load import load_model
from kvbench.models.processes import read_processes

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def test_transformers_gets_the_configuration(folder, monkeypatch):
    """The reader is handed torchao's configuration of the kind that was asked for, and nothing without one."""
    asked = []
    reader = transformers.AutoModelForCausalLM.from_pretrained

    def read(*given, quantization_config=None, **named):
        asked.append(quantization_config)
        return reader(*given, **named)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    monkeypatch.setattr(quantised, "config_of", lambda kind: f"the configuration of {kind}")
    read_weights(folder, How(torch.float32, quantisation="int8"))
    read_weights(folder, How(torch.float32))
    assert asked == ["the configuration of int8", None]


def test_what_cannot_be_quantised_is_refused(monkeypatch):
    """A missing package is answered with the line that installs it; int4 on a CPU and beside processes with why not."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("package-missing", "model.quantisation", "model.quantisation=fp8"):
        quantised.read_kind("fp8", "hf", CPU, torch.float32, 1)
    with refused("settings-conflict", "model.quantisation", "int4", "GPUs", "bfloat16", "float32"):
        quantised.read_kind("int4", "hf", CPU, torch.float32, 1)
    with refused("settings-conflict", "model.quantisation", "int4", "dtype=bfloat16"):
        quantised.read_kind("int4", "hf", GPU, torch.float16, 1)
    with refused("settings-conflict", "model.quantisation", "model.quantisation=int8", "model.tensor_parallel=2"):
        quantised.read_kind("int8", "hf", GPU, torch.bfloat16, 2)
    assert quantised.read_kind(None, "hf", CPU, torch.float32, 1) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert quantised.read_kind("int4", "hf", GPU, torch.bfloat16, 1) == "int4"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_weights_answer_nearly_alike(folder, kind):
    """Linear layers hold 8-bit weights, logits differ by little and not by nothing, and the record says by what."""
    pytest.importorskip("torchao")
    settings = {"kind": "hf", "path": str(folder), "device": "cpu", "dtype": "float32"}
    plain, small = load_model(settings), load_model(settings | {"quantisation": kind})
    assert small.quantisation.startswith(f"{kind} weights (torchao ") and plain.quantisation == ""
    assert small.fingerprint == plain.fingerprint  # of the files; the identity has the other beside it
    weight = small.model.model.layers[0].self_attn.q_proj.weight
    assert type(weight).__module__.startswith("torchao")
    ids = torch.arange(1, 40)[None]
    one, other = (model.model(ids).logits for model in (plain, small))
    assert 0 < (one - other).abs().mean() < 0.25 * one.abs().mean()  # e4m3 has 3 bits behind the point


def test_processes_that_were_not_started_are_asked_for(monkeypatch):
    """The command that starts them is named; so is what excludes them."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with refused("settings-conflict", "model.tensor_parallel", "tensor_parallel=2", "--nproc-per-node"):
        read_processes(2, "hf", Devices((CPU,)))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with refused("settings-conflict", "model.tensor_parallel", "tensor_parallel=2"):
        read_processes(2, "hf", Devices((CPU,)))
    with refused("settings-conflict", "model.tensor_parallel", "tensor_parallel=2", "model.device=[cpu"):
        read_processes(2, "hf", Devices((CPU, CPU)))
    assert read_processes(None, "random", Devices((CPU,))) == read_processes(1, "hf", Devices((CPU,))) == 1
