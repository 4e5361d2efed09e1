"""Consoles, numbers, tables and bars that the commands share."""

import io

import pytest
from rich.console import Console

from kvbench.show import picture, terminal
from kvbench.show.progress import LiveBar


def test_width_off_a_terminal_is_the_commands(monkeypatch):
    """Written to a file, a command is as wide as it asks; on a terminal as wide as that."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal.console(137).width == 137
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "61")
    assert terminal.console(137).width == 61


def test_numbers_and_p_values():
    """Points have one decimal and no minus sign before a zero; nats have three digits. Small p values are not spelt
    out."""
    assert [terminal.number(value, 100.0) for value in (None, 0.12345)] == ["-", "12.3"]
    assert terminal.number(-0.0004, 100.0, signed=True) == "+0.0"
    assert [terminal.number(0.012345, 1.0, signed=True), terminal.number(-0.0, 1.0)] == ["+0.0123", "0"]
    assert [terminal.p_text(p) for p in (None, 0.0004, 0.0421, 0.5)] == ["-", "<0.001", "0.042", "0.50"]


def test_a_plain_table_has_no_lines():
    """Columns stand side by side under a title at the left."""
    table = terminal.plain_table("title")
    table.add_column("run")
    table.add_column("n", justify="right")
    table.add_row("x", "12")
    target = Console(width=40, file=io.StringIO(), record=True)
    target.print(table)
    assert [line.rstrip() for line in target.export_text().splitlines()] == ["title", "run   n", "x    12"]


def test_the_bar_shows_its_state():
    """A bar on a terminal has its label and state, and a total that may come later."""
    stream = io.StringIO()
    bar = LiveBar(stream, "work", total=None, state="begun")
    bar.update(1, 4, "1/4 done")
    assert [(task.completed, task.total, task.fields["state"]) for task in bar._bars.tasks] == [(1, 4, "1/4 done")]
    bar.stop()


def test_colours_of_a_picture_are_distinct():
    """No two methods of one panel share a colour or a marker."""
    for group in (picture.COLOURS, picture.MARKERS, picture.METHOD_COLOURS, picture.METHOD_MARKERS):
        assert len(set(group)) == len(group)


def test_a_file_gets_its_text_in_a_notebook_too(monkeypatch):
    """Inside of a notebook's kernel, what is printed to a file is in the file, and is not shown as a display."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *args: pytest.fail("it was displayed"))
    target = io.StringIO()
    terminal.console(60, file=target).print("a table")
    assert target.getvalue() == "a table\n"


def test_a_reader_who_has_seen_enough_ends_a_command_in_silence():
    """As in `kvbench compare | head`: the command line knows a broken pipe, and takes an exit for a fault."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        terminal.console(80, file=Gone()).print("x")
