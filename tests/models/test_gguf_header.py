"""Headers of GGUF files, and of files that claim more than they hold."""

import struct
import time

import pytest
from gguf_bytes import gguf_header, text

from kvbench.models.gguf_header import read_header


def test_fields_and_elements(tmp_path):
    """Numbers and texts are kept, lists of tokens are passed over, and elements are counted from shapes."""
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_header(**{"llama.block_count": 30}))
    header = read_header(path)
    assert header.of_model("block_count") == 30 and header.of_model("context_length") is None
    assert "tokenizer.ggml.tokens" not in header.fields and "tokenizer.ggml.scores" not in header.fields
    assert (header.num_tensors, header.parameters) == (2, 192 * 64 + 64)
    assert read_header(path) is header  # the file is as it was
    path.write_bytes(gguf_header(**{"llama.block_count": 31}) + bytes(1))
    assert read_header(path).of_model("block_count") == 31


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "names more than the file holds"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "names more than the file holds"),
        (gguf_header(fields=[text("x") + struct.pack("<IIQ", 9, 8, 2**63)]), "names more than the file holds"),
        (gguf_header(fields=[text("x") + struct.pack("<IIQ", 9, 6, 2**62)]), "names more than the file holds"),
        (gguf_header(fields=[text("x") + struct.pack("<IQ", 8, 2**60)]), "names more than the file holds"),
        (gguf_header(fields=[text("x") + struct.pack("<I", 77)]), "the unknown kind 77"),
        (b"PK" + bytes(100), "does not begin as a GGUF file"),
        (b"GGUF" + struct.pack("<I", 9), "version 9"),
    ],
)
def test_a_header_that_lies_is_refused_at_once(tmp_path, content, why):
    """No number in a file makes the reader work longer than the file is."""
    path, began = tmp_path / "a.gguf", time.process_time()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_header(path)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 300_000) + bytes(30_000_000), "300000 keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 300_000, 0) + bytes(30_000_000), "300000 tensors"),
        (gguf_header(tensors=((1,) * 5,)), "tensor t0 has 5 dimensions"),
        (gguf_header(**{"general.alignment": 0}), "general.alignment=0"),
        (gguf_header(**{"general.alignment": 48}), "general.alignment=48"),
    ],
)
def test_a_header_that_no_model_has_is_refused(tmp_path, content, why):
    """More keys and tensors than readers pass in minutes, and sizes that ggml does not have."""
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_header(path)
