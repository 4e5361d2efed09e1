"""`--config-dir`: a folder of the user's own, with methods that live nowhere else, under every command."""

import json
import sys

import pytest
import torch

from kvbench.cli.main import main
from kvbench.config import files

MODULE = '''"""A method of somebody's own."""

from dataclasses import dataclass
from typing import Annotated

from kvbench.policy import EVICT, Number, Policy, PrefillPlan


@dataclass(kw_only=True)
class Toy(Policy):
    """Keeps the first part of every prompt.

    Args:
        share: What stays of the prompt.

    Source: none, an example.
    Differs: none.
    """

    share: Annotated[float, Number(0, 1, above=True)] = 0.5

    def plan_prefill(self, view):
        tier_of = view.filled(0)
        tier_of[..., max(1, int(self.share * view.num_tokens)) :] = EVICT
        return PrefillPlan(tier_of=tier_of)
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a method, a model and a task of one's own."""
    folder = tmp_path / "my folder"
    for group in ("method", "model", "task"):
        (folder / group).mkdir(parents=True)
    (folder / "own_toy.py").write_text(MODULE)
    (folder / "method" / "toy.yaml").write_text("# The first part of a prompt.\n_target_: own_toy.Toy\nshare: 0.5\n")
    (folder / "model" / "mini.yaml").write_text("# A small one.\nkind: random\npreset: tiny\nname: mini\nseed: 0\n")
    (folder / "task" / "short.yaml").write_text(
        "# A short one.\ndefaults:\n  - longctx\n  - _self_\nitems: 1\nkinds: [kv]\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return folder


def test_lists_and_help_know_own_choices(mine, capsys):
    """`list`, `help` and the general help show them; without the flag they are unknown."""
    for words in (["list", "method"], ["help", "methods"], ["--help"]):
        assert main([*words, "--config-dir", str(mine)]) == 0
        out = capsys.readouterr().out
        assert "toy" in out and "snapkv" in out, words
    assert main([f"--config-dir={mine}", "help", "toy"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "method=toy Keeps the first part of every prompt." in out
    assert "share=0.5 a number in (0, 1] What stays of the prompt." in out and "source: none, an example." in out
    assert main(["help", "toy"]) == 2
    assert not files.config_dirs()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=tyo"], "Did you mean toy? Known: ada_pyramidkv"),
        (["toy"], "Did you mean method=toy?"),
        (["method=toy", "method.shaer=1"], "there is no setting method.shaer. Did you mean method.share?"),
        (["method=toy", "method.share=2"], "share=2 must be a number in (0, 1]"),
        (["calibrate", "method=tyo"], "Did you mean toy?"),
        (["gates", "model=mimi"], "Did you mean mini?"),
        (["bench", "what=decode", "decode.methods=[tyo]"], "Did you mean toy?"),
        (["--model", "mini", "--press", "toy"], "Did you mean `model=mini method=toy`?"),
    ],
)
def test_own_choices_are_meant(mine, capsys, words, message):
    """A typo near an own choice finds it, under every command."""
    assert main([*words, "--config-dir", str(mine)]) == 2
    assert message in capsys.readouterr().err


def test_commands_run_with_own_choices(mine, monkeypatch):
    """`calibrate`, `gates` and `bench` get the method, the model and the task from there."""
    from kvbench.runs.choices import read_choice

    pytest.importorskip("kvbench.extensions.bench")
    calibrate = pytest.importorskip("kvbench.extensions.calibrate.command")
    tables = pytest.importorskip("kvbench.extensions.calibrate.tables")

    seen = []
    shares = lambda: read_choice("method", "toy share=0.3")["share"]  # noqa: E731
    monkeypatch.setattr(calibrate, "main", lambda cfg: seen.append(cfg.method._target_) or 0)
    monkeypatch.setattr(tables, "gates", lambda cfg: seen.append((cfg.model.name, cfg.task["items"])) or 0)
    monkeypatch.setattr("kvbench.extensions.bench.command.main", lambda cfg: seen.append(shares()) or 0)
    own = ["--config-dir", str(mine)]
    assert main(["calibrate", "method=toy", *own]) == 0
    assert main(["gates", "model=mini", "task=short", *own]) == 0
    assert main(["bench", *own]) == 0
    assert seen == ["own_toy.Toy", ("mini", 1), 0.3]


def test_run_with_own_choices(mine):
    """A run, and a sweep beside a method of kvbench's, take method, model and task from there."""
    words = ["model=mini", "task=short", "task.length=400", "reference=none", "fidelity.max_tokens=0", "batch_size=1"]
    assert main(["--config-dir", str(mine), "-m", "method=toy,snapkv", *words]) == 0
    assert sorted(path.parent.parent.name for path in mine.parent.glob("results/*/mini/*/*/run.json")) == [
        "snapkv",
        "toy",
    ]


def test_name_of_kvbenchs_own_is_refused(mine, capsys):
    """A file that would be hidden behind kvbench's own of that name is named."""
    (mine / "method" / "snapkv.yaml").write_text("_target_: own_toy.Toy\n")
    assert main(["list", "--config-dir", str(mine)]) == 2
    assert "snapkv.yaml has the name of kvbench's own method=snapkv; rename it" in capsys.readouterr().err


def test_help_says_what_a_statistic_of_ones_own_is(mine, capsys):
    """Without `words` of its own, a statistic is what its docstring says in the first line."""
    (mine / "own_newest.py").write_text(
        "from dataclasses import dataclass\nfrom kvbench.policy import Scored, Statistic\n\n\n"
        "@dataclass(frozen=True)\nclass Late(Statistic):\n"
        '    """The position of a token.\n\n    More.\n    """\n\n'
        "    def of_prompt(self, seen):\n        return seen.pos.float()\n\n\n"
        "@dataclass(kw_only=True)\nclass Newest(Scored):\n    def declare(self):\n"
        "        super().declare()\n        self.score_by(Late())\n"
    )
    (mine / "method" / "newest.yaml").write_text("_target_: own_newest.Newest\nbudget: 0.5\n")
    assert main(["--config-dir", str(mine), "help", "newest"]) == 0
    assert "scores by: The position of a token" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"_target_: a.B\n  budget: 3\n", "toy.yaml, line 2, column 9 cannot be read as YAML: mapping values"),
        (b"share: 1\nshare: 2\n", "toy.yaml, line 2, column 1 cannot be read as YAML: found duplicate key share"),
        (b"share: '${'\n", "toy.yaml cannot be read as YAML: no viable alternative"),
        (b"share: \xff\n", "toy.yaml cannot be read as YAML: 'utf-8' codec"),
        (b"- share\n", "toy.yaml holds a list; a configuration file holds key: value"),
    ],
)
def test_a_file_that_is_no_yaml_is_named(mine, capsys, text, words):
    """A broken file of one's own is an ordinary error under every command, with the place in it; the list marks it."""
    (mine / "method" / "toy.yaml").write_bytes(text)
    for command in (["method=toy"], ["-m", "method=toy,snapkv"], ["help", "toy"], ["bytes", "method=toy"]):
        assert main([*command, "--config-dir", str(mine)]) == 2, command
        said = capsys.readouterr().err
        assert words in said and "fault of kvbench" not in said, command
    assert main(["list", "methods", "--config-dir", str(mine)]) == 0
    assert words in " ".join(capsys.readouterr().out.split()).replace("- ", "-")


@pytest.mark.parametrize("readable", [True, False])
def test_a_module_changes_no_mode_of_torch(mine, capsys, readable):
    """A method whose module switches one is left out by name, however its settings are read, and the full cache of the
    same sweep is computed as ever."""
    name = f"own_switching_{readable}"  # Python runs a module once
    switch = "import torch\ntorch.backends.cuda.enable_flash_sdp(False)\ntorch.set_autocast_enabled('cpu', True)\n"
    default = "0.5" if readable else "float('0.5')"
    (mine / f"{name}.py").write_text(switch + MODULE.replace("= 0.5", f"= {default}"))
    (mine / "method" / "switching.yaml").write_text(f"# It switches.\n_target_: {name}.Toy\n")
    words = ["model=mini", "task=short", "task.length=400", "reference=none", "fidelity.max_tokens=0"]
    assert main(["--config-dir", str(mine), "-m", "method=switching,full", *words]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"method._target_={name}.Toy changed torch.backends.cuda.flash_sdp_enabled from True to False" in said
    assert torch.backends.cuda.flash_sdp_enabled() and not torch.is_autocast_enabled("cpu")
    found = [json.loads(path.read_text()) for path in mine.parent.glob("results/*/mini/*/*/run.json")]
    assert [record["method"] for record in found] == ["full"] * readable  # else the sweep is refused before it begins
    assert not [key for record in found for key in record["identity"]["code"] if key.startswith("torch.")]
