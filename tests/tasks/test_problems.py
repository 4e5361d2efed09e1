"""GSM8K, MATH, AIME, HumanEval+ and MBPP+ as tasks: prompts, reference answers, errors, consent."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cage_target import needs_cage
from loaded import text_of
from longbench_rows import write
from omegaconf import OmegaConf
from problem_rows import AIME, CODE, FILES, GSM8K, MATH, folder_of
from refusals import refused

from kvbench.config.files import conf_folder
from kvbench.tasks import check_task, load_task
from kvbench.tasks.aime import Aime
from kvbench.tasks.gsm8k import COT8, find_answer
from kvbench.tasks.lmeval import metadata_of
from kvbench.tasks.mathematics import SUBJECTS

CODE_TASKS = ("humaneval_plus", "mbpp_plus")
BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture
def no_cage(monkeypatch):
    """Lets code tasks load on machines without isolation; nothing is run."""
    from kvbench.tasks.code.cage import run as cage

    monkeypatch.setattr(cage, "run", lambda *arguments, allow_code_execution, **more: None)
    monkeypatch.setattr("kvbench.tasks.code.reference.unusable", lambda dataset, rows: {})


def load(model, name: str, folder: Path, **settings: object):
    """A task with its data in a folder, answers of at most 64 tokens."""
    protocol = {"max_new_tokens": 64} | settings.pop("protocol", {})
    limit, seed = settings.pop("limit", None), settings.pop("seed", 0)
    consent = {"allow_code_execution": True} if name in CODE_TASKS else {}
    cfg = {"name": name, "data_dir": str(folder)} | consent | settings
    return load_task(cfg, model, limit=limit and f"first:{limit}", seed=seed, protocol=protocol)


@pytest.mark.parametrize("name", FILES)
def test_every_task_has_a_configuration_that_fits_it(name: str, model, tmp_path: Path, no_cage) -> None:
    """The shipped YAML loads with nothing but a data folder; limit, subset, metrics and metadata are as declared."""
    cfg = OmegaConf.to_container(OmegaConf.load(conf_folder() / "task" / f"{name}.yaml"))
    cfg |= {"data_dir": str(folder_of(tmp_path, name))} | ({"subjects": "algebra"} if name == "math" else {})
    cfg |= {"allow_code_execution": True} if name in CODE_TASKS else {}
    task = load_task(cfg, model, limit="first:2", seed=0, protocol={"max_new_tokens": 64})
    assert [request.sample_id for request in task.requests] == [f"{name}/0", f"{name}/1"]
    assert {request.subset for request in task.requests} == {name}
    assert all(request.gold and request.answers and all(request.answers) for request in task.requests)
    assert all(request.meta["index"] in (0, 1) for request in task.requests)
    assert task.primary in task.metrics
    assert "parsed" in task.metrics
    assert task.protocol["form"]
    json.dumps(task.protocol)


def test_cot8_prompt_is_the_published_one(model, tmp_path: Path) -> None:
    """Eight examples and the question, no chat template; the reference continues the prompt in the same style."""
    task = load(model, "gsm8k", folder_of(tmp_path, "gsm8k"), form="cot8")
    prompt = text_of(model, task.requests[0])
    assert len(COT8) == 8
    assert prompt.startswith("<s>Q: There are 15 trees in the grove.")
    assert prompt.count("\nA: ") == prompt.count("The answer is ") == 8
    assert prompt.endswith("23 - 15 is 8. The answer is 8.\n\nQ: Ann has 3 boxes of 4. How many?\nA:")
    assert model.tokenizer.decode(task.requests[0].gold) == " 3 boxes are 12. The answer is 12."
    assert task.requests[0].stop[0] == "Q:"
    agnostic = load(model, "gsm8k", tmp_path, protocol={"query_aware": False}).requests[0]
    assert model.tokenizer.decode(agnostic.segments[1]).lstrip("\n").startswith("Q: Ann has 3 boxes")
    assert text_of(model, agnostic) == prompt


@pytest.mark.parametrize(("question", "reason", "answer"), COT8)
def test_worked_examples_are_right(question: str, reason: str, answer: str) -> None:
    """The last number of every reasoning is its answer, but one says what is left in words before."""
    assert find_answer(reason) == int(answer)
    assert question.endswith("?") or "left?" in question


def test_fewshot5_draws_its_examples_from_the_train_file(model, tmp_path: Path) -> None:
    """Five different ones, by the seed, annotations kept; too few or no train rows are an error with a remedy."""
    folder = folder_of(tmp_path, "gsm8k")
    with refused("data-missing", None, "for train", "train.jsonl"):
        load(model, "gsm8k", folder, form="fewshot5")
    rows = [{"question": f"Is it {n}?", "answer": f"It is <<{n}={n}>>{n}.\n#### {n}"} for n in range(40)]
    write(folder / "train.jsonl", *rows[:4])
    with refused("setting-value", "task.form", "5 examples", "has 4", "cot8"):
        load(model, "gsm8k", folder, form="fewshot5")
    write(folder / "train.jsonl", *rows)
    prompts = [text_of(model, load(model, "gsm8k", folder, form="fewshot5", seed=s).requests[1]) for s in (0, 0, 1)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert prompts[0].count("Question: ") == 6
    assert len({part.partition("\n")[0] for part in prompts[0].split("Question: ")}) == 7
    assert prompts[0].count(">>") == 5
    assert prompts[0].endswith("Question: Ann has 3 boxes of 4. How many?\nAnswer:")


def test_chat_forms(model, tmp_path: Path, no_cage) -> None:
    """MATH, AIME and the chat forms are wrapped and ask for the form that the grader reads; completions are raw."""
    folder = tmp_path
    for name in ("gsm8k", "math500", "humaneval_plus", "aime24"):
        (folder / name).mkdir()
        folder_of(folder / name, name)

    def prompt(name: str, **settings: object) -> str:
        return text_of(model, load(model, name, folder / name, **settings).requests[0])

    def chat(text: str) -> str:
        return f"<s><|user|>\n{text}</s><|assistant|>\n"

    assert prompt("math500") == chat(MATH["problem"] + BOXED)
    assert prompt("aime24") == chat(AIME["problem"] + BOXED)
    assert prompt("gsm8k", form="zeroshot").endswith(
        "End with a line of the form: The answer is <number>.</s><|assistant|>\n"
    )
    assert prompt("humaneval_plus") == "<s>" + CODE["prompt"]
    asked = prompt("humaneval_plus", form="chat")
    assert f"```python\n{CODE['prompt'].strip()}\n```</s>" in asked


def _asked(name: str) -> tuple[str, str]:
    """What the user says in the form with an instruction: the instruction first, and last."""
    row = FILES[name][1]
    if name in CODE_TASKS:
        words = "Write a self-contained Python script that solves the {}, in a fenced code block."
        code = f"```python\n{row['prompt'].strip()}\n```"
        return f"{words.format('following problem')}\n\n{code}", f"{code}\n\n{words.format('problem above')}"
    said, problem = BOXED.strip(), row.get("problem")
    if name == "gsm8k":
        said, problem = (
            "Solve the problem step by step. End with a line of the form: The answer is <number>.",
            row["question"],
        )
    return f"{said}\n\n{problem}", f"{problem}\n\n{said}"


@pytest.mark.parametrize("name", FILES)
def test_the_instruction_stands_first_or_last(name: str, model, tmp_path: Path, no_cage) -> None:
    """The whole prompt with the instruction at either end; at the end of the form it is the run without the setting,
    and at the other one another run, which says so."""
    form = {"gsm8k": {"form": "zeroshot"}, "math": {"subjects": "algebra"}}.get(name, {})
    form |= {"form": "chat"} if name in CODE_TASKS else {}
    folder = folder_of(tmp_path, name)
    usual = load(model, name, folder, **form)
    first, last = (load(model, name, folder, **form, instruction=place) for place in ("first", "last"))
    for task, text in zip((first, last), _asked(name), strict=True):
        assert text_of(model, task.requests[0]) == f"<s><|user|>\n{text}</s><|assistant|>\n"
        assert [request.gold for request in task.requests] == [request.gold for request in usual.requests]
    same, other, moved = (first, last, "last") if name in CODE_TASKS else (last, first, "first")
    assert (same.protocol, same.fingerprint) == (usual.protocol, usual.fingerprint)
    assert "instruction" not in usual.protocol and other.fingerprint != usual.fingerprint
    assert other.protocol == usual.protocol | {"instruction": moved}


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(
    ("name", "form", "remedy"),
    [
        ("gsm8k", "cot8", "zeroshot"),
        ("gsm8k", "fewshot5", "zeroshot"),
        ("math500", "minerva4", "boxed"),
        ("math", "minerva4", "boxed"),
        ("humaneval_plus", "complete", "chat"),
        ("mbpp_plus", "complete", "chat"),
    ],
)
def test_a_form_without_an_instruction_cannot_move_it(name: str, form: str, remedy: str, place: str) -> None:
    """It is refused by name with the form that has one, before data and model are looked for."""
    with refused("settings-conflict", "task.instruction", f"task.instruction={place} ", form, f"task.form={remedy}"):
        check_task({"name": name, "form": form, "instruction": place}, limit=None, seed=0)


def test_raw_code_stops_behind_the_function(model, tmp_path: Path, no_cage) -> None:
    """The stop strings of the completion form stand behind a finished body, where no comment must be; chat has none."""
    folder = folder_of(tmp_path, "humaneval_plus")
    stops = load(model, "humaneval_plus", folder).requests[0].stop
    assert "\ndef " in stops and not any("\n#\n    return".startswith(word) for word in stops)
    assert load(model, "humaneval_plus", folder, form="chat").requests[0].stop == ()


@pytest.mark.parametrize("name", [name for name in FILES if name not in CODE_TASKS])
def test_reference_answers_score_and_others_do_not(name: str, model, tmp_path: Path) -> None:
    """The gold tokens of a sample are graded as right; an empty answer is a parse failure, another number is wrong."""
    settings = {"subjects": ["algebra"]} if name == "math" else {}
    task = load(model, name, folder_of(tmp_path, name), **settings)
    request = task.requests[0]
    assert task.score(request, model.tokenizer.decode(request.gold)) == {"correct": 1.0, "parsed": 1.0}
    assert task.score(request, "") == {"correct": 0.0, "parsed": 0.0}
    assert task.score(request, "So it is \\boxed{7}.") == {"correct": 0.0, "parsed": 1.0}


def test_a_template_that_opens_the_thoughts(tokenizer, make_model, tmp_path: Path) -> None:
    """Where the prompt ends with <think>, an answer without </think> is all thoughts."""
    import copy

    thinking = make_model()
    thinking.tokenizer = copy.deepcopy(tokenizer)
    thinking.tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    folder = folder_of(tmp_path, "aime24")
    task, plain = load(thinking, "aime24", folder), load(make_model(), "aime24", folder)
    for text, expected in (("\\boxed{42}", 0.0), ("hm</think>\\boxed{42}", 1.0)):
        assert task.score(task.requests[0], text)["correct"] == expected
        assert plain.score(plain.requests[0], text)["correct"] == 1.0


def test_levels_and_the_others(model, tmp_path: Path) -> None:
    """A limit counts the problems of the levels; those after the first are the others; ids are lines of the file."""
    write(tmp_path / "test.jsonl", *({**MATH, "problem": f"{at}?", "level": at % 3 + 1} for at in range(9)))

    def asked(limit=None, **settings):
        cfg = {"name": "math500", "data_dir": str(tmp_path)} | settings
        task = load_task(cfg, model, limit=limit, seed=0, protocol={"max_new_tokens": 64})
        return task, [request.meta["index"] for request in task.requests]

    task, plain = asked()
    assert plain == [*range(9)] and "levels" not in task.protocol
    assert task.sources == [{"file": f"{tmp_path.name}/test.jsonl", "rows": 9, "of": 500}]
    task, two = asked(levels=[2, 1])
    assert two == [0, 1, 3, 4, 6, 7] and task.protocol["levels"] == [1, 2]
    assert asked("first:4", levels=[1, 2])[1] + asked("after:4", levels=[1, 2])[1] == two
    assert asked(levels=3)[1] == [2, 5, 8]
    with refused("settings-conflict", None, "limit=after:9"):
        asked("after:9")
    with refused("setting-value", "task.levels", "task.levels=6"):
        asked(levels=6)


@pytest.mark.parametrize("name", ["algebra_train.jsonl", "train/algebra.jsonl"])
def test_problems_for_training(model, tmp_path: Path, name: str) -> None:
    """They lie beside the test problems or in a folder of their own, and are never taken for these."""
    (tmp_path / "train").mkdir()
    row = {**MATH, "subject": "Algebra"}
    write(tmp_path / name, {**row, "problem": "for training?"})
    write(tmp_path / "algebra.jsonl", {**row, "problem": "test?"}, {**row, "problem": "another?"})
    train = load(model, "math", tmp_path, subjects="algebra", split="train")
    assert "for training?" in text_of(model, train.requests[0]) and len(train.requests) == 1
    assert train.protocol["problems"] == "train"
    assert train.sources == [{"file": "/".join((tmp_path / name).parts[-2:]), "rows": 1, "of": 1744}]
    test = load(model, "math", tmp_path, subjects="algebra")
    assert "problems" not in test.protocol and len(test.requests) == 2 and test.fingerprint != train.fingerprint
    (tmp_path / name).unlink()
    with refused("data-missing", None, "task.subjects=[algebra] task.split=train to=math"):
        load(model, "math", tmp_path, subjects="algebra", split="train")


def test_math_by_subject(model, tmp_path: Path) -> None:
    """Subjects are one score, also reported apart; ids are unique; a missing answer is the solution's last box."""
    row = {key: value for key, value in MATH.items() if key not in ("answer", "subject")} | {"level": "Level 5"}
    for subject in SUBJECTS:
        write(tmp_path / f"{subject}.jsonl", row)
    task = load(model, "math", tmp_path, subjects="all")
    assert len({request.sample_id for request in task.requests}) == 7
    assert {request.meta["subject"] for request in task.requests} == set(SUBJECTS)
    assert task.requests[0].meta["level"] == 5
    records = [
        {
            "sample_id": r.sample_id,
            "subset": r.subset,
            "meta": r.meta,
            "scores": {"correct": float(i == 0), "parsed": 1.0},
        }
        for i, r in enumerate(task.requests)
    ]
    result = task.aggregate(records)
    assert result["overall"]["correct"] == pytest.approx(1 / 7)
    assert result["groups"]["algebra"]["correct"] == 1.0
    assert result["groups"]["geometry"] == {"num_samples": 1, "num_failed": 0, "correct": 0.0, "parsed": 1.0}
    assert "sampling" not in result


BROKEN = {
    "gsm8k": [
        ({"question": "x", "answer": "no number"}, "must end with '#### '"),
        (GSM8K | {"question": 3}, "it is int"),
    ],
    "math500": [
        ({"problem": "x", "solution": "none"}, "answer is missing"),
        ({"problem": " "}, "problem must be a text"),
    ],
    "aime24": [(AIME | {"answer": "1000"}, "from 0 to 999"), (AIME | {"answer": "x"}, "from 0 to 999")],
    "humaneval_plus": [
        ({key: CODE[key] for key in CODE if key != "plus_input"}, "use the EvalPlus release file"),
        (CODE | {"base_input": []}, "at least one call"),
        (CODE | {"atol": "0"}, "field atol"),
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_are_set_aside(name: str, model, tmp_path: Path, no_cage) -> None:
    """One broken row does not stop the others or shift their ids; a file of broken rows is refused."""
    lines = [row for row, _ in BROKEN[name]]
    folder_of(tmp_path, name, *lines, b"[1]", b"{cut", FILES[name][1])
    task = load(model, name, tmp_path)
    assert [request.sample_id for request in task.requests] == [f"{name}/{len(lines) + 2}"]
    assert [entry["line"] for entry in task.quarantined] == list(range(1, len(lines) + 3))
    for entry, (_, reason) in zip(task.quarantined, BROKEN[name], strict=False):
        assert reason in entry["reason"]
    folder_of(tmp_path, name, *lines)
    with refused("file-content", None, "line 1"):
        load(model, name, tmp_path)


def test_rows_that_nothing_can_be_graded_against_are_set_aside(model, tmp_path: Path, monkeypatch) -> None:
    """A task sees what will be asked before anything is generated, and its reasons stand beside those of broken
    rows; the other ids do not shift; without a row left it refuses."""
    lines = [AIME, b"{cut", AIME | {"problem": "bad"}, AIME | {"problem": "good"}, AIME | {"problem": "bad too"}]
    path = folder_of(tmp_path, "aime24", *lines) / "test.jsonl"

    def loaded(limit: int | None, word: str = "bad"):
        monkeypatch.setattr(
            Aime,
            "unusable",
            lambda self, docs: {doc["index"]: "no reference" for doc in docs if word in doc["problem"]},
        )
        return load(model, "aime24", tmp_path, limit=limit)

    task = loaded(None)
    assert [request.sample_id for request in task.requests] == ["aime24/0", "aime24/3"]
    assert [(row["file"], row["line"]) for row in task.quarantined] == [(str(path), line) for line in (2, 3, 5)]
    assert [row["reason"] for row in task.quarantined[1:]] == ["no reference"] * 2
    assert [row["line"] for row in loaded(3).quarantined] == [2, 3]  # what is not asked is not looked at
    assert task.fingerprint != loaded(None, "too").fingerprint
    with refused("file-content", None, ":5: no reference"):
        loaded(None, "")


@needs_cage
def test_code_rows_whose_reference_does_not_run_are_set_aside(model, tmp_path: Path, monkeypatch) -> None:
    """Before anything is generated, and only among the rows that will be asked."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    broken = CODE | {"canonical_solution": "    raise KeyError('no reference')\n"}
    folder = folder_of(tmp_path, "humaneval_plus", CODE, broken, CODE | {"task_id": "HumanEval/9"}, broken)
    task = load(model, "humaneval_plus", folder, limit=3)
    assert [request.sample_id for request in task.requests] == ["humaneval_plus/0", "humaneval_plus/2"]
    (row,) = task.quarantined
    assert row["line"] == 2 and "reference solution" in row["reason"] and "no reference" in row["reason"]
    assert task.grading_workers > 0 and task.grading_limit_s is None


@pytest.mark.parametrize("name", FILES)
def test_missing_data_says_where_it_was_looked_for(name: str, model, tmp_path: Path, no_cage) -> None:
    """An empty folder leads to the places tried and a command; a folder that is none is refused at once."""
    with refused("data-missing", None, f"task={name} ", "task.data_dir="):
        load(model, name, tmp_path)
    with refused("file-missing", "task.data_dir", "absent"):
        load(model, name, tmp_path / "absent")


def test_settings_are_checked(model, make_model, tmp_path: Path) -> None:
    """Unknown keys, forms and subjects name the choices; a model too short for AIME names the setting to lower."""
    folder = folder_of(tmp_path, "gsm8k")
    with refused("setting-value", "task.form", "task.form='cot9'", "'zeroshot'", "mean cot8"):
        load(model, "gsm8k", folder, form="cot9")
    with refused("name-unknown", None, "task key=shots"):
        load(model, "gsm8k", folder, shots=3)
    with refused("setting-value", "task.subjects", "task.subjects=['algebr']"):
        load(model, "math", folder, subjects=["algebr"])
    with refused("settings-conflict", "protocol.query_aware", "task=gsm8k"):
        load(model, "gsm8k", folder, form="zeroshot", protocol={"query_aware": False})
    aime = tmp_path / "aime"
    aime.mkdir()
    with refused("prompt-length", "protocol.max_new_tokens", "32768"):
        load(make_model(8192), "aime24", folder_of(aime, "aime24"), protocol={"max_new_tokens": None})


@pytest.mark.parametrize("name", CODE_TASKS)
def test_code_is_refused_without_consent(name: str, model, tmp_path: Path) -> None:
    """The default of the shipped configuration refuses before anything is generated, and only true is a yes."""
    cfg = OmegaConf.to_container(OmegaConf.load(conf_folder() / "task" / f"{name}.yaml"))
    cfg["data_dir"] = str(folder_of(tmp_path, name))
    refusals = {None: "code-not-run", "true": "setting-value", 1: "setting-value"}
    for consent, code in refusals.items():
        changes = {} if consent is None else {"allow_code_execution": consent}
        with refused(
            code, "task.allow_code_execution", f"task.allow_code_execution={consent!r}" if consent else "=true"
        ):
            load_task(cfg | changes, model, limit=None, seed=0, protocol={"max_new_tokens": 64})


@needs_cage
def test_code_is_graded_in_the_cage(model, tmp_path: Path) -> None:
    """The reference passes; right on the original input alone is base only; a syntax error is a parse failure."""
    task = load(model, "humaneval_plus", folder_of(tmp_path, "humaneval_plus"))
    request = task.requests[0]
    for text, plus, base, parsed in (
        (CODE["canonical_solution"], 1, 1, 1),
        ("    return 2\n", 0, 1, 1),
        ("    return 3\n", 0, 0, 1),
        ("    return (\n", 0, 0, 0),
        ("    raise ValueError\n", 0, 0, 1),
        ("", 0, 0, 0),
        ("<think>    return", 0, 0, 0),
    ):
        assert task.score(request, text) == {"plus": plus, "base": base, "parsed": parsed}, text
    chat = load(model, "humaneval_plus", tmp_path, form="chat")
    assert chat.score(chat.requests[0], model.tokenizer.decode(chat.requests[0].gold))["plus"] == 1.0


def test_lmeval_knows_the_tasks() -> None:
    """Every YAML is found with its metadata, so that `KvbenchLM` keeps our rules."""
    names = [f"kvbench_gsm8k_{form}" for form in ("cot8", "fewshot5", "zeroshot")]
    names += [
        "kvbench_math500",
        "kvbench_aime24",
        "kvbench_aime25",
        "kvbench_aime26",
        *(f"kvbench_math_{name}" for name in SUBJECTS),
    ]
    names += [f"kvbench_{name}_{form}" for name in CODE_TASKS for form in ("complete", "chat")]
    assert all(isinstance(metadata_of(name)["chat_template"], bool) for name in names)


def test_requests_is_imported_without_chardet() -> None:
    """Its tables take a second to load and serve for nothing here; whoever wants it afterwards can have it."""
    code = "import sys; from kvbench.tasks.lmeval import _import_requests; _import_requests(); "
    code += "sys.exit('chardet' in sys.modules or 'requests' not in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
