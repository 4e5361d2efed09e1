"""Reads one prompt in a process of its own and prints the bytes that this added at its worst moment, as JSON.

`python -m kvbench.bench.peak '{"model": "smollm2-135m", "device": "cpu", "context": 4096, "name": "full", ...}'`
"""

import json
import sys
from pathlib import Path

import torch

from kvbench.bench import choices
from kvbench.bench.decoders import Decoder, OwnDecoder, StoreDecoder

WARM_TOKENS = 32  # threads, scratch memory and compiled kernels are there before the count begins


def reset(device: str) -> int:
    """Forgets earlier peaks of the resident memory of this process, or of the GPU's allocator; returns the bytes in use
    now. Raises OSError where the system keeps no mark that can be reset (it needs Linux's /proc/self/clear_refs)."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(order: dict) -> int:
    """Peak bytes of one prompt: of a model on a device, with a number of threads, so many tokens of context, and a
    method's string with the kernels, or the kind of transformers' own cache."""
    torch.set_num_threads(order["threads"])
    device, context = order["device"], order["context"]
    model = choices.make_model(order["model"], device)
    text = choices.sample_tokens(model, 1, context)[0]
    decoder: Decoder
    if order["kind"]:
        decoder = OwnDecoder(model, order["kind"])
    else:
        decoder = StoreDecoder(model, order["name"], rows=1, context=context, new_tokens=1, kernels=order["kernels"])
    decoder.prefill([text[:WARM_TOKENS]])
    decoder.clear()
    before = reset(device)
    decoder.prefill([text])
    return (torch.cuda.max_memory_allocated(device) if device != "cpu" else _status("VmHWM")) - before


if __name__ == "__main__":
    print(json.dumps({"peak_bytes": main(json.loads(sys.argv[1]))}))
