"""Sizes as papers count them: their formulas give their numbers, and runs stand next to them."""

from types import SimpleNamespace

import pytest
from stored import store

from kvbench.extensions.papers import memory, papers
from kvbench.extensions.papers.memory import Size, front

LLAMA2_TOKEN = 2 * 32 * 4096 * 2  # bytes of a token of 32 layers and 4,096 channels in 16 bits


def run(method, **settings):
    """A run as the formulas read it, and its records."""
    records = [
        {"status": "ok", "kept": {"tokens_seen": 40, "slots_per_tier": [60, 30], "slot_ratio": 0.9}}
        | {"ledger": {"fp16_bytes": 40 * LLAMA2_TOKEN}}
    ]
    return SimpleNamespace(method=method, settings=settings, samples={}, record=None), records


@pytest.mark.parametrize(
    ("method", "settings", "printed"),
    [
        ("full", {}, 2.4),
        ("minikv", {"heavy": 0.25, "recent": 0.25}, 0.33),
        ("h2o", {"budget": 0.15, "tier": "fp16"}, 0.32),
    ],
)
def test_minikvs_sizes_are_the_printed_ones(method, settings, printed):
    """Section 5.2: 2.4, 0.33 and 0.32 GB of Llama-2-7B with 4,096 + 512 tokens, in the digits that are printed."""
    _, size = memory.minikv(*run(method, **settings), 512)
    assert size / 1e9 == pytest.approx(printed, abs=0.02 if printed > 1 else 0.0065)


def test_minikvs_shares():
    """KIVI with 2 bits and groups of 16 takes a quarter; a budget holds nothing of the answer; bits of a quantised H2O;
    no longest answer, no size."""
    assert memory.minikv(*run("kivi", bits=2, group=16), 512)[0] == 0.25
    assert memory.minikv(*run("snapkv", budget=0.5), 4096)[0] == 0.25
    assert memory.minikv(*run("h2o", budget=0.5, tier="int4"), 4096)[0] == 0.0625
    assert memory.minikv(*run("h2o", budget=0.5), None) == (None, None)
    assert memory.minikv(*run("h2o", budget="50%seen"), 64)[0] is None, "a paper's share is of the prompt"


def test_diffkvs_and_kv_compresss_shares(monkeypatch):
    """DiffKV: bits of codes, 12 and 6 of 32 in its two levels; what prunes keeps its share. KV-Compress: KVs."""
    monkeypatch.setattr(memory, "tier_names", lambda run, count: ["k8v4", "k4v2"][:count])
    assert memory.diffkv(*run("diffkv"), None)[0] == pytest.approx(0.6 * 12 / 32 + 0.3 * 6 / 32)
    assert memory.diffkv(*run("quest", read_budget="50%seen"), None)[0] == 0.5
    assert memory.diffkv(*run("snapkv", budget=0.25), None)[0] == 0.25
    monkeypatch.setattr(memory, "tier_names", lambda run, count: ["k2v2-channel32", "16-bit buffer"][:count])
    assert memory.diffkv(*run("kivi", bits=2), None)[0] == 0.125
    assert memory.kv_compress(*run("kv_compress"), None)[0] == pytest.approx(0.9)


def test_a_row_has_the_papers_size_and_the_resident_bytes(tmp_path):
    """Of each subset with its longest answer, and of all where the answers are alike; the printed share is the paper's
    of the same model."""
    rules = {"rules": {"qasper_e": {"max_new_tokens": 128}, "lcc_e": {"max_new_tokens": 64}}}
    scores = {"qasper_e": [0.5, 0.25], "lcc_e": [1, 0]}
    known = {"task": "longbench", "model": "Llama-2-7b-chat-hf", "asked": rules}
    full, h2o = (store(tmp_path, name, scores, settings=more, ratio=ratio, **known)
                 for name, more, ratio in (("full", {}, 1.0), ("h2o", {"budget": 0.15}, 0.2)))  # fmt: skip
    paper = papers.find("minikv")
    sizes = memory.sizes(paper, paper.find("table", 1), [("Full FP16", full), ("H2O 15%", h2o), ("KIVI 2bit", None)])
    by = {(one.row, one.subset): one for one in sizes}
    assert len(sizes) == 6 and by["H2O 15%", ""].share is None
    qasper = by["H2O 15%", "qasper_e"]
    assert qasper.share == pytest.approx(0.15 * 4096 / (4096 + 128)) and qasper.resident == pytest.approx(0.2)
    assert qasper.score == pytest.approx(0.375)
    assert len(memory.csv_of(sizes).splitlines()) == 7
    assert "| H2O 15% | longbench | qasper_e | 37.5 | 14.5 |" in memory.markdown("it", sizes)


def test_the_printed_share_is_of_the_same_cell(tmp_path):
    """DiffKV's table 1 prints 19.3 % of GSM8K on Llama3-8B; of another model nothing is said."""
    paper = papers.find("diffkv")
    folders = [store(tmp_path, "diffkv", {"": [1, 0]}, task="gsm8k", model=model) for model in
               ("Meta-Llama-3-8B-Instruct", "tiny")]  # fmt: skip
    sizes = memory.sizes(paper, paper.find("table", 1), [("DiffKV K8V4-K4V2", one) for one in folders])
    assert [one.printed for one in sizes] == [19.3, None]


def test_the_front():
    """A row that another one beats in score at no more size is off it; other tasks are apart."""

    def size(row, score, share, task="a"):
        return Size(row, task, "", score, share, None, None, None)

    sizes = [
        size("x", 0.5, 0.2),
        size("y", 0.4, 0.3),
        size("z", 0.6, 0.3),
        size("u", 0.1, 0.9, "b"),
        size("v", 1, None),
    ]
    assert front(sizes) == [True, False, True, True, None]
