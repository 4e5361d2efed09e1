"""Types of the settings that are read of a model's folder."""

import ast
import json

import pytest
from places import ROOT
from refusals import refused

from kvbench.models import fields
from kvbench.models.load import load_model, load_outline

ODD = ("0", [[0]], {}, 2.5, -1, True, "", [None], [2.5])


def edited(folder, name, **settings):
    """Changes settings of a JSON file of a folder, and gives its path."""
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | settings))
    return file


@pytest.mark.parametrize("value", ["0", [[0]], {}, "", 2.5, True, [True], ["0"]], ids=repr)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_tokens_that_are_none_are_the_files_fault(folder, name, value):
    """The file and the setting are named, and transformers reads nothing."""
    (folder / "generation_config.json").unlink()
    edited(folder, name, eos_token_id=value)
    with refused("file-content", None, f"my-tiny/{name}", "eos_token_id"):
        load_model({"kind": "hf", "path": str(folder), "device": "cpu"})


@pytest.mark.parametrize(
    "settings", [{"model_max_length": "0"}, {"model_max_length": [0]}, {"chat_template": 5}], ids=str
)
def test_a_tokenizer_that_fails_at_a_text_is_refused_before(folder, settings):
    """Its settings are read only when a text or a chat comes."""
    edited(folder, "tokenizer_config.json", **settings)
    with refused("file-content", None, "tokenizer_config.json", f"{next(iter(settings))}="):
        load_model({"kind": "hf", "path": str(folder), "device": "cpu"})


@pytest.mark.parametrize("text", ["{", "[]", "5", "[" * 100_000])
def test_a_generation_config_that_is_none_is_not_passed_over(folder, text):
    """Transformers makes one up in its stead, with other end tokens and without a word."""
    (folder / "generation_config.json").write_text(text)
    with refused("file-content", None, "generation_config.json"):
        load_model({"kind": "hf", "path": str(folder), "device": "cpu"})


@pytest.mark.parametrize("part", ["", "text_config"])
@pytest.mark.parametrize("key", fields.CONFIG)
def test_a_setting_of_another_type_is_named(folder, key, part):
    """Each setting, of a text model and of the part of a larger one, with every type that it has not."""
    what, holds = fields.CONFIG[key]
    wrong = [value for value in ODD if not holds(value)]
    assert wrong
    file = folder / "config.json"
    content = json.loads(file.read_text())
    for value in wrong:
        settings = {key: value} if not part else {part: {key: value}}
        with refused("file-content") as caught:
            fields.check_fields(file, content | settings, fields.CONFIG)
        assert f"{file} says {part}{'.' * bool(part)}{key}={value!r}" in str(caught.value)
    fields.check_fields(file, content, fields.CONFIG)


def test_a_list_by_layers_has_an_item_for_each(folder):
    """Two layers and one item."""
    file = edited(folder, "config.json", num_attention_heads_per_layer=[2])
    with refused("file-content", None, "num_attention_heads_per_layer", "num_hidden_layers=2"):
        load_model({"kind": "hf", "path": str(file.parent), "device": "cpu"})


def test_all_that_is_read_has_a_type():
    """Each name that modules of the engine and of models look up in a configuration stands in the table."""
    made = {"is_heterogeneous"}  # by transformers, from what it has checked
    found = set()
    for file in [*(ROOT / "kvbench" / "engine").glob("*.py"), *(ROOT / "kvbench" / "models").glob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        asked = [call.args for call in calls if ast.unparse(call.func) == "getattr"]
        found |= {name.value for where, name, *_ in asked if "config" in ast.unparse(where) and hasattr(name, "value")}
    found = {name for name in found if isinstance(name, str) and not name.startswith("_")}
    assert len(found) > 8 and found - {"quantization_config"} <= set(fields.CONFIG) | made


@pytest.mark.parametrize("step", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    ("pattern", "content", "times", "taken"),
    [({"String": "e"}, "e" * 10, 3, True), ({"String": "e"}, "e" * 10, 9, False), ({"Regex": "."}, "xx", 9, False)],
)
def test_a_tokenizer_that_grows_texts_is_refused(folder, step, pattern, content, times, taken):
    """Its library ends the process where the memory does not hold what a prompt has become."""
    replacing = {"type": "Replace", "pattern": pattern, "content": content}
    edited(folder, "tokenizer.json", **{step: {"type": "Sequence", f"{step}s": [replacing] * times}})
    settings = {"kind": "hf", "path": str(folder), "device": "cpu"}
    if taken:
        assert load_model(settings).tokenizer
        return
    for read in (load_model, load_outline):
        with refused("file-content", None, step):
            read(settings)
