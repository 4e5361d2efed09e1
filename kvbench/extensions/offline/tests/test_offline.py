"""`kvbench offline`: records of answers from elsewhere equal those of ordinary runs."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from places import ROOT
from refusals import refused

from kvbench.cli.main import main
from kvbench.engine.requests import Request, Thoughts, Turn
from kvbench.extensions.offline import answer, grade, requests_file, weights
from kvbench.models.load import load_model
from kvbench.results.lines import journal_lines
from kvbench.results.record import RunRecord

MODEL = ["model=random", "model.preset=tiny", "model.max_tokens=2048", "backend=torch"]
TASK = ["task=longctx", "task.length=256", "task.kinds=[passkey,kv]", "limit=2", "protocol.max_new_tokens=6"]
SMALL = [*MODEL, *TASK, "fidelity.max_tokens=8"]
# Libraries that an answering machine need not have. None in sys.modules makes an import fail as a missing library does.
ABSENT = ("hydra", "omegaconf", "lm_eval", "datasets", "gguf", "pandas", "scipy", "rich", "matplotlib", "accelerate")
# Answers twice: in a child that is killed behind its second answer, and then whole.
PROGRAM = f"""
import os, signal, sys
for name in {ABSENT}:
    sys.modules[name] = None
from kvbench.extensions.offline import answer
from kvbench.results.journal import Journal
child = os.fork()
if not child:
    append, there = Journal.append, []
    def counted(self, record):
        if len(there) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        there.append(record)
        return append(self, record)
    Journal.append = counted
    os._exit(answer.main())
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
os.system("cp -r a killed")
code = answer.main()
assert not [name for name in {ABSENT} if sys.modules.get(name) is not None]
sys.exit(code)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(*words):
    """Write r.jsonl."""
    assert main(["offline", "ask", "file=r.jsonl", *SMALL, *words]) == 0


def samples_of(folder, run):
    """The records of a journal in its order, without times."""
    lines = [line.record for line in journal_lines(folder / "samples.jsonl", run)]
    assert lines and None not in lines
    return [{name: value for name, value in record.items() if name != "timing"} for record in lines]


def runs_in(root):
    """Folder below a folder of results -> record without provenance and times, and samples."""
    result = {}
    for path in sorted(root.glob("*/*/*/*/run.json")):
        record = RunRecord.load(path.parent)
        plain = asdict(record) | dict.fromkeys(("started", "ended", "sessions", "timing"))
        result[path.parent.relative_to(root)] = plain, samples_of(path.parent, record.hash)
    return result


@pytest.mark.long
@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["snapkv", "kivi"], []),
        (["snapkv"], ["fidelity.on=own"]),
        (["kivi"], ["protocol.temperature=0.8", "protocol.num_samples=2"]),
    ],
)
def test_grading_gives_the_records_of_an_ordinary_run(folder, methods, words):
    """Of methods and the full cache: hashes, texts, tokens, scores, fidelity, bytes, differences; a second grading
    changes nothing, and `compare` reads them."""
    words = [f"method={','.join(methods)}", *words]
    ask(*words)
    head, requests = requests_file.read(folder / "r.jsonl")
    assert [run.label.split()[0] for run in head.runs] == ["full", *methods] and len(requests) == 4
    assert not any(request.answers or request.meta for request in requests), "what is only graded stays behind"
    assert main(["offline", "answer", "file=r.jsonl"]) == 0
    assert main(["offline", "grade", "file=r.jsonl", "results_dir=graded"]) == 0
    assert main(["-m", "results_dir=ordinary", *SMALL, *words]) == 0
    graded, ordinary = runs_in(folder / "graded"), runs_in(folder / "ordinary")
    assert graded == ordinary and len(graded) == len(methods) + 1
    for record, samples in graded.values():
        assert record["status"] == "complete" and all(sample["scores"] and sample["fidelity"] for sample in samples)
        assert (record["comparison"] is None) == (record["method"] == "full")
    assert main(["offline", "grade", "file=r.jsonl", "results_dir=graded"]) == 0
    assert runs_in(folder / "graded") == graded
    assert main(["compare", "results_dir=graded"]) == 0


@pytest.mark.long  # a process that loads torch
def test_answers_without_hydra_or_lm_eval_and_after_a_kill(folder):
    """A process without these libraries answers, is killed behind its second answer, and goes on: what was there stays,
    and the whole equals what one process answers."""
    ask("method=snapkv", "reference=none")
    words = [sys.executable, "-c", PROGRAM, "r.jsonl", "a"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (killed,) = folder.glob("killed/snapkv-*/*/1-of-1/samples.jsonl")
    (path,) = folder.glob("a/snapkv-*/*/1-of-1/samples.jsonl")
    first, whole = killed.read_bytes(), path.read_bytes()
    assert first.count(b"\n") == 2 and whole.startswith(first) and whole.count(b"\n") == 4
    answer.answer(folder / "r.jsonl", folder / "b")
    (other,) = folder.glob("b/snapkv-*/*/1-of-1/samples.jsonl")
    run = RunRecord.load(other.parent)
    assert [session.num_done for session in RunRecord.load(path.parent).sessions] == [0, 2]
    assert samples_of(path.parent, run.hash) == samples_of(other.parent, run.hash)


def test_requests_travel_whole():
    """All that can change an answer: turns, thoughts, choices, forced tokens, stop rules and sampling."""
    request = Request(
        sample_id="a/1",
        subset="a",
        segments=((1, 2), (3,)),
        gold=(4, 5),
        warmup_tokens=1,
        choices=((6,), (7, 8)),
        turns=(Turn(tokens=(9,), gold=(10,)),),
        thoughts=Thoughts(opened=True, budget_tokens=3, end=(11,)),
        max_new_tokens=7,
        min_new_tokens=2,
        stop=("\n\n", "\u00e9"),
        stop_token_ids=(12,),
        temperature=0.7,
        top_p=0.9,
        num_samples=2,
        instruction_tokens=1,
        closing_tokens=1,
        num_prompt_tokens_untruncated=40,
        past_context=True,
    )
    changed = replace(request, answers=("x",), meta={"answer": "x"}, turns=(replace(request.turns[0], answers=("y",)),))
    (line,) = requests_file.request_lines([changed]).splitlines()
    assert requests_file._request(json.loads(line)) == request


@pytest.mark.smoke
def test_portions_are_graded_as_one_run(folder, capsys):
    """Half of the answers are no run; with the other half they are, with the sessions of both."""
    ask("method=full", "batch_size=1")
    assert main(["offline", "answer", "file=r.jsonl", "shard=1/2"]) == 0
    assert main(["offline", "grade", "file=r.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "left out: full: 2 of 4 answers" in said and "what=answer" in said
    assert main(["offline", "answer", "file=r.jsonl", "shard=2/2"]) == 0
    assert main(["offline", "grade", "file=r.jsonl"]) == 0
    (path,) = (folder / "results").rglob("run.json")
    assert [session.num_done for session in RunRecord.load(path.parent).sessions] == [2, 2]


def test_answers_that_do_not_count(folder, capsys):
    """Those to other requests, and an edited one, whose line has another seal than what answered gave it."""
    ask("method=full")
    answer.answer(folder / "r.jsonl", folder / "r-answers")
    head, requests = requests_file.read(folder / "r.jsonl")
    keys = frozenset((request.sample_id, 0) for request in requests)
    (answered,) = grade._answered(folder / "r-answers", head.runs[0], head.requests, keys)
    assert answered.samples.keys() == keys
    assert not grade._answered(folder / "r-answers", head.runs[0], "0" * 64, keys)
    assert "to other requests" in capsys.readouterr().err
    (path,) = folder.rglob("samples.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"text":"', b'"text":"42 ', 1))
    assert main(["offline", "grade", "file=r.jsonl"]) == 2
    assert "3 of 4 answers" in capsys.readouterr().err


def test_some_of_the_methods(folder, capsys):
    """By name or label; the full cache comes along where its answers are forced."""
    ask("methods=[kivi,'method=snapkv method.budget=0.25,0.5']", "fidelity.on=own")
    head, _ = requests_file.read(folder / "r.jsonl")
    assert [run.label for run in head.runs] == ["full", "kivi", "snapkv budget=0.25", "snapkv budget=0.5"]
    chosen = answer._chosen(head, ["snapkv*5"])
    assert [run.label for run in chosen] == ["full", "snapkv budget=0.25", "snapkv budget=0.5"]
    assert main(["offline", "answer", "file=r.jsonl", "methods=h2o"]) == 2
    assert "methods=h2o" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model in a folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model = load_model({"kind": "random", "preset": "tiny", "seed": 3})
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def in_parts(source, target, size=50_000):
    """A copy of a model's folder with its weights in parts, and their digests."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    content = (source / "model.safetensors").read_bytes()
    lines = [f"{hashlib.sha256(content).hexdigest()}  model.safetensors\n"]
    for number, start in enumerate(range(0, len(content), size)):
        part = target / f"model.safetensors.part{number:03}"
        part.write_bytes(content[start : start + size])
        lines.append(f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n")
    (target / weights.SUMS).write_text("".join(lines))
    return target


def test_weights_in_parts(folder, tiny):
    """They are joined once, byte for byte; a damaged or missing part is named, and nothing is joined then."""
    parts_folder = in_parts(tiny, folder / "parts")
    parts, whole = sorted(parts_folder.glob("*.part*")), parts_folder / "model.safetensors"
    assert len(parts) > 2
    kept = parts[1].read_bytes()
    parts[1].write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with refused("file-content", None, "part001"):
        weights.join(parts_folder)
    parts[1].unlink()
    with refused("file-missing", None, "lacks 1 of", "model.safetensors.part001"):
        weights.join(parts_folder)
    assert not whole.exists()
    parts[1].write_bytes(kept)
    weights.join(parts_folder)
    assert whole.read_bytes() == (tiny / "model.safetensors").read_bytes()
    for path in parts:
        path.unlink()
    weights.join(parts_folder)
    whole.write_bytes(b"")
    with refused("file-missing", None, "model.safetensors.part000"):
        weights.join(parts_folder)
    (parts_folder / weights.SUMS).write_text("00  ../x\n")
    with refused("file-content", None, "../x", "sha256sum"):
        weights.join(parts_folder)


def test_weights_of_another_folder(folder, tiny):
    """The answers are of that folder's weights, under the model's name where it was asked; a folder with the words of
    another vocabulary is refused before anything is answered."""
    words = ["model=hf", f"model.path={tiny}", *SMALL[2:]]
    assert main(["offline", "ask", "file=r.jsonl", "method=full", *words]) == 0
    parts_folder = in_parts(tiny, folder / "parts")
    assert main(["offline", "answer", "file=r.jsonl", "weights=parts"]) == 0
    assert main(["offline", "grade", "file=r.jsonl", "results_dir=graded"]) == 0
    assert main(["method=full", *words, "results_dir=ordinary"]) == 0
    assert runs_in(folder / "graded") == runs_in(folder / "ordinary") != {}
    path = parts_folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(settings))
    with refused("run-differs", "model", "model tiny"):
        answer.answer(folder / "r.jsonl", folder / "c", folder=parts_folder)
    assert not list(folder.glob("c/**/samples.jsonl"))


def test_files_that_are_refused(folder, capsys):
    """Requests that were changed, other files, and a task that has other requests by now."""
    ask("method=full")
    path = folder / "r.jsonl"
    head, requests = requests_file.read(path)
    content = path.read_bytes()
    changed = content.replace(b'"max_new_tokens":6,"min', b'"max_new_tokens":7,"min', 1)
    assert changed != content
    path.write_bytes(changed)
    with refused("file-content", "file", "SHA-256"):
        requests_file.read(path)
    path.write_bytes(b'{"format": 1}\n')
    with refused("file-content", "file", "model is missing"):
        requests_file.read(path)
    lines = requests_file.request_lines(requests[:-1])
    head.requests = requests_file.digest_of(lines)
    requests_file.write(path, head, lines)
    with refused("run-differs", None, "task longctx"):
        grade.grade(path, folder / "a", folder / "results")
    for words, said in (
        (["offline", "ask"], "needs file="),
        (["offline", "answer", "file=r.jsonl", "limit=3"], "limit=3 is for what=ask"),
        (["offline", "ask", "file=r.jsonl", *SMALL, "method=snapkv", "fidelity.on=own", "reference=none"], "reference"),
        (["offline", "ask", "file=r.jsonl", *SMALL, "seed=1,2"], "its requests differ"),
        (["offline", "answer", "file=none.jsonl"], "cannot be read"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err
