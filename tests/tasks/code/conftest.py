"""What the tests of the cage leave behind is removed."""

import cage_users
import pytest


@pytest.fixture(scope="session", autouse=True)
def no_folders_left():
    """Remove the interpreters of other users at the end of the session."""
    yield
    cage_users.clean()
