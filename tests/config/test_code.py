"""What of source code an answer depends on: the libraries that it imports, with their versions."""

import importlib.metadata
import subprocess
import sys

from places import ROOT
from test_packaging import BRIDGED, OPTIONAL

from kvbench.config import code
from kvbench.results import provenance
from kvbench.tasks.taskset import fingerprint

SOURCE = """
import os, math_verify.parser as p
from typing import TYPE_CHECKING
from kvbench.errors import unknown_name
from . import beside
import yaml, nowhere_at_all
if TYPE_CHECKING:
    import torch
else:
    import rapidfuzz
def late():
    from hydra.utils import instantiate
    from tokenizers.models import BPE
"""


def test_imports_of_a_file(tmp_path):
    """Libraries count wherever they are imported, but not Python's own, kvbench, relative ones, those for types alone,
    and those that only hand on."""
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.yaml").write_text("import: torch")
    found = code.imports(sorted(tmp_path.iterdir()))
    assert found == {"math_verify", "yaml", "nowhere_at_all", "rapidfuzz", "tokenizers"}


def test_versions_are_those_of_the_distributions():
    """A library that is called otherwise than its distribution is found too; an unknown one has no version."""
    found = code.versions(["yaml", "math_verify", "nowhere_at_all"])
    names = {"math-verify": "math-verify", "pyyaml": "PyYAML"}
    assert found == {key: importlib.metadata.version(name) for key, name in names.items()} | {"nowhere_at_all": ""}
    assert list(found) == sorted(found)


def test_every_import_of_a_task_or_the_harness_is_installed_or_optional():
    """Every library of the code has a version, but for those that no installation needs."""
    files = [path for folder in ("kvbench", "kernels", "methods") for path in (ROOT / folder).rglob("*.py")]
    files = [path for path in files if "tests" not in path.relative_to(ROOT).parts]
    assert {name for name, version in code.libraries(files).items() if not version} <= {*OPTIONAL, *BRIDGED}
    harness = code.versions(code.imports(provenance.code_files("cpu").values()))
    assert set(harness) == {"gguf", "pyyaml", "tokenizers", "torch", "transformers"}


def test_a_task_counts_the_libraries_that_it_imports(monkeypatch):
    """Another version of what the scorer or the shared modules import moves a task's fingerprint; of what they do not
    import leaves it."""
    real, tasks = code._installed, ROOT / "kvbench" / "tasks"

    def moved_by(library):
        def installed(name):
            return ("x", "another") if name == library else real(name)

        before = {name: fingerprint([], {}, tasks / name) for name in ("mathematics", "longbench", "gsm8k")}
        with monkeypatch.context() as patch:
            patch.setattr(code, "_installed", installed)
            return {name for name, value in before.items() if fingerprint([], {}, tasks / name) != value}

    assert moved_by("math_verify") == {"mathematics"}
    assert moved_by("sympy") == moved_by("antlr4-python3-runtime") == {"mathematics"}  # math-verify's, at any remove
    assert moved_by("rapidfuzz") == {"longbench"}
    assert moved_by("lm_eval") == {"mathematics", "longbench", "gsm8k"}
    assert moved_by("gguf") == moved_by("datasets") == set()


def test_reading_imports_is_light():
    """Neither the hash of the code nor the versions import what they look at."""
    program = (
        "import sys; from pathlib import Path; from kvbench.config import code; "
        "print(code.libraries(Path('kvbench/models').glob('*.py'))); "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert (
        "tokenizers"
        in subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
        ).stdout
    )
