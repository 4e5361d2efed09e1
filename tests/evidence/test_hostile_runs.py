"""One damaged or hostile run folder never stops the reading of the others: it is named, with its reason, and left
out."""

import copy
import json
import os
import re
import shutil
from functools import reduce

import pytest
from selection import FULL
from stored import store

from kvbench.api.load import load
from kvbench.cli.main import main
from kvbench.results.sample import seal_of

SCORES = {"a": [1, 0, 1, 1, 0, 1], "b": [1, 1, 0, 1, 1, 1]}
VALUES = (None, "x", 5, -1.5, True, [1], {"a": "b"}, [[[]]], 10**400)
NAMES = ("[/red]", "a$x^{$", "\x1b[31mred\x1b]0;t\x07", "=cmd|' /C calc'!A0", "m" * 100_000, "\ud800", "<script>")


def places(value, path=()):
    """Paths to everything in a JSON value, first of each list."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value, path, new):
    """A copy with another value at a place."""
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return made


@pytest.fixture
def root(tmp_path):
    """A results folder with two good runs."""
    store(tmp_path, "full", SCORES)
    store(tmp_path, "half", SCORES)
    return tmp_path


def read_all(root, capsys, *, pictures=True):
    """The output of the reading commands; each must end well and show the good runs. A page has the pictures of
    `pareto`, so the default run leaves that command out."""
    words = {"compare": [f"out={root / 'out.csv'}"]}
    if pictures:
        words |= {"report": ["axes=resident"]} | ({"pareto": ["axes=resident", "kinds=[png]"]} if FULL else {})
    shown = {}
    for command, more in words.items():
        assert main([command, f"results_dir={root}", "resamples=200", *more]) == 0, command
        captured = capsys.readouterr()
        shown[command] = captured.out
        assert "Traceback" not in captured.err, captured.err[-2000:]
        assert all(char.isprintable() or char == "\n" for char in captured.out)
    assert "half" in shown["compare"]
    return shown


@pytest.mark.parametrize("target", ["run.json", "gone/away"], ids=["loop", "nowhere"])
def test_a_record_that_is_a_link_to_nothing_is_named(root, capsys, target):
    """A link that leads in a circle or nowhere stands where a record should: the run is left out by its name."""
    folder = store(root, "odd", SCORES)
    (folder / "run.json").unlink()
    (folder / "run.json").symlink_to(target)
    name = folder.relative_to(root).as_posix()
    assert f"{name} is left out: " in " ".join(read_all(root, capsys, pictures=False)["compare"].split())


def test_every_field_of_a_record_may_be_damaged(root, capsys):
    """Whatever stands in the place of a field of `run.json`, the others are compared."""
    folder = store(root, "odd", SCORES, settings={"budget": 0.25})
    good = json.loads((folder / "run.json").read_text())
    number = 0
    for place, path in enumerate(list(places(good))[1:]):
        for value in (VALUES * 2)[place % len(VALUES) :][:3]:
            number += 1
            copied = folder.with_name(f"{number:012d}")
            copied.mkdir()
            (copied / "run.json").write_text(json.dumps(changed(good, path, value)))
            os.link(folder / "samples.jsonl", copied / "samples.jsonl")
    assert number > 200
    shown = read_all(root, capsys, pictures=False)
    assert shown["compare"].count("has fields this kvbench does not know") > 80


def test_damaged_files_are_named(root, capsys):
    """Cut, emptied, deep, no JSON, no file: each is left out with its reason, in every command."""
    folder = store(root, "odd", SCORES, settings={"budget": 0.25})
    good = (folder / "run.json").read_text()
    contents = {
        "cut": good[:300],
        "empty": "",
        "list": "[]",
        "deep": "[" * 200_000,
        "deep inside": json.dumps(
            json.loads(good) | {"identity": {"method": reduce(lambda inner, _: [inner], range(80), [])}}
        ),
        "NaN": good.replace('"seed": 0', '"seed": NaN'),
        "Latin": "\xff",
        "null": json.dumps(json.loads(good) | {"metrics": None, "identity": None}),
        "status": json.dumps(json.loads(good) | {"status": "great"}),
    }
    for name, content in contents.items():
        copied = folder.with_name(name)
        shutil.copytree(folder, copied)
        (copied / "run.json").write_text(content, encoding="latin-1")
    for name, file in (("pipe", "run.json"), ("pipe in samples", "samples.jsonl")):
        copied = folder.with_name(name)
        shutil.copytree(folder, copied)
        (copied / file).unlink()
        os.mkfifo(copied / file)
    for text in read_all(root, capsys).values():
        flat = text.replace("\n", "")
        for name in (*contents, "pipe", "pipe in samples"):
            assert f"toy/tiny/odd/{name} is left out: " in flat, name


def test_every_field_of_a_line_may_be_damaged(root, capsys):
    """Whatever stands in the place of a field of a line, the line is counted or read, and the others are compared."""
    folder = store(root, "odd", SCORES, settings={"budget": 0.25})
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    first = {key: value for key, value in lines[0].items() if key != "seal"}  # as a version without seals wrote it
    whole = [json.dumps(changed(first, path, value)) for path in list(places(first))[1:] for value in VALUES]
    whole = [text.replace('"a/0"', f'"a/{100 + number}"') for number, text in enumerate(whole)]
    for line in lines:
        del line["seal"]
    (folder / "samples.jsonl").write_text("\n".join([*map(json.dumps, lines), *whole, "[" * 100_000]) + "\n")
    shown = read_all(root, capsys)
    assert "lines of samples.jsonl are no whole record of this run and do not count" in shown["compare"]


def sealed_anew(folder, change):
    """Every line of a run with something changed, and a seal that is right."""
    path, run = folder / "samples.jsonl", json.loads((folder / "run.json").read_text())["hash"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [{key: value for key, value in (line | change(line)).items() if key != "seal"} for line in lines]
    path.write_text("".join(f"{json.dumps(line | {'seal': seal_of(line, run)})}\n" for line in changed))


def test_numbers_that_cannot_be_are_named_and_the_others_shown(root, capsys):
    """Sealed lines with a score of 1e308 or a full cache of no bytes are no records; a run without bytes, or with
    other samples than the rest, is left out of a picture by its name and takes nobody with it."""
    odd = {
        "large": lambda line: {"scores": {"exact": 1e308}},
        "empty": lambda line: {"ledger": line["ledger"] | {"fp16_bytes": 0}},
        "weightless": lambda line: {"ledger": line["ledger"] | {"resident_bytes": 0}},
        "unbilled": lambda line: {"ledger": {}},
        "elsewhere": lambda line: {"subset": "c"},
    }
    for name, change in odd.items():
        sealed_anew(store(root, name, SCORES), change)
    for command, text in read_all(root, capsys).items():
        flat = " ".join(text.split())
        for name in ("large", "empty"):
            assert re.search(f"toy/tiny/{name}/[^ ]+ is left out: none of the 12 lines of samples.jsonl", flat), flat
        if command != "compare":
            assert "elsewhere is not drawn: it has no sample of full's" in flat
            assert "not drawn against resident bytes at the end, which their samples lack: unbilled, weightless" in flat


def test_lines_of_another_run_do_not_count(root, capsys):
    """An edited answer is not believed, nor the samples of another method under this one's name."""
    folder = store(root, "odd", SCORES, settings={"budget": 0.25})
    path, other = folder / "samples.jsonl", next(root.glob("toy/tiny/half/*/samples.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b'"exact":1.0', b'"exact":0.0')
    lines[1] = other.read_bytes().splitlines(keepends=True)[1]
    path.write_bytes(b"".join(lines))
    shown = read_all(root, capsys, pictures=False)["compare"]
    assert "2 lines of samples.jsonl are no whole record of this run and do not count" in shown
    assert "10 of 12" in shown


def test_seals_that_were_taken_off_are_missed(root, capsys, tmp_path):
    """A run that says its lines are sealed is left out by name where they are not, whatever scores they claim."""
    folder = store(root, "odd", SCORES, settings={"budget": 0.25})
    record = json.loads((folder / "run.json").read_text()) | {"sealed": True}
    (folder / "run.json").write_text(json.dumps(record))
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    edited = [{k: v for k, v in line.items() if k != "seal"} | {"scores": {"exact": 1.0}} for line in lines]
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in edited))
    name, why = (
        folder.relative_to(root).as_posix(),
        "none of the 12 lines of samples.jsonl is a whole and sealed record",
    )
    assert f"{name} is left out: {why} of this run" in read_all(root, capsys, pictures=False)["compare"]
    assert main(["show", str(folder)]) == 0 and "! 12 damaged lines of samples.jsonl" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="12 damaged lines of samples.jsonl do not count"):
        assert "odd" not in set(load(root, samples=True).method)


def test_answers_that_are_gone_are_missed(root, capsys):
    """A line that somebody took out leaves a complete run with fewer answers, and every reader says so."""
    path = store(root, "odd", SCORES, settings={"budget": 0.25}) / "samples.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    for command, text in read_all(root, capsys, pictures=False).items():
        assert "was complete and has 11 of 12 answers; giving its command again finishes it" in text, command
    assert main(["show", str(path.parent)]) == 0
    assert "! 1 answers that the run had are not in samples.jsonl" in capsys.readouterr().out


def test_hostile_names_are_text(root, capsys):
    """Markup, formulas, escapes, halves of characters and endless names are shown, and stop nothing."""
    odd = [{"method": name, "message": name} for name in NAMES]
    odd += [{"task": name, "model": name} for name in (NAMES[1], NAMES[4])]
    for number, fields in enumerate(odd):
        path = store(root, f"odd{number}", SCORES) / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    read_all(root, capsys)
    written = (root / "out.csv").read_text()
    assert "\n=cmd" not in written and ",=cmd" not in written and "'=cmd" in written
    page = (root / "report.html").read_text()
    assert "<script>," not in page and "&lt;script&gt;" in page and len(page) < 2_000_000
