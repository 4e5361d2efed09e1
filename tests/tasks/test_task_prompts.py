"""Prompts: chat template, truncation from the middle, segments, gold tokens."""

import pytest
from refusals import refused

from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol

AWARE, AGNOSTIC = Protocol(), Protocol(query_aware=False)
PLAIN, CHAT = PromptRules(max_new_tokens=16), PromptRules(max_new_tokens=16, chat_template=True)
CONTEXT = "Instances of the class are created by calling the object. " * 6
QUESTION = "\n\nQuestion: what is created?\nAnswer:"


def build(model: object, protocol: Protocol = AWARE, rules: PromptRules = PLAIN, **changes: object) -> object:
    """A request for the standard context and question."""
    limit = changes.pop("limit", None)
    asked = {"sample_id": "x/0", "subset": "x", "context": CONTEXT, "question": QUESTION, "gold": "instances"} | changes
    return PromptBuilder(model, protocol, rules, limit).build(**asked)


def test_prompts_have_one_beginning_token(model, tokenizer) -> None:
    """A plain prompt is the text with the tokenizer's special tokens; a template writes its own, and none is added."""
    request = build(model)
    assert list(request.segments[0]) == tokenizer(CONTEXT + QUESTION).input_ids
    assert request.segments[0][0] == tokenizer.bos_token_id and not request.truncated
    request = build(model, rules=CHAT)
    assert tokenizer.decode(request.segments[0]) == f"<s><|user|>\n{CONTEXT + QUESTION}</s><|assistant|>\n"
    assert request.segments[0].count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("setting", "rule", "has_template", "wrapped"),
    [
        ("auto", True, True, True),
        ("auto", False, True, False),
        ("auto", True, False, False),
        ("always", False, True, True),
        ("never", True, True, False),
    ],
)
def test_who_decides_about_the_chat_template(make_model, setting, rule, has_template, wrapped) -> None:
    """The protocol decides first, then the benchmark's rule, then whether there is a template."""
    rules = PromptRules(max_new_tokens=16, chat_template=rule)
    model = make_model(chat_template=has_template)
    assert PromptBuilder(model, Protocol(chat_template=setting), rules).chat is wrapped
    with refused("unsupported", "protocol.chat_template", "chat_template=always", "stand-in"):
        PromptBuilder(make_model(chat_template=False), Protocol(chat_template="always"), PLAIN)


@pytest.mark.parametrize("rules", [PLAIN, CHAT])
@pytest.mark.parametrize("limit", [None, 40, 41])
@pytest.mark.parametrize("context", [CONTEXT, CONTEXT.rstrip(), "  " + CONTEXT + "\n", "x"])
def test_both_protocols_run_the_same_tokens(model, tokenizer, rules, limit, context) -> None:
    """The segments are the unsegmented prompt, divided, and no token of the first holds any of the question."""
    whole = build(model, AWARE, rules, limit=limit, context=context)
    parts = build(model, AGNOSTIC, rules, limit=limit, context=context)
    assert len(whole.segments) == 1 and len(parts.segments) == 2
    assert parts.segments[0] + parts.segments[1] == whole.segments[0] and parts.gold == whole.gold
    first = tokenizer.decode(parts.segments[0], skip_special_tokens=True)
    second = tokenizer.decode(parts.segments[1], skip_special_tokens=True)
    assert "Question" not in first
    assert "Question: what is created?" in second
    assert len(second) < len(QUESTION) + 25  # only a straddling token and the template's end come on top


def test_a_question_that_begins_inside_a_word_keeps_the_straddling_token_out(model, tokenizer) -> None:
    """A token that holds the end of the context and the beginning of the question is part of the question."""
    parts = build(model, AGNOSTIC, context="a b c cre", question="ated?")
    assert tokenizer.decode(parts.segments[0], skip_special_tokens=True) == "a b c"
    assert tokenizer.decode(parts.segments[1]) == " created?"
    # Without a question there is nothing to hold back.
    assert len(build(model, AGNOSTIC, question="").segments) == 1


@pytest.mark.parametrize("limit", [20, 21, 40])
def test_truncation_keeps_the_two_ends(model, tokenizer, limit: int) -> None:
    """First and last halves of the tokens are kept, decoded apart, joined and tokenised again."""
    request = build(model, limit=limit)
    ids = tokenizer(CONTEXT + QUESTION).input_ids
    half = limit // 2
    expected = tokenizer.decode(ids[:half], skip_special_tokens=True) + tokenizer.decode(ids[-half:])
    assert tokenizer.decode(request.segments[0], skip_special_tokens=True) == expected
    assert request.truncated
    assert request.num_prompt_tokens_untruncated == len(ids)


def test_truncation_comes_before_the_chat_template(model, tokenizer) -> None:
    """The template stays whole around a cut message."""
    request = build(model, rules=CHAT, limit=40)
    text = tokenizer.decode(request.segments[0])
    assert text.startswith("<s><|user|>\nInstances")
    assert text.endswith(QUESTION + "</s><|assistant|>\n")
    assert request.num_prompt_tokens_untruncated == build(model, rules=CHAT).num_prompt_tokens


def test_a_question_longer_than_half_is_cut_too(model, tokenizer) -> None:
    """When even the question is cut, what is left of it begins in the second half."""
    request = build(model, AGNOSTIC, limit=20, question=" what" * 60)
    assert len(request.segments) == 2
    assert "what" not in tokenizer.decode(request.segments[0])
    assert set(tokenizer.decode(request.segments[1]).split()) == {"what"}


@pytest.mark.parametrize("rules", [PLAIN, CHAT])
@pytest.mark.parametrize("max_tokens", [60, 61, 97])
def test_prompt_and_answer_fit_the_model(make_model, rules, max_tokens: int) -> None:
    """Without a limit of its own a prompt takes what the model leaves beside the answer."""
    request = build(make_model(max_tokens=max_tokens), rules=rules, context=CONTEXT * 5)
    assert request.truncated
    assert request.num_prompt_tokens + request.max_new_tokens <= max_tokens
    assert request.num_prompt_tokens >= max_tokens - request.max_new_tokens - 24


def test_limits_that_cannot_hold_are_errors(make_model) -> None:
    """Too long a prompt limit, and a model too short for the answer, are refused with the remedy."""
    with refused("setting-value", "task.max_prompt_tokens", "max_prompt_tokens=100", "between 2 and 84"):
        PromptBuilder(make_model(max_tokens=100), AWARE, PLAIN, 100)
    with refused("prompt-length", "protocol.max_new_tokens", "answer of 99"):
        PromptBuilder(make_model(max_tokens=100), Protocol(max_new_tokens=99), PLAIN)


@pytest.mark.parametrize(("limit", "longest"), [("fit:40", 40), ("fit:84", 84), ("fit:85", 68), ("fit:4000", 68)])
def test_a_limit_that_fits_the_model(make_model, limit: str, longest: int) -> None:
    """`fit:N` is N where a model of 100 tokens has room for it beside an answer of 16, else what no limit is; the notes
    of a run say which."""
    builder = PromptBuilder(make_model(max_tokens=100), AWARE, PLAIN, limit)
    assert builder.protocol_notes()["max_prompt_tokens"] == builder.max_prompt_tokens == longest
    assert PromptBuilder(make_model(max_tokens=100), AWARE, PLAIN).max_prompt_tokens == 68


@pytest.mark.parametrize(
    ("question", "rules", "gold", "expected"),
    [
        ("Answer:", PLAIN, "the class", " the class"),
        ("Answer: ", PLAIN, "the class", "the class"),
        ("Answer:\n", PLAIN, "    the class", "    the class"),
        ("Answer:", PLAIN, " 1234", " 1234"),
        ("Answer:", CHAT, "the class", "the class"),
        ("Answer:", PLAIN, "", ""),
    ],
)
def test_gold_tokens_continue_the_prompt(model, tokenizer, question, rules, gold, expected) -> None:
    """The reference follows after one space, or none where the prompt ends in white space."""
    request = build(model, rules=rules, question=question, gold=gold)
    assert tokenizer.decode(request.gold) == expected
    assert tokenizer.bos_token_id not in request.gold


def test_rules_reach_the_request(model, tokenizer) -> None:
    """Stop rules, limits and sampling are passed on; the protocol's answer length wins."""
    rules = PromptRules(max_new_tokens=16, stop=("\n",), stop_tokens=("\n",), min_new_tokens=1)
    protocol = Protocol(temperature=0.5, top_p=0.9, num_samples=3, max_new_tokens=7)
    request = build(model, protocol, rules)
    assert request.stop == ("\n",)
    assert request.stop_token_ids == (tokenizer.encode("\n", add_special_tokens=False)[-1],)
    assert (request.max_new_tokens, request.min_new_tokens) == (7, 1)
    assert (request.temperature, request.top_p, request.num_samples) == (0.5, 0.9, 3)


def test_rendered_texts_are_left_alone(model, tokenizer) -> None:
    """A text that a chat template made keeps its special tokens, also when its middle is cut."""
    text = f"<s><|user|>\n{CONTEXT}</s><|assistant|>\n"
    builder = PromptBuilder(model, Protocol(chat_template="always"), CHAT, 20, rendered=True)
    request = builder.build(sample_id="x", subset="x", context=text, question="")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(request.segments[0]) == tokenizer.decode(ids[:10]) + tokenizer.decode(ids[-10:])


def test_a_template_that_rewrites_the_prompt_cannot_be_divided(model, monkeypatch) -> None:
    """Without the prompt's own text in the rendered one the question's place is unknown."""
    template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    with refused("unsupported", "protocol.query_aware", "stand-in"):
        build(model, AGNOSTIC, CHAT)
    assert len(build(model, AWARE, CHAT).segments) == 1


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"query_awre": True}, ("name-unknown", None, "key=query_awre", "mean query_aware")),
        ({"query_aware": "yes"}, ("setting-value", "protocol.query_aware", "protocol.query_aware='yes'")),
        ({"chat_template": "sometimes"}, ("setting-value", "protocol.chat_template", "'sometimes'", "'auto'")),
        ({"temperature": -0.1}, ("setting-value", "protocol.temperature", "[0.001, 100]")),
        ({"top_p": 0}, ("setting-value", "protocol.top_p", "[1e-09, 1]")),
        ({"top_p": 1.5}, ("setting-value", "protocol.top_p", "[1e-09, 1]")),
        ({"num_samples": 0}, ("setting-value", "protocol.num_samples", "protocol.num_samples=0")),
        ({"num_samples": 2}, ("settings-conflict", "protocol.num_samples", "protocol.num_samples=2")),
        ({"max_new_tokens": 0}, ("setting-value", "protocol.max_new_tokens", "1 to 16777216")),
        ({"max_new_tokens": True}, ("setting-value", "protocol.max_new_tokens", "1 to 16777216")),
        ({"temperature": float("nan")}, ("setting-value", "protocol.temperature", "temperature=nan")),
    ],
)
def test_protocol_settings_out_of_range(settings: dict, error: tuple) -> None:
    """Each bad setting is refused by name."""
    with refused(*error):
        Protocol.from_mapping(settings)


def test_yaml_booleans_mean_always_and_never() -> None:
    """`chat_template: true` is what a user would write."""
    assert Protocol.from_mapping({"chat_template": True}).chat_template == "always"
    assert Protocol.from_mapping({"chat_template": False}).chat_template == "never"
    assert Protocol.from_mapping(None) == Protocol()
