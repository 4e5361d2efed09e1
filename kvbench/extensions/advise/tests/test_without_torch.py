"""Answers from stored results and kept counts, in processes that have neither torch nor Hydra."""

import csv
import json
import os
import subprocess
import sys

import pytest
from places import ROOT

from kvbench.cli.main import main
from kvbench.extensions.advise import named, shipped

COMMANDS = {
    "list": ["list"],
    "help": ["help"],
    "engine": ["engine", "llama-server -ctk q8_0 -ctv q4_0 -c 512"],
    "bytes": ["bytes", "model=smollm2-135m", "method=snapkv,kivi,diffkv", "length=200", "answer=4", "batch=2"],
    "bytes windows": ["bytes", "model=gemma3-1b", "length=256", "answer=8", "methods=[int4,kivi]"],
    "advise": [
        "advise",
        "model=smollm2-135m",
        "context=512",
        "gpu=L4",
        "results_dir=none",
        "methods=[snapkv,int4,full]",
    ],
    "advise why": ["advise", "model=smollm2-135m", "context=512", "results_dir=none", "methods=int4", "why=true"],
}
HEAVY = ("torch", "hydra", "transformers", "scipy")


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Outputs of the commands, and what one fresh process printed for all of them behind that, by name."""
    folder = tmp_path_factory.mktemp("answered")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "100")
        patch.setattr(named, "_known", {})  # what other tests asked is in another folder
        patch.chdir(folder)
        program = "import contextlib, io, json, sys\nfrom kvbench.cli.main import main\nsaid = []\n"
        program += "for words in json.loads(sys.argv[1]):\n    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        program += "        assert main(words) == 0\n"
        program += (
            f"    said.append([out.getvalue(), sorted({set(HEAVY)!r} & set(sys.modules))])\nprint(json.dumps(said))"
        )
        yield folder, program


def _in_a_process(folder, program, commands):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=100)
    return json.loads(done.stdout)


def test_a_process_that_answers_from_what_is_kept_has_neither_torch_nor_hydra(answered, capsys):
    """And it says the same as one that counts."""
    folder, program = answered
    counted = []
    for words in COMMANDS.values():
        assert main(words) == 0
        counted.append(capsys.readouterr().out)
    later = _in_a_process(folder, program, [*COMMANDS.values()])
    for name, first, (again, heavy) in zip(COMMANDS, counted, later, strict=True):
        assert again == first, name
        assert heavy == [], name


def _row(flags):
    with (ROOT / shipped.FOLDER / "shipped.csv").open(newline="") as file:
        return next(row for row in csv.DictReader(file) if row["flags"] == flags)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("llama-server -ctk q8_0 -ctv q4_0", "-ctk q8_0 -ctv q4_0"),
        ("vllm serve m --kv-cache-dtype fp8", "--kv-cache-dtype fp8"),
        ("vllm serve m --kv-cache-dtype fp8 --calculate-kv-scales", "--kv-cache-dtype fp8 --calculate-kv-scales"),
    ],
)
def test_engine_says_what_the_study_of_running_text_measured(command, flags, capsys):
    """Of the very format: with the scales that vLLM finds, too, which is another row."""
    assert main(["engine", command]) == 0
    said, row = " ".join(capsys.readouterr().out.split()), _row(flags)
    assert f"first choice at {100 * float(row['same_first_choice']):.1f} % of {row['n']} tokens" in said
    assert "not measured" not in said


@pytest.mark.parametrize(
    "command", ["LLAMA_ATTN_ROT_DISABLE=1 llama-server -ctk q8_0 -ctv q4_0", "llama-server -ctk q4_1 -ctv q8_0"]
)
def test_engine_says_nothing_of_a_format_that_was_not_measured(command, capsys):
    """One without its rotation, and a pair that the study has not."""
    assert main(["engine", command]) == 0
    assert "not measured" in capsys.readouterr().out
