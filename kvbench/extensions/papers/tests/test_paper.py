"""`kvbench paper`: what it lists, which jobs an entry has, what it says before, and the table at its end."""

import json
import os
import shlex
from pathlib import Path

import problem_rows
import pytest

from kvbench.cli.commands import compose_command
from kvbench.cli.main import main
from kvbench.config import files
from kvbench.config.compose import compose
from kvbench.config.methods import method_settings
from kvbench.config.settings import read_config
from kvbench.extensions.papers import paper, papers
from kvbench.extensions.papers import tables as paper_table
from kvbench.results.sweep import Sweep, process_sweep, sweeps
from kvbench.runs.choices import read_choice
from kvbench.runs.parts import make_policy
from kvbench.show import figure

TOY = """# A toy's paper.
name: DiffKV
models: {Llama3-8B: meta-llama/Meta-Llama-3-8B-Instruct}
entries:
  - at: table 1
    shows: what toys do
    cells: [Table 1]
    tasks: [task=longctx]
    methods:
      Full FP16: method=full
      "SnapKV {50,25}%": method=snapkv method.ratio=0.{}
      DiffKV K8V4: {Llama3-8B: method=kivi, Qwen2.5-7B: method=diffkv}
    differs: [nothing is the same]
  - at: figure 1
    shows: gates
    then: [published papers=diffkv limit=1]
    took: 1 s
  - at: figure 2
    shows: a photograph
    cannot: it shows a person
"""


@pytest.fixture
def toy(fakes, monkeypatch):
    """A paper on fakes, without pictures."""
    (fakes.parent / "conf" / "paper").mkdir()
    (fakes.parent / "conf" / "paper" / "toy.yaml").write_text(TOY)
    monkeypatch.setattr(figure, "draw", lambda records, path: path)
    forget()
    yield fakes
    forget()


def forget():
    """Read the files anew."""
    papers.find.cache_clear()
    papers._raw.cache_clear()


def test_it_lists_papers_and_entries(toy, capsys):
    """Every paper with its cells; every entry with what makes it, or why nothing does."""
    assert main(["paper"]) == 0 and "A toy's paper." in capsys.readouterr().out
    assert main(["paper", "toy"]) == 0
    shown = capsys.readouterr().out
    assert "longctx through 4 rows" in shown and "cannot be: it shows a person" in shown
    assert main(["paper", "toy", "figure=2"]) == 2 and "no command: it shows a person" in capsys.readouterr().out


@pytest.mark.long  # four runs
@pytest.mark.smoke
def test_a_table_is_run_and_compared_with_the_printed_one(toy, capsys):
    """All rows in one sweep; the cells of another task are not run; the page and the CSV are written."""
    assert main(["paper", "toy", "table=1"]) == 0
    said = capsys.readouterr()
    assert "job 1 of 4: " in said.err and "through 4 runs" in said.err
    page = Path("results/paper/toy/table_1.md").read_text()
    assert "other model" not in page, "the task is none of the paper's"
    assert "not run: " in page and "| Full FP16 | Llama3-8B, printed" in page
    assert len(Path("results/paper/toy/table_1.csv").read_text().splitlines()) == 109


def test_only_this_processs_sweep_is_read(tmp_path):
    """One that somebody else started later in the same folder is not taken for it, whatever became of its record."""
    mine = Sweep.start(tmp_path, "kvbench paper toy table=1", "basic", ["full"])
    later = tmp_path / ".multirun" / "9999-01-01_00-00-00-1" / "sweep.json"
    later.parent.mkdir()
    later.write_text((mine.folder / "sweep.json").read_text().replace(f'"process": {os.getpid()}', '"process": 1'))
    assert sweeps(tmp_path)[-1].folder == later.parent
    assert process_sweep(tmp_path).folder == mine.folder
    later.write_text('{"started": ')
    assert process_sweep(tmp_path).folder == mine.folder, "another one's record is torn"


def test_what_would_run(toy, capsys):
    """`plan=timed` names each row's words, samples and time, and begins nothing; the further command of a figure."""
    assert main(["paper", "toy", "table=1", "plan=timed", "methods=snapkv", "limit=3"]) == 0
    said = capsys.readouterr()
    assert "SnapKV 50%: kvbench seed=0 task=longctx method=snapkv method.ratio=0.5 limit=3" in said.out
    assert "Llama3-8B: model=hf model.path=meta-llama/Meta-Llama-3-8B-Instruct" in said.out
    assert "samples of about" in said.err and "memory: " in said.err and "disk: at most" in said.err
    assert "2 runs; to start them: python -m kvbench paper toy table=1 methods=snapkv limit=3\n" in said.out
    assert "limit=3 hydra/launcher=submitit_slurm hydra.launcher.partition=NAME" in said.out
    assert not list(toy.rglob("sweep.json"))
    assert main(["paper", "toy", "table=1", "plan=true", "hydra/launcher=submitti"]) == 2
    assert "hydra/launcher=submitti does not exist. Did you mean submitit_" in capsys.readouterr().err
    assert main(["paper", "toy", "figure=1", "plan=true"]) == 0
    said = capsys.readouterr().out
    assert (
        "kvbench report view=published papers=diffkv limit=1\nto start it: python -m kvbench paper toy figure=1\n"
        in said
    )
    assert "put it into a job: srun --gres=gpu:1 python -m kvbench paper toy figure=1\n" in said
    assert said.endswith("a small run of it took 1 s\n")
    for kind in ("true", "timed"):
        assert main(["paper", "toy", "table=1", f"plan={kind}", "limit=-1"]) == 0
        said = capsys.readouterr()
        assert "! nothing is known of 4 of 4 runs: limit=-1 " in said.out, kind
        assert "samples of about" not in said.err
    assert main(["paper", "toy", "table=1", "plan=later"]) == 2
    assert "plan=later is no plan" in capsys.readouterr().err


def test_a_command_runs_before_the_jobs(monkeypatch):
    """It writes where the jobs read, has the user's model, and where it fails nothing else runs."""
    methods = {"A": "method=kvquant method.books={results}/b.tsv"}
    first, then = ("books books.out={results}/b.tsv",), ("drift results_dir={results}",)
    entry = papers.Entry(at="claim 1", shows="", tasks=("task=longctx",), first=first, methods=methods, then=then)
    toy = papers.Paper(key="toy", name="Toy", about="", models={}, entries=(entry,))
    cfg = compose_command("paper", ["results_dir=R"])
    ((row, words),) = paper.jobs_of(toy, entry, cfg, ["model=mini"])
    assert row == "A" and "method.books=R/b.tsv" in words
    ran, swept = [], []
    monkeypatch.setattr(paper.commands, "run", lambda name, words: ran.append([name, *words]) or 3)
    words = ["model=mini", "task.length=300", "limit=1"]
    assert paper.run(toy, entry, cfg, words, [], lambda *args: swept.append(args)) == 3
    assert ran == [["books", "books.out=R/b.tsv", "model=mini"]] and not swept


def test_a_plan_loads_no_model(monkeypatch, capsys, tmp_path):
    """It counts samples as they are published, under a limit too, names what is not at hand."""
    monkeypatch.setattr("kvbench.runs.parts.Loaders.load_model", lambda self, group: pytest.fail("it was loaded"))
    monkeypatch.setattr("kvbench.models.files.hub_reachable", lambda *args: pytest.fail("the hub was tried"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    problem_rows.folder_of(tmp_path, "gsm8k")
    words = ["paper", "diffkv", "table=1", "plan=true", "methods=[full,kivi]", "tasks=[gsm8k,math]"]
    assert main([*words, f"task.data_dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "gsm8k: 1319 samples as published, through 2 runs, 2638 answers\nmath: 5000 samples" in said
    assert "! math: no data at hand for algebra, counting_and_probability" in said and "! gsm8k" not in said
    assert "4 runs; to start them: python -m kvbench paper diffkv table=1 'methods=[full,kivi]'" in said
    assert main([*words, f"task.data_dir={tmp_path}", "limit=5"]) == 0
    assert "math: 35 samples as published, through 2 runs, 70 answers" in capsys.readouterr().out


def test_how_much_a_bench_and_a_calibration_measure():
    """Cells and rounds of a bench, as the user's words have them; the settings of a grid."""
    words = ["what=throughput", "throughput.lengths=[64,128]", "throughput.methods=[full]", "rounds=5"]
    assert paper._size("bench", words).startswith("\n2 cells, 5 timed rounds each; quick=true takes small")
    words = ["method=diffkv", "task=math", "calibrate.grid.alpha_h=[0,1]", "calibrate.grid.alpha_l=[0,0.1,1]"]
    assert paper._size("calibrate", words).startswith("\nat most 5 settings through 8 samples of each subset")
    words = ["rule=paper", "method=diffkv", "task=math", "task.split=train"]
    assert paper._size("calibrate", words).startswith("\nat most 11 settings through 8 samples of each subset")
    assert paper._size("attention", []) == ""


def test_a_figure_is_the_command_that_draws_it(toy, capsys):
    """With the user's words that the command has a setting for."""
    assert main(["paper", "toy", "figure=1", "limit=2"]) == 0
    shown = capsys.readouterr().out
    assert "kvbench report view=published papers=diffkv limit=1 limit=2" in shown and "more rows" in shown


@pytest.mark.parametrize(
    ("at", "words", "heading"),
    [
        (
            "figure 8",
            [],
            "DiffKV, figure 8, measured here: other model, smollm2-135m (the paper has Llama3-8B, Llama3-70B",
        ),
        ("figure 2", ["model=mini"], "DiffKV, figure 2, measured here: other model, mini (the paper has Llama3-8B, "),
        ("figure 15b", [], "DiffKV, figure 15b, measured here: other model, smollm2-135m (the paper names none)"),
        ("figure 15a", [], "DiffKV, figure 15a, measured here: other machine, no model"),
        (
            "table 1",
            ["model=hf", "model.path=meta-llama/Meta-Llama-3-8B-Instruct"],
            "DiffKV, table 1, measured here with Meta-Llama-3-8B-Instruct, the paper's Llama3-8B",
        ),
    ],
)
def test_pictures_say_whose_they_are(at, words, heading):
    """Of another model than the paper's, of one of its models, and of no model."""
    known = papers.find("diffkv")
    assert paper.heading_of(known, known.find(*at.split()), words).startswith(heading)


def test_only_what_its_commands_have_just_written_is_read(tmp_path):
    """A bench of before is left out; a table of bytes is read."""
    old, new = (tmp_path / "bench" / "decode" / name / "bench.json" for name in ("1", "2"))
    for path in (old, new):
        document = {"schema": 1, "what": "decode", "started": path.parent.name, "cells": [], "notes": []}
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(document | {"elapsed_s": 1, "settings": {}, "environment": {}}))
    os.utime(old, (1, 1))
    (tmp_path / "a.csv").write_text("method,resident_bytes\nfull,7\n")
    words = ["what=decode", f"out={tmp_path}/bench"], ["method=full", f"out={tmp_path}/a.csv"], ["model=tiny"]
    documents = [*paper._documents(list(zip(("bench", "bytes", "bytes"), words, strict=True)), began=2)]
    assert [one.get("started") or one["rows"] for one in documents] == [
        "2",
        [{"method": "full", "resident_bytes": "7"}],
    ]


def test_a_row_has_the_settings_of_the_model(toy):
    """A model of the paper takes its own line; another one the first."""
    cfg = compose_command("paper", ["paper=toy", "results_dir=r"])
    known, entry = papers.find("toy"), papers.find("toy").find("table", 1)

    def line(*words):
        (job,) = [job for row, job in paper.jobs_of(known, entry, cfg, words) if row == "DiffKV K8V4"]
        return next(word for word in job if word.startswith("method="))

    assert line("model=smollm2-135m") == line() == "method=kivi"
    assert line("model=hf", "model.path=a/Meta-Llama-3-8B-Instruct") == "method=kivi"
    assert paper.model_name(["model=hf", "model.path=/x/Qwen2.5-7B"]) == "Qwen2.5-7B"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("paper tyo", "paper=tyo does not exist. Did you mean toy?"),
        ("paper toy table=7", "table=7 does not exist"),
        ("paper toy table=1 figure=1", "table=1, figure=1: give one of them at a time"),
        ("paper toy figure=1 limt=2", "there is no setting limt"),
        ("paper toy figure=1 hydra/launcher=joblib", "figure 1 is one command and no sweep; on a Slurm cluster put it"),
        ("paper toy table=1 methods=kviv", "methods=kviv does not exist"),
    ],
)
def test_what_it_refuses(toy, capsys, line, message):
    """One sentence, and nothing is begun."""
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err
    assert not list(toy.rglob("sweep.json"))


@pytest.mark.smoke
def test_every_line_of_a_shipped_paper_names_what_there_is():
    """Methods with their settings, tasks with theirs, and commands."""
    for each in papers.every():
        for entry in each.entries:
            lines = {line for model in ("", *each.models) for line in entry.rows(model).values()} | set(entry.tasks)
            if not entry.tasks and any("{methods}" in line for line in entry.then):
                assert all(read_choice("method", line) for line in lines)
            for line in lines if entry.tasks else ():
                first, *words = shlex.split(line)
                group, _, name = first.partition("=")
                has = method_settings(name) if group == "method" else read_config(files.path_of(group, name))
                has = has.get("task", has) if group == "task" else has
                keys = {word.partition("=")[0].removeprefix(f"{group}.") for word in words if word.startswith(group)}
                assert keys <= set(has), line
            assert {line.partition(" ")[0] for line in (*entry.first, *entry.then)} <= {
                name.rpartition("/")[2] for name in files.options("command")
            }


COMPOSED = set()  # what some papers share


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", files.options("paper"))
def test_the_papers_that_kvbench_ships(name):
    """Every line of methods makes its method, every task is composed, and every further command."""

    def is_new(*key):
        is_unknown = key not in COMPOSED
        COMPOSED.add(key)
        return is_unknown

    each = papers.find(name)
    for entry in each.entries:
        lines = [line for model in ("", *each.models) for line in entry.rows(model).values() if entry.tasks]
        for line in entry.tasks:
            words = (*shlex.split(entry.every), *shlex.split(line))
            if is_new(*words):
                compose([*words, "model=random"])
        for line in dict.fromkeys(lines):
            if is_new(*(word.partition("=")[0] if "." in word else word for word in shlex.split(line))):
                make_policy(compose(shlex.split(line)).method)
        cfg = compose_command("paper", [f"paper={name}", "results_dir=r"])
        model_words = ["model=hf", "model.path=a/b"]
        before = paper.command_lines(entry, cfg, model_words, entry.first)  # which go with a model alone
        for command, words in [*before, *paper.command_lines(entry, cfg, model_words)]:
            if is_new(command, *(word for word in words if not word.startswith(("out=", "attention.out=")))):
                compose_command(command, words)


@pytest.mark.smoke
def test_the_document_is_the_files():
    """kvbench/extensions/papers/tables.md is what `make docs` writes today."""
    text = Path(paper_table.__file__).with_name("tables.md").read_text()
    assert text == paper_table.render(), "run `make docs`"
