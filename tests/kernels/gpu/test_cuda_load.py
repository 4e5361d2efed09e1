"""Decode kernels in CUDA C++ loaded and launched through libcuda, for which a library stands in that records its calls
and runs the kernels' build for this CPU."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from kvbench.kernels.backend import REFERENCE
from kvbench.kernels.cpu.build import BuildError, find_compiler
from kvbench.kernels.device_inputs import filled
from kvbench.kernels.dispatch import get_backend
from kvbench.kernels.format import PageFormat, SlotFormat
from kvbench.kernels.gpu import cuda_build, cuda_load
from kvbench.kernels.gpu.backend import Gpu
from kvbench.kernels.gpu.compile import nvidia_tool
from kvbench.kernels.gpu.cuda_call import Call, _host_library
from kvbench.kernels.gpu.cuda_counts import form_named
from kvbench.kernels.gpu.cuda_form import Form
from kvbench.kernels.gpu.cuda_load import CudaKernels, LaunchError

try:
    find_compiler()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

DEVICE, STREAM, CONTEXT, MODULE = torch.device("cuda:1"), 4711, 99, 7
PROCESSORS, EACH = 2, 3  # multiprocessors of the card, and blocks that lie on one
SIZES, FUNCTIONS = 0xABC, {b"kvb_plan": 1, b"kvb_decode": 2, b"kvb_scores": 3}
FORM = Form(
    tiers=(PageFormat(SlotFormat(64, 4, 4, track=("score", "pos")), 4096),), queries=4, query="bf16", scores=True
)  # fmt: skip


class Libcuda:
    """Records calls as (name, arguments); `fails` names one that returns an error.

    Results are written where the driver would. A launch copies its arguments at once, and runs on this CPU.
    """

    def __init__(self, form: Form, fails: str = "") -> None:
        self.calls: list[tuple] = []
        self._host, self._fails = _host_library(form), fails

    def __getattr__(self, name: str):
        def call(*arguments: object) -> int:
            self.calls.append((name, arguments))
            if name == self._fails:
                return 2
            act = vars(Libcuda).get(f"_{name}")
            return (act(self, *arguments) if act else 0) or 0

        return call

    def named(self, name: str) -> list[tuple]:
        """Arguments of the calls of a function."""
        return [arguments for own, arguments in self.calls if own == name]

    def _cuDevicePrimaryCtxRetain(self, to, device) -> None:
        to._obj.value = CONTEXT

    def _cuModuleLoadData(self, to, image) -> None:
        to._obj.value = MODULE

    def _cuModuleGetFunction(self, to, module, name) -> None:
        assert module.value == MODULE
        to._obj.value = FUNCTIONS[name]

    def _cuModuleGetGlobal_v2(self, where, size, module, name) -> None:
        assert name == b"kvb_sizes"
        where._obj.value, size._obj.value = SIZES, 8

    def _cuMemcpyDtoH_v2(self, to, where, size) -> None:
        assert (where.value, size.value) == (SIZES, 8)
        to[:] = [self._host.kvb_shared_bytes(), ctypes.sizeof(Call)]

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, to, function, threads, shared_bytes) -> None:
        assert (function.value, threads.value, shared_bytes.value) == (2, 160, self._host.kvb_shared_bytes())
        to._obj.value = EACH

    def _cuGetErrorName(self, status, to) -> None:
        to._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"

    def _cuGetErrorString(self, status, to) -> None:
        to._obj.value = b"out of memory"

    def _cuLaunchKernel(self, function, *more) -> None:
        arguments = more[8]
        call = Call.from_buffer_copy(ctypes.string_at(arguments[0], ctypes.sizeof(Call)))
        run = {1: self._host.kvb_run_plan, 2: self._host.kvb_run_decode, 3: self._host.kvb_run_scores}[function.value]
        run(ctypes.byref(call), more[0].value)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """torch as if there were a card; the devices that were made current, in order."""
    current: list[torch.device] = []

    class Current:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.append(torch.device("cuda:0"))

    kind = SimpleNamespace(major=9, minor=0, multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: kind)
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    return current


def launches(library: Libcuda) -> list[tuple]:
    """Function, grid, block, shared bytes and stream of each launch."""
    found = [(function, [x.value for x in more[:8]]) for function, *more in library.named("cuLaunchKernel")]
    return [(function.value, tuple(x[:3]), tuple(x[3:6]), *x[6:]) for function, x in found]


def test_a_step_through_the_driver_equals_the_reference(card):
    """Three launches on torch's stream, with the shared memory that the build asks for; the result is right, so that
    arguments were packed as the source reads them."""
    fmt = FORM.tiers[0]
    pages, tiers = filled(None, [fmt], [torch.tensor([[1, 300], [0, 77]])])
    library = Libcuda(FORM)
    kernels = CudaKernels(FORM, DEVICE, library=library, built=b"\x7fELF\0cubin")
    q = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    want = REFERENCE.paged_decode(q, pages, tiers, None, 0.125, group="max")
    got = Gpu(lambda form, device: kernels).paged_decode(q, pages, tiers, None, 0.125, group="max")
    for a, b in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3, equal_nan=True)
    torch.testing.assert_close(got[2][0], want[2][0].nan_to_num(0.0), rtol=0, atol=2e-3)
    shared, width = kernels.shared_bytes, tiers[0].ids.shape[-1] * fmt.tokens_per_page
    assert launches(library) == [
        (1, (1, 1, 1), (256, 1, 1), 64, STREAM),
        (2, (PROCESSORS * EACH, 1, 1), (160, 1, 1), shared, STREAM),
        (3, (4 * -(-width // 256), 1, 1), (256, 1, 1), 0, STREAM),
    ]
    (image,) = (arguments[1] for arguments in library.named("cuModuleLoadData"))
    assert ctypes.string_at(image, 10) == b"\x7fELF\0cubin"
    assert [(f.value, name, x.value) for f, name, x in library.named("cuFuncSetAttribute")] == [
        (2, 8, shared), (2, 9, 100),  # MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFERRED_SHARED_MEMORY_CARVEOUT
    ]  # fmt: skip
    assert {arguments[0].value for arguments in library.named("cuCtxSetCurrent")} == {CONTEXT}
    assert card[0] == DEVICE and card[-1] == torch.device("cuda:0")  # the caller's device is current again


def test_what_cannot_be_loaded_is_a_build_error(card):
    """With the driver's words for it; so the step falls back."""
    with pytest.raises(BuildError, match="cuModuleLoadData failed with CUDA_ERROR_OUT_OF_MEMORY: out of memory"):
        CudaKernels(FORM, DEVICE, library=Libcuda(FORM, "cuModuleLoadData"), built=b"")


def test_a_launch_that_fails_is_no_wrong_answer(card):
    """It raises, and is known for a lack of memory."""
    from kvbench.kernels.memory import is_out_of_memory

    kernels = CudaKernels(FORM, DEVICE, library=Libcuda(FORM, "cuLaunchKernel"), built=b"")
    with pytest.raises(LaunchError, match="cuLaunchKernel failed with CUDA_ERROR_OUT_OF_MEMORY") as raised:
        kernels.plan(Call(), 3)
    assert is_out_of_memory(raised.value)


def test_a_machine_without_the_driver_decodes_in_triton(monkeypatch: pytest.MonkeyPatch):
    """Said once for all forms and steps, and on record; it is tried once per form."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tried = []

    def build(form: Form, device: torch.device) -> CudaKernels:
        tried.append(form)
        raise BuildError("the driver's library libcuda.so.1 cannot be loaded")

    pages, tiers = filled(None, [FORM.tiers[0]], [torch.tensor([[1, 30]])])
    backend, q = Gpu(build), torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(3)).half()
    with pytest.warns(UserWarning, match="libcuda") as said:
        for _ in range(2):
            got = backend.paged_decode(q, pages, tiers, None, 0.125)
    assert len(said) == len(tried) == 1
    assert backend.decodes == {"triton: the driver's library libcuda.so.1 cannot be loaded"}
    torch.testing.assert_close(got[0], REFERENCE.paged_decode(q, pages, tiers, None, 0.125)[0], rtol=0, atol=4e-3)


def test_the_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    """By its file's name."""
    monkeypatch.setattr(cuda_load, "_LIBRARY", "libcuda-of-nobody.so.1")
    cuda_load.libcuda.cache_clear()
    with pytest.raises(BuildError, match=r"libcuda-of-nobody\.so\.1"):
        cuda_load.libcuda()


def test_sizes_are_in_the_build():
    """What is read from a cubin is what the host's build says, and what ctypes has."""
    try:
        built = cuda_build.compiled(form := form_named("K4V4", 64), "sm_90")
    except BuildError as error:
        pytest.skip(str(error))
    if not (text := nvidia_tool("nvdisasm", binary=built)):
        pytest.skip("triton's package has no nvdisasm here")
    listed = re.search(r"\nkvb_sizes:\n((?:\s*/\*[0-9a-f]+\*/\s+\.byte[^\n]*\n)+)", text)
    assert listed is not None
    found = bytes(int(x, 16) for x in re.findall(r"0x([0-9a-f]{2})\b", re.sub(r"/\*.*?\*/", "", listed[1])))
    shared, call = (int.from_bytes(found[i : i + 4], "little") for i in (0, 4))
    assert (shared, call) == (_host_library(form).kvb_shared_bytes(), ctypes.sizeof(Call))


@pytest.mark.parametrize(("decode", "name"), [("cuda", "triton"), ("torch", "triton"), ("triton", "triton")])
def test_decode_is_a_choice_of_the_gpu_backend(decode: str, name: str, monkeypatch: pytest.MonkeyPatch):
    """Elsewhere it is refused by its name; plain torch on request equals the reference to the bit."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend = get_backend("triton", "cpu", decode)
    assert backend.name == name
    if decode == "triton":
        return
    with pytest.raises(ValueError, match=f"backend.decode={decode}"):
        get_backend("torch", "cpu", decode)
    if decode == "torch":
        pages, tiers = filled(None, [FORM.tiers[0]], [torch.tensor([[1, 30]])])
        q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(3))
        got, want = (each.paged_decode(q, pages, tiers, None, 0.125) for each in (backend, REFERENCE))
        assert torch.equal(got[0], want[0]) and backend.decodes == {"torch"}
