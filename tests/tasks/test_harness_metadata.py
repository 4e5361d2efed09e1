"""Tasks of lm-eval that make their own data: what they are told, where their context ends, and what they lack."""

import json

import pytest
from refusals import refused

from kvbench.tasks import load_task

YAML = """task: made_ask
test_split: test
custom_dataset: !function made.rows
output_type: generate_until
doc_to_text: "{{%s}}Read. {{facts}}\\nQ: {{question}}\\nA:"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
# Notes what it is told, and makes as many rows as it is told.
CODE = """
import json
from pathlib import Path

def rows(**told):
    known = {name: value for name, value in told.items() if name in ("tokenizer", "lengths", "count")}
    Path(__file__).with_name("told.json").write_text(json.dumps(known))
    %s
    import datasets
    made = [{"facts": f"The box {n} is red.", "question": f"Which box is {n}?", "target": "red"}
            for n in range(told.get("count", 2))]
    return {"test": datasets.Dataset.from_list(made)}
"""


@pytest.fixture
def load(tmp_path, model, tokenizer, monkeypatch):
    """Gives a function that loads a task whose data are made by code of its own."""

    def load(first="", lines="pass", protocol=None, folder=str(tmp_path), **settings):
        (tmp_path / "made.yaml").write_text(YAML.replace("{{%s}}", first))
        (tmp_path / "made.py").write_text(CODE % lines)
        monkeypatch.setattr(tokenizer, "name_or_path", folder, raising=False)
        cfg = {"harness": "lm_eval", "name": "made_ask", "include_path": str(tmp_path)} | settings
        return load_task(cfg, model, limit=None, seed=0, protocol=protocol)

    load.told = lambda: json.loads((tmp_path / "told.json").read_text())
    return load


def test_the_task_is_told_the_metadata_and_the_tokenizer(load, tmp_path):
    """The model's own tokenizer unless another one is named; the row says what was told, and it decides the hash."""
    plain = load()
    assert load.told() == {"tokenizer": str(tmp_path)} and len(plain.requests) == 2
    told = load(metadata={"count": 3, "lengths": [512, 1024]})
    assert load.told() == {"tokenizer": str(tmp_path), "count": 3, "lengths": [512, 1024]}
    assert len(told.requests) == 3 and told.protocol["metadata"] == {"count": 3, "lengths": [512, 1024]}
    assert told.fingerprint != plain.fingerprint
    load(metadata={"tokenizer": "other"})
    assert load.told() == {"tokenizer": "other"}
    load(folder="")
    assert load.told() == {}


@pytest.mark.parametrize("field", ["facts", None])
def test_the_context_ends_where_the_document_says(load, model, field):
    """By the field that is named; without one of the usual names there is an error that lists them."""
    if field is None:
        with refused("settings-conflict", "protocol.query_aware", "task.context_field=", "facts, question, target"):
            load(protocol={"query_aware": False})
        return
    task = load(protocol={"query_aware": False}, context_field=field)
    for number, request in enumerate(task.requests):
        before, behind = (model.tokenizer.decode(list(part)) for part in request.segments)
        assert before == f"<s>Read. The box {number} is red."
        assert behind == f"\nQ: Which box is {number}?\nA:"


def test_the_system_speaks_first(load, model):
    """Once, whoever writes the prompt."""
    for request in load(protocol={"system": "Be kind."}).requests:
        text = model.tokenizer.decode(list(request.prompt))
        assert text.startswith("<s>Be kind.") and text.count("Be kind.") == 1
    for request in load(protocol={"system": "Be kind.", "chat_template": "always"}).requests:
        text = model.tokenizer.decode(list(request.prompt))
        assert text.startswith("<s><|system|>\nBe kind.") and text.count("Be kind.") == 1


@pytest.mark.parametrize(
    ("lines", "code", "setting", "value"),
    [
        ("import not_there_at_all", "package-missing", None, "`pip install not_there_at_all`"),
        ("assert 'size' in told, 'No size was given'", "setting-missing", "task.metadata", "No size was given"),
        (
            "raise LookupError(\"Resource punkt_tab not found. >>> nltk.download('punkt_tab')\")",
            "package-missing",
            "task.name",
            "`python -m nltk.downloader punkt_tab`",
        ),
    ],
)
def test_what_is_missing_is_answered_with_what_gets_it(load, lines, code, setting, value):
    """Never with a traceback of lm-eval's own."""
    with refused(code, setting, "task.name=made_ask", value):
        load(lines=lines)


@pytest.mark.parametrize("metadata", [{"count": None}, {"count": {"a": 1}}, 3])
def test_wrong_metadata_is_named(load, metadata):
    """Before anything is made."""
    with refused("setting-value", "task.metadata", "task.metadata="):
        load(metadata=metadata)
