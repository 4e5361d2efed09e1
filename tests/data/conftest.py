"""Fixtures of the tests of tasks."""

from task_fixtures import make_model, model, tokenizer  # noqa: F401
