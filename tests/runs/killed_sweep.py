"""Run as a program: sweeps in children that have the libraries already, killed after a given time.

Reads lines `FOLDER SECONDS` (SECONDS may be `inf`) and answers each with the child's exit code, or `killed`. It is a
process of its own because a process whose torch has started threads cannot be forked.
"""

import os
import signal
import sys
import time
from pathlib import Path

METHODS = ("snapkv", "h2o", "kivi", "diffkv")
NUM_SAMPLES = 6  # of each method and of the full cache


def sweep(results_dir: Path) -> None:
    """Runs every method on a tiny random model, with the full-cache reference, as one process does it."""
    from omegaconf import OmegaConf
    from test_run_real import compose

    from kvbench.runs.parts import default_parts
    from kvbench.runs.run import run_experiment

    parts = default_parts()
    changes = {"task.items": 3, "task.kinds": ["kv", "recall"], "reference": "auto"}
    for method in METHODS:
        cfg = compose(method, results_dir)
        for key, value in changes.items():
            OmegaConf.update(cfg, key, value)
        run_experiment(cfg, method=method, parts=parts, say=lambda text: None)


def run(results_dir: Path, seconds: float) -> str:
    """One sweep in a child; kills it when the time is over."""
    child = os.fork()
    if not child:
        try:
            sweep(results_dir)
        except BaseException as error:  # the child must never come back into the loop
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if seconds < float("inf"):
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return "killed" if os.WIFSIGNALED(status) else str(os.WEXITSTATUS(status))


if __name__ == "__main__":
    import test_run_real  # noqa: F401

    import kvbench.engine.engine
    import kvbench.tasks.longctx  # noqa: F401  (imported once, here, not in every child)

    print("ready", flush=True)
    for line in sys.stdin:
        folder, seconds = line.split()
        print(run(Path(folder), float(seconds)), flush=True)
