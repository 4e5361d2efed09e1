"""Values that are wrong are refused before torch and transformers are imported."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from kvbench.cli.main import main
codes = [main(words.split()) for words in json.loads(sys.argv[1])]
print(json.dumps([codes, sorted({"torch", "transformers", "lm_eval", "datasets"} & sys.modules.keys())]))
"""
COMMANDS = (
    "limit=abc",
    "seed=abc",
    "reference=foo",
    "batch_size=0",
    "resume=maybe",
    "shard=3",
    "results_dir=file/within",
    "task=longctx task.items=abc",
    "task=longctx task.kinds=[foo]",
    "protocol.max_new_tokens=-1",
    "model.dtype=foo",
    "model.linear=foo",
    "model.device=foo",
    "model.device=[cpu,auto]",
    "model.max_tokens=abc",
    "model=random model.preset=foo",
    "backend.name=foo",
    "prefill.chunk=-3",
    "fidelity.on=foo",
    "store.key_offset=nowhere",
    "store.page_bytes=17",
    "method=snapkv,kivi limit=abc",
    "method=snapkv,kivi task.items=abc",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The exit code and the message of each command, all in one process, and what it imported."""
    folder = tmp_path_factory.mktemp("wrong_values")
    (folder / "file").touch()
    words = [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    codes, imported = json.loads(done.stdout)
    return dict(zip(COMMANDS, codes, strict=True)), imported, done.stderr


def test_wrong_values_import_neither_torch_nor_transformers(answers):
    """Values of every group but the method's, in a run and in a sweep."""
    codes, imported, said = answers
    assert set(codes.values()) == {2}, f"{codes}\n{said}"
    assert not imported
    assert said.count("error[") == len(COMMANDS)


def test_names_that_are_read_without_torch_are_those_of_the_loaders():
    """A kind, a backend or a quantisation that is added must be accepted here too."""
    from kvbench.kernels.dispatch import BACKENDS
    from kvbench.kernels.names import BACKEND_NAMES
    from kvbench.models import load, names, quantised

    assert set(names.KINDS) == set(load._LOADERS)
    assert set(BACKEND_NAMES) == set(BACKENDS)
    assert set(names.QUANTISATIONS) == set(quantised.KINDS)
