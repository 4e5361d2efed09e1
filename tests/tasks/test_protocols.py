"""Protocols end to end: what a method sees before it compresses, labels in every row, and the terminal table."""

import io
import json
from pathlib import Path

from fake_parts import altered
from omegaconf import OmegaConf
from problem_rows import AIME, GSM8K, MATH, folder_of
from refusals import refused
from rich.console import Console
from test_problem_runs import aime_config

from kvbench.config.files import conf_folder
from kvbench.runs.parts import Loaders
from kvbench.runs.run import run_experiment
from kvbench.show import table
from kvbench.tasks import load_task

QUIET = {"say": lambda text: None}


def config(folder: Path, results_dir: Path, task: str, **changes: object):
    """A task with a tight SnapKV on a tiny random model."""
    cfg = aime_config(folder, results_dir)
    cfg.task = OmegaConf.load(conf_folder() / "task" / f"{task}.yaml")
    plain = {"task.data_dir": str(folder), "protocol.temperature": 0.0, "protocol.num_samples": 1}
    for key, value in (plain | changes).items():
        OmegaConf.update(cfg, key, value)
    return cfg


def spied(seen: list[int]):
    """The real loaders, with a policy that notes how many tokens it sees when it plans a prompt."""
    parts = Loaders()

    def make_policy(cfg):
        policy = parts.make_policy(cfg)
        plan = policy.plan_prefill

        def plan_prefill(view):
            seen.append(view.num_tokens)
            return plan(view)

        object.__setattr__(policy, "plan_prefill", plan_prefill)
        return policy

    return altered(parts, make_policy=make_policy)


def test_no_question_token_is_seen_before_compression(tmp_path: Path) -> None:
    """The policy plans on the context's tokens alone in the agnostic protocol; rows say which protocol they are of."""
    rows = [GSM8K | {"question": f"Ann has {n} boxes of {n}. How many? " * n} for n in (1, 2)]
    folder = folder_of(tmp_path, "gsm8k", *rows)
    runs, seen = {}, {}
    for aware in (True, False):
        seen[aware] = []
        cfg = config(folder, tmp_path / "results", "gsm8k", **{"protocol.query_aware": aware, "batch_size": 1})
        runs[aware] = run_experiment(cfg, method="snapkv", parts=spied(seen[aware]), **QUIET)
        task = load_task(cfg.task, Loaders().load_model(cfg.model), limit=None, seed=0, protocol=cfg.protocol)
        decode = Loaders().load_model(cfg.model).tokenizer.decode
        wanted = [len(request.segments[0]) for request in task.requests]
        assert sorted(set(seen[aware])) == sorted(set(wanted))
        firsts = [decode(request.segments[0]) for request in task.requests]
        assert all(("Ann has" in text) is aware for text in firsts)
        assert aware or all(text.rstrip().endswith(".") for text in firsts)  # the last example's end, and no "Q:"
    records = {
        aware: [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
        for aware, run in runs.items()
    }
    assert all(row["protocol"]["query_aware"] is aware for aware, rows in records.items() for row in rows)
    assert [row["num_prompt_tokens"] for row in records[True]] == [row["num_prompt_tokens"] for row in records[False]]
    assert [row["kept"] for row in records[True]] != [row["kept"] for row in records[False]]
    assert runs[True].record.hash != runs[False].record.hash


def shown(*records) -> str:
    """What the terminal shows, at 100 columns."""
    console = Console(width=100, record=True, file=io.StringIO())
    table.show(list(records), console=console)
    return console.export_text()


def test_the_terminal_shows_how_answers_ended(tmp_path: Path) -> None:
    """Length, share cut, parse failures apart, avg@n and pass@k with intervals, and the protocol's notes."""
    folder = folder_of(tmp_path, "aime24", *(AIME | {"problem": f"Find $6\\cdot {n}$. " * 5} for n in range(2)))
    run = run_experiment(aime_config(folder, tmp_path / "results"), method="snapkv", **QUIET)
    answers = run.record.task_aggregate["answers"]
    flags = {"loop_share": 0.0, "num_fallback": 0, "num_out_of_time": 0, "num_several": 0}
    assert answers == {"num_answers": 16, "mean_tokens": 5.0, "cut_share": 1.0, "num_unparsed": 16} | flags
    text = shown(run.record)
    for part in ("Answers: how they ended", "cut by the limit, %", "100.0", "nothing to grade", "mean tokens"):
        assert part in text, part
    assert "Sampling: 8 answers to each of 2 problems" in text
    line = next(line for line in text.splitlines() if "avg@8" in line)
    assert all(name in line for name in ("pass@2", "pass@4", "pass@8"))
    assert "0.0 [0.0," in text and "Query-agnostic" not in text
    folder = folder_of(tmp_path, "gsm8k")
    cfg = config(folder, tmp_path / "results", "gsm8k", **{"protocol.query_aware": False})
    text = shown(run_experiment(cfg, method="snapkv", **QUIET).record)
    assert "Query-agnostic: the context was compressed before the question was seen." in text
    assert "Sampling" not in text


def test_minerva_form(model, tmp_path: Path) -> None:
    """Four worked examples in front, plain text, graded like the other form; the examples are the context."""
    folder = folder_of(tmp_path, "math500")
    cfg = {"name": "math500", "form": "minerva4", "data_dir": str(folder)}
    task = load_task(cfg, model, limit=1, seed=0, protocol={"max_new_tokens": 64})
    (request,) = task.requests
    text = model.tokenizer.decode(request.segments[0], skip_special_tokens=True)
    assert text.count("Problem:\n") == 5 and text.count("I hope it is correct.") == 4
    assert text.endswith(f"I hope it is correct.\n\nProblem:\n{MATH['problem']}\n\nSolution:")
    assert request.stop[0] == "Problem:" and task.protocol["form"] == "minerva4"
    assert task.score(request, " The final answer is $5/6$. I hope it is correct.") == {"correct": 1.0, "parsed": 1.0}
    assert task.score(request, " Final Answer: The final answer is $6/5$.")["correct"] == 0.0
    agnostic = load_task(cfg, model, limit=1, seed=0, protocol={"max_new_tokens": 64, "query_aware": False})
    first, second = (model.tokenizer.decode(part, skip_special_tokens=True) for part in agnostic.requests[0].segments)
    assert MATH["problem"] not in first and MATH["problem"] in second
    with refused("setting-value", "task.form", "task.form='minerva'", "mean minerva4"):
        load_task(cfg | {"form": "minerva"}, model, limit=1, seed=0)
    cfg = {"name": "math", "form": "minerva4", "subjects": ["algebra"], "data_dir": str(folder_of(tmp_path, "math"))}
    task = load_task(cfg, model, limit=1, seed=0, protocol={"max_new_tokens": 64})  # the subjects of MATH have it too
    assert model.tokenizer.decode(task.requests[0].segments[0]).count("Problem:\n") == 5
