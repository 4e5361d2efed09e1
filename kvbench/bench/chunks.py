"""Reads one prompt at once and in chunks, and prints what each form holds at its worst moment, as JSON.

`python -m kvbench.bench.chunks '{"method": "snapkv budget=0.25", "context": 16384, "chunk": 512}'`
"""

import json
import sys

import torch

from kvbench.bench import choices
from kvbench.engine.runner import Runner
from kvbench.sizing.live import LiveBytes

MODEL = "random preset=tiny max_tokens=1000000"


def main(order: dict) -> dict[str, dict[str, int]]:
    """Bytes of both forms, of all tensors alive at the worst moment but the weights, and of the ledger: for a method's
    string, so many tokens of a random context, and a chunk; of a small random model by default."""
    model = choices.make_model(order.get("model", MODEL), order.get("device", "cpu"))
    make = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, 256, (order["context"],), generator=make).tolist()
    found = {}
    for name, chunk in (("at_once", None), ("in_chunks", order["chunk"])):
        runner = Runner(model, choices.make_method(order["method"]), chunk=chunk)
        runner.reserve(rows=1, prompt_tokens=len(prompt), new_tokens=1)
        with LiveBytes() as live:
            row, _ = runner.read(prompt)
        ledger, _ = runner.store.ledger.report(row)
        found[name] = {"alive_bytes": live.peak_bytes, **{key: ledger[key] for key in ("peak_bytes", "resident_bytes")}}
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1])), indent=2))
