"""Loading models: every source, what identifies them, and what a user reads when something is missing."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import urllib.request

import pytest
import torch
from gguf_bytes import gguf_header, text
from omegaconf import OmegaConf
from places import ROOT
from refusals import refused

from kvbench.errors import MissingWeightsError
from kvbench.models import files as model_files
from kvbench.models.load import load_model

TINY = {"kind": "random", "preset": "tiny", "device": "cpu"}


# Folders and hub ids.


def test_folder_loads_the_same_weights(folder):
    """A folder gives the logits of the model that was saved there, under the folder's name."""
    original, loaded = load_model(TINY), load_model({"kind": "hf", "path": str(folder), "device": "cpu"})
    assert loaded.name == "my-tiny"
    assert not loaded.chat_template
    assert loaded.dtype == torch.float32 and loaded.model.dtype == torch.float32
    tokens = torch.arange(1, 40)[None]
    torch.testing.assert_close(loaded.model(tokens).logits, original.model(tokens).logits, rtol=0, atol=0)


def test_folder_accepts_a_dictconfig_and_the_yaml_defaults(folder):
    """conf/model/hf.yaml as Hydra hands it over is a valid configuration."""
    cfg = OmegaConf.load(ROOT / "conf/model/hf.yaml")
    OmegaConf.set_struct(cfg, True)
    cfg.path, cfg.dtype, cfg.device, cfg.max_tokens, cfg.name = str(folder), "bfloat16", "cpu", 64, "org/given"
    loaded = load_model(cfg)
    assert (loaded.name, loaded.max_tokens, loaded.dtype) == ("org-given", 64, torch.bfloat16)
    assert loaded.model.dtype == torch.bfloat16


def test_fingerprint_follows_content_and_not_place(folder, tmp_path):
    """Copies share a fingerprint; a changed weight, template or configuration gives another."""
    before = model_files.folder_fingerprint(folder)
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, copy)
    assert model_files.folder_fingerprint(copy) == before
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    assert model_files.folder_fingerprint(copy) == before
    seen = {before}
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(model_files.folder_fingerprint(copy))
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    seen.add(model_files.folder_fingerprint(copy))
    with (copy / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    seen.add(model_files.folder_fingerprint(copy))
    assert len(seen) == 4


def test_missing_folder_says_where_was_looked(tmp_path):
    """A path that is no folder and no hub id is named in full."""
    with pytest.raises(MissingWeightsError, match=rf"no such folder \(looked for {tmp_path}/no/where\)"):
        load_model({"kind": "hf", "path": f"{tmp_path}/no/where"})


def hub_error(tmp_path, endpoint):
    """Loads an uncached hub id in a fresh process against an endpoint; returns the error."""
    script = (
        "from kvbench.models.load import load_model\n"
        "try: load_model({'kind': 'hf', 'path': 'some-org/some-model'})\n"
        "except ValueError as error: print(type(error).__name__, error)\n"
    )
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@pytest.mark.parametrize("network", ["refused", "silent", "offline mode"])
def test_uncached_hub_id_without_a_hub_is_not_asked_for(tmp_path, monkeypatch, network):
    """A hub that refuses, never answers, or must not be asked: one probe of 2 s, then the command that gets the model;
    the hub's own client, which retries for half a minute, is asked for what is here and nothing else."""
    import huggingface_hub
    from huggingface_hub import constants

    find, probe, found_here, waits = huggingface_hub.snapshot_download, urllib.request.urlopen, [], []

    def snapshot_download(*given, local_files_only=False, **named):
        found_here.append(local_files_only)
        return find(*given, local_files_only=local_files_only, **named)

    def urlopen(request, timeout=None):
        waits.append(timeout)
        return probe(request, timeout=timeout)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", network == "offline mode")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = 1 if network == "refused" else server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        message = r"not in the local hub cache .*hf download some-org/some-model --local-dir FOLDER"
        with pytest.raises(MissingWeightsError, match=message):
            load_model({"kind": "hf", "path": "some-org/some-model"})
    assert found_here == [True]
    assert waits == ([] if network == "offline mode" else [2.0])


def test_hub_that_does_not_have_the_id_is_quoted(tmp_path):
    """A hub that answers 404 leads to an error with its own reason and the command."""
    code = (
        "from http.server import *\n"
        "class H(BaseHTTPRequestHandler):\n"
        "    def do_HEAD(self):\n"
        "        self.send_response(404); self.send_header('X-Error-Code', 'RepoNotFound'); self.end_headers()\n"
        "    do_GET = do_HEAD\n"
        "    def log_message(self, *a): pass\n"
        "s = ThreadingHTTPServer(('127.0.0.1', 0), H); print(s.server_port, flush=True); s.serve_forever()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        try:
            message = hub_error(tmp_path, f"http://127.0.0.1:{int(server.stdout.readline())}")
        finally:
            server.terminate()
    assert "The download failed" in message and "404" in message and "hf auth login" in message


def test_cached_hub_id_loads_without_the_network(folder, tmp_path, monkeypatch):
    """A complete snapshot in the local hub cache is used although the hub is out of reach."""
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--some-org--cached-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(model_files, "hub_reachable", lambda: pytest.fail("asked the network"))
    loaded = load_model({"kind": "hf", "path": "some-org/cached-model", "device": "cpu"})
    assert loaded.name == "cached-model"
    assert loaded.fingerprint == model_files.folder_fingerprint(folder)


# GGUF files.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ("weights-missing", "model.path", "model.gguf")),
        (b"version https", ("file-content", "model.path", "GGUF")),
        (b"GGUF\x03", ("file-content", "model.path", "model.path=")),
        (
            gguf_header(fields=[text("x") + struct.pack("<IIQ", 9, 0, 2**40)]),
            ("file-content", "model.path", "model.path=", "header"),
        ),
    ],
)
def test_bad_gguf_files(tmp_path, content, message):
    """A missing file, a file of another kind and a cut file are each named as that."""
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with refused(*message):
        load_model({"kind": "gguf", "path": str(path)})


def test_missing_path_is_asked_for():
    """model=hf and model=gguf without model.path say what to set."""
    for kind in ("hf", "gguf"):
        with refused("weights-missing", "model.path", "model.path=FOLDER"):
            load_model({"kind": kind, "path": None})


# Values that do not exist or are out of range.


@pytest.mark.parametrize("key", ["kind", "preset", "dtype", "linear", "quantisation", "overrides", "device", "seed"])
@pytest.mark.parametrize("value", [[[[]]], {"a": 1}, [], 3.5, True, "", "nix"], ids=repr)
def test_a_value_of_any_type_is_refused_by_name(key, value):
    """A configuration file may hold a list or a table where a name belongs."""
    with pytest.raises(ValueError, match=rf"model\.{key}"):
        load_model({"kind": "random", "preset": "tiny", "device": "cpu", key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "llama3-8bn"}, ("name-unknown", "model.preset", "model.preset=llama3-8bn")),
        ({"kind": "randm"}, ("name-unknown", "model.kind", "model.kind=randm")),
        ({"dtype": "bf16"}, ("name-unknown", "model.dtype", "model.dtype=bf16", "bfloat16")),
        ({"device": "gpu0"}, ("setting-value", "model.device", "model.device=gpu0")),
        ({"device": "cuda:99"}, ("setting-value", "model.device", "model.device=cuda", "99", "CUDA")),
        ({"device": "meta"}, ("setting-value", "model.device", "model.device=meta")),
        ({"device": []}, ("setting-value", "model.device", "model.device=[]")),
        ({"device": ["cpu", "gpu1"]}, ("setting-value", "model.device", "model.device=gpu1")),
        ({"device": ["auto"]}, ("setting-value", "model.device", "model.device=auto")),
        ({"device": ["cpu", "cpu", "cpu"]}, ("setting-value", "model.device", "model.device=[cpu")),
        (
            {"tensor_parallel": 2},
            ("settings-conflict", "model.tensor_parallel", "model.tensor_parallel=2", "model.kind=random"),
        ),
        ({"tensor_parallel": 0}, ("setting-value", "model.tensor_parallel", "model.tensor_parallel=0")),
        ({"quantisation": "int3"}, ("name-unknown", "model.quantisation", "model.quantisation=int3")),
        (
            {"quantisation": "int8"},
            ("settings-conflict", "model.quantisation", "model.quantisation=int8", "model.kind=random"),
        ),
        ({"seed": -1}, ("setting-value", "model.seed", "model.seed=-1")),
        ({"num_layers": 0}, ("setting-value", "model.num_layers", "model.num_layers=0")),
        ({"max_tokens": -5}, ("setting-value", "model.max_tokens", "model.max_tokens=-5")),
        ({"overrides": {"num_key_value_head": 1}}, ("name-unknown", "model.overrides", "num_key_value_heads")),
        (
            {"overrides": {"model_type": "lama"}},
            ("name-unknown", "model.overrides.model_type", "model.overrides.model_type=lama"),
        ),
        (
            {"overrides": {"num_key_value_heads": 3}},
            ("settings-conflict", "model.overrides.num_attention_heads", "num_key_value_heads=3"),
        ),
        ({"overrides": {"vocab_size": 100}}, ("setting-value", "model.overrides.vocab_size", "vocab_size=100", "257")),
        ({"path": "x"}, ("name-unknown", "model.path")),
    ],
)
def test_bad_settings_are_named_with_the_remedy(change, message):
    """Unknown names list what exists and the nearest; values out of range state the rule."""
    with refused(*message):
        load_model(TINY | change)


def test_longer_context_than_the_model_is_refused(folder):
    """model.max_tokens may shorten a trained model's context, never stretch it."""
    with refused("setting-value", "model.max_tokens", "model.max_tokens=4096", "2048"):
        load_model({"kind": "hf", "path": str(folder), "device": "cpu", "max_tokens": 4096})
    assert load_model(TINY | {"max_tokens": 4096}).max_tokens == 4096
