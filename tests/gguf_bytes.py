"""GGUF files: headers alone, for the tests of what reads headers, and small models."""

import struct

import pytest
import torch


def text(value):
    """A text as the format has it."""
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_header(tensors=((192, 64), (64,)), fields=None, **numbers):
    """The header of a llama of 9 heads, 3 KV heads and 64 channels; `fields` are whole fields as bytes."""
    numbers = {
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.embedding_length": 576,
    } | numbers
    every = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    every += [text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + b"".join(map(text, "abc"))]
    every += [text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 2000) + bytes(8000)]
    every += [text(key) + struct.pack("<II", 4, value) for key, value in numbers.items()]
    every += fields or []
    named = [
        text(f"t{place}") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)
        for place, shape in enumerate(tensors)
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, len(named), len(every)) + b"".join([*every, *named])


def write_gguf(path, *, lacks=(), pre=None, blocks=1, words="", kind="llama", fields=None):
    """A llama of one layer as a GGUF file, or a header of another `kind`; further `fields` are whole numbers."""
    library = pytest.importorskip("gguf")
    writer = library.GGUFWriter(path, kind)
    writer.add_block_count(blocks)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    for key, value in (fields or {}).items():
        writer.add_uint32(f"{kind}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    if "tokens" not in lacks:
        writer.add_token_list(["a", "b", "ab", *(f"<{words}{i}>" for i in range(257))])
    writer.add_token_types([1] * 260)
    if "merges" not in lacks:
        writer.add_token_merges(["a b"])
    shapes = {"attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32)}
    shapes |= {"attn_norm": (32,), "ffn_norm": (32,), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items() if name not in lacks}
    tensors |= {"token_embd.weight": (260, 32), "output_norm.weight": (32,), "output.weight": (260, 32)}
    for name, shape in tensors.items():
        writer.add_tensor(name, torch.randn(shape, generator=torch.Generator().manual_seed(len(name))).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"kind": "gguf", "path": str(path), "device": "cpu"}
