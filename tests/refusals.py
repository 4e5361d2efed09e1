"""Assertions about errors that a user can act on: by code and setting, not by sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvbench.errors import KvbenchError

ERROR = r"error(?:\[[a-z-]+\])?: "
"""Regular expression of how the command line begins an error; one of kvbench's own has its code."""


@contextmanager
def refused(code: str, setting: str | None = None, *values: object) -> Iterator[pytest.ExceptionInfo[KvbenchError]]:
    """Expect a KvbenchError of a code.

    Args:
        code: Its `code`.
        setting: Its `setting`, where the test is about one.
        values: Texts that the message holds: values and names, never a sentence.
    """
    with pytest.raises(KvbenchError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}: {error}"
    assert setting is None or error.setting == setting, f"{error.setting}: {error}"
    missing = [str(value) for value in values if str(value) not in str(error)]
    assert not missing, f"{missing} not in: {error}"
