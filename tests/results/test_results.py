"""The record of a run and its identity."""

import ast
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from refusals import refused

from kvbench.config.code import hash_files
from kvbench.config.files import package_folder
from kvbench.results import identity, provenance
from kvbench.results.record import Comparison, Counts, Metric, RunRecord, Session
from kvbench.stats.intervals import Estimate


def test_run_record_round_trip(tmp_path):
    """run.json holds every field and reads back equal; another schema version or a broken file is refused."""
    metric = Metric(value=0.5, num_samples=4, low=0.1, high=0.9, primary=True, subsets={"a": Estimate(value=0.5)})
    made = RunRecord(
        method="kivi",
        metrics={"exact": metric},
        counts=Counts(total=4, done=4),
        comparison=Comparison(difference=Estimate(value=-0.1), num_worse=1),
        versions=provenance.versions(),
        git=provenance.git_state(),
        machine=provenance.machine("cpu"),
        sessions=[Session(started="then", num_done=4)],
        ledger={"resident_bytes": 5.0},
    )
    assert RunRecord.load(tmp_path) is None
    made.save(tmp_path)
    assert RunRecord.load(tmp_path) == made
    assert made.primary == "exact"
    content = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(content | {"schema_version": 99}))
    with refused("file-content", None, "schema version 99"):
        RunRecord.load(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(content | {"surprise": 1}))
    with refused("file-content", None, "surprise"):
        RunRecord.load(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with refused("file-content", None, "JSON"):
        RunRecord.load(tmp_path)


def test_an_edited_identity_is_seen(tmp_path):
    """The hash, which seals every sample, is over the identity: other settings in run.json would give them another
    run's name, and `bytes run=` another run's bytes, without a word."""
    made = RunRecord(method="snapkv", identity={"method": {"budget": 0.25}})
    made.hash = identity.hash_identity(made.identity)
    made.save(tmp_path)
    assert RunRecord.load(tmp_path) == made
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace("0.25", "0.5"))
    with refused("file-content", None, made.hash[:12]):
        RunRecord.load(tmp_path)


def test_every_result_field_is_described():
    """Each field of run.json has a sentence under it in the source."""
    for module in ("results/record.py", "results/provenance.py"):
        tree = ast.parse((package_folder() / module).read_text())
        bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
        fields = [(item, after) for body in bodies for item, after in zip(body, body[1:] + [None], strict=True)]
        fields = [(item, after) for item, after in fields if isinstance(item, ast.AnnAssign)]
        assert len(fields) > 10
        for item, after in fields:
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert is_text and isinstance(after.value.value, str), f"{module}:{item.lineno}: {item.target.id}"


@dataclass
class Settings:
    """Settings as a policy holds them."""

    budget: float = 0.5
    names: tuple = ("a", "b")


def test_canonical_settings():
    """Equal settings give equal JSON whatever holds them; a share of 1.0 and a budget of 1 token differ; objects are
    refused."""
    torch = pytest.importorskip("torch")
    assert identity.canonical(Settings()) == {"budget": 0.5, "names": ["a", "b"]}
    assert identity.canonical({"b": {2, 1}, "a": torch.float16}) == {"a": "torch.float16", "b": [1, 2]}
    one, whole = identity.canonical(Settings(budget=1)), identity.canonical(Settings(budget=1.0))
    assert identity.hash_identity(one) != identity.hash_identity(whole)
    with pytest.raises(TypeError, match="two settings of type object"):
        identity.canonical({"a": object()})


def test_folder_names():
    """A name cannot leave the results folder, and a usual name stays as it is."""
    assert identity.folder_name("smollm2-135m_v1.2+x") == "smollm2-135m_v1.2+x"
    assert identity.folder_name("../../etc/passwd") == "etc-passwd"
    assert identity.folder_name("..") == "unnamed"
    made = identity.run_folder(Path("results"), "t", "org/model", "kivi", "0123456789abcdef")
    assert made == Path("results/t/org-model/kivi/0123456789ab")


def test_code_hash_follows_content(tmp_path):
    """The hash of sources changes with a name, a byte, or a moved boundary between two files, and with nothing else."""
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("x = 1\n"), b.write_text("y = 2\n")
    first = hash_files({"a": a, "b": b})
    assert first == hash_files({"b": b, "a": a})
    assert first != hash_files({"a": a, "c": b})
    a.write_text("x = 1\ny"), b.write_text(" = 2\n")
    assert first != hash_files({"a": a, "b": b})


def test_code_hash_follows_meaning(tmp_path):
    """Comments, formatting and docstrings do not count; a number, an order and a text that is used do."""
    path = tmp_path / "a.py"
    texts = [
        'def f(x):\n    """Says."""\n    return [x, 1]\n',
        "def f(x):\n  # why\n  return [x,1]\n",
        "def f(x):\n    return [x, 2]\n",
        "def f(x):\n    return [1, x]\n",
        'def f(x):\n    return ["Says.", x]\n',
    ]
    found = []
    for text in texts:
        path.write_text(text)
        found.append(hash_files({"a": path}))
    assert found[0] == found[1] and len(set(found)) == 4


def test_method_files_follow_imports(tmp_path, monkeypatch):
    """A method counts its own file and those of the methods it takes a class from, however the import is written."""
    from kvbench.methods.snapkv import SnapKV

    assert set(provenance.method_files(SnapKV)) == {"kvbench.methods.snapkv"}
    for number, line in enumerate(("from kvbench.methods.snapkv import SnapKV", "import kvbench.methods.snapkv")):
        (tmp_path / f"own_method_{number}.py").write_text(f"{line}\nclass Own: pass\n")
        monkeypatch.syspath_prepend(tmp_path)
        own = __import__(f"own_method_{number}").Own
        assert set(provenance.method_files(own)) == {f"own_method_{number}", "kvbench.methods.snapkv"}


def test_method_files_follow_a_users_own_modules(tmp_path, monkeypatch):
    """A module of one's own that a method imports counts, at any remove, however it is imported and even where it is
    not loaded yet; Python's modules, libraries and what nobody imports do not."""
    files = {
        "own_pack/__init__.py": "from .near import x",
        "own_pack/near.py": "x = 1",
        "own_pack/method.py": "import math, torch\nfrom own_helper import share\nfrom . import near\n"
        "class Own:\n    def late(self):\n        from own_loose import deep\n",
        "own_helper.py": "import own_further as f\nshare = 0.25",
        "own_further.py": "y = 2",
        "own_loose/deep.py": "z = 3",  # a package without __init__
        "own_unused.py": "w = 4",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_pack.method").Own
    counted = {path.relative_to(tmp_path).as_posix() for path in provenance.method_files(own).values()}
    assert counted == set(files) - {"own_unused.py"}
    before = hash_files(provenance.method_files(own))
    (tmp_path / "own_helper.py").write_text("import own_further as f\nshare = 0.9")
    assert hash_files(provenance.method_files(own)) != before


def test_method_files_leave_another_environments_libraries_out(tmp_path, monkeypatch):
    """Where one environment is laid over another, the libraries of the other one are libraries too, and none is run."""
    ran = "import pathlib; pathlib.Path(__file__).with_name('ran').touch(); raise SystemExit('run')"
    for name, text in {
        "below/lib/python3/site-packages/own_library/__init__.py": ran,
        "below/lib/python3/site-packages/own_library/part.py": "x = 1",
        "below/lib/python3/dist-packages/own_packaged.py": "y = 2",
        "mine/own_broken/__init__.py": "raise RuntimeError('no GPU')",
        "mine/own_broken/part.py": "z = 3",
        "mine/own_layered.py": "class Own:\n    def late(self):\n        import own_library.part, own_packaged\n"
        "        from own_broken.part import z\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in ("below/lib/python3/site-packages", "below/lib/python3/dist-packages", "mine"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    own = importlib.import_module("own_layered").Own
    # A package of one's own whose import fails counts itself; what lies behind it cannot be found.
    assert set(provenance.method_files(own)) == {"own_layered", "own_broken"}
    assert not list(tmp_path.rglob("ran"))
