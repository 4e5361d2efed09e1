"""The config.json of model families, as transformers writes it: its bytes are those that a run's loader finds."""

import csv
import json
import random
import tempfile
from pathlib import Path

from hostile.case import Case
from hostile.child import carry_out, new_place

LENGTHS = (64, 5000, 100_000)  # inside of every window, beyond most, beyond all
# Families whose layers see a window or hold a state by default: of every second case, since most others are refused.
MIXED = (
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
)
MIXED += ("lfm2", "llama4_text", "mistral", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_next", "smollm3", "zamba2")
CHANGES = (
    *({}, {}, {}, {"num_hidden_layers": 6}, {"sliding_window": 32}, {"use_sliding_window": True}, {"head_dim": 96}),
    *({"num_key_value_heads": 2}, {"num_key_value_heads": 1}, {"max_window_layers": 1}, {"attention_chunk_size": 16}),
)


# What published files say; which layers have a window is left to transformers.
SIZES = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "dtype",
)
SIZES += (
    "intermediate_size",
    "vocab_size",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "kv_lora_rank",
)
FORMS = ("whole", "difference", "sizes", "sizes")


def write_config(kind: str, form: str, changes: dict, path: Path) -> str:
    """Write the file of a family's defaults with some fields changed; what it is."""
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    config.dtype = "bfloat16"
    content = json.loads(config.to_json_string(use_diff=form == "difference"))
    if form == "sizes":
        inner = content.get("text_config")
        content = {name: value for name, value in content.items() if name in SIZES}
        content |= {"text_config": {name: inner[name] for name in SIZES if name in inner}} if inner else {}
    inner = content.get("text_config") or content
    inner |= changes
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    return f"{kind}, {form}, {changes}"


def loaded_bytes(model: str, length: int) -> None:
    """Print the FP16 bytes of a sequence that the loader of a run finds, or why it refuses the model."""
    import torch

    from kvbench.engine.states import States
    from kvbench.engine.supported import check_supported, layer_kinds, model_shape
    from kvbench.models.checkpoint import config_of, outline_of

    try:
        outline = outline_of(config_of(Path(model)), torch.bfloat16)
        check_supported(outline)
        state_bytes = States(outline, layer_kinds(outline.config).states).row_bytes
        print("bytes:", model_shape(outline).fp16_bytes(length) + state_bytes)
    except Exception as error:
        print("refused:", " ".join(str(error).split())[:300])


def config_json(draw: random.Random, folder: Path, base: Path) -> Case:
    """A family's config.json, whole or of differences alone: the bytes are the loader's, or the file is refused."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    kinds = draw.choice((known, [kind for kind in MIXED if kind in known]))
    path = folder / "model" / "config.json"
    length = draw.choice(LENGTHS)
    while not path.exists():
        try:
            what = write_config(draw.choice(kinds), draw.choice(FORMS), draw.choice(CHANGES), path)
        except Exception:  # a family without a configuration of its own, or without one by default
            continue

    def check(ended: list[tuple[str, str]]) -> list[str]:
        with tempfile.TemporaryDirectory() as place:
            other = new_place(Path(place))
            how, [(_, said)] = carry_out(other, [lambda: loaded_bytes(str(path.parent), length)])
        code, text = ended[0]
        wanted = said.rpartition("bytes:")[2].strip()
        if code != "0":
            return []
        if how or not wanted.isdecimal():
            return [f"the loader refuses what is counted: {how} {said[-500:]}"]
        found = [int(row["fp16_bytes"]) for row in csv.DictReader((folder / "out" / "bytes.csv").open())]
        return (
            [] if found == [int(wanted)] else [f"{found} bytes are counted, and the loader says {wanted}: {text[:500]}"]
        )

    words = ["bytes", "model=model", "method=full", f"length={length}", "answer=8", "out=out/bytes.csv"]
    return Case(f"{what}, {length} tokens", [words], check=check)
