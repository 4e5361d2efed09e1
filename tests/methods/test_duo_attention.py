"""DuoAttention: tables of gates, and heads of two kinds side by side through the real store."""

import pytest
import torch
from omegaconf import OmegaConf
from refusals import refused
from store_helpers import filled, held_positions, make_store, plain_attention, random_layer, step_at

from kvbench.methods.duo_attention import DuoAttention
from kvbench.rules import tables
from kvbench.runs.parts import make_policy
from kvbench.runs.verdict import complaint

DIM = 16
TARGET = "kvbench.methods.duo_attention.DuoAttention"
GATES = [[0.9, 0.1], [0.2, 0.8], [1.0, 0.7]]  # 3 layers x 2 KV heads; the three lowest are 0.1, 0.2 and 0.7


def after_prompt(policy, length: int, total: int = 60, **settings):
    """A store of 3 layers x 2 KV heads that has read `length` tokens, with what was and will be read."""
    tensors = [random_layer(3 * length + layer, 2, 2, total, DIM) for layer in range(3)]
    return *filled(policy, tensors, length, 0.25, **settings), tensors


@pytest.mark.parametrize(
    ("sparsity", "streaming"), [(0.5, [1, 2, 5]), (0.4, [1, 2]), (0.0, []), (1.0, [0, 1, 2, 3, 4, 5]), (None, [1, 2])]
)
def test_the_lowest_gates_stream(sparsity, streaming):
    """Of 20 prompt tokens streaming heads keep 2 sinks and the last 5, the others all; heads counted layer by layer."""
    store, row, _ = after_prompt(DuoAttention(table=GATES, sparsity=sparsity, sinks=2, recent=5), 20, track=("pos",))
    for head, held in enumerate(held_positions(store, row)):
        assert held == ([0, 1, 15, 16, 17, 18, 19] if head in streaming else list(range(20)))


def test_equal_gates_stream_from_the_last_head():
    """Ties go to the later layer, then to the later head."""
    policy = DuoAttention(table=[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], sparsity=0.5, sinks=1, recent=2)
    store, row, _ = after_prompt(policy, 10)
    assert store.holding.slots_per_tier(store.pages.lists_of(torch.tensor([row])))[0].tolist() == [10, 10, 10, 3, 3, 3]


@pytest.mark.parametrize("length", [3, 7, 20])
def test_steps_follow_plain_lists(length):
    """25 steps from prompts below, at and above sinks + recent: kept sets and outputs of both kinds of head."""
    policy = DuoAttention(table=GATES, sinks=2, recent=5, tier="native")
    store, row, tensors = after_prompt(policy, length, track=("pos",))
    for position in range(length, length + 25):
        outs = step_at(store, row, tensors, position, 0.25)
        for layer, (out, (q, k, v)) in enumerate(zip(outs, tensors, strict=True)):
            for head in range(2):
                held = list(range(position + 1))
                if layer * 2 + head in (1, 2, 5):
                    held = sorted({*held[:2], *held[-5:]})
                own = slice(2 * head, 2 * head + 2)
                want = plain_attention(q[own, position], k[head : head + 1, held], v[head : head + 1, held], 0.25)
                assert (out[own] - want).abs().max() < 1e-5
                assert sorted(held_positions(store, row)[layer * 2 + head]) == held
    lists = store.pages.lists_of(torch.tensor([row]))
    kept = {**store.ledger.meters[row].prompt, "tokens_seen": length + 25}
    kept["slots_per_tier"] = [int(count.sum()) for count in store.holding.slots_per_tier(lists)]
    assert complaint(policy, {"kept": kept}) is None
    kept["slots_per_tier"][0] += 1
    assert "3 streaming heads of 7 make" in complaint(policy, {"kept": kept})


@pytest.mark.parametrize("form", ["tab", "comma", "blank", "json"])
def test_a_file_holds_the_gates(tmp_path, form):
    """The authors' form and three others give the same gates, which stand in the settings in place of the path."""
    path = tmp_path / ("gates.json" if form == "json" else "full_attention_heads.tsv")
    mark = {"tab": "\t", "comma": ", ", "blank": "  "}.get(form)
    lines = "\n".join(mark.join(f"{g:.18e}" for g in row) for row in GATES) + "\n" if mark else str(GATES)
    path.write_text(lines)
    policy = make_policy(OmegaConf.create({"_target_": TARGET, "table": str(path)}))
    assert policy.table == tuple(map(tuple, GATES)) and policy == DuoAttention(table=GATES)
    policy.check_model(3, 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gates.tsv", "0.1\t0.2\n0.3\n", "is not one line per layer with one number per KV head"),
        ("gates.tsv", "0.1\tnone\n", "is not one line per layer"),
        ("gates.tsv", "", "is not one line per layer"),
        ("gates.json", "[[1, 0]", "is no JSON"),
        ("gates.json", "[" * 100_000, "is no JSON"),
        ("gates.json", f"[[1{'0' * 400}]]", "is not one line per layer"),
        ("gates.tsv", "1,,2\n3,,4\n", "is not one line per layer"),
        ("gates.tsv", "nan\t0.5\n", "is not one line per layer .*; NaN and infinity are no numbers"),
        ("gates.json", "[[1e999, 1]]", "is not one line per layer"),
        ("gates.tsv", "\udcff", "cannot be read: it is no text"),
        ("gates.tsv", "0 " * 2000, "cannot be read: it has more than 3000 bytes"),
        ("absent.tsv", None, "is no file; give a table of numbers"),
        ("", None, "cannot be read: Is a directory"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, monkeypatch, name, text, message):
    """Ragged lines, words, an empty or a long file, what is no text or no JSON, and what is not there are named."""
    path = tmp_path / name
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", 500_000 if name.endswith("json") else 3000)
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=f"{name} {message}"):
        DuoAttention(table=str(path))


def test_the_table_must_be_the_models():
    """No table and a table of another shape are refused before anything is read, with the shape that fits."""
    with refused("method-misfit", "method.table", "table=null", "3 lines", "2 numbers"):
        make_store(DuoAttention(), num_layers=3, num_q_heads=4, num_kv_heads=2)
    with refused("method-misfit", "method.table", "3 layers x 2 heads", "4 layers x 2 KV heads"):
        make_store(DuoAttention(table=GATES), num_layers=4, num_q_heads=4, num_kv_heads=2)
