"""What the system says: in every prompt of every task, once, before the user; and refused where it has no place."""

import json

import pytest
from loaded import text_of
from longbench_rows import row, write
from problem_rows import folder_of
from refusals import refused

from kvbench.tasks import load_task
from kvbench.tasks.chat import check_template
from kvbench.tasks.protocol import Protocol

SYSTEM = "Speak as a pirate does."


def settings_of(name, folder) -> dict:
    """A few prompts of a task."""
    if name == "custom":
        rows = [
            {"context": "The door is red.", "question": "What is red?", "answers": "door"},
            {"messages": [{"role": "user", "content": "What is red?"}], "answers": "door"},
        ]
        (folder / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {"file": str(folder / "my.jsonl")}
    if name == "longbench":
        for subset in ("qasper", "trec"):  # a chat, and none
            write(folder / f"{subset}.jsonl", row(all_classes=["Food"], answers=["Food"]))
        return {"subsets": ["qasper", "trec"], "data_dir": str(folder)}
    if name in ("gsm8k", "math500", "aime24"):
        return {"data_dir": str(folder_of(folder, name))}
    return {
        "longctx": {"length": 512, "items": 1},
        "ruler": {"tasks": ["niah_single_1", "vt"], "lengths": 700, "items": 1},
        "needle": {"lengths": 512, "depths": 2, "items": 1},
        "instructions": {"lengths": 512, "items": 1},
    }[name]


TASKS = ("custom", "longbench", "gsm8k", "math500", "aime24", "longctx", "ruler", "needle", "instructions")


@pytest.mark.every(2)
@pytest.mark.parametrize("chat", ["auto", "never"])
@pytest.mark.parametrize("name", TASKS)
def test_it_stands_before_every_prompt(model, tmp_path, name, chat):
    """As a message of the system in a chat, else in front of the text; it is what the policy knows as instruction."""
    if name == "longctx" and chat == "auto":
        chat = "always"
    cfg = {"name": name} | settings_of(name, tmp_path)
    protocol = {"chat_template": chat, "max_new_tokens": 64}
    with_it = load_task(cfg, model, limit=None, seed=0, protocol=protocol | {"system": SYSTEM})
    without = load_task(cfg, model, limit=None, seed=0, protocol=protocol)
    assert with_it.fingerprint != without.fingerprint and with_it.protocol["system"] == SYSTEM
    for request in with_it.requests:
        text = model.tokenizer.decode(list(request.prompt))
        assert text.count(SYSTEM) == 1
        if request.thoughts is not None:
            assert text.startswith(f"<s><|system|>\n{SYSTEM}") and text.count("<s>") == 1
        else:
            assert text.startswith(f"<s>{SYSTEM}\n\n")
        plain = name == "custom" and request.sample_id == "all/1" and chat == "auto"  # messages come as they are
        kept = model.tokenizer.decode(list(request.prompt[: request.instruction_tokens]))
        assert plain or SYSTEM in kept
        assert request.num_prompt_tokens + request.answer_tokens <= model.max_tokens


def custom_prompt(model, folder, row, protocol, **settings) -> str:
    """The prompt of one row of a file of the user's own."""
    (folder / "my.jsonl").write_text(json.dumps(row))
    cfg = {"name": "custom", "file": str(folder / "my.jsonl")} | settings
    (request,) = load_task(cfg, model, limit=None, seed=0, protocol={"system": SYSTEM} | protocol).requests
    return text_of(model, request)


def test_a_system_message_of_a_row_follows_it(model, tmp_path):
    """Templates take one, so both stand in it."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is red?"}]
    row = {"messages": messages, "answers": "door"}
    wanted = f"<s><|system|>\n{SYSTEM}\n\nBe brief.</s><|user|>\nWhat is red?</s><|assistant|>\n"
    assert custom_prompt(model, tmp_path, row, {}) == wanted
    plain = custom_prompt(model, tmp_path, row, {"chat_template": "never"}, metric="contains")
    assert plain == f"<s>{SYSTEM}\n\nBe brief.\n\nWhat is red?"


@pytest.mark.parametrize("chat", ["auto", "never"])
def test_choices_have_it_too(model, tmp_path, chat):
    """Choices are scored behind the same prompt."""
    row = {"context": "The door is red.", "question": "What is red?", "answers": "door", "choices": ["door", "car"]}
    for aware in (True, False):
        protocol = {"chat_template": chat, "query_aware": aware}
        text = custom_prompt(model, tmp_path, row, protocol, metric="choice")
        assert text.startswith(f"<s><|system|>\n{SYSTEM}</s>" if chat == "auto" else f"<s>{SYSTEM}\n\nThe door")
        assert text.count(SYSTEM) == 1


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            "no system",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "drops it"),
    ],
)
def test_templates_without_a_place_for_it(model, tokenizer, monkeypatch, template, why):
    """One error, with what to do."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    check_template(model, Protocol())
    with refused("unsupported", "protocol.system", "protocol.system='Speak ", why):
        check_template(model, Protocol(system=SYSTEM))


def test_a_task_that_needs_one_is_refused_in_its_name(model, tokenizer, monkeypatch):
    """No setting is named that nobody gave; the one that helps is, and helps."""
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    settings = {"name": "instructions", "lengths": 512, "items": 1}
    with refused(
        "unsupported", "protocol.chat_template", "task=instructions", "protocol.chat_template=never"
    ) as caught:
        load_task(settings, model, limit=1, seed=0)
    assert "protocol.system" not in str(caught.value)
    assert load_task(settings, model, limit=1, seed=0, protocol={"chat_template": "never"}).requests


@pytest.mark.parametrize("name", ["drift", "stream", "perplexity"])
def test_texts_without_a_question_refuse_it(model, name):
    """There is nothing that it would be said before."""
    with refused("settings-conflict", None, f"task={name} ", "protocol.system"):
        load_task({"name": name}, model, limit=1, seed=0, protocol={"system": SYSTEM})


def test_it_is_refused_before_the_weights_are_read(tmp_path, monkeypatch, tokenizer):
    """A folder whose template has no system message: the weights are never opened."""
    from kvbench.models import load
    from kvbench.runs import experiment
    from kvbench.runs.config import RunConfig
    from kvbench.runs.parts import Loaders

    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    monkeypatch.setattr(load, "_folder_of", lambda settings: (tmp_path, lambda folder: tokenizer))
    monkeypatch.setattr(load.fields, "check_growth", lambda folder, tokenizer: None)
    bare = load.outline({"kind": "random", "preset": "tiny"})
    monkeypatch.setattr(load, "outline", lambda settings: bare)
    monkeypatch.setattr(Loaders, "load_model", lambda self, group: pytest.fail("the weights were read"))
    monkeypatch.setattr(Loaders, "check_fit", lambda self, config, policy: None)
    settings = {"model": {"kind": "hf", "path": "x"}, "task": {"name": "instructions", "lengths": 512, "items": 1}}
    settings |= {"method": {"_target_": "kvbench.methods.full.Full"}, "results_dir": str(tmp_path)}
    with refused("unsupported", "protocol.chat_template", "task=instructions", "protocol.chat_template=never"):
        experiment.load_method(RunConfig.read(settings), Loaders(), print)
