"""A default test may take so many processor seconds: which runs fail for one."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# By its path: other folders of tests have a file of this name, too.
spec = spec_from_file_location("conftest_of_all", Path(__file__).with_name("conftest.py"))
conftest = module_from_spec(spec)
spec.loader.exec_module(conftest)


def test_slowness_is_that_of_one_thread(monkeypatch):
    """The first process has a thread per core, which wait for each other and would make every limit laxer."""
    seen = []
    monkeypatch.setattr(torch, "softmax", lambda x, dim: seen.append(torch.get_num_threads()) or x)
    threads = torch.get_num_threads()
    assert conftest.slowness.__wrapped__() >= 1
    assert {*seen} == {1} and torch.get_num_threads() == threads


@pytest.mark.parametrize(("spent_s", "alone", "fails"), [(7.0, True, True), (7.0, False, False), (6.0, True, False)])
def test_a_test_that_is_slow_in_company_is_run_alone(monkeypatch, spent_s, alone, fails):
    """A run of several processes fails for a test that takes too long alone, too; 25 % more than its limit is noise."""
    rerun = []
    monkeypatch.setattr(conftest, "slowness", lambda: 1.0)
    monkeypatch.setattr(conftest, "TAKEN", [(spent_s, 9.0, "tests/a.py::slow", 5), (1.0, 1.0, "tests/a.py::quick", 5)])
    monkeypatch.setattr(conftest, "too_long_alone", lambda tests, config: rerun.extend(tests) or alone)
    config = SimpleNamespace(option=SimpleNamespace(slowest=5, numprocesses=2))
    session = SimpleNamespace(config=config, exitstatus=pytest.ExitCode.OK)
    conftest.pytest_sessionfinish(session)
    assert (session.exitstatus == pytest.ExitCode.TESTS_FAILED) is fails
    assert rerun == (["tests/a.py::slow"] if spent_s > 6.25 else [])
