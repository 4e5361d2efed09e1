"""Runs the checks of the decode kernels under NVIDIA's compute-sanitizer: `python -m kvbench.kernels.sanitize`.

The checks are those of `check_device`, quick, of attention. Each tool is a run of its own: memcheck (accesses out of
bounds), racecheck (hazards in shared memory), synccheck (barriers). Where the sanitizer is not on the machine, one line
says so, the checks run without it, and the exit status is 3 on a GPU: something was not checked.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvbench.kernels.dispatch import HOST
from kvbench.kernels.names import DECODES

TOOLS = ("memcheck", "racecheck", "synccheck")
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
ERROR_STATUS = 9  # its exit status where it finds an error; the checks have others
NOT_CHECKED = 3
REMEDY = "it is in the CUDA toolkit (package cuda-sanitizer) and in conda's cuda-sanitizer-api"


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer: on PATH, in CUDA_HOME or at the toolkit's usual location; None if absent."""
    home = os.environ.get("CUDA_HOME", "")
    folders = [os.environ.get("PATH", ""), *([f"{home}/bin", f"{home}/compute-sanitizer"] if home else ()), *FOLDERS]
    folders += [str(path) for path in sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def command(sanitizer: str | None, tool: str, words: list[str]) -> list[str]:
    """The command line of one run; without a sanitizer the checks alone."""
    checks = [sys.executable, "-m", "kvbench.kernels.check_device", *words]
    if sanitizer is None:
        return checks
    return [sanitizer, "--tool", tool, "--error-exitcode", str(ERROR_STATUS), "--print-limit", "20", *checks]


def main(argv: list[str] | None = None) -> int:
    """Runs the checks under each tool.

    Returns 0 when all passed, 1 where a check or a tool reported an error, 3 where a GPU's checks passed without the
    sanitizer.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu, where there is nothing to sanitize")
    parser.add_argument("--only", nargs="*", default=["attention"], help="which checks, as of check_device")
    parser.add_argument("--decode", nargs="*", default=["triton", "cuda"], choices=[*DECODES, HOST])
    parser.add_argument("--tool", nargs="*", default=list(TOOLS), choices=TOOLS)
    chosen = parser.parse_args(argv)
    sanitizer = None if chosen.device == "cpu" else find_sanitizer()
    if sanitizer is None:
        why = "there is no GPU to watch" if chosen.device == "cpu" else f"it is not on this machine; {REMEDY}"
        print(f"compute-sanitizer is not used: {why}", flush=True)
    failed = 0
    for decode in chosen.decode:
        for tool in chosen.tool if sanitizer else [""]:
            words = ["--quick", "--device", chosen.device, "--decode", decode, "--only", *chosen.only]
            print(f"{tool or 'checks alone'}, decode={decode}", flush=True)
            failed += subprocess.run(command(sanitizer, tool, words), check=False).returncode != 0
    print(f"{failed} runs with an error", flush=True)
    return 1 if failed else NOT_CHECKED if sanitizer is None and chosen.device != "cpu" else 0


if __name__ == "__main__":
    raise SystemExit(main())
