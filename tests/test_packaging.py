"""The package as it says of itself: its libraries, versions, entry points, and the files that sites and tools read."""

import importlib.metadata
import re
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from places import ROOT
from test_house import modules, names_imported

import kvbench

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DECLARED = {Requirement(text).name.lower().replace("_", "-") for text in PROJECT["project"]["dependencies"]}
# Imported only where the machine has them, and declared in extras.
OPTIONAL = {"triton": "gpu", "optuna": "search", "mlflow": "tracking", "wandb": "tracking", "ray": "ray"}
# What a bridge leads to; no extra can name it, since its requirements exclude kvbench's transformers.
BRIDGED = {"kvpress": "methods/kvpress.py"}
PYTHONS = ["3.11", "3.12", "3.13"]


def imported():
    """Library that is neither Python's nor kvbench's -> the modules that import it anywhere."""
    found = {}
    for module, path in modules().items():
        names = names_imported(path.read_text(), module)
        for top in {name.split(".")[0] for name in names} - {"kvbench", *sys.stdlib_module_names}:
            found.setdefault(top, []).append(module)
    return found


def test_every_library_that_is_imported_is_declared():
    """A library that some module imports is a dependency of its own, not one that another happens to bring."""
    owners = importlib.metadata.packages_distributions()
    missing = {}
    for library, where in imported().items():
        names = {name.lower().replace("_", "-") for name in owners.get(library, [library])}
        if not names & DECLARED and library not in {*OPTIONAL, *BRIDGED}:
            missing[library] = where[0]
    assert missing == {}
    for library, extra in OPTIONAL.items():
        assert any(Requirement(text).name == library for text in PROJECT["project"]["optional-dependencies"][extra])


def test_the_roots_are_linked():
    """kvbench/ has a relative link to each root folder that belongs to the package, so that tools see one package. None
    has an __init__.py, so that it never hides a distribution of the same name. The marker that type checkers look for
    lies in the package; a wheel holds every file of it (test_imports)."""
    for name in ("kernels", "methods", "conf"):
        link = ROOT / "kvbench" / name
        assert link.is_symlink() and link.readlink().as_posix() == f"../{name}" and link.is_dir()
        assert not list((ROOT / name).rglob("__init__.py"))
    assert (ROOT / "kvbench" / "py.typed").is_file()


def test_versions_agree():
    """The program, the citation, the changelog and the README name one version."""
    version = PROJECT["tool"]["hatch"]["version"]
    assert re.search(version["pattern"], (ROOT / version["path"]).read_text())["version"] == kvbench.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == kvbench.__version__ and citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license"} <= set(citation)
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert newest == kvbench.__version__
    readme = (ROOT / "README.md").read_text()
    assert f"version = {{{kvbench.__version__}}}" in readme and citation["title"] in readme


def test_pythons_agree():
    """Classifiers, the workflow, the README and `requires-python` name the same Pythons."""
    classified = [text.rpartition(" ")[2] for text in PROJECT["project"]["classifiers"] if ":: 3." in text]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    assert classified == matrix["python"] == PYTHONS
    assert matrix["libraries"] == ["lowest-direct", "highest"]
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    for name in ("README.md", "CONTRIBUTING.md"):
        assert "Python 3.11, 3.12 or 3.13" in " ".join((ROOT / name).read_text().split())
    image = re.search(r"^FROM python:([\d.]+)", (ROOT / "Dockerfile").read_text(), re.M)[1]
    assert image in PYTHONS


def test_torch_is_asked_for_alike():
    """The README's line for CPUs and the Dockerfile's ask for the torch that the package asks for."""
    wanted = next(text for text in PROJECT["project"]["dependencies"] if Requirement(text).name == "torch")
    assert re.search(r"\d GB", (ROOT / "README.md").read_text())  # and how much that is
    line = f"pip install '{wanted}' --index-url https://download.pytorch.org/whl/cpu"
    assert line in (ROOT / "README.md").read_text()
    assert line.removeprefix("pip install ") in (ROOT / "Dockerfile").read_text()


def test_the_docker_image_gets_what_a_build_needs():
    """Each file that the Dockerfile copies exists and is let through by .dockerignore, and nothing else is."""
    copied = set()
    for line in re.findall(r"^COPY (.*)$", (ROOT / "Dockerfile").read_text(), re.M):
        copied |= set(line.split()[:-1])
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == let_through == {"kvbench", "kernels", "methods", "conf", "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in copied)


def test_the_workflow_runs_what_exists():
    """Every make target that the workflow names is one."""
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make (\w[\w-]*)", text)) and set(re.findall(r"make (\w[\w-]*)", text)) <= targets


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_are_forms(path):
    """Every form has a name, a description and fields with ids of their own, as the site wants them."""
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert form["name"] and form["description"] and form["body"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names) and any(field.get("validations", {}).get("required") for field in fields)


def test_lm_eval_takes_the_entry_point():
    """The entry point names kvbench's model, and lm-eval's registry resolves it under the name that it is asked for."""
    from lm_eval.api.registry import get_model, model_registry

    (value,) = PROJECT["project"]["entry-points"]["lm_eval.models"].values()
    point = importlib.metadata.EntryPoint(name="kvbench", value=value, group="lm_eval.models")
    found = point.load()
    model_registry.register(point.name, target=found)
    assert get_model("kvbench") is found and (found.__module__, found.__name__) == ("kvbench.lm", "KvbenchLM")
