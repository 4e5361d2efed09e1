"""kvbench: compares KV-cache compression methods on real pages.

From Python: `kvbench.load_model(...)` and `kvbench.Runner(model, method)`; see README.md.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.engine.runner import Runner
    from kvbench.models.load import load_model

__all__ = ["Runner", "__version__", "load_model"]
__version__ = "0.1.0"

# In a clone `methods/`, `kernels/` and `conf/` sit in the repository root, beside this package: appending the root
# makes `kvbench.methods` and the others resolve there. In a wheel they are inside the package and no pyproject.toml is
# beside it.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))
del _root


def __getattr__(name: str) -> object:
    """What this package offers, imported when it is asked for: the command line answers without torch."""
    if name == "Runner":
        from kvbench.engine.runner import Runner

        return Runner
    if name == "load_model":
        from kvbench.models.load import load_model

        return load_model
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
