"""kvbench: compares KV-cache compression methods on real pages."""

from pathlib import Path

__version__ = "0.1.0"

# In a clone `methods/`, `kernels/` and `conf/` sit in the repository root, beside this package: appending the root
# makes `kvbench.methods` and the others resolve there. In a wheel they are inside the package and no pyproject.toml is
# beside it.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))
del _root
