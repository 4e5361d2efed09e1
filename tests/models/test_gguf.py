"""GGUF files: read once, converted once, and what is read from the cache is what is in the file."""

import re
import shutil
import struct
from types import SimpleNamespace

import pytest
import torch
from gguf_bytes import write_gguf
from refusals import refused

from kvbench.config import code
from kvbench.models import cache as model_cache
from kvbench.models import conversions, gguf
from kvbench.models import load as model_load
from kvbench.models.load import load_model, load_outline


@pytest.fixture(autouse=True)
def native_cache(tmp_path, monkeypatch):
    """Gives the folder of conversions, which is this test's alone."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"lacks": ["attn_k"]}, "do not fit .* lack model.layers.0.self_attn.k_proj"),
        ({"blocks": 10**9}, "says llama.block_count=1000000000, and has 12 tensors"),
        ({"blocks": 0}, "says llama.block_count=0, and has 12 tensors"),
        ({"pre": "smollm", "lacks": ["merges"]}, r"cannot read this GGUF file \(it has no tokenizer.ggml.merges\)"),
    ],
)
def test_a_gguf_file_that_lacks_something_is_refused(tmp_path, made, said):
    """A file without a projection or a part of the tokenizer, and one with more layers than tensors, are named."""
    with pytest.raises(ValueError, match=f"model.path=.*small.gguf.* {said}"):
        load_model(write_gguf(tmp_path / "small.gguf", **made))


@pytest.mark.parametrize(
    ("tensor", "changed", "said"),
    [
        ("blk.0.attn_k.weight", {"offset": lambda offset: 0}, "lie on the same bytes"),
        ("blk.0.attn_k.weight", {"offset": lambda offset: offset - 32}, "lie on the same bytes"),
        ("blk.0.attn_k.weight", {"offset": lambda offset: offset + 1}, "no multiple of 32"),
        ("blk.0.attn_k.weight", {"offset": lambda offset: 2**40}, "ends at byte"),
        ("output.weight", {"kind": lambda kind: 28}, "ends at byte"),  # of 64 bits each
        ("blk.0.attn_k.weight", {"kind": lambda kind: 77}, "unknown type 77"),
    ],
)
def test_tensors_that_lie_on_one_another_are_refused(tmp_path, tensor, changed, said):
    """Readers of llama.cpp refuse them; gguf's own takes one tensor's bytes for another's."""
    asked = write_gguf(tmp_path / "small.gguf", pre="smollm")
    content = bytearray((tmp_path / "small.gguf").read_bytes())
    at = content.index(struct.pack("<Q", len(tensor)) + tensor.encode()) + 8 + len(tensor)
    at += 4 + 8 * int.from_bytes(content[at : at + 4], "little")
    kind, offset = struct.unpack_from("<IQ", content, at)
    there = {"kind": kind, "offset": offset}
    there |= {name: change(there[name]) for name, change in changed.items()}
    struct.pack_into("<IQ", content, at, there["kind"], there["offset"])
    (tmp_path / "small.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=f"model.path=.*small.gguf.*{said}"):
        load_model(asked)


def test_a_gguf_file_is_parsed_once(tmp_path, monkeypatch):
    """A header with a large vocabulary takes seconds, and transformers asks for it again and again; and in each module
    of a model for the list of the tensors' names."""
    library = pytest.importorskip("gguf")
    parsed, fields = [], library.GGUFReader._build_fields
    monkeypatch.setattr(library.GGUFReader, "_build_fields", lambda *args: parsed.append(1) or fields(*args))
    mapped, made = [], library.TensorNameMap.__init__
    monkeypatch.setattr(library.TensorNameMap, "__init__", lambda *args: mapped.append(1) or made(*args))
    load_model(write_gguf(tmp_path / "small.gguf", pre="smollm"))
    assert len(parsed) == len(mapped) == 1


def test_a_gguf_file_need_not_chat(tmp_path):
    """SmolLM's tokenizer is built without a chat template where the file has none."""
    loaded = load_model(write_gguf(tmp_path / "small.gguf", pre="smollm"))
    assert not loaded.chat_template and loaded.tokenizer.chat_template is None


def alike(one, other):
    """True if two models and their tokenizers are the same to the bit."""
    found, wanted = one.model.state_dict(), other.model.state_dict()
    assert found.keys() == wanted.keys() and one.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    told = [(each.fingerprint, each.name, each.eos_token_ids, each.max_tokens, each.dtype) for each in (one, other)]
    return told[0] == told[1] and all(torch.equal(found[key], wanted[key]) for key in wanted)


def direct(asked, monkeypatch):
    """The model as it is read from the file itself."""
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "ensure_converted", lambda path, dtype: None)
        return load_model(asked)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_converted_is_what_is_in_the_file(tmp_path, native_cache, monkeypatch, capfd, dtype):
    """The first load and the second one, which does not look into the file, give the same bits, tokens and fingerprint
    as the file itself; nothing draws a bar, and it is said once what was made, how large and where."""
    asked = write_gguf(tmp_path / "small.gguf", pre="smollm") | {"dtype": dtype}
    wanted = direct(asked, monkeypatch)
    assert "%" not in capfd.readouterr().err
    assert alike(load_model(asked), wanted)
    said = capfd.readouterr().err
    assert f"small: converting it once, 0 MB in {native_cache}" in said and "%" not in said
    monkeypatch.setattr(gguf, "read_gguf", lambda *given: pytest.fail("it was read again"))
    assert (
        alike(load_model(asked), wanted) and load_outline(asked).tokenizer.get_vocab() == wanted.tokenizer.get_vocab()
    )
    assert capfd.readouterr().err == ""
    assert len([path for path in native_cache.iterdir() if path.is_dir()]) == 1


def test_a_conversion_that_does_not_fit_is_made_again(tmp_path, native_cache, monkeypatch, capfd):
    """One that was changed, and one by another version of the code; of another file there is another one."""
    monkeypatch.setattr(model_cache, "_SETTLED_NS", -1)
    asked = write_gguf(tmp_path / "small.gguf", pre="smollm")
    wanted = load_model(asked)
    (folder,) = [path for path in native_cache.iterdir() if path.is_dir()]
    (folder / "config.json").write_text("{}")
    assert alike(load_model(asked), wanted)
    assert "config.json is not as it was converted; it is made again" in capfd.readouterr().err
    monkeypatch.setattr(code, "versions", lambda names: dict.fromkeys(names, "0"))
    assert alike(load_model(asked), wanted)
    assert "another version of the converter made; it is made again" in capfd.readouterr().err
    assert [path for path in native_cache.iterdir() if path.is_dir()] == [folder]
    write_gguf(tmp_path / "small.gguf", pre="smollm", words="c")
    assert load_model(asked).fingerprint != wanted.fingerprint
    assert len([path for path in native_cache.iterdir() if path.is_dir()]) == 2


def test_a_file_that_changes_while_it_is_converted_is_refused(tmp_path, native_cache, monkeypatch):
    """What was hashed must be what was read."""
    asked, read = write_gguf(tmp_path / "small.gguf", pre="smollm"), gguf.read_gguf

    def changing(path, dtype):
        found = read(path, dtype)
        path.write_bytes(path.read_bytes() + b"x")
        return found

    monkeypatch.setattr(gguf, "read_gguf", changing)
    with refused("file-content", None, "small.gguf"):
        load_model(asked)
    assert not [path for path in native_cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize("fault", ["full", "unwritable", "another tokenizer"])
def test_a_conversion_that_cannot_be_kept_is_told(tmp_path, native_cache, monkeypatch, capfd, fault):
    """The file is read at every load then; where its tokenizer is to blame, that is not tried again."""
    asked = write_gguf(tmp_path / "small.gguf", pre="smollm")
    wanted = direct(asked, monkeypatch)
    if fault == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        why = r"small does not fit into .*models: converting it takes 0 MB and 0 MB are free"
    elif fault == "unwritable":
        native_cache.parent.mkdir()
        native_cache.write_text("no folder")
        why = "Not a directory"
    else:
        monkeypatch.setitem(conversions._COMPARED, "chats", lambda tokenizer: tokenizer.name_or_path)
        why = "its tokenizer has other chats when it is read from a folder"
    saved = []
    monkeypatch.setattr(conversions, "save", lambda *given, save=conversions.save: (saved.append(1), save(*given)))
    for _ in range(2):
        capfd.readouterr()
        assert alike(load_model(asked), wanted)
        said = capfd.readouterr().err
        assert "small: every load de-quantises it anew: " in said
        assert re.search(why, said)
    assert len(saved) == (fault == "another tokenizer")


def test_a_conversion_that_changes_while_it_is_loaded_is_refused(tmp_path, native_cache, monkeypatch):
    """As of the embedded model."""
    monkeypatch.setattr(model_cache, "_SETTLED_NS", -1)
    asked = write_gguf(tmp_path / "small.gguf", pre="smollm")

    def changing(folder, how, read_tokenizer):
        (folder / "config.json").write_text("{}")
        return None, None

    monkeypatch.setattr(model_load, "_read_folder", changing)
    with refused("file-content", None, "config.json"):
        load_model(asked)
