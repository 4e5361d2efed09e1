"""Every setting of every task has a rule, which is checked before a model is loaded: generated from what is declared,
so that a new setting is covered without being named here."""

import pytest
from places import CONF
from refusals import refused
from wrong_values import wrong

from kvbench.config.settings import as_dict, read_config, read_settings
from kvbench.errors import KvbenchError
from kvbench.rules import Number, Several, Text, Whole, declared
from kvbench.tasks import BENCHMARKS, HARNESS, check_task, settings_class
from kvbench.tasks.task import name_list, names_of

# What the shipped files leave open, because only the user knows it.
OPEN = {"custom": {"file": "mine.jsonl"}, "lm_eval": {"name": "hellaswag"}}
FILES = {path.stem: as_dict(read_config(path)) for path in sorted(CONF.glob("task/*.yaml"))}
# A file may set more than its group, which then lies in it as `task`.
TASKS = {name: given.get("task", given) | OPEN.get(name, {}) for name, given in FILES.items()}
SETTINGS = [(task, key) for task, given in TASKS.items() for key in declared(settings_class(given))]


@pytest.mark.parametrize(("task", "setting"), SETTINGS)
def test_a_wrong_value_is_refused_by_name(task, setting):
    """Wrong types, NaN, and what lies outside: one ValueError that names the setting and comes before the model."""
    given = TASKS[task]
    kind = settings_class(given)
    values = list(wrong(declared(kind)[setting]))
    assert len(values) > 8
    for value in values:
        with pytest.raises(KvbenchError) as caught:
            read_settings(kind, given | {setting: value}, "task.", "task key")
        assert caught.value.setting == f"task.{setting}" and str(caught.value).startswith(f"task.{setting}=")
    if setting != "harness":  # without it, it is another task
        with pytest.raises(KvbenchError) as caught:
            check_task(given | {setting: values[0]}, limit=None, seed=0)
        assert caught.value.setting == f"task.{setting}" and str(caught.value).startswith(f"task.{setting}=")


@pytest.mark.parametrize(("task", "setting"), SETTINGS)
def test_every_setting_says_what_it_may_be(task, setting):
    """There is a rule; a number has both ends of its range, and counts something."""
    rule = declared(settings_class(TASKS[task]))[setting].rule
    parts = [rule.item, rule.alone] if isinstance(rule, Several) else [rule]
    for part in parts:
        assert part is not None
        if isinstance(part, Whole | Number):
            assert part.low is not None and part.high is not None and part.unit
            assert part.fits(part.low) and part.fits(part.high)
            assert not part.unit.startswith("of ")  # a text says "a number of {unit}"


@pytest.mark.parametrize("task", TASKS)
def test_the_file_lists_what_is_declared(task):
    """conf/task/ has each setting of the task with a value that is allowed, and no other; and every task has a file."""
    given = TASKS[task]
    kind = settings_class(given)
    assert set(given) == set(declared(kind))
    read_settings(kind, given, "task.", "task key")
    known = {name for name, group in TASKS.items() if "harness" not in group}
    assert known == set(BENCHMARKS) and {group.get("harness") for group in TASKS.values()} == {None, HARNESS}


def test_the_list_is_long():
    """What these tests try: some dozens of settings of all tasks, and some hundred values."""
    fields = [declared(settings_class(TASKS[task]))[setting] for task, setting in SETTINGS]
    assert len(SETTINGS) >= 60 and sum(len(list(wrong(field))) for field in fields) >= 1500


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"name": "longctx", "lenght": 300}, ("name-unknown", None, "task key=lenght", "mean length")),
        ({"name": "longctx", "kinds": ["kv", "passky"]}, ("setting-value", "task.kinds", "'passky'", "mean passkey")),
        (
            {"name": "longbench", "subsets": "treck"},
            ("setting-value", "task.subsets", "task.subsets='treck'", "mean trec"),
        ),
        ({"name": "custom"}, ("setting-missing", "task.file", "task.file")),
        ({"name": "aime24", "k": [0]}, ("setting-value", "task.k", "task.k=[0]")),
        ({"harness": "lm_eval", "name": None}, ("setting-missing", "task.name", "task.name=null")),
        ({"name": "rular"}, ("name-unknown", "task.name", "task.name=rular", "mean ruler")),
        ({"name": "math500", "subjects": "all"}, ("name-unknown", None, "task key=subjects")),
    ],
)
def test_the_message_says_what_is_right(given, error):
    """The setting, the value, the rule, and the nearest name where one was mistyped."""
    with refused(*error):
        check_task(given, limit=None, seed=0)


def test_lists_of_names_and_groups():
    """A group stands for its members, each name is there once, in the order given; alone or in a list."""
    groups = {"both": ("kv", "recall")}
    rule = names_of(("kv", "recall", "passkey"), groups)
    assert rule.fits("both") and rule.fits(["passkey", "both"]) and not rule.fits(["kv", "kv"])
    assert name_list(["passkey", "both", "kv"], groups) == ["passkey", "kv", "recall"] and name_list("kv") == ["kv"]


def test_rules_are_of_kinds_that_help_can_show(capsys):
    """`kvbench help TASK` has each setting with its rule; a new setting is shown without being named."""
    from kvbench.cli.choice_help import choice_help

    for task, given in TASKS.items():
        shown = " ".join(choice_help("task", task, 80).split())
        for key, field in declared(settings_class(given)).items():
            assert f" {key}=" in shown and " ".join(field.text.split()) in shown, (task, key)
    assert "length=1024 a whole number of tokens from 256 to 16777216 tokens per prompt" in " ".join(
        choice_help("task", "longctx", 80).split()
    )
    assert isinstance(declared(settings_class(TASKS["custom"]))["file"].rule, Text)
