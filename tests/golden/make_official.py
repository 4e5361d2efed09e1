"""Writes official.json: small tensors and what the methods' official code makes of them; run by hand where that is.

`python tests/golden/make_official.py KVPRESS RKV > tests/golden/official.json`: KVPRESS is the folder of NVIDIA/kvpress
that holds its package, RKV a checkout of Zefan-Cai/R-KV.
"""

import importlib
import json
import sys
import types
from pathlib import Path

import torch

HEADS, GROUP, LENGTH, DIM, WIDTH = 2, 2, 21, 4, 6


def package(name: str, folder: Path) -> None:
    """Makes a package's modules importable without its `__init__`, which imports more than is needed."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]


def press(module: str, name: str):
    """A press of kvpress."""
    return getattr(importlib.import_module(f"kvpress.presses.{module}"), name)


def rounded(x: torch.Tensor) -> list:
    """A tensor for the file."""
    return [rounded(y) for y in x] if x.dim() else round(float(x), 7)


def main() -> None:
    """Draws the tensors, runs the code, prints the file."""
    package("kvpress", Path(sys.argv[1]) / "kvpress")
    package("kvpress.presses", Path(sys.argv[1]) / "kvpress" / "presses")
    package("rkv", Path(sys.argv[2]) / "rkv")
    package("rkv.compression", Path(sys.argv[2]) / "rkv" / "compression")
    for name in ("cal_similarity", "compute_attention_scores"):  # which its `__init__` takes from there
        setattr(sys.modules["rkv.compression"], name, getattr(importlib.import_module("rkv.utils"), name))
    make = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=make) * 1000).round() / 1000

    k, v, plain_q = draw(HEADS, LENGTH, DIM), draw(HEADS, LENGTH, DIM), draw(HEADS * GROUP, LENGTH, DIM)
    k[1, 5], k[1, 9] = k[1, 2], k[1, 2] * 1.5  # repetitions, for R-KV
    weight = draw(WIDTH, HEADS * GROUP * DIM)
    inv_freq = torch.tensor([1.0, 0.1])

    def angles(x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turn = (position[0][:, None] * inv_freq).repeat(1, 2)
        return turn.cos()[None], turn.sin()[None]

    config = types.SimpleNamespace(
        num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS, head_dim=DIM, hidden_size=WIDTH
    )
    layer = types.SimpleNamespace(
        config=config,
        head_dim=DIM,
        num_key_value_groups=GROUP,
        rotary_emb=angles,
        q_proj=lambda hidden: hidden,
        o_proj=types.SimpleNamespace(weight=weight),
    )
    hidden = plain_q.transpose(0, 1).reshape(1, LENGTH, -1)
    cos, sin = angles(k, torch.arange(LENGTH)[None])
    q = plain_q * cos + torch.cat([-plain_q[..., DIM // 2 :], plain_q[..., : DIM // 2]], -1) * sin
    named = {"position_embeddings": (cos, sin)}

    def score(scorer) -> list:
        return rounded(scorer.score(layer, hidden, k[None], v[None], None, named)[0])

    snap = press("snapkv_press", "SnapKVPress")(window_size=3, kernel_size=3, compression_ratio=1 - 11.5 / LENGTH)
    four = press("snapkv_press", "SnapKVPress")(window_size=4, kernel_size=1, compression_ratio=0.4)
    chunk = press("chunkkv_press", "ChunkKVPress")(press=four, chunk_length=4)
    short = LENGTH - 1  # of which the window is the last chunk
    told = torch.arange(LENGTH, dtype=torch.float32)[None, None, :, None].expand(1, HEADS, -1, DIM)
    cut = {"position_embeddings": (cos[:, :short], sin[:, :short])}
    kept = chunk.compress(layer, hidden[:, :short], k[None, :, :short], v[None, :, :short], None, cut)[0]
    chosen = [int((k[0] - row).abs().sum(-1).argmin()) for row in kept[0, 0]]
    critical = press("criticalkv_press", "CriticalKVPress")(snap, first_stage_ratio=7 / 11)
    r1 = importlib.import_module("rkv.compression.r1_kv").R1KV
    r_kept = r1(budget=11, window_size=3, kernel_size=3, mix_lambda=0.3).update_kv(k[None], q[None, :, -3:], told)[1]
    found = {
        "k": rounded(k),
        "v": rounded(v),
        "q": rounded(q),
        "output_projection": rounded(weight),
        "inv_freq": rounded(inv_freq),
        "keydiff": score(press("keydiff_press", "KeyDiffPress")()),
        "lagkv": score(press("lagkv_press", "LagKVPress")(n_sink=2, lag_size=4)),
        "expected_attention": score(
            press("expected_attention_press", "ExpectedAttentionPress")(n_sink=2, n_future_positions=7, epsilon=0.01)
        ),
        "expected_attention_mean": score(
            press("expected_attention_press", "ExpectedAttentionPress")(
                n_sink=2, n_future_positions=7, use_covariance=False, use_vnorm=False
            )
        ),
        "critical_norm": rounded(critical.vwl1norm(v[None], layer)[0]),
        "critical_kept": sorted_top(torch.tensor(score(critical)), 11),
        "chunkkv_kept": chosen,
        "r_kv_kept": [sorted(int(x) for x in head[:, 0]) for head in r_kept[0]],
    }
    print(json.dumps(found))


def sorted_top(score: torch.Tensor, count: int) -> list:
    """The positions that a ScorerPress keeps."""
    return [sorted(row.topk(count).indices.tolist()) for row in score]


main()
