"""Thinking on and off: the template's switch, its labels, and thoughts that are not graded."""

from types import SimpleNamespace

import pytest
from lmeval_demo import TINY
from longbench_rows import row, write
from problem_rows import MATH, folder_of
from refusals import refused
from test_task_prompts import CHAT, PLAIN, build

from kvbench.tasks import load_task
from kvbench.tasks.longbench import metrics
from kvbench.tasks.prompts import PromptBuilder
from kvbench.tasks.protocol import Protocol

# As thinking models have it: off writes empty thoughts into the prompt, on opens them.
SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


@pytest.fixture
def thinker(model, tokenizer, monkeypatch):
    """Gives a chat model whose template knows enable_thinking."""
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + SWITCH)
    return model


@pytest.mark.parametrize(
    ("thinking", "end", "label", "opens"),
    [(True, "<think>\n", "on", True), (False, "</think>\n\n", "off", False), (None, "<think>\n", "template", True)],
)
def test_the_switch_reaches_the_template(thinker, tokenizer, thinking, end, label, opens) -> None:
    """On, off and unset give the three prompts of the template, and the label says which."""
    builder = PromptBuilder(thinker, Protocol(thinking=thinking), CHAT)
    request = build(thinker, Protocol(thinking=thinking), CHAT)
    assert tokenizer.decode(request.segments[0]).endswith(end)
    assert builder.thinking == label
    assert builder.opens_thoughts(request) is opens


def test_plain_prompts_are_labelled_as_no_chat(thinker) -> None:
    """Without a template there is no switch."""
    assert PromptBuilder(thinker, Protocol(thinking=True), PLAIN).thinking == "no chat"


def test_a_switch_that_does_not_exist_is_refused(model, tmp_path) -> None:
    """A template without the switch, a form that is no chat, and chat_template=never are told apart."""
    with refused("unsupported", "protocol.thinking", "stand-in", "enable_thinking"):
        PromptBuilder(model, Protocol(thinking=False), CHAT)
    with refused("settings-conflict", "protocol.thinking", "protocol.chat_template=never"):
        Protocol(thinking=True, chat_template="never")
    with refused("setting-value", "protocol.thinking", "thinking='yes'"):
        Protocol(thinking="yes")
    cfg = {"name": "gsm8k", "form": "cot8", "data_dir": str(folder_of(tmp_path, "gsm8k"))}
    with refused("settings-conflict", "protocol.thinking", "thinking=true", "task=gsm8k"):
        load_task(cfg, model, limit=1, seed=0, protocol={"thinking": True})
    write(tmp_path / "trec.jsonl", row(all_classes=["Food"], answers=["Food"]))
    cfg = {"name": "longbench", "subsets": "trec", "data_dir": str(tmp_path)}
    with refused("settings-conflict", "protocol.thinking", "task=longbench"):
        load_task(cfg, model, limit=1, seed=0, protocol={"thinking": True})


@pytest.mark.parametrize("cfg", [{"name": "longctx", "length": 512}, {"name": "ruler", "tasks": "vt", "lengths": 512}])
@pytest.mark.parametrize("protocol", [{"thinking": True}, {"thinking_tokens": 64}])
def test_no_task_takes_it_without_a_chat(model, make_model, cfg, protocol) -> None:
    """A task that asks in plain text, or a model without a template: nothing would think, so it is refused."""
    plain = make_model(chat_template=False)
    (setting,) = protocol
    with refused("settings-conflict", f"protocol.{setting}", f"task={cfg['name']}"):
        load_task(cfg | {"items": 1}, plain, limit=None, seed=0, protocol=protocol)
    with refused("settings-conflict", "protocol.thinking_tokens", "protocol.thinking_tokens=9"):
        Protocol(thinking_tokens=9, thinking=False)


@pytest.mark.parametrize("budget", [None, 50])
def test_a_budget_of_thoughts_is_beside_the_answer(thinker, tokenizer, budget) -> None:
    """Prompt, thoughts and answer share the model's context, and the end of thoughts is known in tokens."""
    protocol = Protocol(thinking=True, thinking_tokens=budget, max_new_tokens=20)
    request = build(thinker, protocol, CHAT)
    assert request.thoughts.opened and request.thoughts.budget_tokens == budget
    assert tokenizer.decode(list(request.thoughts.end)) == ("" if budget is None else "\n</think>\n\n")
    builder = PromptBuilder(thinker, protocol, CHAT)
    more = 0 if budget is None else budget + len(request.thoughts.end)
    assert request.answer_tokens == builder.answer_tokens == 20 + more
    assert builder.room_tokens == thinker.max_tokens - 20 - more
    cfg = {"name": "ruler", "tasks": "vt", "items": 1, "answer_prefix": False}
    if budget:
        with refused("setting-value", "task.lengths", "4090 beside 50"):
            load_task(cfg | {"lengths": 4090}, thinker, limit=None, seed=0, protocol={"thinking_tokens": 50})


@pytest.mark.parametrize("task", ["gsm8k", "math500", "aime24"])
def test_every_row_names_it_and_thoughts_are_not_graded(thinker, tmp_path, task) -> None:
    """An answer inside open thoughts is none; the same answer behind their end counts."""
    cfg = {"name": task, "data_dir": str(folder_of(tmp_path, task))} | ({"form": "zeroshot"} if task == "gsm8k" else {})
    protocol = {"thinking": True, "max_new_tokens": 64}
    loaded = load_task(cfg, thinker, limit=1, seed=0, protocol=protocol)
    assert (loaded.protocol["thinking"], loaded.protocol["thoughts"]) == ("on", "not graded")
    answer = {"gsm8k": "12", "math500": MATH["answer"], "aime24": "42"}[task]
    form = "The answer is {}." if task == "gsm8k" else "The answer is \\boxed{{{}}}."
    right, wrong = form.format(answer), form.format("7")
    request = loaded.requests[0]
    assert loaded.score(request, right)["parsed"] == 0.0
    assert loaded.score(request, f"{wrong}</think>{right}") == {"correct": 1.0, "parsed": 1.0}
    assert loaded.score(request, f"{right}</think>{wrong}") == {"correct": 0.0, "parsed": 1.0}
    off = load_task(cfg, thinker, limit=1, seed=0, protocol=protocol | {"thinking": False})
    assert off.protocol["thinking"] == "off" and off.fingerprint != loaded.fingerprint
    assert off.score(off.requests[0], right) == {"correct": 1.0, "parsed": 1.0}


def test_longbench_grades_what_follows_the_thoughts(thinker, tmp_path) -> None:
    """In a chat subset thoughts go; in one that is no chat, text stays text."""
    write(tmp_path / "qasper.jsonl", row(answers=["in the box"]))
    cfg = {"name": "longbench", "subsets": "qasper", "data_dir": str(tmp_path)}
    loaded = load_task(cfg, thinker, limit=1, seed=0, protocol={"thinking": True})
    assert loaded.protocol["rules"]["qasper"]["thinking"] == "on"
    assert loaded.score(loaded.requests[0], "the bag</think>\n\nbox") == {"score": pytest.approx(2 / 3)}
    assert loaded.score(loaded.requests[0], "in the box") == {"score": 0.0}  # thoughts without an end
    doc = {"answers": ["x = '</think>'"], "all_classes": None}
    assert metrics.score_code_similarity(doc, ["x = '</think>'"])["score"] == 1.0


def test_lm_eval_gets_answers_without_thoughts(monkeypatch) -> None:
    """In a rendered chat, and behind a prompt that opens thoughts, only what follows their end is handed out."""
    from lm_eval.api.instance import Instance

    from kvbench.lm import KvbenchLM

    lm = KvbenchLM(**TINY)
    said = iter(["why</think>so", "why", "a <think>b", "a</think>b"])

    def run(asked, **settings):
        return {request.sample_id: SimpleNamespace(status="ok", text=next(said)) for request in asked}

    def answers(*prompts: str) -> list[str]:
        given = [(text, {"max_gen_toks": 4}) for text in prompts]
        return lm.generate_until([Instance("generate_until", {}, one, n, ("x", n, 1)) for n, one in enumerate(given)])

    monkeypatch.setattr(lm, "_run", run)

    assert answers("Think. <think>\n", "Think. <think>\n", "Plain text") == ["so", "", "a <think>b"]
    lm._rendered = True
    assert answers("<s>user</s>") == ["b"]
