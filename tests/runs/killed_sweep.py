"""Run as a program: jobs in children that have the libraries already, killed or disturbed at a given moment.

Reads lines of JSON and answers each with one. It is a process of its own because a process whose torch has started
threads cannot be forked. With faults.c loaded into it (LD_PRELOAD), a moment may be a system call. With `once` behind
its name, Hydra composes nothing twice and only a sweep's picture is drawn, as in the default run of the tests.

    job      sweep: a kvbench command, `words`; fake: a slow run on fakes, or its `shard`; build: a small kernel;
             convert: the embedded model from the file `gguf`; hostile: cases of hostile input, by their `seeds`
    folder   where the job works: the results, or the cache
    seconds  when to kill it; null = not
    at       which call below the folder goes wrong, from 1 on; 0 = none
    kind     how: kill, torn (half of a write is done before the kill), eio, enospc, short (half of a write is done)
    background  true: the child works on while further lines are answered; this line's answer has its `pid`, and a line
             with this pid as `ended` is answered with how it ended: null where it is at work and `wait` is false
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO

import composed_once
import fake_parts

KINDS = ("", "kill", "torn", "eio", "enospc", "short")
SOURCE = 'extern "C" int kvbench_test_answer() { return 42; }\n'


def sweep(task: dict) -> int:
    """A kvbench command, with the shipped loaders."""
    from kvbench.cli.main import main

    return main([*task["words"], f"results_dir={task['folder']}"])


def fake(task: dict) -> int:
    """A run of 120 samples on fakes."""
    fake_parts.main(Path(task["folder"]), task.get("shard"))
    return 0


def build(task: dict) -> int:
    """Compile and load a kernel of one line."""
    from kvbench.kernels.cpu.build import build_library

    source = Path(task["folder"]).with_suffix(".src")
    source.mkdir(exist_ok=True)
    (source / "small.cpp").write_text(SOURCE)
    library = build_library("small", ("small.cpp",), source)
    return 0 if ctypes.CDLL(str(library)).kvbench_test_answer() == 42 else 3


def convert(task: dict) -> int:
    """Convert the embedded model from a file that is here."""
    from kvbench.models import embedded

    embedded._installed_gguf = lambda: Path(task["gguf"])
    embedded.ensure_embedded()
    return 0


def hostile(task: dict) -> int:
    """Cases of hostile input, each in a child of its own."""
    from hostile.trials import several

    return several(task["seeds"], Path(task["folder"]), only=task.get("only", ""))


JOBS = {"sweep": sweep, "fake": fake, "build": build, "convert": convert, "hostile": hostile}


def begin(task: dict, said: IO[bytes], outer: int) -> int:
    """One job in a child, which writes what it says to a file, and the number of its calls to a pipe; gives its id."""
    shim = ctypes.CDLL(None)
    child = os.fork()
    if not child:
        code = 9
        try:
            for number in (1, 2):
                os.dup2(said.fileno(), number)
            if task["job"] in ("build", "convert"):
                os.environ["KVBENCH_CACHE"] = task["folder"]
            if task["at"] is not None:
                shim.fault_arm(task["folder"].encode(), ctypes.c_long(task["at"]), KINDS.index(task["kind"]))
            code = JOBS[task["job"]](task)
        except BaseException:  # the child must never come back into the loop
            traceback.print_exc()
        finally:
            try:
                sys.stderr.flush()
                os.write(outer, str(shim.fault_calls()).encode() if task["at"] is not None else b"0")
            finally:
                os._exit(code)
    return child


def how(status: int) -> str | int:
    """`killed`, or an exit code."""
    return "killed" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def run(task: dict) -> dict:
    """One job in a child: how it ended (`killed` or its exit code), the calls it made, and what it said."""
    inner, outer = os.pipe()
    with tempfile.TemporaryFile() as said:
        child = begin(task, said, outer)
        os.close(outer)
        if task["seconds"] is not None:
            time.sleep(task["seconds"])
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        calls = int(os.read(inner, 20) or 0)
        os.close(inner)
        said.seek(0)
        text = said.read().decode(errors="replace")
    return {"ended": how(status), "calls": calls, "said": text}


def answer(task: dict) -> dict:
    """What a line asks for: a job to its end, one beside others, or how such a one ended."""
    if "ended" in task:
        found, status = os.waitpid(task["ended"], 0 if task["wait"] else os.WNOHANG)
        return {"ended": how(status) if found else None}
    if not task.get("background"):
        return run(task)
    with open(os.devnull, "r+b") as nowhere:
        return {"pid": begin(task, nowhere, nowhere.fileno())}


def warm() -> None:
    """Imports what a sweep imports on its way, and reads what it reads of the code: once, here, not in every child.

    Nothing is run, since a process whose torch has started threads cannot be forked.
    """
    import hydra  # noqa: F401
    import lm_eval.tasks  # noqa: F401
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import kvbench.cli.main
    import kvbench.cli.sweeping
    import kvbench.engine.engine
    import kvbench.runs.run
    import kvbench.show.figure
    import kvbench.show.table
    import kvbench.tasks.longctx  # noqa: F401
    from kvbench.config.code import imports, versions
    from kvbench.config.compose import compose
    from kvbench.methods.full import Full
    from kvbench.methods.snapkv import SnapKV
    from kvbench.results.provenance import code_files, harness_hash, method_files

    harness_hash("torch")
    versions(imports([*code_files("torch").values(), *method_files(Full).values(), *method_files(SnapKV).values()]))
    for method in ("full", "snapkv"):
        compose([f"method={method}", "model=random", "model.preset=tiny", "backend=torch"])


def draw_sweeps_alone() -> None:
    """Writes the pictures of runs, of which each sweep has several, without drawing them."""
    from kvbench.results.writing import write_atomic
    from kvbench.show import figure

    drawn = figure.draw

    def draw(records, path):
        if path.name != "result.png":
            return drawn(records, path)
        write_atomic(path, " ".join(record.hash for record in records).encode())
        return path

    figure.draw = draw


if __name__ == "__main__":
    if "once" in sys.argv[1:]:
        composed_once.install()
        draw_sweeps_alone()
    warm()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
