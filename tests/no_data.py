"""Steps on tensors that have no data, so that nothing of a device could be read back; launches are not run."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.kernels.gpu import backend, decode, pages, table
from kvbench.kernels.reference import quant
from kvbench.methods.duo_attention import DuoAttention
from kvbench.policy import Policy


class NothingOnTheHost(TorchDispatchMode):
    """Fails when an operation brings a result to main memory, takes a tensor from there (a single number is no copy: it
    goes with the launch), or makes the host's numbers a tensor, which a GPU would have to fetch: no step with such a
    copy could be captured."""

    def __enter__(self):
        self.made, torch.tensor = torch.tensor, self._refused
        return super().__enter__()

    def __exit__(self, *ended):
        torch.tensor = self.made
        return super().__exit__(*ended)

    def _refused(self, data, **kwargs):
        raise AssertionError(f"{data} of the host became a tensor")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            is_there = not isinstance(x, torch.Tensor) or x.device.type == "meta"
            alone = is_there or (x.dim() == 0 and function.overloadpacket.__name__ != "_to_copy")
            assert alone, f"{function} takes {tuple(x.shape)} numbers of the host"
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            assert not isinstance(x, torch.Tensor) or x.device.type == "meta", f"{function} put a result on the host"
        return out


def as_if_read(policy: Policy) -> None:
    """What a method brings to the device with its first prompt is there."""
    if isinstance(policy, DuoAttention):
        policy._streams_on(torch.device("meta"))


@contextmanager
def without_data() -> Iterator[None]:
    """A GPU of 132 multiprocessors is asked for, and no table without data stays behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_num_processors", lambda device: 132)
        for name, *modules in (("byte_map", pages, table, backend), ("_numbers", quant)):
            for module in modules:
                patch.setattr(module, name, _made_before(_plain(getattr(module, name))))
        yield


def _plain(made):
    """What makes a table, not what keeps it."""
    return getattr(made, "__wrapped__", made)


def _made_before(make):
    """What makes a table of numbers, as if before the step in which it is asked for."""
    tensor = torch.tensor

    def made(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "tensor", tensor)
            return make(*arguments)

    return made
