"""Extensions: manifests, discovery without imports, and a core that goes on without any of them."""

import os
import shutil
import subprocess
import sys

import pytest
from places import ROOT, WITHOUT
from refusals import refused

from kvbench.config import extensions

NAMES = sorted(path.parent.name for path in (ROOT / "kvbench" / "extensions").glob(f"*/{extensions.MANIFEST}"))
# `list`, `help`, a run, `compare` and `report`, as small as they can be, in a process per copy of the package, which is
# forked when other packages have been imported.
CORE = """
import os, sys
import hydra, pandas, torch
import matplotlib.pyplot
import transformers.models.llama.modeling_llama

small = ["task=longctx", "task.length=512", "task.kinds=[passkey]", "limit=1", "model=random", "model.preset=tiny"]
small += ["backend=torch", "results_dir=results"]
sweep = ["-m", "method=full,snapkv", *small]


def check(gone, folder):
    os.chdir(folder)
    sys.path.insert(0, folder)
    from kvbench.cli.main import main

    for words in (["list"], ["help", "snapkv"], ["help"], sweep, ["compare"], ["report"]):
        code = main(words)
        assert code == 0, (words, code)
    import kvbench as kb

    assert kb.__file__.startswith(folder)
    assert set(kb.load("results")["method"]) == {"full", "snapkv"}
    assert not [name for name in sys.modules if name.startswith(f"kvbench.extensions.{gone}")]


assert not [name for name in sys.modules if name.split(".")[0] == "kvbench"]
for gone, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    if not (child := os.fork()):
        check(gone, folder)
        sys.stdout.flush()
        os._exit(0)  # a failed check ends the child by its error, with status 1
    _, status = os.waitpid(child, 0)
    assert status == 0, f"without {gone or 'any extension'}"
"""


@pytest.fixture(autouse=True)
def fresh():
    """Forget what was discovered."""
    for known in (extensions.discovered, extensions.enabled):
        known.cache_clear()
    yield
    for known in (extensions.discovered, extensions.enabled):
        known.cache_clear()


def write(folder, text):
    """A package with a manifest."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / extensions.MANIFEST).write_text(text)
    return folder


def entry_point(folder, name, package):
    """A distribution that names a package as an extension."""
    info = folder / f"{package}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[kvbench.extensions]\n{name} = {package}\n")


def test_every_folder_is_whole():
    """Each folder of kvbench/extensions has a manifest, a package, a page and tests, and its hooks exist."""
    folders = [path for path in (ROOT / "kvbench" / "extensions").iterdir() if path.is_dir() and path.name[0] != "_"]
    for folder in folders:
        for part in (extensions.MANIFEST, "__init__.py", "README.md", "tests"):
            assert (folder / part).exists(), folder / part
    assert WITHOUT or list(extensions.enabled()) == list(extensions.discovered())
    points = {point for one in extensions.enabled().values() for point in one.hooks}
    for point in points:
        assert all(callable(function) for function in extensions.hooks(point))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("summary = 1", ("file-content", None, "odd", "summary")),
        ("summary = 'x'\nuse = ['b']", ("name-unknown", "use", "odd", "uses")),
        ("summary = ", ("file-content", None, "odd")),
        ("", ("file-content", None, "odd", "summary")),
    ],
)
def test_a_wrong_manifest_is_named(tmp_path, text, error):
    """The error names the file and the key."""
    with refused(*error):
        extensions.read_manifest(write(tmp_path / "odd", text), "odd", "odd")


def test_an_entry_point_adds_an_extension_without_importing_it(tmp_path, monkeypatch):
    """A package of a third party is found by its entry point; its commands are listed, its code is not run."""
    folder = write(tmp_path / "theirs" / "ext", "summary = 'theirs'\n[hooks]\n'x.y' = 'json:dumps'")
    (tmp_path / "theirs" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "conf" / "command").mkdir(parents=True)
    (folder / "conf" / "command" / "greet.yaml").write_text("# Greets.\n_target_: theirs.ext.greet\n")
    entry_point(tmp_path, "theirs", "theirs.ext")
    monkeypatch.syspath_prepend(tmp_path)
    from kvbench.config import files

    assert extensions.enabled()["theirs"].folder == folder
    assert files.command_files()["greet"] == "Greets."
    assert [function.__name__ for function in extensions.hooks("x.y")] == ["dumps"]
    assert "theirs" not in sys.modules


@pytest.mark.parametrize(
    ("name", "package", "error"),
    [
        ("export", "pytest", ("unsupported", None, "export")),
        ("theirs", "nowhere.ext", ("package-missing", None, "nowhere.ext")),
        ("theirs", "places", ("package-missing", None, "places")),
    ],
)
def test_an_entry_point_that_cannot_be_is_refused(name, package, error, tmp_path, monkeypatch):
    """It has the name of another extension, or what it names is missing or a module without a folder."""
    entry_point(tmp_path, name, package)
    monkeypatch.syspath_prepend(tmp_path)
    with refused(*error):
        extensions.discovered()


def test_a_stopped_command_says_what_it_keeps():
    """By the manifest of its extension; others start again."""
    assert [extensions.kept_by(name) for name in ("bench", "suite", "compare")] == ["cell", "sample", ""]


def test_an_extension_without_what_it_uses_is_disabled(monkeypatch):
    """It and what uses it are left out, and its command says why."""
    make = lambda name, *uses: extensions.Extension(  # noqa: E731
        name=name, package=name, folder=ROOT / "kvbench" / "extensions" / "export", summary="", uses=uses
    )
    monkeypatch.setattr(extensions, "discovered", lambda: {"a": make("a", "b"), "b": make("b", "c"), "d": make("d")})
    assert list(extensions.enabled()) == ["d"]
    monkeypatch.setattr(extensions, "discovered", lambda: {"a": make("a", "b")})
    extensions.enabled.cache_clear()
    assert "needs the extension b" in extensions.lacking("export")
    assert not extensions.lacking("compare")


def without(name, folder):
    """A copy of the package with its bytecode, without one extension, or without all ("")."""
    for part in ("kvbench", "kernels", "methods", "conf"):
        # Another process may be writing bytecode, under a name that is gone when it is done.
        gone = shutil.ignore_patterns("tests", "*.pyc.*", *([] if name else ["extensions"]))
        shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=gone)
    if name:
        shutil.rmtree(folder / "kvbench" / "extensions" / name)
    return folder


def check(names, folder):
    """`list`, `help`, a run, `compare` and `report` pass in copies without an extension each, or without all ("")."""
    words = [str(word) for name in names for word in (name, without(name, folder / (name or "none")))]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", CORE, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.long
def test_the_core_works_without_extensions(tmp_path):
    """The whole folder is gone, or one and with it those that use it."""
    check(["", *NAMES[::7]], tmp_path)


@pytest.mark.exhaustive
def test_the_core_works_without_each_extension(tmp_path):
    """One folder is gone, and with it those that use it."""
    check(NAMES, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_the_cores_tests_pass_without_each_extension(name, tmp_path):
    """The default tests of the core, in a copy of the repository; those that go through the extension are skipped."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for file in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / file).is_file() or (ROOT / file).is_symlink():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, tmp_path / file, follow_symlinks=False)
    shutil.rmtree(tmp_path / "kvbench" / "extensions" / name)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    gone, known = {name}, extensions.discovered()
    while more := {other for other, one in known.items() if gone & set(one.uses)} - gone:
        gone |= more
    commands = {path.stem for other in gone for path in (known[other].conf / "command").rglob("*.yaml")}
    environment |= {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "KVBENCH_WITHOUT": " ".join([name, *commands])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "--ignore=tests/extensions"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
