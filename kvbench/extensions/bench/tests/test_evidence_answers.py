"""The stage of a GPU's evidence that answers requests: what it asks for, what it answers, and what it says of both."""

import json
import shlex

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install -e '.[test]')")

from kvbench.cli import sweeping
from kvbench.config.compose import compose
from kvbench.extensions.bench import evidence_answers, show
from kvbench.extensions.offline import offline, requests_file
from kvbench.kernels.bench.bench import REFUSED, read_document


@pytest.mark.long  # interpreted kernels
def test_requests_are_answered_and_counted(tmp_path, capsys):
    """Of a model with random weights, by each method; a second call answers nothing anew, and the document says how
    many answers there are."""
    out = tmp_path / "answers.json"
    words = ["--dry", "--device", "cpu", "--out", str(out)]
    assert evidence_answers.main(words) == 0
    (cell,) = read_document(out)["cells"]
    assert cell["cell"] == {"file": "dry", "requests": 2}
    assert [(row["name"], row["answers"], row["status"]) for row in cell["variants"]] == [
        (name, 2, "complete") for name in evidence_answers.DRY_METHODS
    ]
    journals = sorted(tmp_path.glob("answers/dry/*/*/1-of-1/samples.jsonl"))
    before = [path.read_bytes() for path in journals]
    assert len(before) == 2 and all(text.count(b"\n") == 2 for text in before)
    assert evidence_answers.main(words) == 0
    assert [path.read_bytes() for path in journals] == before
    assert "2 answers" in capsys.readouterr().out
    document = read_document(out)
    assert "kivi bits=2" in "".join(map(str, show._cell_table(document, document["cells"][0]).columns[0].cells))
    assert show.draw(document, tmp_path / "answers.png") == tmp_path / "answers.png"


def test_without_requests_it_says_where_they_come_from(tmp_path, capsys):
    """A folder that has none is no failure that a second try would mend."""
    assert evidence_answers.main(["--folder", str(tmp_path), "--out", str(tmp_path / "a.json")]) == REFUSED
    assert "--prepare" in capsys.readouterr().err and not (tmp_path / "a.json").exists()


def test_the_commands_compose(tmp_path):
    """Every file's words are those of runs: eleven methods, the full cache first, of the tasks and sizes that the stage
    is made for."""
    commands = evidence_answers.asking(tmp_path)
    names = [words[2].rpartition("/")[2] for words in commands]
    assert names == sorted(names) and [name[3:].partition(".")[0] for name in names] == [
        "humaneval_plus", "gsm8k", "math500", "longbench",
    ]  # fmt: skip
    for words in commands:
        methods = next(word for word in words if word.startswith("methods="))
        lines = json.loads(methods.partition("=")[2])
        shared = [word for word in words[3:] if not word.startswith("methods=")]
        jobs = [job for line in lines for job in sweeping.combinations(
            [*shared, *(shlex.split(line) if "=" in line else [f"method={line}"])]
        )]  # fmt: skip
        assert len(jobs) == 11
        jobs = jobs if words is commands[0] else jobs[:1]  # the methods are the same
        composed = [compose(job, with_choices=True) for job in jobs]
        assert composed[0]["_choices_"]["method"] == "full"
        assert {str(cfg["model"]["dtype"]) for cfg in composed} == {"bfloat16"}
        assert all(cfg["batch_size"] == "auto" for cfg in composed)
    assert offline.main and requests_file.FORMAT  # which carry them out
