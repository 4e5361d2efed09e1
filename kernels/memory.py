"""Memory for pages: large arrays that are read at random places; and the errors that say there is none."""

import ctypes
import errno
import mmap
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

SMALLEST = 4 << 20  # bytes from which huge pages can matter: two of them


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor; on a CPU in huge pages, where the operating system offers them on demand.

    Pages of a cache lie anywhere in their pool. In the operating system's own pages of 4 KiB, nearly every one of them
    costs a walk of the address tables; in those of 2 MiB few do. Values are the same either way.
    """
    made = torch.empty(*shape, dtype=dtype, device=device)
    if made.device.type == "cpu" and made.nbytes >= SMALLEST and (advise := _madvise()):
        begin = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        advise(begin, made.data_ptr() + made.nbytes - begin, mmap.MADV_HUGEPAGE)  # refused: ordinary pages, as before
    return made


def free_bytes(device: torch.device | str) -> int | None:
    """Bytes that can still be allocated on a GPU, unused memory of torch's allocator included.

    None for main memory, where the operating system decides.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device | str, work: Callable[[], object]) -> int:
    """Bytes that a call takes on a GPU at its worst moment, beyond what was taken before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


# torch has a class of its own for a GPU alone. Its allocator for CPUs, libraries below it, and older versions raise a
# RuntimeError that differs from others only by these words.
_OUT_OF_MEMORY = (
    "can't allocate memory",  # torch's allocator for CPUs on Linux
    "not enough memory",  # the same elsewhere
    "out of memory",  # CUDA and HIP
    "ALLOC_FAILED",  # cuBLAS, cuDNN and cuSPARSE
    "bad_alloc",  # the standard library of C++
)


def is_out_of_memory(error: BaseException) -> bool:
    """Says of an error that there was no memory, on whatever device and from whatever library."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's madvise, on Linux."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


def first_line(error: BaseException) -> str:
    """The first line of what an error says; torch's go on with the stack of its own code."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
