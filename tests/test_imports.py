"""kvbench works from a clone, from an editable install and from a wheel, beside a distribution called kernels."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from places import ROOT

# Folders of the repository -> where they live as packages.
SOURCES = {"kvbench": "kvbench", "kernels": "kvbench/kernels", "methods": "kvbench/methods", "conf": "kvbench/conf"}
DATA_SUFFIXES = {".py", ".typed", ".csv", ".jinja", ".yaml", ".txt", ".json", ".cpp", ".h"}


def source_files(root):
    """Lists every file that belongs to the installed package, relative to the repository root."""
    files = (path for folder in SOURCES for path in (root / folder).rglob("*") if path.suffix in DATA_SUFFIXES)
    return sorted(path.relative_to(root) for path in files if "__pycache__" not in path.parts)


def installed_path(file):
    """Returns where a repository file lies in a wheel: kernels/pool.py -> kvbench/kernels/pool.py."""
    return Path(SOURCES[file.parts[0]], *file.parts[1:])


def module_name(file):
    """Returns the dotted name of a repository file: kernels/pool.py -> kvbench.kernels.pool."""
    parts = installed_path(file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def printed(script, *words, cwd=ROOT, **environment):
    """Returns what a fresh interpreter prints for a script."""
    command, environment = [sys.executable, "-c", script, *words], os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def within(name, *packages):
    """Returns True when a dotted name is one of the packages or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


# Three ways of importing.

# Runs in a process of its own. Its argument says where everything must come from, which modules to import (methods,
# kernels), which to find without running them (the harness, which imports far more), and which data files to find.
PROBE = """
import importlib, importlib.resources, importlib.util, json, pathlib, sys
home, imported, found, data = json.loads(sys.argv[1])
import kvbench
assert pathlib.Path(kvbench.__file__).resolve().is_relative_to(home), kvbench.__file__
for name in imported:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).resolve().is_relative_to(home), module.__file__
for name in found:
    spec = importlib.util.find_spec(name)
    assert spec is not None and pathlib.Path(spec.origin).resolve().is_relative_to(home), (name, spec)
for package, file in data:
    assert importlib.resources.files(package).joinpath(file).is_file(), (package, file)
print(len(imported), len(found), len(data))
"""


def run_probe(home, options, prelude="", cwd=None):
    """Imports everything in a fresh interpreter; `home` is where every module must come from."""
    files = source_files(ROOT)
    modules = [(file, module_name(file)) for file in files if file.suffix == ".py" and file.stem != "__main__"]
    imported = [name for _, name in modules if within(name, "kvbench.kernels", "kvbench.methods")]
    if importlib.util.find_spec("triton") is None:  # an extra: without it these are only found
        imported = [name for name in imported if not name.startswith("kvbench.kernels.gpu.")]
    found = [name for _, name in modules if name not in imported]
    data = [("kvbench.conf", str(Path(*file.parts[1:]))) for file in files if file.parts[0] == "conf"]
    assert len(imported) > 8 and len(found) > 8 and len(data) > 8
    argument = json.dumps([str(home), imported, found, data])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [sys.executable, *options, "-c", prelude + PROBE, argument]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(imported)), str(len(found)), str(len(data))]


# -S keeps .pth files out, and with them an editable kvbench of this environment; libraries are added by their path.
ISOLATED = ("-I", "-S")
LIBRARIES = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"


@pytest.mark.exhaustive  # every default run imports from the root of a clone
def test_clone_imports_from_its_root():
    """In a clone, with its root as the working folder, root folders are kvbench's subpackages."""
    # Not isolated: the working folder is what makes a clone importable. It comes before any installed copy.
    run_probe(ROOT, (), cwd=ROOT)


@pytest.fixture(scope="module")
def clean_copy(tmp_path_factory):
    """Gives a copy of what a build needs, so that no build output lands in the repository and none of its is used."""
    copy = tmp_path_factory.mktemp("folder") / "kvbench"
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def pip(*arguments):
    """Runs pip without any network or build environment."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_editable_install_imports_from_anywhere(clean_copy, tmp_path):
    """An editable install finds every part in the clone it was made from, from another working folder and from the one
    that holds the clone, where a folder called kvbench is no package."""
    target = tmp_path / "site"
    pip("install", "--editable", str(clean_copy), "--target", str(target))
    # The target first: an environment with an editable kvbench of its own has a finder module of the same name.
    prelude = f"import site; site.addsitedir({str(target)!r})\n" + LIBRARIES
    run_probe(clean_copy, ISOLATED, prelude, cwd=tmp_path)
    folder = clean_copy.parent
    run_probe(clean_copy, ISOLATED, prelude + f"sys.path.insert(0, {str(folder)!r})\n", cwd=folder)


@pytest.mark.exhaustive
def test_wheel_holds_and_imports_everything(clean_copy, tmp_path):
    """A wheel holds every module and data file of the repository, and imports without the repository."""
    pip("wheel", str(clean_copy), "--wheel-dir", str(tmp_path))
    (wheel,) = tmp_path.glob("kvbench-*.whl")
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        held = {Path(name) for name in archive.namelist() if ".dist-info" not in name}
        archive.extractall(target)
    expected = {installed_path(file) for file in source_files(clean_copy)}
    assert held == expected, f"missing: {sorted(expected - held)}; not expected: {sorted(held - expected)}"
    run_probe(target, ISOLATED, LIBRARIES + f"sys.path.insert(0, {str(target)!r})\n", cwd=tmp_path)


# The root folder called kernels and the distribution of that name.


def test_another_kernels_package_wins_over_the_root_folder(tmp_path):
    """With the root as the working folder, an installed distribution called kernels is what `import kernels` finds."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = 'theirs'\n")
    script = "import sys, kernels, kvbench.kernels.codes; assert sys.path[0] == ''; print(kernels.__version__)"
    assert printed(script, PYTHONPATH=str(tmp_path)) == "theirs\n"


@pytest.mark.exhaustive
def test_transformers_works_with_the_root_as_working_folder():
    """transformers does not take the root folder called kernels for the distribution."""
    script = (
        "from transformers.utils import is_kernels_available\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)\n"
        "LlamaForCausalLM(LlamaConfig(**sizes))\n"
        "print(is_kernels_available())\n"
    )
    assert printed(script) == printed(script, cwd="/")


# Runs in a process of its own, which behaves as if some distributions were not installed: neither their modules nor
# their metadata are found.
BARE = """
import importlib, importlib.machinery, json, sys
absent, modules = map(set, json.loads(sys.argv[1]))
finder = importlib.machinery.PathFinder


class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in absent else finder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*given, **named):
        found = finder.find_distributions(*given, **named)
        return (each for each in found if each.metadata["Name"].lower().replace("-", "_") not in absent)


sys.meta_path[:] = [Hiding if each is finder else each for each in sys.meta_path]
for name in sorted(modules):
    importlib.import_module(name)
from kvbench.runs import choices
from kvbench.engine.runner import Runner

model = choices.make_model("random preset=tiny dtype=float32", "cpu")
for method in ("diffkv window=8", "kivi residual_tokens=32 group=32"):
    runner = Runner(model, choices.make_method(method), backend="torch")
    runner.reserve(rows=1, prompt_tokens=20, new_tokens=2)
    print(len(runner.generate(range(1, 21), 2)[1]))

from pathlib import Path
from kvbench.extensions.bench.evidence_gpu import STAGES, words_of
from kvbench.kernels.bench.bench import read_words

for stage in STAGES:
    for dry in (False, True):
        _, _, module, *words = words_of(stage, Path(), dry)
        if hasattr(found := importlib.import_module(module), "Settings"):
            read_words(found.Settings, words)
assert not absent & {name.partition(".")[0] for name in sys.modules}
"""
# What kvbench depends on beyond what a machine that was made for torch and transformers has.
BEYOND_TORCH = {
    "hydra", "hydra_core", "omegaconf", "antlr4", "lm_eval", "datasets", "pandas", "gguf", "accelerate",
    "matplotlib", "rich", "math_verify", "rapidfuzz", "scipy", "pytest",
}  # fmt: skip
BENCHES = ("attention", "prefill", "manager")


@pytest.mark.exhaustive
def test_a_machine_with_torch_and_transformers_alone_measures():
    """Kernels, cache, engine, methods, benches and random models need no library beyond torch, triton and
    transformers: everything of them is imported, two methods answer, and the settings of all stages of `make gpu` are
    read, where the others are not installed."""
    with_triton = importlib.util.find_spec("triton") is not None
    rooms = [
        "kvbench.kernels",
        "kvbench.cache",
        "kvbench.engine",
        "kvbench.methods",
        "kvbench.models",
        "kvbench.extensions.bench",
    ]
    names = [module_name(file) for file in source_files(ROOT) if file.suffix == ".py"]
    # The command line, and what draws: they need the settings' library and matplotlib.
    shown = {"kvbench.extensions.bench.command", "kvbench.extensions.bench.show"}
    wanted = [name for name in names if within(name, *rooms) and name not in shown]
    wanted = [name for name in wanted if with_triton or not within(name, "kvbench.kernels.gpu")]
    assert {f"kvbench.kernels.bench.{name}" for name in BENCHES} < set(wanted) and "kvbench.engine.engine" in wanted
    assert printed(BARE, json.dumps([sorted(BEYOND_TORCH), wanted]), PYTHONPATH=str(ROOT)) == "2\n2\n"
