"""Tests of generated code keep the results of references in a folder of their own, and leave no interpreters behind."""

import cage_users
import pytest


@pytest.fixture(autouse=True, scope="module")
def own_references(tmp_path_factory):
    """An empty cache folder for each file of tests; nothing comes from an earlier version or goes to a later one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_folders_left():
    """Remove the interpreters of other users at the end of the session."""
    yield
    cage_users.clean()
