"""The notebook in notebooks/: its cells run on the committed example and print what it shows."""

import json
import sys
from types import SimpleNamespace

from places import ROOT


def test_notebook_prints_what_it_shows(monkeypatch, capsys):
    """Every code cell runs in order, and what it prints is what the committed notebook shows."""
    shown = []
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(version_info=(9, 0)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=shown.append))
    monkeypatch.chdir(ROOT / "notebooks")
    notebook = json.loads((ROOT / "notebooks/frontier.ipynb").read_text())
    names, outputs = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), names)
            expected = "".join("".join(output.get("text", [])) for output in cell["outputs"])
            assert capsys.readouterr().out == expected
            outputs += cell["outputs"]
    assert len(shown) == 1 and shown[0].startswith(b"\x89PNG")
    assert any("image/png" in output.get("data", {}) for output in outputs)
