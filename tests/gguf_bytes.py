"""GGUF files that are a header alone, for the tests of what reads headers."""

import struct


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
