"""Generated documents in the form that lm-eval reads."""

from typing import TYPE_CHECKING

from kvbench.tasks.longctx.generate import make_doc
from kvbench.tasks.source import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_LENGTH = 1024
DEFAULT_ITEMS = 6


def load(
    kind: str,
    tokenizer: "PreTrainedTokenizerBase | str | None" = None,
    length: int = DEFAULT_LENGTH,
    items: int = DEFAULT_ITEMS,
    seed: int = 0,
    **_: object,
) -> dict[str, Rows]:
    """The documents of one kind; the function that the YAMLs name as `custom_dataset`.

    Args:
        kind: One of `generate.KINDS`.
        tokenizer: Counts tokens: a tokenizer, or the folder or hub id of one.
        length: Most tokens of a prompt.
        items: Documents wanted, >= 1.
        seed: Decides their content.

    Returns:
        `test`: the documents of `generate.make_doc`.

    Raises:
        ValueError: nothing to count tokens with, or a setting out of range.
    """
    if tokenizer is None:
        raise ValueError(
            "the longctx tasks are made to a length in tokens: pass a tokenizer in the task metadata, for example "
            'TaskManager(metadata={"tokenizer": "FOLDER OR HUB ID", "length": 1024}, ...)'
        )
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    docs = (make_doc(kind, index, tokenizer=tokenizer, length=length, seed=seed) for index in range(items))
    return {"test": Rows(docs, origin="generated")}
