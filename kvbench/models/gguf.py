"""Reads a GGUF file into a transformers model and tokenizer."""

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvbench.config import code
from kvbench.errors import FileContent, MissingWeightsError
from kvbench.models import checkpoint, conversions, fetched
from kvbench.models.cache import NoRoom, file_digest, file_state
from kvbench.models.checkpoint import SAFELY, How, check_complete, is_fault, read_weights
from kvbench.models.files import combine_fingerprints
from kvbench.models.gguf_header import GgufHeader, read_header

if TYPE_CHECKING:
    from gguf import ReaderField
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def check_gguf(path: Path) -> None:
    """Checks that a path is a GGUF file whose header and tensors fit in it, before anything slow happens.

    Each tensor has bytes of its own, and there are no more layers than tensors. transformers would build missing
    layers, and read missing lists, one by one without an end, and would silently take one tensor's bytes for another's.
    """
    if not path.is_file():
        raise MissingWeightsError(
            f"model.path={path}: there is no such file (looked for {path.absolute()}). Give the path of an existing "
            ".gguf file.",
            setting="model.path",
        )
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise FileContent(
            f"model.path={path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'. "
            "Fetch it again; a Git LFS pointer or a saved web page looks like this too.",
            setting="model.path",
        )
    try:
        header = read_header(path)
        _check_tensors(header, path.stat().st_size)
    except ValueError as error:
        raise FileContent(
            f"model.path={path}: kvbench cannot read this GGUF file ({error}). Fetch it again.", setting="model.path"
        ) from error
    for key, count in header.fields.items():
        if key.endswith(".block_count") and not (type(count) is int and 1 <= count <= header.num_tensors):
            raise FileContent(
                f"model.path={path} says {key}={count!r:.100}, and has {header.num_tensors} tensors; a model has at "
                "least one layer, and a layer at least one tensor: fetch the file again",
                setting="model.path",
            )


def _check_tensors(header: GgufHeader, file_bytes: int) -> None:
    """Checks that each tensor has a known type, and lies aligned, whole and alone in the file, as llama.cpp does."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES}
    alignment, end, last = header.fields.get("general.alignment", 32), 0, ""
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        if tensor.kind not in sizes:
            raise ValueError(f"its tensor {tensor.name} has the unknown type {tensor.kind}")
        block, block_bytes = sizes[tensor.kind]
        if tensor.offset % alignment:
            raise ValueError(f"its tensor {tensor.name} lies at {tensor.offset}, which is no multiple of {alignment}")
        if tensor.offset < end:
            raise ValueError(f"its tensors {last} and {tensor.name} lie on the same bytes")
        end, last = tensor.offset + -(-tensor.elements // block) * block_bytes, tensor.name
        if header.data_at + end > file_bytes:
            raise ValueError(f"its tensor {tensor.name} ends at byte {header.data_at + end} of {file_bytes}")


def read_gguf(path: Path, dtype: torch.dtype) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Reads and de-quantises a file that passed `check_gguf`.

    Returns the model on the CPU, whose weights are ordinary tensors of the dtype, and its tokenizer, with the chat
    template and the end token that the file names.
    """
    # The GGUF reader draws a bar that no setting hides.
    with _parsed_once(), conversions.quiet_transformers(), redirect_stderr(io.StringIO()):
        return _read(path, dtype)


def fingerprint(digest: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The fingerprint of a model whose file has a digest, with the tokenizer that was read from it."""
    return combine_fingerprints([digest, tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template or ""])


def ensure_converted(path: Path, dtype: torch.dtype) -> tuple[Path, str] | None:
    """Makes sure that a file that passed `check_gguf` is in the cache as a folder with weights of the dtype.

    De-quantising takes seconds and more. Returns the folder and the model's fingerprint, or None where it cannot be
    kept; the reason is printed on stderr.
    """
    state, digest, (folder, by) = file_state(path), file_digest(path), _conversion_of(path, dtype)
    needed_bytes = read_header(path).parameters * dtype.itemsize * 11 // 10

    def make(scratch: Path, converted: Path) -> dict[str, str]:
        with conversions.progress(path.stem, f"converting it once, {needed_bytes / 1e6:.0f} MB in {folder}"):
            model, tokenizer = read_gguf(path, dtype)
            try:
                conversions.save(model, tokenizer, converted)
            except conversions.NotAlike as error:  # noted, so that it is not tried again
                return {"why_not": str(error)}
        if file_state(path) != state:
            raise FileContent(f"{path} was changed while it was loaded; try again when nothing writes there")
        return {"fingerprint": fingerprint(digest, tokenizer)}

    try:
        known = conversions.ensure(folder, path.stem, needed_bytes, make, by)
    except (OSError, NoRoom) as error:
        known = {"why_not": str(error)}
    if "fingerprint" in known:
        return folder, known["fingerprint"]
    said = f"kvbench: {path.stem}: every load de-quantises it anew: {known['why_not']}"
    fetched.console().print(said, soft_wrap=True)
    return None


def _conversion_of(path: Path, dtype: torch.dtype) -> tuple[Path, str]:
    """The folder of a file's conversion, and what converts."""
    modules = {Path(str(module.__file__)).name: Path(str(module.__file__)) for module in (checkpoint, conversions)}
    libraries = code.versions(["gguf", "tokenizers", "torch", "transformers"])
    by = combine_fingerprints([code.hash_files(modules | {"gguf.py": Path(__file__)}), str(libraries)])
    kind = str(dtype).removeprefix("torch.")
    return conversions.models_folder() / f"gguf-{file_digest(path)[:12]}-{kind}", by


def config_of(path: Path, dtype: torch.dtype) -> "PretrainedConfig":
    """Reads the configuration of a file that passed `check_gguf`.

    That of its conversion, where there is one, since the header takes seconds.
    """
    folder, by = _conversion_of(path, dtype)
    if not conversions.find_damage(folder, by):
        return checkpoint.config_of(folder)
    return header_config(path)


def header_config(path: Path) -> "PretrainedConfig":
    """Reads the configuration of a file that passed `check_gguf` from its header, which takes seconds."""
    with _parsed_once(), conversions.quiet_transformers(), redirect_stderr(io.StringIO()):
        return checkpoint.config_of(path.parent, path.name)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Parses a file's header once, as plain arrays, and makes the list of tensor names once.

    transformers and `_read` read the header three times, with a memory map's class for each word, and transformers the
    list in every module of a model. Each takes seconds.
    """
    import gguf

    real, name_map = gguf.GGUFReader, gguf.get_tensor_name_map

    class Reader(real):  # type: ignore[misc, valid-type]
        """A reader whose file is a plain array, of which slices are made five times as fast."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(type(value).__mro__[1]) if name == "data" else value)

    once = cache(Reader)
    gguf.GGUFReader = lambda file: once(os.path.realpath(file))  # type: ignore[misc, assignment]
    gguf.get_tensor_name_map = cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = real, name_map  # type: ignore[misc]


def _read(path: Path, dtype: torch.dtype) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    import transformers
    from gguf import GGUFReader

    with _reading(path):
        model, loaded = read_weights(path.parent, How(dtype), path.name)
    check_complete(loaded, f"model.path={path}")
    with _reading(path):
        fields = GGUFReader(path).fields
        if "tokenizer.ggml.pre" in fields and fields["tokenizer.ggml.pre"].contents() == "smollm":
            tokenizer = _smollm_tokenizer(fields)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, **SAFELY)
            tokenizer.add_special_tokens(dict(_special_tokens(fields)))
    if getattr(model.config, "quantization_config", None) is not None:
        # Left after by the loader; the weights are ordinary tensors now.
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
        raise FileContent(
            f"model.path={path}: transformers {transformers.__version__} cannot read this GGUF file ({reason}). Fetch "
            "it again if it is damaged; if its architecture is not supported, use the original weights: model=hf "
            "model.path=FOLDER.",
            setting="model.path",
        ) from error


def _field(fields: Mapping[str, "ReaderField"], name: str) -> "ReaderField":
    """A field that the file has to have."""
    if name not in fields:
        raise ValueError(f"it has no {name}")
    return fields[name]


def _special_tokens(fields: Mapping[str, "ReaderField"]) -> dict[str, str]:
    """Returns the special tokens that the file names, under transformers' names."""
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = {}
    for ours, theirs in names.items():
        field = fields.get(f"tokenizer.ggml.{ours}_token_id")
        if field is not None:
            tokens[theirs] = _field(fields, "tokenizer.ggml.tokens").contents(field.contents())
    return tokens


def _smollm_tokenizer(fields: Mapping[str, "ReaderField"]) -> "PreTrainedTokenizerBase":
    """Builds SmolLM's tokenizer from the vocabulary and merges in the file.

    transformers' own reader gives other tokens: it ignores that in SmolLM every digit is a word of its own, so
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
