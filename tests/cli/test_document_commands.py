"""Every command that README and docs print, with small sizes and a tiny model, one document after the other."""

import re
import subprocess
import sys

import pytest
import roundtrip
from places import DATA, ROOT
from refusals import ERROR
from test_docs import DOCUMENTS, commands_in

from kvbench.cli.words import split_command

TINY = ("model=random", "model.preset=tiny")
LENGTH = "task.length=900"  # of the tiny model's tokens, the fewest that the questions of every kind take
ONE = (*TINY, "limit=1", "model.max_tokens=40000")
SUITE = (*ONE, "protocol.max_new_tokens=3", "methods=[full,snapkv]")
BENCH = (
    "quick=true",
    "rounds=1",
    "serve.requests=2",
    "serve.answers=[4,6]",
    *(f"{what}.model='random preset=tiny'" for what in ("decode", "parts", "throughput", "serve")),
)
SAMPLES = ("tuning_samples=2", "held_out_samples=2", "resamples=100")
GRIDS = ("alpha_h=[0,1]", "alpha_l=[0,0.02]", "budget=[0.9,0.5]")
SMALL = {
    "run": ONE,
    "rerun": (),
    "suite": SUITE,
    "paper": ("plan=true",),
    "bench": BENCH,
    "calibrate": (
        *(*TINY, LENGTH, "calibrate.layers.points=2", "calibrate.margin.nll=9"),
        *(f"calibrate.{word}" for word in (*SAMPLES, *(f"grid.{grid}" for grid in GRIDS))),
    ),
    "search": (*TINY, LENGTH, "search.trials=3", "search.winners=1", "search.by_hand=1"),
    "report": ("resamples=100",),
}
NO_ANSWER = "No value of"  # of a search whose margin no value keeps to
# What cannot be had where the tests run, and how a command says so before it does anything.
ABSENT = (
    *("could not be fetched", "is not installed", "No module named", "there is no GPU", "offline", "is no file"),
    *("no data", "pip install", "there is no file", "nothing is stored", "does not exist", "cannot be fetched"),
    *(NO_ANSWER, "was calibrated on the model", "layers, but the model has 2", "is not a file", "is not a folder"),
    *("is no folder", "has no categories", "No such file"),
)


def small(command: str, words: list[str], run: str) -> list[str]:
    """The words with what stands for something of the reader's in them, and the sizes of a test."""
    # A document's own sizes are for a real model and a reader's time.
    is_ours = not any(word.startswith("task=") for word in words)
    reads = command == "suite" and bool({"status", "plan"} & {*words[:2]})  # runs nothing
    added = [word for word in SMALL.get(command, ()) if not reads and (is_ours or word != LENGTH)]
    if command == "run" and not {"task=stream", "task=drift", "task=perplexity"} & {*words}:
        added.append("protocol.max_new_tokens=3")
    names = {word.partition("=")[0] for word in added}
    kept = [word for word in words if word.partition("=")[0] not in names]
    if "model=random" in added:
        kept = [word for word in kept if not word.startswith("model.")]
    places = {"FILE.gguf": "absent.gguf", "FILE": "diffkv_smollm2-135m", "RUN": run}
    told = []
    for word in kept:
        for name, value in places.items():
            word = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", value, word)
        word = re.sub(r"results/[\w/.-]*HASH", run, word)
        word = re.sub(r"(?<=task\.lengths=)\[.*\]", "[2048]", word)
        told.append(re.sub(r"(?<=data_dir=)DIR", str(DATA), word).replace("=DIR", "=out"))
    return [*told, *added]


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if any(commands_in(name))])
def test_commands_of_a_document_run(name, tmp_path, monkeypatch):
    """In their order, in one folder: each gives an answer, or says what is not here before it does anything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "example").symlink_to(ROOT / "results" / "example")
    code, said = roundtrip.give(*("-m", "method=full,snapkv,diffkv", "task=longctx", LENGTH, *ONE))
    assert code == 0, said
    (run, *_) = (str(path.parent) for path in sorted((tmp_path / "results" / "longctx").rglob("diffkv/*/run.json")))
    faults = []
    for module, *words in commands_in(name):
        if module == "kvbench.extensions.offline.answer":  # needs the reader's folder of weights
            continue
        if module != "kvbench":
            subprocess.run([sys.executable, "-m", module, *words, "quick=true"], check=True, timeout=600)
            continue
        command, _ = split_command(words)
        if "--config-dir" in words or "lm_eval" in words:  # a folder of the reader's; lm-eval's own data
            continue
        code, said = roundtrip.give(*small(command, words, run))
        refused = code in (1, 2) and (re.search(ERROR, said) or NO_ANSWER in said)
        is_absent = refused and any(text in said for text in (*ABSENT, *roundtrip.NOTHING))
        if (code and not is_absent) or "Traceback" in said or "fault of kvbench" in said:
            faults.append(f"{' '.join(small(command, words, run))}: exit {code}: {said[-500:]}")
    assert not faults, "\n\n".join(faults)
