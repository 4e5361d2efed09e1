"""`kvbench suite`: which jobs it has, what it says before, the page at its end, and that it goes on."""

import shlex
from pathlib import Path

import pytest
from fake_command import SMALL

from kvbench.cli.commands import compose_command
from kvbench.cli.main import main
from kvbench.cli.words import split_command
from kvbench.config import files
from kvbench.config.compose import compose
from kvbench.extensions.suite import suite
from kvbench.results.sweep import sweeps
from kvbench.runs.parts import make_policy


def jobs_of(*words, others=()):
    """The words of each job of the small suite."""
    cfg = compose_command("suite", ["suite=small", "results_dir=r", *words])
    return [" ".join(job) for job in suite.jobs(suite.find("small"), cfg, others)]


def test_a_suite_is_every_task_with_every_method(small):
    """Task by task; a line's values are combined, and a line's word is put instead of the same word of all."""
    jobs = jobs_of()
    methods = ["method=full", "method=snapkv method.ratio=0.5", "method=snapkv method.ratio=0.25", "method=kivi"]
    assert jobs[:4] == [f"seed=3 limit=9 task=longctx {method} results_dir=r" for method in methods]
    assert jobs[4:] == [
        f"seed=3 limit=6 task=longbench protocol.temperature=0.5 {method} results_dir=r" for method in methods
    ]


def test_the_users_words_replace_the_suites(small):
    """A setting, data for the tasks that read data, and a choice among tasks and methods; others come by name or as a
    line."""
    assert jobs_of(
        "methods=full", "tasks=long*x", others=["limit=2", "hydra/launcher=joblib", "store.page_bytes=64"]
    ) == ["seed=3 limit=2 task=longctx method=full store.page_bytes=64 results_dir=r"]
    assert jobs_of("data_dir=/my data", "tasks=longbench", "methods=[kivi]") == [
        "seed=3 limit=6 task=longbench protocol.temperature=0.5 task.data_dir='/my data' method=kivi results_dir=r"
    ]
    jobs = jobs_of("tasks=longctx", "methods=[snap*,diffkv,'method=kivi method.ratio=0.5,0.75',snapkv]")
    assert [shlex.split(job)[3:-1] for job in jobs] == [
        ["method=snapkv", "method.ratio=0.5"],
        ["method=snapkv", "method.ratio=0.25"],
        ["method=diffkv"],
        ["method=kivi", "method.ratio=0.5"],
        ["method=kivi", "method.ratio=0.75"],
    ]


@pytest.mark.long  # eight runs and two pages
@pytest.mark.smoke
def test_it_shows_a_preflight_and_ends_in_a_page(small, capsys):
    """Answers, time, memory and disk of each task and of all; one page with every method in both tasks. Given again, it
    computes nothing, and the sweep knows its command."""
    assert main(["suite=small", "seed=4"]) == 0
    said = capsys.readouterr().err
    # A fake reads a prompt in up to a second, and decodes a token in 0.05 s; answers may have 32.
    assert "fake: 9 samples of about 9 tokens through 4 runs, 36 answers; at most " in said
    assert "fake: 6 samples of about 8 tokens through 4 runs, 24 answers; at most " in said
    assert "in all 60 answers; at most " in said and "memory: " in said and "disk: at most " in said
    assert said.index("in all 60") < said.index("job 1 of 8: ")
    page = Path("results/small/small.html").read_text()
    assert "small: Two tasks, four runs each." in page and "All tasks with tiny" in page
    assert page.count('<th scope="row">snapkv ratio=0.25</th>') >= 3
    assert main(["suite", "suite=small", "seed=4"]) == 0
    second = capsys.readouterr().err
    assert "36 answers, 36 of them there; at most 0 s" in second and "already there" in second
    newest = sweeps(Path("results/small"))[-1].record()
    assert newest.command == "kvbench suite suite=small seed=4" and len(newest.jobs) == 8
    assert newest.jobs[5] == "task=longbench snapkv ratio=0.5", "what always goes with a task is not said"
    assert main(["suite", "status", "suite=small"]) == 0
    assert "8 jobs: 8 done" in capsys.readouterr().out


def test_a_suite_whose_job_fails_shows_the_others(small, capsys):
    """The worst exit code, and the page of what is there."""
    assert main(["suite=small", "tasks=longctx", "methods=[snapkv,'method=kivi method.ratio=3']"]) == 2
    assert "method.ratio=3 is outside (0, 1]" in capsys.readouterr().err
    assert "snapkv ratio=0.25" in Path("results/small/small.html").read_text()


def test_samples_that_a_verdict_takes(small, capsys):
    """`suite plan` reads what is there: the share that differs, and numbers for both verdicts."""
    assert main(["suite=small", "tasks=longctx"]) == 0
    capsys.readouterr()
    assert main(["suite", "plan", "suite=small", "margin=0.1", "methods=snapkv"]) == 0
    shown = capsys.readouterr().out
    assert "n to show" in shown and "n for equal" in shown and "differ, %" in shown
    assert "snapkv ratio=0.5" in shown and "kivi" not in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("suite=smal", "suite=smal does not exist. Did you mean small? Known: "),
        ("suite", "suite=None does not exist"),
        ("suite=small tasks=gsm8k", "tasks=gsm8k does not exist"),
        ("suite=small methods=snapvk", "methods=snapvk does not exist. Did you mean snapkv?"),
        ("suite plan_ suite=small", "what=plan_ does not exist. Did you mean plan?"),
        ("suite=small tasks=longctx limt=2", "there is no setting limt. Did you mean limit?"),
    ],
)
def test_what_a_suite_refuses(small, capsys, line, message):
    """One sentence, and nothing is begun."""
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err
    assert not list(small.rglob("sweep.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("task=longctx\n -> limit=3\n", "a line of a suite says task=NAME, and this one does not: limit=3"),
        ("tasks: -> taks:", "there is no setting small.yaml: taks"),
        ("- method=kivi -> - [method=kivi]", "a list of lines of words"),
        ("method=kivi -> method=kivi=[", "cannot be read"),
    ],
)
def test_a_suite_that_is_written_wrongly(small, capsys, change, message):
    """The file, or the line, is named."""
    before, after = change.split(" -> ")
    (small.parent / "conf" / "suite" / "small.yaml").write_text(SMALL.replace(before, after))
    assert main(["suite=small"]) == 2
    assert message in capsys.readouterr().err


def test_code_runs_after_the_user_agreed(small, capsys):
    """A task that runs code is refused without a word, and gets it with one."""
    (small.parent / "conf" / "task" / "longctx.yaml").write_text("# Code.\nkind: fake\nallow_code_execution: false\n")
    assert main(["suite=small"]) == 2
    assert (
        "asks longctx, which runs code that the model wrote; add allow_code_execution=true" in capsys.readouterr().err
    )
    assert "task.allow_code_execution=True" in jobs_of("allow_code_execution=true")[0]


def test_a_suite_is_a_command():
    """`suite=NAME` alone is one; a run with such a word is none."""
    assert split_command(["suite=quick", "limit=1"]) == ("suite", ["suite=quick", "limit=1"])
    assert split_command(["limit=1", "suite=quick"])[0] == "suite"
    assert split_command(["suite", "status"]) == ("suite", ["status"])
    assert split_command(["run", "suite=quick"])[0] == "run" and split_command(["limit=1"])[0] == "run"


def test_the_suites_that_kvbench_ships():
    """Every line is composed, and every method is made of it."""
    seen = set()
    for name in files.options("suite"):
        cfg = compose_command("suite", [f"suite={name}", "allow_code_execution=true", f"results_dir=results/{name}"])
        known = suite.find(name)
        jobs = suite.jobs(known, cfg, [])
        assert len({tuple(job) for job in jobs}) == len(jobs) > 5
        assert jobs[0][-2] == "method=full"
        for words in suite._tasks(known, cfg):
            compose([*shlex.split(known.every), *words])
        for words in suite._methods(known, cfg):
            if (line := tuple(word.partition("=")[0] if "." in word else word for word in words)) not in seen:
                make_policy(compose(words).method)
            seen.add(line)


def test_a_folder_of_data_goes_to_tasks_that_read_it(tmp_path, capsys):
    """A task that makes its own text where the folder has none for it is not given the folder, which is said; one that
    cannot do without its data is."""

    def folders(*lines):
        known = suite.Suite(every="seed=0", tasks=lines, methods=("method=full",))
        jobs = suite.jobs(known, compose_command("suite", ["suite=quick", f"data_dir={tmp_path}"]), ())
        return [f"task.data_dir={tmp_path}" in job for job in jobs]

    lines = ("task=ruler", "task=needle", "task=instructions", "task=longbench", "task=longctx")
    assert folders(*lines) == [False, False, False, True, False]
    said = capsys.readouterr().err
    assert all(f"data_dir={tmp_path} has nothing for task={name}" in said for name in ("ruler", "needle"))
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "PaulGrahamEssays.jsonl").write_text("{}")
    assert folders(*lines) == [True, True, True, True, False] and not capsys.readouterr().err
