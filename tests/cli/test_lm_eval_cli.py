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
        f"method=snapkv,model=random,method.budget=16,method.window=4,{model_args}",
    ]
    words += ["--tasks", "demo_pick,demo_write", "--include_path", str(folder), "--output_path", str(tmp_path)]
    start = time.monotonic()
    assert main([*words, "--batch_size", "2", "--log_samples"]) == 0
    assert time.monotonic() - start < 60  # the whole index alone takes longer
    shown = capsys.readouterr().out
    assert "demo_pick" in shown and "exact_match" in shown
    (result,) = tmp_path.rglob("results_*.json")
    found = json.loads(result.read_text())["results"]
    small = lm_of("snapkv", **{"method.budget": 16, "method.window": 4})
    task = task_of(folder, small, "demo_pick")
    wanted = task.aggregate(answered(small, task))["lm_eval"]["demo_pick"]
    assert {key: found["demo_pick"][f"{key},none"] for key in wanted} == pytest.approx(wanted)
    assert main(["lm_eval", "--model", "kvbench", "--model_args", "method=snapkv", "--tasks", "demo_pik"]) == 2
    assert "no task, group or tag of that name" in capsys.readouterr().err


def test_device_is_chosen_as_kvbench_does() -> None:
    """lm-eval's default is the first GPU, also where there is none; other models keep it."""
    from kvbench.cli.lm_eval import with_device

    assert with_device(["--model", "kvbench"])[2:] == ["--device", "auto"]
    assert with_device(["--model=kvbench", "--device", "cpu"])[1:] == ["--device", "cpu"]
    assert with_device(["--model", "hf"]) == ["--model", "hf"]


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
