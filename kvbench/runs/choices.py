"""Models and methods that a bench names in one string, such as `snapkv budget=0.25`, and text to feed them.

The files of conf/ are read as plain YAML, so that the benches run where only torch, triton and transformers are
installed.
"""

from typing import Any

import yaml

from kvbench.cache.options import StoreOptions
from kvbench.config.files import options, path_of
from kvbench.config.one_file import is_method_file, target_of
from kvbench.errors import PromptLength, SettingValue, check_keys, unknown_name
from kvbench.models.load import LoadedModel
from kvbench.policy import Policy
from kvbench.rules import declared

_STORE = "store."


def read_choice(group: str, text: str, *more: str) -> dict[str, Any]:
    """Parse a choice of `group` (`method` or `model`) and its settings from a string such as `kivi bits=2`.

    The settings have no group's name; `more` are settings in the same form. Raises ValueError for an unknown one.
    """
    name, *changes = [*str(text).split(), *more] or [""]
    known = options(group)
    if name not in known:
        raise unknown_name(group, name, known)
    path = path_of(group, name)
    if is_method_file(path):
        content: dict[str, Any] = {"_target_": target_of(path)}
    else:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings = list(content)
    if group == "method":  # a file lists what differs from its class
        from kvbench.runs.parts import policy_class

        settings = list(declared(policy_class(content["_target_"])))
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            said = f"{change} in {group}={text} cannot be read as key=value"
            raise SettingValue(f"{said}; write {group}s as {name} KEY=VALUE", setting=group)
        check_keys([key], settings, prefix=f"{group}.")
        content[key] = yaml.safe_load(value)
    return content


def make_method(text: str) -> Policy:
    """Make the policy that a string describes."""
    from kvbench.runs.parts import make_policy

    return make_policy(read_choice("method", text))


def make_cache(text: str) -> tuple[Policy, StoreOptions]:
    """Make the policy and the store options that a string describes, such as `int4 store.rotation=hadamard`."""
    from kvbench.runs.config import store_options

    words = str(text).split()
    layout = [word for word in words if word.startswith(_STORE) and "=" in word]
    method = " ".join(word for word in words if word not in layout)
    pairs = (word.removeprefix(_STORE).partition("=") for word in layout)
    return make_method(method), store_options({key: yaml.safe_load(value) for key, _, value in pairs})


def make_model(text: str, device: str) -> LoadedModel:
    """Load the model that a string describes onto a device."""
    from kvbench.models.load import load_model

    return load_model(read_choice("model", text, f"device={device}"))


def describe_model(model: LoadedModel) -> dict[str, Any]:
    """The description of the model in a document."""
    from kvbench.engine.supported import model_shape

    shape = model_shape(model.model, model.device_spans)
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "dtype": str(model.dtype),
        "linear": model.linear,
        "remark": model.remark,
        "max_tokens": model.max_tokens,
        "shape": {
            "layers": shape.num_layers,
            "q_heads": shape.num_q_heads,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
        },
    }


def sample_tokens(model: LoadedModel, rows: int, length: int) -> list[list[int]]:
    """Prompts of real prose, a different passage for each row: on noise, attention has no peaks."""
    from kvbench.tasks.haystack import paragraphs

    if length > model.max_tokens:
        raise PromptLength(
            f"context and new tokens make {length}, but {model.name} holds {model.max_tokens}; lower context, "
            "rounds or steps",
            setting="context",
        )
    texts = paragraphs()
    samples, at = [], 0
    for _ in range(rows):
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += model.tokenizer(texts[at % len(texts)] + "\n\n", add_special_tokens=False)["input_ids"]
            at += 1
        samples.append(tokens[:length])
    return samples
