"""Bytes of all tensors that are alive, counted as operations make and drop them, on any device, meta included."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the memory behind tensors that operations make while it is on (`with LiveBytes() as live`): alive now, and
    the most at once since the last `restart`.

    A view adds nothing to what it is a view of; what was there before does not count. What an operation needs inside
    itself and gives back before it ends is not seen, such as the blocks of a fused attention.
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
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and _key(made) not in given:
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
