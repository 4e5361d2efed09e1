"""Chat templates are data of a model's maker: their date is the protocol's, their faults name model and template."""

import datetime
import os
import random
import sys
import time

import pytest
from refusals import refused
from test_task_prompts import AWARE, CHAT, build

from kvbench.tasks import chat
from kvbench.tasks.chat import render_chat
from kvbench.tasks.prompts import PromptBuilder
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.rows import Source, read_rows

USER = [{"role": "user", "content": "hello"}]
# As Llama 3.2's template asks for the day, and as others do.
STRFTIME = "Today: {{ strftime_now('%d %b %Y, %H:%M:%S') }}|{% for m in messages %}{{ m['content'] }}{% endfor %}"
LLAMA = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{% endif %}"
    "Today: {{ date_string }}|{{ messages[0]['content'] }}"
)


@pytest.fixture
def with_template(model, monkeypatch):
    """Gives a model whose chat template is the one that is handed over."""

    def change(template: str):
        monkeypatch.setattr(model.tokenizer, "chat_template", template)
        return model

    return change


@pytest.mark.parametrize(("date", "told"), [("2024-07-26", "26 Jul 2024"), ("2031-03-05", "05 Mar 2031")])
def test_templates_are_told_the_date_of_the_protocol(with_template, date, told) -> None:
    """Both ways in which templates ask for today give the setting, and the time is midnight."""
    assert render_chat(with_template(LLAMA), USER, Protocol(date=date)) == f"Today: {told}|hello"
    assert render_chat(with_template(STRFTIME), USER, Protocol(date=date)) == f"Today: {told}, 00:00:00|hello"


def test_the_clock_changes_no_prompt(with_template, monkeypatch) -> None:
    """A template that prints the date gives the same tokens on another day."""
    from transformers.utils import chat_template_utils

    model = with_template(STRFTIME)
    today = build(model, AWARE, CHAT).segments

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2040, 1, 1)

    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    assert build(model, AWARE, CHAT).segments == today


@pytest.mark.parametrize("date", ["26 Jul 2024", "20240726", "2024-7-26", "2024-02-30", "today", "", None, 5, True])
def test_a_date_is_a_day(date) -> None:
    """Anything but YYYY-MM-DD is refused with an example."""
    with refused("setting-value", "protocol.date", f"protocol.date={date!r}", "YYYY-MM-DD"):
        Protocol.from_mapping({"date": date})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "TemplateSyntaxError: "),
        ("{% include 'x' %}{{ messages[0]['content'] }}", "TypeError: "),
        ("{{ raise_exception('no user role') }}", "TemplateError: no user role"),
        ("{% for i in range(10**12) %}x{% endfor %}", "OverflowError: "),
        ("{{ messages[0]['contents'].strip() }}", "UndefinedError: "),
        ("{{ ''.__class__.__mro__ }}{{ messages[0]['content'] }}", "SecurityError: "),
        ("{{ messages[0]['content'] + 5 }}", "TypeError: "),
    ],
)
def test_faults_of_a_template_name_the_model(with_template, template, reason) -> None:
    """Whatever a template raises becomes one sentence with the model, the reason and a remedy."""
    with refused("unsupported", "protocol.chat_template", "model stand-in", reason, "protocol.chat_template=never"):
        PromptBuilder(with_template(template), AWARE, CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0]['content'] }}",
        "{% macro f(n) %}{% for i in range(9) %}{{ f(n) if n < 500 }}{% endfor %}{% endmacro %}{{ f(0) }}",
        "{% set ns = namespace(n=9) %}{% for i in range(99999) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    ],
)
def test_a_template_without_end_is_stopped(with_template, monkeypatch, template) -> None:
    """Loops in loops, a macro that calls itself, numbers that grow: one sentence that names the model, and no hang."""
    monkeypatch.setattr(chat, "RENDER_LIMIT_S", 0.3)
    # An alarm inside a finaliser is lost, and the next one counts; pytest's hook would take that one too.
    monkeypatch.setattr(sys, "unraisablehook", lambda told: None)
    begin = time.process_time()
    with refused("unsupported", "protocol.chat_template", "model stand-in"):
        PromptBuilder(with_template(template), AWARE, CHAT)
    assert time.process_time() - begin < 10


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**11 }}{{ messages[0]['content'] }}",
        "{{ ('%' ~ 10**11 ~ 's') | format('a') }}{{ messages[0]['content'] }}",
        "{{ 'a'.center(10**11) }}{{ messages[0]['content'] }}",
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    ],
)
def test_a_template_of_gigabytes_is_refused(with_template, template) -> None:
    """Text that is asked for at once, or doubles: memory ends at a bound, and the process has what it had before."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with refused("unsupported", "protocol.chat_template", "MemoryError", "1024 MiB"):
        PromptBuilder(with_template(template), AWARE, CHAT)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("hello <s>", "would be 'hello <s>'"),
        ("{{ messages[0]['content'][:1] }}", "would be 'T'"),
        ("{{ ' ' * 2000 ~ messages[0]['content'][:1000] }}", "would be '      "),
        ("{{ messages[0]['content'] | replace('fox', 'cat') }}", "would be 'The quick brown cat"),
        ("{{ messages[0]['content'] }}{{ '\\ud800' }}", "UTF-8"),
        ("{{ messages[0]['content'] }}{{ lipsum }}", "'<function generate_lorem_ipsum at 0x"),
        (
            "{% for i in range(99999) %}0123456789ab{% endfor %}{{ messages[0]['content'] }}",
            "1201548 characters of a conversation of 1560",
        ),
    ],
)
def test_a_template_that_makes_no_prompt_is_refused(with_template, template, shown) -> None:
    """One that drops the message would make all prompts the same; one that repeats itself is named before its text is
    tokenised."""
    with refused("unsupported", "protocol.chat_template", "model stand-in", shown):
        PromptBuilder(with_template(template), AWARE, CHAT)


def test_half_a_character_is_no_text() -> None:
    """In a setting, as a byte that is no UTF-8 on the command line becomes one, and in a row of any file; a pair is."""
    with refused("setting-value", "protocol.system", "udcff'", "UTF-8"):
        Protocol.from_mapping({"system": os.fsdecode(b"\xff")})
    assert Protocol.from_mapping({"system": "\U0001f600"}).system
    lines = [b'{"text": ["\\ud83d\\ude00"]}', b'{"text": ["\\ud83d"]}']
    rows = read_rows(Source("a.jsonl", lines), lambda row: row)
    assert len(rows) == 1 and "half of a character pair" in rows.quarantined[0]["reason"]


def test_a_template_draws_the_same_at_every_start(with_template) -> None:
    """Jinja's `random` and `lipsum` begin anew for each prompt, and the process draws what it would have drawn."""
    model = with_template("{{ range(10**5) | random }} {{ lipsum(1, False, 5, 9) }}{{ messages[0]['content'] }}")
    rendered = set()
    for seed in range(3):
        random.seed(seed)
        drawn = random.random()
        random.seed(seed)
        rendered.add(render_chat(model, USER, Protocol()))
        assert random.random() == drawn
    assert len(rendered) == 1


def test_a_template_that_cuts_long_prompts_is_refused(with_template) -> None:
    """Where a prompt is longer than what it shows."""
    model = with_template("{{ messages[0]['content'][:3000] }}")
    assert render_chat(model, [{"role": "user", "content": 2999 * "a"}], Protocol())
    with refused("unsupported", "protocol.chat_template", "'aaaa"):
        render_chat(model, [{"role": "user", "content": 3001 * "a"}], Protocol())


def test_what_stands_around_the_user_s_text_is_known(with_template) -> None:
    """A request says how many first and last tokens are the same whatever the user says: a template's own words, and
    none without a template."""
    model = with_template("Be brief.|{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}<a>")
    request = build(model, AWARE, CHAT)
    text = model.tokenizer.decode(request.prompt[: request.instruction_tokens])
    assert text.endswith("Be brief.|<s>") and request.instruction_tokens < request.num_prompt_tokens
    assert model.tokenizer.decode(list(request.closing)).endswith("<e><a>")
    assert 0 < request.closing_tokens < request.num_prompt_tokens
    assert request.closing == request.prompt[-len(request.closing) :]
    plain = build(model, AWARE)
    assert plain.instruction_tokens == plain.closing_tokens == 0 and plain.closing == ()
