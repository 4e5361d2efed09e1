"""Reads a GGUF file into a transformers model and tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvbench.errors import MissingWeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_gguf(path: Path) -> None:
    """Checks that a path is a GGUF file before anything slow happens.

    Args:
        path: What the user gave.

    Raises:
        MissingWeightsError: There is no such file.
        ValueError: The file does not start as GGUF files do.
    """
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


def read_gguf(path: Path, dtype: torch.dtype) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Reads and de-quantises a GGUF file; weights become ordinary tensors of the given dtype.

    Args:
        path: A file that passed `check_gguf`.
        dtype: Floating-point dtype of the weights.

    Returns:
        The model on the CPU and its tokenizer, with the chat template that the file carries.

    Raises:
        ValueError: transformers cannot read this file: damaged, or an architecture that it does not know.
    """
    import transformers

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, attn_implementation="sdpa")
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        scheme = _pretokenizer_name(path)
    except Exception as error:
        # A damaged file fails wherever the reader happens to be, with struct, index, memory-map and other errors.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"model.path={path}: transformers {transformers.__version__} cannot read this GGUF file ({reason}). Fetch "
            "it again if it is damaged; if its architecture is not supported, use the original weights: model=hf "
            "model.path=FOLDER."
        ) from error
    if getattr(model.config, "quantization_config", None) is not None:
        # Left behind by the loader; the weights are ordinary tensors now.
        del model.config.quantization_config
    if scheme == "smollm":
        _split_digits(tokenizer)
    return model, tokenizer


def _pretokenizer_name(path: Path) -> str:
    """Returns the name of the rule by which the tokenizer splits text, such as `llama-bpe`; else an empty string."""
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return field.contents() if field is not None else ""


def _split_digits(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Makes every digit a word of its own, as SmolLM's tokenizer does and transformers' GGUF reader forgets.

    Without it the space before a number joins the number and not the spaces before it, and prompts get other tokens
    than the model was trained on.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
