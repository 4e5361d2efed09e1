"""Model folders are data: what is loaded is what is hashed, nothing in them runs, and nothing is made up."""

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from places import ROOT
from refusals import refused
from safetensors.torch import load_file, save_file

from kvbench.errors import MissingWeightsError
from kvbench.models import files as model_files
from kvbench.models.checkpoint import How, check_complete, config_of, read_weights
from kvbench.models.devices import Devices
from kvbench.models.load import load_model


def load(path):
    """Loads a folder on the CPU."""
    return load_model({"kind": "hf", "path": str(path), "device": "cpu"})


def edit_config(folder, **settings):
    """Changes settings of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def edit_weights(folder, edit):
    """Changes the tensors of a folder by a function over the dictionary of them."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_the_attention_that_a_folder_names_is_not_taken(folder, key):
    """It may be code from the hub: what is taken is torch's."""
    edit_config(folder, **{key: "somebody/kernel"})
    assert load(folder).model.config._attn_implementation == "sdpa"


def test_nor_is_that_of_a_part_of_a_model(tmp_path):
    """A model that can also be shown pictures has a configuration for each of its parts."""
    transformers.AutoConfig.for_model("qwen3_vl").save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config=text | {"_attn_implementation": "somebody/kernel"})
    assert config_of(tmp_path).text_config._attn_implementation == "sdpa"


def test_a_class_without_fused_attention_is_loaded_with_its_own(tmp_path):
    """gpt-oss has sinks and refuses `sdpa`."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 257}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.GptOssConfig(**sizes, **heads)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found, complete = read_weights(tmp_path, How(torch.float32, Devices((torch.device("cpu"),))))
    check_complete(complete, str(tmp_path))
    assert found.config._attn_implementation == "eager"


def test_a_gpu_gets_the_weights_without_a_stop_in_main_memory(folder, monkeypatch):
    """On a device of its own memory, transformers is asked to put every tensor there; the meta device stands for it,
    on which a weight that was read elsewhere could not end. In main memory nothing is asked for."""
    found, complete = read_weights(folder, How(torch.float32, Devices((torch.device("meta"),))))
    assert {weight.device.type for weight in found.parameters()} == {"meta"}
    check_complete(complete, str(folder))
    asked = []
    reader = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda *given, device_map, **named: (asked.append(device_map), reader(*given, **named))[1],
    )
    for device in ("cuda:1", "cpu"):
        read_weights(folder, How(torch.float32, Devices((torch.device(device),))))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # accelerate is not there
    read_weights(folder, How(torch.float32, Devices((torch.device("cuda:1"),))))
    assert asked == [{"": torch.device("cuda:1")}, None, None]
    monkeypatch.undo()
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *given, device_map, **named: (device_map, {})
    )
    found, _ = read_weights(folder, How(torch.float32, Devices((torch.device("cuda:0"), torch.device("cuda:1")))))
    assert [str(found[f"model.layers.{index}"]) for index in (0, 1)] == ["cuda:0", "cuda:1"]


def test_two_models_that_differ_in_the_middle_are_two(folder, tmp_path):
    """A fine-tune of inner layers, of the same size and with the same first and last MiB, is another model."""
    file = folder / "model.safetensors"
    edit_weights(folder, lambda tensors: tensors.update(padding=torch.zeros(1 << 20)))
    content = bytearray(file.read_bytes())
    other = shutil.copytree(folder, tmp_path / "other" / "my-tiny")
    assert len(content) > (3 << 20)
    content[len(content) // 2] ^= 1
    (other / "model.safetensors").write_bytes(content)
    assert model_files.folder_fingerprint(other) != model_files.folder_fingerprint(folder)


@pytest.mark.parametrize(
    "name", ["added_tokens.json", "tokenizer.4.0.json", "vocab.txt", "additional_chat_templates/tool.jinja"]
)
def test_every_file_that_a_tokenizer_reads_counts(folder, name):
    """A file that transformers would read beside the usual ones makes another model; a note does not."""
    before = model_files.folder_fingerprint(folder)
    (folder / "notes.md").write_text("mine")
    assert model_files.folder_fingerprint(folder) == before
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    assert model_files.folder_fingerprint(folder) != before


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_checkpoint_loads(saved, tied):
    """Tied embeddings, which are stored once, lack nothing."""
    names = load_file(saved[tied] / "model.safetensors").keys()
    assert ("lm_head.weight" in names) is not tied
    model = load(saved[tied]).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_rotary_buffers_of_old_checkpoints_are_no_tensors_of_a_model(folder):
    """Llama 2's files hold the rotary frequencies, which the configuration decides; they load."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    load(folder)


def cut_to_one_shard(folder, tensors, listed):
    """Puts tensors into the one shard that is there of those that an index lists."""
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": listed | dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def without(folder, word):
    """The tensors of a folder but for those with a word in their name."""
    return {name: x for name, x in load_file(folder / "model.safetensors").items() if word not in name}


def replace(folder, tensors):
    """Puts other tensors in place of a folder's."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


OTHERS = {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 5), "model.extra.weight": torch.ones(2)}


# What is done to a folder, and what is said of it.
def index_only(folder, text):
    """Puts an index of such a text in the place of the weights."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


REFUSED = (
    {
        "no config": (lambda f: (f / "config.json").unlink(), "my-tiny lacks config.json"),
        "no weights": (lambda f: (f / "model.safetensors").unlink(), "my-tiny lacks weights"),
        "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "my-tiny lacks a tokenizer"),
        "a shard is missing": (
            lambda f: cut_to_one_shard(f, without(f, "mlp"), {"b": "model-00002-of-00002.safetensors"}),
            "missing: model-00002-of-00002.safetensors",
        ),
        "cut weights": (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:1000]),
            r"transformers [\d.]+ cannot load the model in .*my-tiny",
        ),
        "tensors are missing": (
            lambda f: replace(f, without(f, "k_proj")),
            "my-tiny do not fit .* lack model.layers.0.self_attn.k_proj.weight, model.laye",
        ),
        "a shard that index and folder lack": (
            lambda f: cut_to_one_shard(f, without(f, "layers.1.mlp"), {}),
            "lack model.layers.1.mlp.down_proj.weight",
        ),
        "another shape and one too many": (
            lambda f: edit_weights(f, lambda tensors: tensors.update(OTHERS)),
            r"in another shape model.layers.0.mlp.up_proj.weight \[3, 5\] instead.*beyond the model model.extra.weight",
        ),
        "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
        "no object": (lambda f: (f / "config.json").write_text("[]"), "config.json holds list and not settings"),
        "other weights": (
            lambda f: edit_config(f, transformers_weights="other.safetensors"),
            r"names its weights itself \(transformers_weights='other.safetensors'\)",
        ),
        "an adapter": (
            lambda f: (f / "adapter_config.json").write_text("{}"),
            r"my-tiny holds an adapter \(adapter_config.json\)",
        ),
    }
    | {
        f"num_hidden_layers={count}": (
            lambda f, count=count: edit_config(f, num_hidden_layers=count),
            f"config.json says num_hidden_layers={count!r}, and .* 21 tensors",
        )
        for count in (-1, 0, 10**9, "two", None)
    }
    | {
        f"an index that says {text[:20]}": (
            lambda f, text=text: index_only(f, text),
            r"index.json lists no weight files \(",
        )
        for text in (
            "{",
            "[]",
            "[" * 100_000,
            "{}",
            '{"weight_map": 5}',
            '{"weight_map": {"a": 5}}',
            '{"weight_map": {"a": []}}',
        )
    }
)


@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_folder_is_refused(folder, capfd, damage, message):
    """In one sentence with its name and what is wrong there: nothing is filled up, and nothing comes from elsewhere."""
    damage(folder)
    with pytest.raises(
        MissingWeightsError if "lacks" in message or "missing" in message else ValueError, match=message
    ):
        load(folder)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_many_names_are_counted():
    """A message lists the first names and says how many there are."""
    found = dict.fromkeys(("unexpected_keys", "mismatched_keys", "error_msgs"), ())
    found["missing_keys"] = {f"t{i}" for i in range(9)}
    with refused("file-content", None, "t0", "t1", "t2", "t3"):
        check_complete(found, "x")
    check_complete(dict.fromkeys(found, ()), "x")


def test_code_of_a_folder_is_neither_run_nor_asked_about(folder, tmp_path):
    """A folder that needs its own Python is refused at once, although a yes waits on the standard input."""
    mark = tmp_path / "ran"
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_config(folder, model_type="unheard-of", auto_map=auto_map)
    script = (
        "from kvbench.models.load import load_model\n"
        f"try: load_model({{'kind': 'hf', 'path': {str(folder)!r}}})\n"
        "except ValueError as error: print(error)\n"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, input="y\n" * 9, capture_output=True, text=True
    )
    assert "needs Python code of its own (trust_remote_code), which kvbench does not run" in done.stdout
    assert len(done.stdout.splitlines()) == 1 and "[y/N]" not in done.stdout + done.stderr
    assert not mark.exists()


def test_a_pickle_is_not_run(folder, tmp_path):
    """A pytorch_model.bin that would run a program is refused; one with plain tensors loads."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Evil()}))
    with pytest.raises(ValueError, match=r"cannot load the model in .*my-tiny"):
        load(folder)
    assert not (tmp_path / "ran").exists()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert torch.equal(load(folder).model.lm_head.weight, tensors["lm_head.weight"])


def test_a_folder_that_changes_while_it_is_loaded_is_refused(folder, monkeypatch):
    """A fingerprint taken after the load must be of the files that were loaded."""
    fingerprint = model_files.folder_fingerprint

    def meddle(path):
        edit_config(path, rms_norm_eps=0.25)
        return fingerprint(path)

    monkeypatch.setattr(model_files, "folder_fingerprint", meddle)
    with pytest.raises(ValueError, match="my-tiny was changed while it was loaded"):
        load(folder)
