"""Two processes, each with half of the heads, give the tokens and the bytes of one."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_run import METHODS, run
from places import ROOT

from kvbench.models.random_weights import byte_tokenizer, random_config, random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Gives a folder with a tiny model of two KV heads."""
    made = tmp_path_factory.mktemp("models") / "tiny"
    config = random_config("tiny")
    random_model(config, seed=0, dtype=torch.float32, device=torch.device("cpu")).save_pretrained(made)
    byte_tokenizer(config.vocab_size).save_pretrained(made)
    return made


def start(words, count, **more):
    """Runs a program in processes that know of each other as torchrun tells them; their outputs and exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = f"{ROOT / 'tests'}{os.pathsep}{ROOT / 'tests' / 'engine'}{os.pathsep}{ROOT}"
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    common |= {"PYTHONPATH": tests, "OMP_NUM_THREADS": "1", **more}
    running = [
        subprocess.Popen(
            [sys.executable, *words],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        return [(one.communicate(timeout=300)[0], one.returncode) for one in running]
    finally:
        for one in running:
            one.kill()


@pytest.mark.exhaustive
def test_two_processes_answer_as_one(folder, tmp_path):
    """Tokens, ledgers and what was kept are those of one process, for methods that plan by head, by layer and over the
    model, on prompts, forks, segments and forced answers; fidelity differs in the last digits at most."""
    out = tmp_path / "found"
    ended = start([str(Path(__file__).with_name("parallel_run.py")), str(folder), str(out)], 2)
    assert [code for _, code in ended] == [0, 0], ended
    found, wanted = pickle.loads(out.read_bytes()), run(folder)
    for name in METHODS:
        for key, outcome in wanted[name].items():
            other = found[name][key]
            measured, expected = other.pop("fidelity") or {}, outcome.pop("fidelity") or {}
            gone = {key for key, value in expected.items() if value is None}  # a tail of too few tokens
            assert gone == {key for key, value in measured.items() if value is None}
            measured, expected = ({key: x[key] for key in x if key not in gone} for x in (measured, expected))
            assert measured == pytest.approx(expected, rel=1e-3, abs=1e-5), name
            assert other == outcome, (name, key)
