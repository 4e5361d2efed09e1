"""kvbench: compares KV-cache compression methods on real pages.

From Python: `run` and `sweep` make and store results, `load`, `table` and `compare` read them, `bytes` counts what a
method would hold, `list_methods` names the methods, `generate` and `compress` put a model over a
compressed cache, and `load_model` and `Runner` are the parts for a loop of one's own. See docs/python.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvbench.config.version import VERSION as __version__

if TYPE_CHECKING:
    from kvbench.api.compress import CompressedCache, compress
    from kvbench.api.generate import Generation, generate
    from kvbench.api.load import load
    from kvbench.api.run import Result, Results, release, run, sweep
    from kvbench.api.stored import bytes, compare, list_methods, table
    from kvbench.engine.runner import Runner
    from kvbench.models.load import load_model

__all__ = [
    "CompressedCache",
    "Generation",
    "Result",
    "Results",
    "Runner",
    "__version__",
    "bytes",
    "compare",
    "compress",
    "generate",
    "load",
    "list_methods",
    "load_model",
    "release",
    "run",
    "sweep",
    "table",
]

# Where each name comes from; imported on access, since the command line works without torch.
_MODULES = {
    "kvbench.api.compress": ("CompressedCache", "compress"),
    "kvbench.api.generate": ("Generation", "generate"),
    "kvbench.api.load": ("load",),
    "kvbench.api.run": ("Result", "Results", "release", "run", "sweep"),
    "kvbench.api.stored": ("bytes", "compare", "list_methods", "table"),
    "kvbench.engine.runner": ("Runner",),
    "kvbench.models.load": ("load_model",),
}


def __getattr__(name: str) -> object:
    """Import public names of this package on access."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    from kvbench.errors import did_you_mean

    hint = "" if name.startswith("_") else did_you_mean(name, __all__)
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}.{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
