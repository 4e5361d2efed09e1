"""Reads one prompt at once and in chunks, and prints what each form holds at its worst moment, as JSON.

`python -m kvbench.extensions.bench.chunks '{"method": "snapkv budget=0.25", "context": 16384, "chunk": 512}'`
"""

import json
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.engine.runner import Runner
from kvbench.runs import choices

MODEL = "random preset=tiny max_tokens=1000000"


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operations make while it is on (`with LiveBytes() as live`).

    Alive now, and the peak since the last `restart`.

    A view adds nothing to its base; earlier tensors do not count. Memory that an operation allocates and frees inside
    itself is not seen, such as the blocks of a fused attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def restart(self) -> None:
        """Forgets the peak so far."""
        self.peak_bytes = self.now_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and _key(made) not in inputs:
                self._note(made.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            if self._known.pop(key, None) is not None:
                self.now_bytes -= size

        self._known[key] = weakref.ref(storage, gone)
        self.now_bytes += size


def _key(x: Tensor) -> int:
    """The key of the memory behind a tensor while it is alive."""
    return int(x.untyped_storage()._cdata)


def main(order: dict) -> dict[str, dict[str, int]]:
    """Prints bytes of both forms: peak of all tensors alive except the weights, and the ledger's.

    For a method's string, a number of tokens of a random context, and a chunk; of a small random model by default.
    """
    model = choices.make_model(order.get("model", MODEL), order.get("device", "cpu"))
    make = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, 256, (order["context"],), generator=make).tolist()
    result = {}
    for name, chunk in (("at_once", None), ("in_chunks", order["chunk"])):
        runner = Runner(model, choices.make_method(order["method"]), chunk=chunk)
        runner.reserve(rows=1, prompt_tokens=len(prompt), new_tokens=1)
        with LiveBytes() as live:
            row, _ = runner.read(prompt)
        ledger, _ = runner.store.ledger.report(row)
        result[name] = {
            "alive_bytes": live.peak_bytes,
            **{key: ledger[key] for key in ("peak_bytes", "resident_bytes")},
        }
    return result


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1])), indent=2))
