"""Hostile models: folders, chat templates and GGUF files."""

import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path

from hostile.case import OUTSIDE, Case, edit
from hostile.child import shared
from hostile.inputs import RUN, write_rows

OWN_MODEL = [word for word in RUN if not word.startswith("model")]
OF_FOLDER = [*OWN_MODEL, "model=hf", "model.path=model"]

TEMPLATES = (
    *("{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**10 }}", "{{ 'x'.ljust(10**10) }}", "{{ 9**9**9 }}"),
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in i %}{% endfor %}{% endfor %}{% endfor %}",
    *("{{ cycler.__init__.__globals__.os.system('touch ../outside/ran') }}", "{{ lipsum.__globals__ }}", "{{ self }}"),
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ (messages|map(attribute='content')|list).__class__.__base__ }}",
    *("{% include '../outside/victim' %}", "{% import 'os' as os %}", "{% extends 'x' %}", "{{ namespace().x.y.z }}"),
    "{{ messages[0]['content'] }}{{ range(100000)|random }}",
    "{{ messages[0]['content'][:1] }}",
    "{{ messages[0]['content'][::-1] }}",
    "{{ messages[0]['content'] }}{{ '\\ud800' }}",
    *(
        "{{ raise_exception('\x1b]0;title\x07' + 'x' * 100000) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '{:>9999999999}'.format(1) }}",
    ),
    *("{{ messages[0]['content'] }}" + "{{ strftime_now('%Y') }}" * 3, "{{ strftime_now('%99999999d') }}"),
    *(
        "{" * 100_000,
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% if " + "not " * 5000 + "x %}{% endif %}",
        "{#" * 9,
    ),
    "{{ messages[0]['content'] }}" + "{% set x = 1 %}" * 20_000,
    "{{ range(10**8)|list|length }}",
    "{% set x = namespace(v='x') %}{% for i in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}{{ x.v }}",
    "{{ messages[0]['content']|replace('', 'x' * 9999)|replace('x', 'y' * 9999) }}",
    "{{ messages|tojson(indent=999999999) }}",
    "{{ messages.clear() }}{{ messages.append(1) }}",
    *("", " ", "\x00", "{{ messages[0]['content'] }}\x00\x1b[31m", 5, None, {"default": "x"}, [{"name": "default"}]),
)


def template(draw: random.Random, folder: Path, base: Path) -> Case:
    """A chat template that loops, grows, reads, drops or makes things up."""
    shutil.copytree(shared(base, "model", write_model), folder / "model")
    write_rows(folder)
    text, place = draw.choice(TEMPLATES), draw.choice(("chat_template.jinja", "tokenizer_config.json", "additional"))
    if isinstance(text, str) and place == "chat_template.jinja":
        (folder / "model" / place).write_text(text, encoding="utf-8", errors="surrogatepass")
    elif isinstance(text, str) and place == "additional":
        (folder / "model" / "additional_chat_templates").mkdir()
        (folder / "model" / "additional_chat_templates" / "default.jinja").write_text(text, errors="surrogatepass")
    else:
        path = folder / "model" / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": text}))
    return Case(f"{place}: {str(text)[:70]!r}", [OF_FOLDER, OF_FOLDER], wants="once")


def write_model() -> None:
    """Write the tiny model into the folder `model`, as `save_pretrained` does."""
    import torch

    from kvbench.models.random_weights import byte_tokenizer, random_config, random_model

    config = random_config("tiny", overrides={"tie_word_embeddings": False})
    random_model(config, seed=0, dtype=torch.float32, device=torch.device("cpu")).save_pretrained("model")
    byte_tokenizer(config.vocab_size).save_pretrained("model")


class Payload:
    """Touches a file where it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch ../outside/ran",)


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)


def model_folder(draw: random.Random, folder: Path, base: Path) -> Case:
    """A model's folder with settings, weights or a tokenizer that do not fit, run, or lead elsewhere."""
    model = shutil.copytree(shared(base, "model", write_model), folder / "model")
    write_rows(folder)
    kind = draw.choice(
        (_edited, _edited, _sized, _sized, _with_code, _pickled, _sharded, _headed, _flipped, _special, _odd)
    )
    what = kind(draw, model)
    wants = "refused" if kind in (_pickled, _sharded, _headed) else "end"
    return Case(f"{kind.__name__[1:]} {what}", [OF_FOLDER], wants=wants)


def _changed(model: Path, **settings: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def _edited(draw: random.Random, model: Path) -> str:
    path = draw.choice(sorted(model.glob("*.json")))
    content = json.loads(path.read_text())
    how = edit(content, draw)
    path.write_text(json.dumps(content))
    return f"{path.name}: {how}"


def _sized(draw: random.Random, model: Path) -> str:
    key, value = draw.choice(SIZES), draw.choice((0, -1, 3, 10**9, 10**13, "64", 2.5, None))
    _changed(model, **{key: value})
    return f"{key}={value}"


def _with_code(draw: random.Random, model: Path) -> str:
    (model / "own.py").write_text("open('../outside/ran', 'w')\n")
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": "own.T"}
    more = draw.choice(({}, {"model_type": "own"}, {"architectures": ["own.Model"]}))
    _changed(model, auto_map=auto, **more)
    return str(more)


def _pickled(draw: random.Random, model: Path) -> str:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Payload()}))
    return ""


def _sharded(draw: random.Random, model: Path) -> str:
    shard = draw.choice((f"{OUTSIDE}.safetensors", "../../outside/victim", "/dev/zero", "\x00", 5, None, ["x"]))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    (model / "model.safetensors").unlink()
    return repr(shard)


def _headed(draw: random.Random, model: Path) -> str:
    path, length = model / "model.safetensors", draw.choice((0, 2**63 - 1, 2**64 - 1, 99_000_000, 5))
    path.write_bytes(struct.pack("<Q", length) + draw.choice((path.read_bytes()[8:], b"", b"{}", b"[" * 1000)))
    return f"{length} bytes"


def _flipped(draw: random.Random, model: Path) -> str:
    path, at = model / "model.safetensors", draw.randrange(8, 2000)
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content[: draw.choice((len(content), at, len(content) // 2))])
    return f"byte {at}"


def _special(draw: random.Random, model: Path) -> str:
    names = [*sorted(path.name for path in model.iterdir()), "chat_template.jinja", "merges.txt"]
    path, kind = model / draw.choice(names), draw.choice(("pipe", "folder", "/dev/zero"))
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)
    return f"{path.name} is {kind}"


def _odd(draw: random.Random, model: Path) -> str:
    path = draw.choice(sorted(model.iterdir()))
    text = draw.choice((b"", b"[" * 100_000, b"null", b"\xff" * 99, b"9" * 10**6, b"{}"))
    path.write_bytes(text)
    return f"{path.name} is {text[:9]!r}"


def write_gguf(path: Path, changes: dict[str, object]) -> None:
    """A small Llama in a GGUF file, with a byte-level vocabulary; `changes` to its metadata, None takes out."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "ab"]
    held: dict[str, object] = {
        "llama.context_length": 2048,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 32,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * 257],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (held | changes).items():
        if isinstance(value, bool | str | float):
            {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32}[type(value)](key, value)
        elif isinstance(value, int):
            (writer.add_uint32 if 0 <= value < 2**32 else writer.add_int64)(key, value)
        elif value is not None:
            writer.add_array(key, value)
    shapes = {"token_embd": (len(tokens), 64), "output": (len(tokens), 64), "output_norm": (64,)}
    for layer in range(2):
        parts = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
        parts |= {"ffn_gate": (64, 64), "ffn_up": (64, 64), "ffn_down": (64, 64), "attn_norm": (64,), "ffn_norm": (64,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF = {
    "llama.block_count": (10**9, 0, 2**31, -1, "2", 2.5, None),
    "llama.embedding_length": (10**9, 0, 63, "x", None),
    "llama.feed_forward_length": (10**9, 0, None),
    "llama.attention.head_count": (0, 10**9, 3, None),
    "llama.attention.head_count_kv": (0, 10**9, 3, None),
    "llama.context_length": (0, 10**12, -5, 1, None),
    "llama.vocab_size": (10**9, 1, None),
    "llama.rope.dimension_count": (0, 10**9, None),
    "llama.rope.freq_base": (float("nan"), 0.0, -1.0, 1e38),
    "tokenizer.ggml.model": ("other", "llama", "../x", 5, None),
    "tokenizer.ggml.pre": ("smollm", "other", 5, None),
    "tokenizer.ggml.tokens": (["a"], ["a"] * 259, [""] * 259, [1, 2, 3], None),
    "tokenizer.ggml.merges": (["a"], ["a b c"], [""], ["x y"], [5], None),
    "tokenizer.ggml.token_type": ([1], [9] * 259, ["x"], None),
    "tokenizer.ggml.eos_token_id": (10**9, -1, 2.5, "x", [1], None),
    "tokenizer.chat_template": (*(one for one in TEMPLATES if isinstance(one, str) and one), 5, None),
    "general.alignment": (0, 3, 2**31),
    "general.file_type": (99, "x"),
}


def gguf(draw: random.Random, folder: Path, base: Path) -> Case:
    """A GGUF file whose metadata ask for too much, lack something or are damaged."""
    write_rows(folder)
    path, changes, kind = (
        folder / "x.gguf",
        {},
        draw.choice(("metadata", "metadata", "metadata", "header", "bits", "cut")),
    )
    if kind == "metadata":
        key = draw.choice(sorted(GGUF))
        changes = {key: draw.choice(GGUF[key])}
        if key != "tokenizer.ggml.pre" and draw.random() < 0.3:
            changes["tokenizer.ggml.pre"] = "smollm"
        kind = str(changes)[:80]
    write_gguf(path, changes)
    content = bytearray(path.read_bytes())
    if kind == "header":
        at, value = draw.choice((4, 8, 16, 24)), draw.choice((0, 2**31, 2**60, 2**64 - 1))
        content[at : at + 8] = struct.pack("<Q", value)
        kind = f"{value} at {at}"
    elif kind == "bits":
        for _ in range(draw.choice((1, 3, 20))):
            content[draw.randrange(4, 7000)] = draw.randrange(256)
    elif kind == "cut":
        content = content[: draw.randrange(4, len(content))]
    path.write_bytes(content)
    return Case(kind, [[*OWN_MODEL, "model=gguf", "model.path=x.gguf"]], wants="refused" if kind == "cut" else "end")
