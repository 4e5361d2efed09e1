"""LongBench: the official protocol, subset by subset, and the task as a whole."""

import json
import logging
from pathlib import Path

import pytest
from longbench_rows import row, write
from places import DATA, need_data
from refusals import refused

from kvbench.tasks import load_task
from kvbench.tasks.lmeval import TASKS_FOLDER, metadata_of
from kvbench.tasks.longbench import ENGLISH, LONGBENCH_E

# LongBench's six prompts that lm-eval changed: what lm-eval has at the end, and what the official file has.
CHANGED = {
    "triviaqa": ("{{context}}\n{{input}}", "{{context}}\n\n{{input}}"),
    "samsum": ("{{context}}\n{{input}}", "{{context}}\n\n{{input}}"),
    "passage_count": ("is:", "is: "),
    "passage_retrieval_en": ("is:", "is: "),
    "lcc": ("code:", "code:\n"),
    "repobench-p": ("code:", "code:\n"),
}
WITHOUT_CHAT = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}


@pytest.fixture(scope="module")
def manager():
    """Gives lm-eval's index of our YAMLs."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False, include_path=str(TASKS_FOLDER))


@pytest.fixture(scope="module")
def configs(manager) -> dict[str, dict]:
    """Gives our YAMLs by their names."""
    return {name: entry.cfg for name, entry in manager.task_index.items()}


def folder_of(tmp_path: Path, *subsets: str) -> Path:
    """A data folder with three rows for each subset."""
    for subset in subsets:
        base = subset.removesuffix("_e")
        classes = ["Food", "Date"] if base == "trec" else None
        answers = {"trec": ["Food"], "passage_retrieval_en": ["Paragraph 3"], "passage_count": ["7"]}.get(
            base, ["a box"]
        )
        rows = [row(input=f"Where is {n}?", all_classes=classes, answers=answers, length=4000 * n) for n in range(3)]
        write(tmp_path / f"{subset}.jsonl", *rows)
    return tmp_path


def load(model, folder: Path, subsets: object, **more: object):
    """The task with its data in a folder."""
    protocol, limit = more.pop("protocol", None), more.pop("limit", None)
    settings = {"name": "longbench", "subsets": subsets, "data_dir": str(folder)} | more
    return load_task(settings, model, limit=limit and f"first:{limit}", seed=0, protocol=protocol)


def test_available_takes_the_subsets_that_are_at_hand(tiny_model, tmp_path, monkeypatch) -> None:
    """Alone of the 16, with `e` of the 13, with the identity of a list of the same names; the others are named, and the
    hub is not tried for them. Where none is at hand all are missing."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("kvbench.models.files.hub_reachable", lambda *given: False)
    model, folder = tiny_model(), folder_of(tmp_path, "trec", "lcc", "samsum_e")
    found, named = load(model, folder, "available"), load(model, folder, ["trec", "lcc"])
    assert {request.subset for request in found.requests} == {"trec", "lcc"}
    assert (found.fingerprint, found.protocol) == (named.fingerprint, named.protocol)
    assert found.missing == [name for name in ENGLISH if name not in ("trec", "lcc")] and named.missing == []
    found = load(model, folder, ["e", "available"])
    assert {request.subset for request in found.requests} == {"samsum_e"} and len(found.missing) == 12
    with refused("data-missing", None, "hotpotqa, qmsum"):
        load(model, folder, ["available", "hotpotqa", "qmsum"])


@pytest.mark.parametrize("subset", ENGLISH)
def test_prompts_are_the_official_ones(configs, subset: str) -> None:
    """Ten prompts equal lm-eval's; the six that lm-eval changed differ from it exactly as the official file does."""
    import lm_eval
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads function names as text."""

    Loader.add_constructor("!function", lambda loader, node: node.value)
    path = Path(lm_eval.__file__).parent / "tasks" / "longbench" / f"{subset}.yaml"
    theirs = yaml.load(path.read_text(), Loader)
    expected = theirs["doc_to_text"].replace("{{question}}", "{{input}}")
    if subset in CHANGED:
        old, new = CHANGED[subset]
        assert expected.endswith(old)
        expected = expected.removesuffix(old) + new
    ours = configs[f"kvbench_longbench_{subset}"]
    assert ours["doc_to_text"] == expected
    assert ours["generation_kwargs"]["max_gen_toks"] == theirs["generation_kwargs"]["max_gen_toks"]
    assert ours["generation_kwargs"]["until"] == []
    assert ours["metadata"]["subset"] == subset
    assert ours["metadata"]["chat_template"] is (subset not in WITHOUT_CHAT)


def test_longbench_e_is_asked_like_longbench(configs) -> None:
    """The 13 variants differ from their subsets in data only."""
    assert (len(ENGLISH), len(LONGBENCH_E)) == (16, 13)
    assert set(ENGLISH) - {name.removesuffix("_e") for name in LONGBENCH_E} == {"narrativeqa", "musique", "qmsum"}
    for name in LONGBENCH_E:
        own, base = (dict(configs[f"kvbench_longbench_{key}"]) for key in (name, name.removesuffix("_e")))
        assert own.pop("task") != base.pop("task")
        assert own.pop("metadata") == base.pop("metadata") | {"subset": name}
        assert {key: str(value) for key, value in own.items()} == {key: str(value) for key, value in base.items()}


def test_the_index_holds_our_tasks_alone(manager) -> None:
    """Our tasks are found by reading our folder; lm-eval's own, whose index takes more than a minute, is not read."""
    paths = [entry.yaml_path for entry in manager.task_index.values() if entry.yaml_path]
    assert len(paths) > 29 and all(path.is_relative_to(TASKS_FOLDER) for path in paths)
    assert {"kvbench_longbench", "kvbench_longbench_e", "kvbench_longctx"} <= set(manager.all_groups)


def test_every_subset_loads_and_scores(model, tokenizer, tmp_path: Path) -> None:
    """All 29 subsets give requests whose own reference answer scores 1 (a rounding short of it for ROUGE)."""
    folder = folder_of(tmp_path, *ENGLISH, *LONGBENCH_E)
    task = load(model, folder, ["en", "e"])
    assert len(task.requests) == 29 * 3
    assert list(dict.fromkeys(request.subset for request in task.requests)) == [*ENGLISH, *LONGBENCH_E]
    for request in task.requests:
        reference = tokenizer.decode(request.gold).strip()
        assert task.score(request, reference)["score"] == pytest.approx(1.0, abs=1e-6), request.sample_id
        assert task.score(request, "zzz")["score"] == 0.0
    buckets = {request.meta["length_bucket"] for request in task.requests if request.subset.endswith("_e")}
    assert buckets == {"0-4k", "4-8k", "8k+"}
    assert not any("length_bucket" in request.meta for request in task.requests if not request.subset.endswith("_e"))


def test_chat_template_by_subset(model, tokenizer, tmp_path: Path) -> None:
    """Few-shot and code subsets go without, the others with; the protocol can override both."""
    folder = folder_of(tmp_path, "trec", "qasper")
    wrapped = {
        r.subset: tokenizer.decode(r.segments[0]).endswith("<|assistant|>\n")
        for r in load(model, folder, ["trec", "qasper"]).requests
    }
    assert wrapped == {"trec": False, "qasper": True}
    never = load(model, folder, ["trec", "qasper"], protocol={"chat_template": "never"})
    assert not any("<|assistant|>" in tokenizer.decode(r.segments[0]) for r in never.requests)
    assert never.protocol["rules"]["qasper"]["chat_template"] is False


def test_samsum_ends_at_a_newline_but_not_at_once(model, tokenizer, tmp_path: Path) -> None:
    """The official rule: the newline token is an end token, and the answer has at least one token."""
    folder = folder_of(tmp_path, "samsum", "samsum_e", "triviaqa")
    rules = {
        r.subset: (r.stop_token_ids, r.min_new_tokens, r.stop)
        for r in load(model, folder, ["samsum", "samsum_e", "triviaqa"]).requests
    }
    newline = tuple(tokenizer.encode("\n", add_special_tokens=False)[-1:])
    assert rules == {"samsum": (newline, 1, ()), "samsum_e": (newline, 1, ()), "triviaqa": ((), 0, ())}


def test_the_question_is_held_back(model, tokenizer, tmp_path: Path) -> None:
    """Without query awareness the second segment holds everything behind the document."""
    folder = folder_of(tmp_path, "qasper", "lcc", "trec")
    task = load(model, folder, ["qasper", "lcc", "trec"], protocol={"query_aware": False}, limit=1)
    second = {r.subset: tokenizer.decode(r.segments[1], skip_special_tokens=True) for r in task.requests}
    assert second["lcc"].strip() == "Next line of code:"
    assert second["trec"].strip() == "Where is 0?"
    assert "Answer the question based on the above article" in second["qasper"]
    assert task.protocol["query_aware"] is False
    assert task.protocol["split"] == "after the context"


def test_the_line_behind_code_can_be_left_out(model, tokenizer, tmp_path: Path) -> None:
    """It is at the end of the two subsets about code, and nothing else changes."""
    subsets = ["lcc", "repobench-p", "qasper"]
    folder = folder_of(tmp_path, *subsets)
    tasks = [load(model, folder, subsets, limit=1, **more) for more in ({}, {"next_line": False})]
    texts = [[tokenizer.decode(r.segments[0], skip_special_tokens=True) for r in t.requests] for t in tasks]
    (lcc, repobench, qasper), without = texts
    assert without[:2] == [text.removesuffix("Next line of code:\n") for text in (lcc, repobench)] != [lcc, repobench]
    assert without[2] == qasper
    assert tasks[0].fingerprint != tasks[1].fingerprint


def test_long_prompts_lose_their_middle_and_are_counted(make_model, tokenizer, tmp_path: Path) -> None:
    """A prompt longer than the model is cut by the official rule, and the task counts it."""
    write(tmp_path / "qasper.jsonl", row(), row(context="It is in the box. " * 900))
    task = load(make_model(max_tokens=1000), tmp_path, "qasper")
    assert [request.truncated for request in task.requests] == [False, True]
    cut = task.requests[1]
    assert cut.num_prompt_tokens + cut.max_new_tokens <= 1000
    text = tokenizer.decode(cut.segments[0], skip_special_tokens=True)
    assert "You are given a scientific article" in text
    assert text.rstrip().endswith("Question: Where is it?\n\nAnswer:")
    shorter = load(make_model(), tmp_path, "qasper", max_prompt_tokens=300)
    assert sum(request.truncated for request in shorter.requests) == 2


def test_limit_and_quarantine(model, tmp_path: Path) -> None:
    """The first good rows are taken, broken ones are reported, and ids do not shift."""
    write(tmp_path / "qasper.jsonl", row(), b"{", row(), row())
    task = load(model, tmp_path, "qasper", limit=2)
    assert [request.sample_id for request in task.requests] == ["qasper/0", "qasper/2"]
    assert [(item["line"], Path(item["file"]).name) for item in task.quarantined] == [(2, "qasper.jsonl")]


def test_the_fingerprint_follows_the_data(model, tmp_path: Path) -> None:
    """A changed reference answer is another task although the prompts are the same; a moved folder is the same task."""
    first, second, third = (tmp_path / name for name in "abc")
    for folder, answers in ((first, ["x"]), (second, ["x", "y"]), (third, ["x"])):
        folder.mkdir()
        write(folder / "qasper.jsonl", row(answers=answers))
    prints = [load(model, folder, "qasper").fingerprint for folder in (first, second, third)]
    assert prints[0] == prints[2] != prints[1]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"subsets": ["tre"]}, ("setting-value", "task.subsets", "['tre']", "mean trec")),
        ({"subsets": "gov_reports"}, ("setting-value", "task.subsets", "'gov_reports'", "mean gov_report")),
        (
            {"subsets": "trec", "max_prompt_tokens": 1},
            ("setting-value", "task.max_prompt_tokens", "task.max_prompt_tokens=1", "2 to 16777216"),
        ),
        (
            {"subsets": "trec", "max_prompt_tokens": 9999},
            ("setting-value", "task.max_prompt_tokens", "task.max_prompt_tokens=9999", "2 and 4032"),
        ),
        (
            {"subsets": "trec", "max_prompt_tokens": "fit:1"},
            ("setting-value", "task.max_prompt_tokens", "task.max_prompt_tokens=", "fit:N for N"),
        ),
        (
            {"subsets": "trec", "max_prompt_tokens": "4000"},
            ("setting-value", "task.max_prompt_tokens", "task.max_prompt_tokens=", "fit:N for N"),
        ),
        ({"subsets": "trec", "datadir": "x"}, ("name-unknown", None, "key=datadir", "mean data_dir")),
        ({"subsets": ["qasper"]}, ("data-missing", None, "data for qasper")),
    ],
)
def test_bad_settings(model, tmp_path: Path, settings: dict, error: tuple) -> None:
    """Each is refused with the value, the rule and what exists."""
    with refused(*error):
        load(model, folder_of(tmp_path, "trec"), **settings)


def test_loading_is_quiet(model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """lm-eval's warnings about settings that we make on purpose do not reach the user, and its logger is put back."""
    logger = logging.getLogger("lm_eval.api.task")
    before = logger.level
    load(model, folder_of(tmp_path, "trec"), "trec")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logger.level == before


def test_metadata_of_tasks() -> None:
    """The LM class finds our tasks' rules by name, and only ours."""
    assert metadata_of("kvbench_longbench_samsum_e")["min_new_tokens"] == 1
    assert metadata_of("longbench_samsum") is None


@need_data("longbench")
def test_real_rows(make_model, tokenizer) -> None:
    """Every file of real rows loads without a broken row, and its references score 1."""
    subsets = sorted(path.stem for path in (DATA / "longbench").glob("*.jsonl"))
    task = load(make_model(max_tokens=3000), DATA / "longbench", subsets, limit=3)
    assert {request.subset for request in task.requests} == set(subsets)
    assert task.quarantined == []
    assert any(request.truncated for request in task.requests)
    with (DATA / "longbench" / "trec.jsonl").open(newline="\n") as stream:
        answers = [json.loads(line)["answers"][0] for line in stream]
    for request in task.requests:
        assert request.num_prompt_tokens + request.max_new_tokens <= 3000
        if request.subset == "trec":
            assert task.score(request, answers[request.meta["index"]] + "\nQuestion: What")["score"] > 0.3
