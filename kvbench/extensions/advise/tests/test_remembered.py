"""Counts that are kept between processes."""

import os
import shutil
from dataclasses import replace

import pytest

from kvbench.config import files
from kvbench.extensions.advise import remembered as module
from kvbench.extensions.advise.named import method_of, stored_method
from kvbench.extensions.advise.remembered import VERSIONS, remembered
from kvbench.sizing.outline import outline
from kvbench.sizing.shapes import find_shape
from kvbench.sizing.stored import policy_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of what is kept, empty."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / module.FOLDER


class Answers:
    """Answers, another one each time."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return {"count": self.count, "sizes": (1, 2)}


def test_a_question_is_answered_once_and_the_answer_is_plain(folder):
    """The order of its keys is none of it; the answer is as JSON has it from the first time on."""
    answers = Answers()
    first = remembered({"what": "x", "tokens": 5}, answers)
    assert first == {"count": 1, "sizes": [1, 2]} == remembered({"tokens": 5, "what": "x"}, answers)
    assert remembered({"what": "x", "tokens": 6}, answers)["count"] == 2
    assert remembered({"what": "x", "tokens": 5.0}, answers)["count"] == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"question": {"what": "y"}, "answer": 7}', '{"answer": 7}'])
def test_a_damaged_answer_is_made_again(folder, content):
    """Whatever the file holds, the answer is right, and kept again."""
    answers = Answers()
    remembered({"what": "x"}, answers)
    (file,) = folder.glob("*/*.json")
    file.write_text(content)
    assert remembered({"what": "x"}, answers)["count"] == 2
    assert remembered({"what": "x"}, answers)["count"] == 2


def test_other_code_is_another_question_and_few_versions_stay(folder, monkeypatch):
    """Counts of the oldest versions of the code are removed."""
    answers = Answers()
    for version in range(VERSIONS + 2):
        monkeypatch.setattr(module, "_code_digest", lambda version=version: f"{version}" * 64)
        assert remembered({"what": "x"}, answers)["count"] == version + 1
        (made,) = folder.glob(f"{version}*")
        os.utime(made, (version, version))
    assert len(list(folder.iterdir())) == VERSIONS


def test_the_digest_is_of_every_file_of_the_code(tmp_path, monkeypatch):
    """A change of a method, a kernel or a table of sizes changes it; one of a test does not."""
    package = tmp_path / "kvbench"
    for name in ("methods", "kernels", "config", "sizing/tests"):
        (package / name).mkdir(parents=True)
    monkeypatch.setattr(module, "package_folder", lambda: package)
    digest = module._code_digest.__wrapped__
    seen = [digest()]
    for name in ("methods/a.py", "kernels/b.cpp", "config/shapes.yaml"):
        for content in ("1", "2"):
            (package / name).write_text(content)
            seen.append(digest())
    assert len(set(seen)) == 7
    (package / "sizing" / "tests" / "test_a.py").write_text("3")
    assert digest() == seen[-1]


@pytest.mark.parametrize(
    "question",
    [
        {"method": {"_target_": "mine.Method"}},
        {"method": {"_target_": "kvbench.methods.h2o.H2O", "table": "FILE"}},
        {"words": [["table", "FILE"]]},
        {"method": {"window": object}},
    ],
)
def test_what_may_change_without_the_code_is_never_kept(folder, tmp_path, question):
    """A class of the user's, the numbers of a file, and values that JSON has no form for."""
    file = tmp_path / "table.tsv"
    file.write_text("1\n")

    def named(value):
        if isinstance(value, dict):
            return {key: named(item) for key, item in value.items()}
        if isinstance(value, list):
            return [named(item) for item in value]
        return str(file) if value == "FILE" else value

    answers = Answers()
    assert [remembered(named(question), answers)["count"] for _ in range(2)] == [1, 2]
    assert not folder.exists()


def test_errors_and_folders_that_cannot_be_written_do_no_harm(folder):
    """An error is raised each time; without a folder every answer is made."""

    def refuse():
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            remembered({"what": "x"}, refuse)
    folder.parent.mkdir(exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("no folder")
    answers = Answers()
    assert [remembered({"what": "x"}, answers)["count"] for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("text", ["kivi", "snapkv budget=0.25", "engine_format tier=q8_0-q4_0", "full"])
def test_a_kept_count_is_the_count(folder, text, monkeypatch):
    """From the cache folder come the numbers that counting gives, and no policy is made for them."""
    shape = find_shape("smollm2-135m")
    policy = method_of(text).policy
    exact = outline(policy, shape.store_shape, 500, 10)
    for _ in range(2):
        monkeypatch.setattr("kvbench.extensions.advise.named._known", {})
        known = method_of(text)
        assert known.text == repr(policy) and known.outline(shape, 500, 10) == exact
    stored = stored_method({"method": dict(known.settings)})
    assert stored is not None and stored.text == repr(policy_of({"method": dict(known.settings)}))
    assert stored.settings == known.settings
    unmade = replace(known, make=None)
    assert unmade.outline(shape, 500, 10) == exact
    with pytest.raises(TypeError):
        unmade.outline(shape, 501, 10)


def test_methods_of_the_users_are_made_each_time(folder, tmp_path):
    """The code of one may change under its name."""
    for window in (8, 16):
        (tmp_path / "method").mkdir(exist_ok=True)
        file = tmp_path / "method" / "mine.yaml"
        file.write_text(f"_target_: kvbench.methods.snapkv.SnapKV\nbudget: 0.5\nwindow: {window}\n")
        with files.with_config_dirs([tmp_path]):
            assert method_of("mine").settings["window"] == window
