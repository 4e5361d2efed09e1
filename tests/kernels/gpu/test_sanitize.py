"""The checks under compute-sanitizer: which tools run, what is said where it is not there, and the status of both."""

import os
import stat
import subprocess
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from kvbench.kernels import check_device, sanitize
from kvbench.kernels.gpu.cuda_decode import Decoder


@pytest.fixture
def ran(monkeypatch):
    """The command lines that were run, each with status 0 unless a word of it is in `fails`."""
    found = SimpleNamespace(commands=[], fails=set())

    def run(command, check):
        found.commands.append(command)
        return SimpleNamespace(returncode=int(not found.fails.isdisjoint(command)))

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_every_tool_watches_both_decoders(ran, monkeypatch, capsys):
    """An error of one tool is the status of all."""
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "/bin/compute-sanitizer")
    assert sanitize.main([]) == 0
    assert [(command[2], command[command.index("--decode") + 1]) for command in ran.commands] == [
        (tool, decode) for decode in ("triton", "cuda") for tool in sanitize.TOOLS
    ]
    assert all(command[0] == "/bin/compute-sanitizer" and "--error-exitcode" in command for command in ran.commands)
    ran.fails = {"racecheck"}
    assert sanitize.main(["--decode", "cuda"]) == 1
    assert "1 runs with an error" in capsys.readouterr().out


def test_without_the_sanitizer_the_checks_run_alone(ran, monkeypatch, capsys):
    """On a GPU that is no success, and on a CPU there is nothing to watch."""
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    assert sanitize.main(["--decode", "cuda"]) == sanitize.NOT_CHECKED
    assert "it is not on this machine" in capsys.readouterr().out
    assert sanitize.main(["--device", "cpu", "--decode", "host"]) == 0
    assert [command[1:3] for command in ran.commands] == [["-m", "kvbench.kernels.check_device"]] * 2
    ran.fails = {"host"}
    assert sanitize.main(["--device", "cpu", "--decode", "host"]) == 1


def test_it_is_looked_for_where_the_toolkit_is(monkeypatch, tmp_path):
    """On PATH, and in CUDA_HOME."""
    monkeypatch.setattr(sanitize, "FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    before = sanitize.find_sanitizer()
    tool = tmp_path / "cuda" / "bin" / "compute-sanitizer"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    assert sanitize.find_sanitizer() == str(tool) != before
    os.rename(tool, tmp_path / "compute-sanitizer")
    assert sanitize.find_sanitizer() == str(tmp_path / "compute-sanitizer")


def test_checks_of_a_decoder_that_never_ran_do_not_pass(monkeypatch, capsys):
    """Where Triton stood in for all of the attention that was to be CUDA's, the check says so and fails."""
    made = []

    def checked(plan):
        plan.backend.decoder.ran |= made.pop()
        yield check_device.Finding("attend k8v4", 0.0, 1.0)

    monkeypatch.setitem(check_device.CHECKS, "attention", checked)
    words = ["--quick", "--device", "cpu", "--only", "attention", "--decode", "host"]
    for ran, status in (({"triton: no NVRTC"}, 1), ({"cuda"}, 0)):
        made.append(ran)
        assert check_device.main(words) == status
        assert f"decode attention by {ran.copy().pop()}" in capsys.readouterr().out
    assert Decoder().ran == set()


def test_quick_checks_of_cuda_have_queries_that_it_takes():
    """Its kernels refuse those of 32 bits."""
    from kvbench.kernels.device_inputs import QUICK_CUDA, format_of
    from kvbench.kernels.gpu.cuda_form import form_of

    taken = 0
    for dim, dtype, names in QUICK_CUDA:
        for name in names:
            try:
                form_of([format_of(name, dim)], 4, dtype, dtype, None, True)
            except ValueError as error:
                assert name == "k16v16", error
            else:
                taken += 1
    assert taken == 3
