"""lm-eval's own command line with kvbench among its models."""

import json
import time
from pathlib import Path

import pytest
from lmeval_demo import TINY, answered, lm_of, task_of, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Gives the demo folder."""
    return write_folder(tmp_path_factory.mktemp("lmeval"))


def test_lm_evals_command_line_knows_kvbench(folder, tmp_path, capsys) -> None:
    """`python -m kvbench lm_eval --model kvbench ...` is lm-eval's own command: its table, its files, its numbers."""
    from kvbench.cli.main import main

    model_args = ",".join(f"{key}={value}" for key, value in TINY.items() if key != "model")
    words = [
        "lm_eval",
        "--model",
        "kvbench",
        "--model_args",
        f"method=snapkv,model=random,budget=16,method.window=4,{model_args}",
    ]
    words += ["--tasks", "demo_pick,demo_write", "--include_path", str(folder), "--output_path", str(tmp_path)]
    start = time.monotonic()
    assert main([*words, "--batch_size", "2", "--log_samples"]) == 0
    assert time.monotonic() - start < 60  # the whole index alone takes longer
    shown = capsys.readouterr().out
    assert "demo_pick" in shown and "exact_match" in shown
    (result,) = tmp_path.rglob("results_*.json")
    whole = json.loads(result.read_text())
    found, held = whole["results"], whole["config"]["kvbench"]["held"]
    assert held.keys() == {"demo_pick", "demo_write"} and all(each["resident_bytes"] > 0 for each in held.values())
    for name, each in held.items():
        bytes_ = f"|{each['prompts']}|{each['resident_bytes']:.0f}|{100 * each['resident_ratio']:.1f}|"
        assert "|held by SnapKV|prompts|mean bytes|" in shown and f"|{name}{bytes_}" in shown
    small = lm_of("snapkv", **{"method.budget": 16, "method.window": 4})
    task = task_of(folder, small, "demo_pick")
    wanted = task.aggregate(answered(small, task))["lm_eval"]["demo_pick"]
    assert {key: found["demo_pick"][f"{key},none"] for key in wanted} == pytest.approx(wanted)
    assert main(["lm_eval", "--model", "kvbench", "--model_args", "method=snapkv", "--tasks", "demo_pik"]) == 2
    assert "no task, group or tag of that name" in capsys.readouterr().err


def test_device_and_model_are_chosen_as_kvbench_does() -> None:
    """lm-eval's default is the first GPU, also where there is none, and its own model; other models keep both."""
    from kvbench.cli.lm_eval import with_defaults

    assert with_defaults(["--model", "kvbench"])[2:] == ["--device", "auto"]
    assert with_defaults(["--model=kvbench", "--device", "cpu"])[1:] == ["--device", "cpu"]
    assert with_defaults(["--tasks", "x"])[2:] == ["--model", "kvbench", "--device", "auto"]
    for words in (["--model", "hf", "--tasks", "x"], ["run", "--config", "mine.yaml", "--tasks", "x"], ["ls", "tasks"]):
        assert with_defaults(words) == words


def test_lm_evals_own_models_are_there_too(folder, capsys) -> None:
    """A comparison with lm-eval's own model needs no other command."""
    from kvbench.cli.main import main

    assert (
        main(["lm_eval", "--model", "dummy", "--tasks", "demo_pick", "--limit", "2", "--include_path", str(folder)])
        == 0
    )
    assert "demo_pick" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--model kvbench --tasks a,b c --limit 3", ["a", "b", "c"]),
        ("-t a --tasks=b,c", ["a", "b", "c"]),
        ("--tasks mmlu_* --limit 3", []),
        ("--tasks folder/a.yaml", []),
        ("ls tasks", []),
    ],
)
def test_names_in_lm_evals_arguments(words, names) -> None:
    """Names are known before lm-eval parses; patterns and files leave its whole index in place."""
    from kvbench.cli.lm_eval import task_names

    assert task_names(words.split()) == names


ROLLING = """task: demo_whole
dataset_path: json
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
"""
NEEDY = """task: demo_needy
dataset_path: json
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: ""
process_results: !function needy.score
"""


def refused(folder: Path, name: str, monkeypatch, capsys, more: str = "") -> str:
    """What the command says of a task that cannot run; it must not load a model."""
    from kvbench.cli.main import main

    settings = f"model=random,model.preset=tiny{more}"
    words = ["lm_eval", "--model", "kvbench", "--model_args", settings, "--tasks", name]
    assert main([*words, "--include_path", str(folder)]) == 2
    shown = capsys.readouterr().err
    assert "a fault of kvbench" not in shown
    return shown


def test_whole_texts_are_refused_where_nothing_would_be_compressed(tmp_path, monkeypatch, capsys) -> None:
    """Before a model is loaded, by the name of the task and by that of a group that has it; other methods, and those
    that are given a prompt, go on to the model."""
    from kvbench import lm

    def load(*arguments, **named):
        raise ValueError("a model was loaded")

    monkeypatch.setattr(lm, "load_method", load)
    (tmp_path / "whole.yaml").write_text(ROLLING)
    (tmp_path / "group.yaml").write_text("group: demo_wholes\ntask: [demo_whole]\n")
    for name in ("demo_whole", "demo_wholes"):
        shown = refused(tmp_path, name, monkeypatch, capsys, ",method=snapkv,method.budget=64")
        assert "--tasks demo_whole: SnapKV compresses prompts only" in shown and "rolling_prompt_tokens=512" in shown
    for more in (",method=snapkv,rolling_prompt_tokens=8", ",method=h2o,method.budget=64", ",method=full"):
        assert "a model was loaded" in refused(tmp_path, "demo_whole", monkeypatch, capsys, more)


@pytest.mark.parametrize(
    ("module", "line"),
    [("langdetect_gone", "`pip install langdetect_gone`"), ("wonderwords", "`pip install 'lm_eval[")],
)
def test_a_missing_package_is_named_with_its_install_line(tmp_path, monkeypatch, capsys, module, line) -> None:
    """lm-eval's own command names it as `task=lm_eval` does; it is the user's to install and no fault of kvbench."""
    import sys

    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    (tmp_path / "needy.yaml").write_text(NEEDY)
    (tmp_path / "needy.py").write_text(f"import {module}\n\n\ndef score(doc, results):\n    return {{}}\n")
    shown = refused(tmp_path, "demo_needy", monkeypatch, capsys)
    assert f"needs the package {module}, which is not installed; {line}" in shown
