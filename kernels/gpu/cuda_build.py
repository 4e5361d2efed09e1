"""Decode attention in CUDA C++ (GPU backend): compiles its source with NVRTC.

CUDA builds of torch include NVRTC. There is one build per source, form and target.
"""

import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from kvbench.kernels.cpu.build import BuildError, cache_dir
from kvbench.kernels.gpu.cuda_call import HEADERS, MAIN, SOURCE_DIR
from kvbench.kernels.gpu.cuda_form import Form

OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
KERNELS = ("kvb_plan", "kvb_decode", "kvb_scores")
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@cache
def nvrtc() -> ctypes.CDLL:
    """NVIDIA's run-time compiler: of the packages that torch depends on, else of the system.

    Raises:
        BuildError: There is none.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    paths = [str(path) for folder in folders for name in _NAMES for path in sorted(folder.glob(f"*/lib/{name}"))]
    for path in [*paths, *_NAMES]:
        try:
            # NVRTC opens its library of builtins by name, and a package's folder is on no path of the loader.
            for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*") if path in paths else ():
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise BuildError("NVRTC is not there (libnvrtc.so); install nvidia-cuda-nvrtc")


def nvrtc_version() -> str:
    """Its version, such as 13.0."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _checked(nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def _checked(status: int, name: str) -> None:
    if status:
        say = nvrtc().nvrtcGetErrorString
        say.restype = ctypes.c_char_p
        raise BuildError(f"{name}: {say(status).decode()}")


def compiled(form: Form, target: str) -> bytes:
    """The kernels of a form for a target such as sm_90, as a cubin; from the cache where it was built before.

    Raises:
        BuildError: There is no NVRTC, it failed (with the end of its output), or the cache cannot be written.
    """
    sources = {name: (SOURCE_DIR / name).read_text() for name in (MAIN, *HEADERS)} | {"form.h": form.header(target)}
    parts = [*(f"{name}\0{text}" for name, text in sorted(sources.items())), target, nvrtc_version(), *OPTIONS]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    try:
        path = cache_dir() / f"decode-{target}-{key}.cubin"
        if path.is_file() and (built := _intact(path.read_bytes())):
            return built
        built = _compile(sources, target)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".build-", delete=False) as file:
            file.write(hashlib.sha256(built).digest() + built)
        os.replace(file.name, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        raise BuildError(
            f"the compiled kernels cannot be stored: {error}; set KVBENCH_CACHE to a folder that can be written"
        ) from error
    return built


def compile_parallel(forms: Iterable[Form], target: str, workers: int) -> list[str]:
    """Compiles forms by threads into the cache; returns what could not be compiled, with the reason."""

    def build(form: Form) -> str:
        try:
            compiled(form, target)
        except BuildError as error:
            return f"{form}: {error}"
        return ""

    with ThreadPoolExecutor(workers) as pool:
        return [reason for reason in pool.map(build, forms) if reason]


def _intact(stored: bytes) -> bytes:
    """Payload of a cached build, which follows its digest; empty if the digest does not match."""
    digest, built = stored[:32], stored[32:]
    return built if hashlib.sha256(built).digest() == digest else b""


def _compile(sources: dict[str, str], target: str) -> bytes:
    library, program = nvrtc(), ctypes.c_void_p()
    included = {name: text for name, text in sources.items() if name != MAIN}
    texts = (ctypes.c_char_p * len(included))(*(text.encode() for text in included.values()))
    names = (ctypes.c_char_p * len(included))(*(name.encode() for name in included))
    _checked(
        library.nvrtcCreateProgram(
            ctypes.byref(program), sources[MAIN].encode(), MAIN.encode(), len(included), texts, names
        ),
        "nvrtcCreateProgram",
    )
    try:
        wanted = [option.encode() for option in (f"--gpu-architecture={target}", *OPTIONS)]
        options = (ctypes.c_char_p * len(wanted))(*wanted)
        status = library.nvrtcCompileProgram(program, len(wanted), options)
        if status:
            said = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode(errors="replace")
            raise BuildError(f"NVRTC cannot compile {MAIN} for {target}: {said.strip()[-800:]}")
        return _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: Callable[..., int], get: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    """Compiler log or cubin of an NVRTC program."""
    size = ctypes.c_size_t()
    _checked(size_of(program, ctypes.byref(size)), "NVRTC")
    room = ctypes.create_string_buffer(size.value)
    _checked(get(program, room), "NVRTC")
    return room.raw
