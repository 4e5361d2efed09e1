"""The notebooks run from top to bottom in a kernel, outside of a clone, and are committed without outputs."""

import re
from importlib import import_module

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from places import ROOT

NAMES = ("first_compression", "generate", "read_results", "write_a_method")
NOTEBOOKS = {name: nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4) for name in NAMES}


def printed(cells):
    """The outputs of cells as text."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.fixture(scope="module")
def executed(embedded_model, tmp_path_factory):
    """Runs all of them in one kernel, which imports torch once, with names of their own; gives cells by notebook."""
    home = tmp_path_factory.mktemp("elsewhere")
    cells, spans = [], {}
    for name, notebook in NOTEBOOKS.items():
        code = [new_code_cell(cell.source) for cell in notebook.cells if cell.cell_type == "code"]
        spans[name] = code
        cells += [*code, new_code_cell("%reset -f")]
    book = new_notebook(cells=cells)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("IPYTHONDIR", str(home / "ipython"))
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)
        NotebookClient(book, timeout=250, kernel_name="python3", resources={"metadata": {"path": str(home)}}).execute()
    assert [path.name for path in home.iterdir()] in ([], ["ipython"])  # what they write goes to temporary folders
    return spans


@pytest.mark.exhaustive
def test_notebooks_run(executed):
    """Every method holds another number of bytes, and a run ends with its table and its picture; three texts are
    continued, the items of the bytes are shown, a stream is seen and beams are refused; tables of runs and of answers
    come out with nothing left out; a class in a cell is tried, a wrong setting is named, and two files make a method
    that runs are stored for."""
    text = printed(executed["first_compression"])
    shares = {line.split()[0]: float(line.split()[3]) for line in text.splitlines() if "% of FP16" in line}
    assert list(shares) == ["full", "int8", "kivi", "snapkv", "diffkv"]
    assert shares["snapkv"] < 0.5 * shares["full"] and shares["int8"] < 0.8 * shares["full"]
    (shown,) = [output for output in executed["first_compression"][-1].outputs if "data" in output]
    assert "vs full" in shown.data["text/plain"] and "image/png;base64" in shown.data["text/html"]
    text = printed(executed["generate"])
    assert "and the capital of Italy is Rome" in text and "seven, eight, and nine" in text
    assert "resident_bytes" in text and "num_beams=4 asks for beam search" in text
    text = printed(executed["read_results"])
    assert "method.budget" in text and "{'left_out': {}}" in text and re.search(r"snapkv +0\.\d+ +0\.\d+", text)
    text = printed(executed["write_a_method"])
    assert "last=0.5" in text and "ends" in text and "vs full" in text
    full, ends, _ = (float(share) for share in re.findall(r"\(([\d.]+) % of an FP16", text))
    assert ends < 0.5 * full


@pytest.mark.parametrize("name", NAMES)
def test_what_a_notebook_imports_exists(name):
    """Each name of kvbench that a cell imports is there, also in the file that a cell writes."""
    imported = re.findall(
        r"^from (kvbench[\w.]*) import (.+)$", str(NOTEBOOKS[name]).replace("\\n", "\n"), re.MULTILINE
    )
    for module, names in imported:
        assert all(hasattr(import_module(module), each) for each in names.split(", ")), (module, names)


@pytest.mark.parametrize("name", NAMES)
def test_no_outputs_are_committed(name):
    """A notebook says what it does; what comes out is made where it runs."""
    cells = NOTEBOOKS[name].cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_the_frontier_notebook_says_what_it_lacks(tmp_path, monkeypatch):
    """Outside of a clone it asks for a table of one's own, and takes one that lies beside it."""
    first = nbformat.read(ROOT / "notebooks" / "frontier.ipynb", as_version=4).cells[1].source
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="kvbench report view=pareto"):
        exec(first, {})
    (tmp_path / "pareto.csv").write_bytes((ROOT / "results" / "example" / "pareto.csv").read_bytes())
    exec(first, {})
