"""Policies and models passed as objects: adapters to the names, settings and fingerprints that runs use."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config import files
from kvbench.config.methods import read_method
from kvbench.engine import hf
from kvbench.errors import ArgumentValue
from kvbench.models.files import combine_fingerprints
from kvbench.models.load import LoadedModel
from kvbench.models.rotary import context_length
from kvbench.policy import Policy
from kvbench.runs.parts import Loaders, policy_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KIND = "given"  # model.kind of a model that was loaded by the caller


def method_of(policy: Policy) -> tuple[str, dict[str, Any]]:
    """Name and settings of a method passed as a policy object.

    Raises:
        ValueError: Its class lies inside a function, where another process cannot import it.
    """
    kind = type(policy)
    target = f"{kind.__module__}.{kind.__qualname__}"
    if "<locals>" in target:
        raise ArgumentValue(
            f"policy={kind.__qualname__} is defined inside a function; define it at the top of a module",
            setting="policy",
        )
    policy_class(target)
    settings = {item.name: _plain(getattr(policy, item.name)) for item in fields(policy) if item.init}
    return _name_of(target, kind.__name__), {"_target_": target, **settings}


def _name_of(target: str, name: str) -> str:
    """The name of the configuration that has a class, else the class's own in small letters."""
    for known in files.options("method"):
        if read_method(files.path_of("method", known)).get("_target_") == target:
            return known
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def shared(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None") -> Iterator[tuple[dict, Loaders]]:
    """Model settings and loaders for a model passed as an object; its attention is restored at the end of the block.

    Its weights, its configuration and its tokenizer are hashed: they identify its runs.

    Raises:
        ValueError: The tokenizer is missing.
    """
    if tokenizer is None:
        raise ArgumentValue(
            "tokenizer=None: a model that is loaded already needs its tokenizer, too", setting="tokenizer"
        )
    name = re.sub(r"[^\w.-]", "-", Path(str(model.config.name_or_path or model.config.model_type)).name)
    loaded = LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        name=name,
        fingerprint=fingerprint(model, tokenizer),
        max_tokens=context_length(model.config, None),
        dtype=model.dtype,
        device=model.device,
        chat_template=bool(getattr(tokenizer, "chat_template", None)),
    )
    group, loaders = {"kind": KIND, "name": name}, Loaders()
    loaders.take_model(group, loaded)
    with hf.attached(model):
        yield group, loaders


def fingerprint(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> str:
    """The fingerprint of a model in memory: 64 hex digits over its weights, its configuration and its tokenizer."""
    import torch

    parts = [model.config.to_json_string(), str(sorted(tokenizer.get_vocab().items())), str(tokenizer.chat_template)]
    for name, weight in sorted(model.state_dict().items()):
        content = weight.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
        parts.append(f"{name} {weight.dtype} {tuple(weight.shape)} {hashlib.sha256(content).hexdigest()}")
    return combine_fingerprints(parts)
