"""Any lm-eval task by name: the same scores as lm-eval's own loop, through the compressed cache; clear errors."""

import re
from pathlib import Path

import pytest
import torch
from lmeval_demo import DATA, PICK, WRITE, answered, lm_of, task_of, write_folder
from refusals import refused
from selection import in_turn

from kvbench.tasks import load_task
from kvbench.tasks.harness import find


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Gives the demo folder."""
    return write_folder(tmp_path_factory.mktemp("lmeval"))


SHOWN = [("demo_pick", 2), ("demo_pick", 0), ("demo_last", None), ("demo_write", 2)]


@pytest.mark.parametrize(
    ("shown", "method"), in_turn(SHOWN, ({}, {"method": "snapkv", "method.budget": 16, "method.window": 4}))
)
def test_scores_are_those_of_lm_evals_own_loop(folder, shown, method) -> None:
    """Per document and in the aggregate: the same metrics from lm-eval's evaluator with kvbench as its model."""
    import lm_eval

    lm, (name, shots) = lm_of(**method), shown
    task = task_of(folder, lm, name, num_fewshot=shots)
    records = answered(lm, task)
    theirs = lm_eval.simple_evaluate(
        model=lm,
        tasks=[name],
        task_manager=find.manager_of([name], [str(folder)]),
        num_fewshot=shots,
        bootstrap_iters=0,
        log_samples=True,
    )
    reported = task.aggregate(records)["lm_eval"][name]
    for key, value in theirs["results"][name].items():
        metric, _, filter_name = key.partition(",")
        if metric in ("alias", "name", "sample_len") or metric.endswith("_stderr"):
            continue
        found = metric if filter_name == "none" else key
        # Perplexities are exp of sums of logits, which differ in the last bits with the batch they were computed in.
        assert reported[found] == pytest.approx(value, rel=1e-3), key
    samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
    per_document = [sample for sample in samples if sample["filter"] in ("none", "raw")]
    assert len(per_document) == len(records) == 4
    for record, sample in zip(records, per_document, strict=True):
        for metric in ("acc", "acc_norm"):
            if metric in sample:
                assert record["scores"][metric] == sample[metric]
        if name == "demo_write":
            assert record["text"] == sample["resps"][0][0]


def test_choices_of_the_full_cache_are_transformers_own(folder) -> None:
    """Each choice of each document: the sum of a plain forward pass, with the examples in front."""
    from kvbench.models.load import load_model

    lm = lm_of(**{"method.tier": "native"})
    plain = load_model({**dict(lm.config.model)}).model
    task = task_of(folder, lm, "demo_pick", num_fewshot=2)
    for record, request in zip(answered(lm, task), task.requests, strict=True):
        prompt = [token for segment in request.segments for token in segment]
        assert lm.model.tokenizer.decode(prompt, skip_special_tokens=True).count("Question:") == 3
        for tokens, found in zip(request.choices, record["choices"], strict=True):
            with torch.no_grad():
                logp = plain(torch.tensor([[*prompt, *tokens]])).logits[0].float().log_softmax(-1)
            wanted = sum(float(logp[len(prompt) - 1 + at, token]) for at, token in enumerate(tokens))
            assert found["loglikelihood"] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("doc_to_text: 5", "(AssertionError: Context is not a string! : 5)"),
        ('doc_to_text: "{{ question.missing.x }}"', "(UndefinedError: "),
        ('doc_to_text: "{{"', "(TemplateSyntaxError: "),
    ],
)
def test_what_lm_eval_raises_over_a_task_is_told_of_the_task(folder, tmp_path, line, fault) -> None:
    """A broken YAML is its maker's, and was called a fault of kvbench; lm-eval raises whatever there is."""
    text = re.sub("doc_to_text: .*", lambda _: line, WRITE.replace("demo_write", "odd"))
    (tmp_path / "odd.yaml").write_text(text + DATA.format(folder=folder))
    with refused("file-content", "task.name", "task.name=odd", fault):
        task_of(tmp_path, lm_of(), "odd")


def test_groups_and_tags_find_their_members(folder) -> None:
    """A group's members in other folders are found; a tag is spread over YAMLs; protocols name the task."""
    lm = lm_of()
    group = task_of(folder, lm, "demo_group")
    assert {request.subset for request in group.requests} == {"demo_pick", "demo_last"}
    assert list(group.metrics) == ["acc"]  # what both report
    with refused("unsupported", "task.name", "demo_pick, demo_write"):
        task_of(folder, lm, "demo_tag")
    assert task_of(folder, lm, "other").primary == "exact_match,raw"
    assert task_of(folder, lm, "other", metric="exact_match,letters").primary == "exact_match,letters"
    assert group.protocol["harness"].startswith("lm-eval ") and group.protocol["lm_eval_task"] == "demo_group"
    assert group.fingerprint != task_of(folder, lm, "demo_pick").fingerprint


def test_agnostic_prompts_hold_no_question_token_before_compression(folder) -> None:
    """The examples are the context; without examples there is none, and the protocol is refused."""
    lm = lm_of()
    for name in ("demo_pick", "demo_write"):
        aware = task_of(folder, lm, name, num_fewshot=2)
        parts = task_of(folder, lm, name, {"query_aware": False}, num_fewshot=2)
        assert parts.protocol["query_aware"] is False
        for one, other in zip(aware.requests, parts.requests, strict=True):
            assert sum(one.segments, ()) == sum(other.segments, ())
            first, second = (lm.model.tokenizer.decode(part, skip_special_tokens=True) for part in other.segments)
            assert first.count("Question:") == 2 and second.count("Question:") == 1
    with refused("settings-conflict", "protocol.query_aware", "task.name=demo_pick"):
        task_of(folder, lm, "demo_pick", {"query_aware": False}, num_fewshot=0)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"name": None}, ("setting-missing", "task.name", "task.name=hellaswag")),
        ({"name": "demo_pik"}, ("name-unknown", "task.name", "task.name=demo_pik", "demo_pick,")),
        ({"num_fewshot": -1}, ("setting-value", "task.num_fewshot", "num_fewshot=-1")),
        ({"metric": "f1"}, ("name-unknown", "task.metric", "task.metric=f1")),
        ({"include_path": "/nowhere"}, ("file-missing", "task.include_path", "include_path=/nowhere")),
        ({"shots": 1}, ("name-unknown", None, "key=shots")),
        ({"data_dir": "/nowhere"}, ("file-missing", "task.data_dir", "data_dir=/nowhere")),
    ],
)
def test_wrong_settings_say_what_is_right(folder, settings, error) -> None:
    """Each names the value and the remedy."""
    with refused(*error):
        task_of(folder, lm_of(), settings.pop("name", "demo_pick"), **settings)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("output_type: loglikelihood_rolling", "loglikelihood_rolling"),
        ("repeats: 3", "3 answers"),
        ("unsafe_code: true", "task=humaneval_plus"),
    ],
)
def test_what_the_loop_cannot_run_is_refused(folder, tmp_path, change, value) -> None:
    """The message names the way that can."""
    text = WRITE.replace("demo_write", "odd").replace("output_type: generate_until\n", "")
    text += change + ("" if "output_type" in change else "\noutput_type: generate_until") + "\n"
    (tmp_path / "odd.yaml").write_text(text + DATA.format(folder=folder))
    with refused("unsupported", "task.name", "task.name=odd", value):
        task_of(tmp_path, lm_of(), "odd")


@pytest.mark.parametrize("name", ["mmlu", "mmlu_pro", "gpqa", "hellaswag"])
def test_missing_data_is_told_without_asking_the_hub(name, monkeypatch) -> None:
    """lm-eval's own tasks are found without its index; without their data, and with a hub that does not answer, the
    command that fetches it is named, and the data libraries, which retry for half a minute, never tried the network."""
    import datasets
    from huggingface_hub import constants
    from lm_eval.tasks import TaskManager
    from omegaconf import OmegaConf

    from kvbench.config.files import conf_folder

    file = name if name != "hellaswag" else "lm_eval"
    cfg = OmegaConf.load(conf_folder() / "task" / f"{file}.yaml")
    cfg.name = cfg.name or name
    lm = lm_of()
    # Nobody said that this machine has no network; the hub just does not answer.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    build, offline, indexed = TaskManager.load, [], []

    def load(self, specs):
        offline.append((constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        indexed.append(len(self.task_index))
        return build(self, specs)

    monkeypatch.setattr(TaskManager, "load", load)
    with refused("data-missing", None, "hf download", "--repo-type dataset --local-dir DIR", "task.data_dir=DIR"):
        load_task(cfg, lm.model, limit=1, seed=0)
    assert offline == [(True, True)] and indexed[0] < 1000  # of 14,000


def test_data_from_a_local_copy_of_the_repository(folder, tmp_path) -> None:
    """`task.data_dir` stands in for the data set's name on the hub, for a group, a tag and a task."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, split in (("rows", "test"), ("shots", "train")):
        (copy / f"{split}.jsonl").write_text((folder / f"{name}.json").read_text())
    tasks = tmp_path / "yamls"
    tasks.mkdir()
    (tasks / "far.yaml").write_text(PICK.replace("demo_pick", "far") + "dataset_path: nobody/nothing\nnum_fewshot: 0\n")
    (tasks / "group.yaml").write_text("group: far_group\ntask: [far]\n")
    for name in ("far", "far_group", "demo_tag"):
        task = task_of(tasks, lm_of(), name, data_dir=str(copy))
        assert [request.sample_id for request in task.requests] == [f"far/{n}" for n in range(4)]


def test_the_fingerprint_is_the_same_in_another_process(folder, tmp_path, monkeypatch) -> None:
    """Functions of a task that have no source, such as partials, are hashed without their address."""
    from kvbench.tasks import task as task_module

    lines = "from functools import partial\ndef ask(word, doc):\n    return word\ndoc_to_text = partial(ask, 'Q')\n"
    (tmp_path / "utils.py").write_text(lines)
    text = PICK.replace("demo_pick", "far").replace('"Question: {{question}}\\nAnswer:"', "!function utils.doc_to_text")
    (tmp_path / "far.yaml").write_text(text + DATA.format(folder=folder))
    hashed = []
    fingerprint = task_module.fingerprint
    monkeypatch.setattr(task_module, "fingerprint", lambda *given: hashed.append(given[1]) or fingerprint(*given))
    task = task_of(tmp_path, lm_of(), "far", num_fewshot=0)
    (config,) = (str(item) for item in hashed[0].values() if len(item) == 3)
    assert " at 0x" in str(task.docs["far/0"].task.dump_config())
    assert "functools.partial(<function ask>" in config and " at 0x" not in config


def test_groups_weigh_their_tasks_as_lm_eval_does():
    """MMLU's questions weigh alike, as its YAML says; a group without a mean of its own has equal tasks, and a single
    task has no weights."""
    from kvbench.tasks.harness.find import weighting_of

    assert weighting_of("mmlu") == weighting_of("mmlu_pro") == "sample"
    assert weighting_of("gsm8k") == "subset"
