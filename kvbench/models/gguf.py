"""Reads a GGUF file into a transformers model and tokenizer."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvbench.errors import MissingWeightsError
from kvbench.models.checkpoint import SAFELY, How, check_complete, is_fault, read_weights
from kvbench.models.gguf_header import read_header

if TYPE_CHECKING:
    from gguf import ReaderField
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_gguf(path: Path) -> None:
    """Checks that a path is a GGUF file whose header fits in it, with no more layers than tensors, before anything slow
    happens: transformers would build layers, and read lists, that are not there one by one without an end."""
    if not path.is_file():
        raise MissingWeightsError(
            f"model.path={path}: there is no such file (looked for {path.absolute()}). Give the path of an existing "
            ".gguf file."
        )
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ValueError(
            f"model.path={path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'. "
            "Fetch it again; a Git LFS pointer or a saved web page looks like this too."
        )
    try:
        header = read_header(path)
    except ValueError as error:
        raise ValueError(f"model.path={path}: kvbench cannot read this GGUF file ({error}). Fetch it again.") from error
    for key, count in header.fields.items():
        if key.endswith(".block_count") and not (type(count) is int and 1 <= count <= header.num_tensors):
            raise ValueError(
                f"model.path={path} says {key}={count!r:.100}, and has {header.num_tensors} tensors; a model has at "
                "least one layer, and a layer at least one tensor: fetch the file again"
            )


def read_gguf(path: Path, dtype: torch.dtype) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Reads and de-quantises a file that passed `check_gguf`: the model on the CPU, whose weights are ordinary tensors
    of the dtype, and its tokenizer, with the chat template and the end token that the file names."""
    with _parsed_once():
        return _read(path, dtype)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Parses a file's header once: transformers and `_read` ask for it five times, each of which takes seconds for the
    150,000 words of a vocabulary."""
    import gguf

    reader = gguf.GGUFReader
    once = cache(reader)
    gguf.GGUFReader = lambda file: once(os.fspath(file))  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader = reader  # type: ignore[misc]


def _read(path: Path, dtype: torch.dtype) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    import transformers
    from gguf import GGUFReader

    with _reading(path):
        model, found = read_weights(path.parent, How(dtype), path.name)
    check_complete(found, f"model.path={path}")
    with _reading(path):
        fields = GGUFReader(path).fields
        if "tokenizer.ggml.pre" in fields and fields["tokenizer.ggml.pre"].contents() == "smollm":
            tokenizer = _smollm_tokenizer(fields)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, **SAFELY)
            tokenizer.add_special_tokens(dict(_special_tokens(fields)))
    if getattr(model.config, "quantization_config", None) is not None:
        # Left behind by the loader; the weights are ordinary tensors now.
        del model.config.quantization_config
    return model, tokenizer


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what readers raise over a file into a ValueError about it."""
    import transformers

    try:
        yield
    except BaseException as error:
        # A damaged file fails wherever the reader happens to be, with struct, index, memory-map and other errors.
        if not is_fault(error):
            raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"model.path={path}: transformers {transformers.__version__} cannot read this GGUF file ({reason}). Fetch "
            "it again if it is damaged; if its architecture is not supported, use the original weights: model=hf "
            "model.path=FOLDER."
        ) from error


def _field(fields: Mapping[str, "ReaderField"], name: str) -> "ReaderField":
    """A field that the file has to have."""
    if name not in fields:
        raise ValueError(f"it has no {name}")
    return fields[name]


def _special_tokens(fields: Mapping[str, "ReaderField"]) -> dict[str, str]:
    """Returns the special tokens that the file names, under transformers' names."""
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {}
    for ours, theirs in names.items():
        field = fields.get(f"tokenizer.ggml.{ours}_token_id")
        if field is not None:
            found[theirs] = _field(fields, "tokenizer.ggml.tokens").contents(field.contents())
    return found


def _smollm_tokenizer(fields: Mapping[str, "ReaderField"]) -> "PreTrainedTokenizerBase":
    """Builds SmolLM's tokenizer from the vocabulary and merges in the file.

    transformers' own reader gives other tokens: it does not know that in SmolLM every digit is a word of its own, so
    that a space before a number joins the number and not the spaces before it; and up to 5.17 it takes another end
    token.

    Source: the rule named `smollm` in llama.cpp's `src/llama-vocab.cpp`: digits one by one, then GPT-2's words.
    Differs: none.
    """
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _field(fields, "tokenizer.ggml.tokens").contents()
    merges = [tuple(merge.split(" ")) for merge in _field(fields, "tokenizer.ggml.merges").contents()]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = _field(fields, "tokenizer.ggml.token_type").contents()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    template = fields.get("tokenizer.chat_template")  # a model that never learnt to chat has none
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=None if template is None else template.contents(),
        **_special_tokens(fields),
    )
