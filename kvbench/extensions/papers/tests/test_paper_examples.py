"""The examples that papers draw, held to what their texts say of them."""

import pytest

from kvbench.cli.main import main
from kvbench.extensions.papers import examples, papers


def test_diffkvs_requests_take_the_bytes_that_the_paper_says():
    """Figure 1 and section 1: 80 %, 50 %, head A 25 and 12.5 %, head B 30 and 15 %, 20.6 % in all."""
    pruned, int8, head_a, head_b, both, *rest = examples.diffkv_bytes()
    assert pruned.endswith("80 % of the FP16 cache") and int8.endswith("50 %")
    assert "keys 25 %, values 12.5 %" in head_a and "keys 30 %, values 15 %" in head_b
    assert both.endswith(f" {(25 + 12.5 + 30 + 15) / 4:.4g} %") and "20.6" in both
    assert "1 high, 4 low, 0 pruned" in rest[0] and "2 pruned" in rest[1]


def test_diffkvs_request_of_eight_tokens_on_the_stores_pages():
    """Figure 6: pages 5 to 8 and 9 to 12 are reserved; one high page of head A and two of B stay, one low page each."""
    reserved, planned, low, exact = examples.diffkv_pages()
    assert "[5, 6, 7, 8] and [9, 10, 11, 12]" in reserved and "none free" in reserved
    assert "high [5] and [9, 10]" in planned and "[6, 7, 8, 11, 12]" in planned
    assert "[6] and [7]" in low and "rows [5, -, -, 6] and [9, 10, -, 7]" in low
    assert low.endswith("free [8, 11, 12]"), "three pages come back, as in the figure (6, 7 and 11 there)"
    assert "high [5] and [6, 7]; low [8] and [9]" in exact and exact.endswith("5 and 5")


def test_kv_compress_frees_two_blocks_of_the_first_head():
    """Figure 5: of heads with five and two KVs on blocks of two both blocks come from the first, a third from the
    second; what stays are the largest metrics, in whole blocks."""
    before, gone, after, third = examples.kv_compress_blocks()
    assert "[0, 1, 2] and [3]" in before
    assert "KVs [0, 1, 3] of head 1 and [] of head 2" in gone, "5 mod 2 = 1 and one block of two, the smallest"
    assert "blocks then [0] and [3], freed [1, 2]" in after and "[[0.7, 0.6], [0.5, 0.4]]" in after
    assert third.endswith("head 2")


def test_block_tables_of_heads():
    """Figure 3: twelve blocks of one head each; six stay when heads hold 6, 2, 4 and no tokens."""
    shared, per_head, evicted = examples.kv_compress_layouts()
    assert "3 entries" in shared and "table [4, 3]" in per_head and "12 blocks" in per_head
    assert "in 6 blocks" in evicted and "hold 12" in evicted


@pytest.mark.parametrize(
    ("name", "evicts", "bits"),
    [
        ("AttentionSink", True, 16),
        ("FastGen", True, 16),
        ("KVQuant", False, 4),
        ("KIVI", False, 2),
        ("MiniKV", True, 2),
    ],
)
def test_approaches(name, evicts, bits):
    """MiniKV's table 2 says the same of these."""
    (line,) = [one for one in examples.minikv_approaches() if one.startswith(f"{name}:")]
    assert ("evicts nothing" not in line) == evicts and f", {bits} bits," in line


def test_every_example_is_an_entrys_and_is_printed(capsys):
    """By `kvbench paper`, which runs no model for it."""
    named = {entry.example for paper in papers.every() for entry in paper.entries if entry.example}
    assert named == set(examples.EXAMPLES)
    assert main(["paper", "diffkv", "figure=6"]) == 0
    assert "[5, 6, 7, 8] and [9, 10, 11, 12]" in capsys.readouterr().out
    assert main(["paper", "leankv", "figure=5", "plan=true"]) == 0
    assert "checked example" in capsys.readouterr().out
