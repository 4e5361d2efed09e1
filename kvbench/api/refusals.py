"""Requests of transformers' `generate` and `forward` that a compressed cache refuses."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvbench.errors import ArgumentValue

if TYPE_CHECKING:
    from torch import Tensor

# Requests of `generate` that need more of a cache than rows that grow at their end: values that need nothing, and the
# argument's purpose otherwise.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "num_beams": ((None, 1), "beam search"),
    "constraints": ((None,), "constrained beam search"),
    "force_words_ids": ((None,), "constrained beam search"),
    "penalty_alpha": ((None, 0), "contrastive search"),
    "dola_layers": ((None,), "DoLa decoding"),
    "assistant_model": ((None,), "assisted generation"),
    "prompt_lookup_num_tokens": ((None,), "assisted generation by prompt lookup"),
    "assistant_early_exit": ((None,), "assisted generation by early exit"),
    "is_assistant": ((None, False), "drafts for another model (assisted generation)"),
    "use_mtp": ((None, False), "assisted generation by multi-token prediction"),
    "cache_implementation": ((None, "dynamic"), "a cache of transformers' own"),
    "cache": ((None,), "a cache that was made elsewhere"),
    "past_key_values": ((None,), "a cache that was made elsewhere"),
    "use_cache": ((None, True), "generation without a cache"),
    "prefill_chunk_size": ((None,), "a prompt in chunks"),
    "guidance_scale": ((None, 1), "classifier-free guidance"),
    "token_healing": ((None, False), "token healing"),
    "custom_generate": ((None,), "a decoding loop from elsewhere"),
    "output_attentions": ((None, False), "attention weights"),
    "output_hidden_states": ((None, False), "hidden states"),
    "inputs_embeds": ((None,), "a prompt of embeddings"),
}


def check(name: str, value: object) -> None:
    """Raise ValueError for a value that a compressed cache does not support."""
    harmless, what = REFUSED[name]
    if any(value is known or (isinstance(value, bool | int | float | str) and value == known) for known in harmless):
        return
    shown = value if isinstance(value, bool | int | float | str) else type(value).__name__
    raise ArgumentValue(
        f"{name}={shown} asks for {what}, which a compressed cache does not do; inside kvbench.compress use greedy "
        "decoding or sampling, one pass over each prompt, and no other cache",
        setting=name,
    )


def check_forward(arguments: Mapping[str, Any]) -> "Tensor":
    """The `input_ids` of a call of `forward`, int64 [batch, tokens].

    Raises:
        ArgumentValue: An argument is one with which a compressed cache reads nothing, or that it does not support.
    """
    for name in ("use_cache", "inputs_embeds", "output_attentions", "output_hidden_states"):
        check(name, arguments.get(name))
    if arguments.get("labels") is not None:
        raise ArgumentValue(
            "labels: a loss needs every logit of an uncompressed pass; compute it outside the block", setting="labels"
        )
    tokens = arguments.get("input_ids")
    if tokens is None or tokens.ndim != 2 or not tokens.numel():
        raise ArgumentValue(
            "kvbench.compress needs input_ids of shape [batch, tokens], with at least one of each", setting="input_ids"
        )
    return tokens
