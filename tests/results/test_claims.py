"""What a record claims of its metrics is held against its task."""

import json

import pytest
from refusals import refused
from stored import store

from kvbench import tasks
from kvbench.cli.main import main
from kvbench.results.claims import REGISTERED, TASKS, Declared, contradiction, unchecked
from kvbench.results.record import RunRecord
from kvbench.tasks.taskset import TaskSet


def test_the_table_is_what_the_tasks_declare():
    """Every task of kvbench's own, with its metrics, directions, primary metric and weights."""
    assert set(TASKS) == set(tasks.BENCHMARKS)
    for name, known in TASKS.items():
        kind = tasks.settings_class({"name": name})
        metrics = {metric: info.higher_is_better for metric, info in kind.metrics.items()} or {"score": True}  # custom
        weighting = kind.kind.__dataclass_fields__["weighting"].default
        assert known == Declared(kind.primary, metrics, weighting), name
    assert TaskSet.__dataclass_fields__["weighting"].default == "subset"


def test_the_table_of_registered_metrics_is_lm_evals():
    """With the directions that lm-eval has."""
    from lm_eval.api import metrics, registry

    assert metrics
    assert {name: registry.HIGHER_IS_BETTER_REGISTRY[name] for name in registry.HIGHER_IS_BETTER_REGISTRY} == REGISTERED


CLAIMS = [
    lambda record: record["metrics"]["score"].update(higher_is_better=False),
    lambda record: record["metrics"]["score"].update(primary=False),
    lambda record: record["metrics"].update(other=record["metrics"]["score"] | {"primary": False}),
    lambda record: record.update(weighting="sample"),
    lambda record: record.update(task="another"),
]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_that_its_task_does_not_make_is_named_and_not_used(tmp_path, capsys, claim):
    """One boolean turned every loss into a gain: the folder is named with both values, and its numbers are nowhere."""
    scores = {"a": [1.0] * 12}
    store(tmp_path, "full", scores, task="custom")
    store(tmp_path, "good", scores, task="custom")
    folder = store(tmp_path, "bad", {"a": [0.0] * 12}, task="custom")
    path = folder / "run.json"
    record = json.loads(path.read_text())
    claim(record)
    path.write_text(json.dumps(record))
    with refused("file-content", None, "run.json claims"):
        RunRecord.load(folder)
    out = tmp_path / "out.csv"
    assert main(["compare", f"results_dir={tmp_path}", "resamples=200", f"out={out}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert folder.relative_to(tmp_path).as_posix() in said and "claims" in said
    assert "good" in out.read_text() and "bad" not in out.read_text()


def test_both_values_are_named():
    """That of the record and that of the task."""
    held = "claims loop: higher is better, and task drift declares: lower is better"
    assert contradiction("drift", {"repetition": (False, True), "loop": (True, False)}, "subset") == held
    assert not contradiction("drift", {}, "sample"), "a run that has only begun claims nothing"
    assert "2 primary metrics" in contradiction("lm_eval_x", {"acc": (True, True), "f1": (True, True)}, "subset")


def test_claims_of_lm_evals_tasks_are_said_to_be_claims(tmp_path, capsys):
    """Its tasks cannot be read without their data; what is unlike lm-eval's own metric of that name is named."""
    assert not unchecked("custom", {"score": False})
    said = unchecked("lm_eval_x", {"acc,none": False, "mine": False})
    assert "acc,none: lower is better, unlike" in said and "mine:" not in said
    for method in ("full", "half"):
        store(tmp_path, method, {"a": [1, 0, 1]}, task="lm_eval_x")
    assert main(["compare", f"results_dir={tmp_path}", "resamples=200"]) == 0
    assert "as run.json claims" in " ".join(capsys.readouterr().out.split())


def test_a_record_that_contradicts_the_others_is_left_out(tmp_path, capsys):
    """Of a task that is declared elsewhere, the runs of one question claim one direction."""
    for method in ("full", "good", "bad"):
        folder = store(tmp_path, method, {"a": [1, 0, 1]}, task="lm_eval_x")
    path = folder / "run.json"
    record = json.loads(path.read_text())
    record["metrics"]["exact"]["higher_is_better"] = False
    path.write_text(json.dumps(record))
    out = tmp_path / "out.csv"
    assert main(["compare", f"results_dir={tmp_path}", "resamples=200", f"out={out}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "lower is better" in said and "higher is better" in said
    assert "good" in out.read_text() and "bad" not in out.read_text()


@pytest.mark.parametrize(
    "claim",
    [
        {"method": "full"},  # the others would be compared with it
        {"protocol": {"query_aware": False}},
        {"backend": "gpu"},
        {"seed": 7},
    ],
)
def test_what_a_record_says_twice_is_one_thing(tmp_path, capsys, claim):
    """Fields that the identity has too are readers' settings and names: a record whose two differ is left out."""
    for method in ("full", "good", "bad"):
        folder = store(tmp_path, method, {"a": [1, 0, 1]}, settings={"budget": 0.5} if method != "full" else None)
    record = json.loads((folder / "run.json").read_text())
    assert claim.keys() <= record.keys()
    (folder / "run.json").write_text(json.dumps(record | claim))
    assert main(["compare", f"results_dir={tmp_path}", "resamples=200"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{folder.name} is left out" in said and "and its identity is of" in said
