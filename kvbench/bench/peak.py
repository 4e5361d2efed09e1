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


class Watermark:
    """The largest resident memory of this process since `reset`, or of the GPU's allocator.

    Raises:
        OSError: The system keeps no resettable mark (it needs Linux's /proc/self/clear_refs).
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def reset(self) -> int:
        """Forgets earlier peaks; returns the bytes in use now."""
        if self.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")

    def peak(self) -> int:
        """The largest number of bytes since then."""
        return torch.cuda.max_memory_allocated(self.device) if self.device != "cpu" else _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(order: dict) -> int:
    """Peak bytes of one prompt.

    Args:
        order: model, device, context, name (a method's string), kind (transformers' own cache, or None), kernels,
            threads; and chunk, tokens of the prompt that are read at once (None: all).
    """
    torch.set_num_threads(order["threads"])
    model = choices.make_model(order["model"], order["device"])
    text = choices.sample_tokens(model, 1, order["context"])[0]
    mark = Watermark(order["device"])
    decoder: Decoder
    if order["kind"]:
        decoder = OwnDecoder(model, order["kind"])
    else:
        reads = {"context": order["context"], "chunk": order.get("chunk"), "kernels": order["kernels"]}
        decoder = StoreDecoder(model, order["name"], rows=1, new_tokens=1, **reads)
    decoder.prefill([text[:WARM_TOKENS]])
    decoder.clear()
    before = mark.reset()
    decoder.prefill([text])
    return mark.peak() - before


if __name__ == "__main__":
    print(json.dumps({"peak_bytes": main(json.loads(sys.argv[1]))}))
