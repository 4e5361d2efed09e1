"""kvbench: compares KV-cache compression methods on real pages.

From Python: `run` and `sweep` make and store results, `load` reads them, `generate` and `compress` put a model over a
compressed cache, and `load_model` and `Runner` are the parts for a loop of one's own. See docs/python.md.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.config.version import VERSION as __version__

if TYPE_CHECKING:
    from kvbench.api.compress import CompressedCache, compress
    from kvbench.api.generate import Generation, generate
    from kvbench.api.load import load
    from kvbench.api.run import Result, Results, release, run, sweep
    from kvbench.engine.runner import Runner
    from kvbench.models.load import load_model

__all__ = [
    "CompressedCache",
    "Generation",
    "Result",
    "Results",
    "Runner",
    "__version__",
    "compress",
    "generate",
    "load",
    "load_model",
    "release",
    "run",
    "sweep",
]

# In a clone `methods/`, `kernels/` and `conf/` sit in the repository root, beside this package: appending the root
# makes `kvbench.methods` and the others resolve there. In a wheel they are inside the package and no pyproject.toml is
# beside it.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))
del _root


# Where each name comes from; imported when it is asked for, since the command line answers without torch.
_HOMES = {
    "kvbench.api.compress": ("CompressedCache", "compress"),
    "kvbench.api.generate": ("Generation", "generate"),
    "kvbench.api.load": ("load",),
    "kvbench.api.run": ("Result", "Results", "release", "run", "sweep"),
    "kvbench.engine.runner": ("Runner",),
    "kvbench.models.load": ("load_model",),
}


def __getattr__(name: str) -> object:
    """What this package offers."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
