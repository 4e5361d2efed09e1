"""GPU backend, decode attention in CUDA C++: loads compiled kernels onto a card and launches them, through libcuda."""

import ctypes
from functools import cache
from typing import Any

import torch

from kvbench.kernels.cpu.build import BuildError
from kvbench.kernels.gpu.cuda_build import KERNELS, compiled
from kvbench.kernels.gpu.cuda_call import Call
from kvbench.kernels.gpu.cuda_form import BLOCK, WARPS, Form

_MOST_SHARED, _CARVEOUT = 8, 9  # of CUfunction_attribute
_DECODE_THREADS = 32 * (WARPS + 1)
_PLAN_BYTES = 64  # of shared memory, for the sums of its warps
_LIBRARY = "libcuda.so.1"


class LaunchError(RuntimeError):
    """The driver refused a call."""


@cache
def libcuda() -> ctypes.CDLL:
    """The driver's library.

    Raises:
        BuildError: There is none.
    """
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise BuildError(f"the driver's library {_LIBRARY} cannot be loaded ({error})") from error


class Driver:
    """Calls of libcuda that raise where it returns an error.

    Args:
        library: With the functions of libcuda.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *arguments: object) -> None:
        """Calls a function.

        Raises:
            LaunchError: With the driver's name and description of the error.
        """
        if status := getattr(self._library, name)(*arguments):
            said = [ctypes.c_char_p() for _ in range(2)]
            for text, get in zip(said, ("cuGetErrorName", "cuGetErrorString"), strict=True):
                getattr(self._library, get)(status, ctypes.byref(text))
            words = ": ".join((text.value or b"").decode() for text in said if text.value) or "an unknown error"
            raise LaunchError(f"{name} failed with {words} ({status})")


class CudaKernels:
    """The kernels of one form on one card, launched on torch's current stream there.

    Args:
        form: The form that they are built for.
        device: The card.
        library: With the functions of libcuda; None = the driver's.
        built: The cubin; None = compiled for the card, or from the cache.

    Attributes:
        shared_bytes: Shared memory of a block of the decode kernel, bytes.
        blocks: Blocks of the decode kernel that the card holds at once.

    Raises:
        BuildError: They cannot be compiled or loaded.
    """

    def __init__(self, form: Form, device: torch.device, *, library: Any = None, built: bytes | None = None) -> None:
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        target = f"sm_{properties.major}{properties.minor}"
        built = compiled(form, target) if built is None else built
        self._driver = Driver(libcuda() if library is None else library)
        try:
            with torch.cuda.device(device):
                self._load(built, properties.multi_processor_count)
        except LaunchError as error:
            raise BuildError(f"the kernels for {target} cannot be loaded: {error}") from error

    def _load(self, built: bytes, processors: int) -> None:
        call, at = self._driver, ctypes.byref
        call("cuInit", 0)
        device, self._context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        call("cuDeviceGet", at(device), ctypes.c_int(index))
        call("cuDevicePrimaryCtxRetain", at(self._context), device)
        call("cuCtxSetCurrent", self._context)
        call("cuModuleLoadData", at(module), ctypes.c_char_p(built))
        functions = [ctypes.c_void_p() for _ in KERNELS]
        for function, name in zip(functions, KERNELS, strict=True):
            call("cuModuleGetFunction", at(function), module, name.encode())
        self._plan, self._decode, self._scores = functions
        where, size, sizes = ctypes.c_uint64(), ctypes.c_size_t(), (ctypes.c_int * 2)()
        call("cuModuleGetGlobal_v2", at(where), at(size), module, b"kvb_sizes")
        call("cuMemcpyDtoH_v2", sizes, where, ctypes.c_size_t(ctypes.sizeof(sizes)))
        self.shared_bytes, of_call = sizes
        assert of_call == ctypes.sizeof(Call), "Call differs from the struct in csrc/call.h"
        call("cuFuncSetAttribute", self._decode, _MOST_SHARED, ctypes.c_int(self.shared_bytes))
        call("cuFuncSetAttribute", self._decode, _CARVEOUT, ctypes.c_int(100))
        each = ctypes.c_int()
        call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", at(each), self._decode, ctypes.c_int(_DECODE_THREADS),
            ctypes.c_size_t(self.shared_bytes),
        )  # fmt: skip
        self.blocks = max(1, each.value) * processors

    def _launch(self, kernel: ctypes.c_void_p, call: Call, blocks: int, threads: int, shared_bytes: int) -> None:
        """Launches a kernel, whose only argument is the call; the driver copies it at once."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        sizes = [ctypes.c_uint(x) for x in (blocks, 1, 1, threads, 1, 1, shared_bytes)]
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with torch.cuda.device(self._device):
            self._driver("cuCtxSetCurrent", self._context)  # a new thread has none
            self._driver("cuLaunchKernel", kernel, *sizes, stream, arguments, None)

    def plan(self, call: Call, layers: int) -> None:
        self._launch(self._plan, call, layers, BLOCK, _PLAN_BYTES)

    def decode(self, call: Call) -> None:
        self._launch(self._decode, call, self.blocks, _DECODE_THREADS, self.shared_bytes)

    def scores(self, call: Call, blocks: int) -> None:
        if blocks:
            self._launch(self._scores, call, blocks, BLOCK, 0)


@cache
def cuda_kernels(form: Form, device: torch.device) -> CudaKernels:
    """The kernels of a form on a card, loaded once per process.

    Raises:
        BuildError: They cannot be compiled or loaded.
    """
    return CudaKernels(form, device)
