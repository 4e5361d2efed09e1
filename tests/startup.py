"""Seconds of the commands that run no model: `python tests/startup.py`.

Each command runs in fresh processes, one after the other, with the page cache warm. Medians are of the wall clock and
of the processor (user and system), which says more on a machine with other work; `import torch` is there for
comparison, since `bytes` makes the methods, which import it.
"""

import os
import resource
import subprocess
import sys
from statistics import median
from time import perf_counter

TIMES = 5
KVBENCH = ["-m", "kvbench"]
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "list": [*KVBENCH, "list"],
    "help": [*KVBENCH, "help"],
    "engine": [*KVBENCH, "engine", "llama-server -ctk q8_0 -ctv q8_0"],
    "bytes": [*KVBENCH, "bytes"],
    "bytes method=diffkv": [*KVBENCH, "bytes", "method=diffkv", "model=llama3-8b", "length=32768", "batch=16"],
}


def seconds(words: list[str]) -> tuple[float, float]:
    """Seconds of one fresh process, on the wall and of the processor."""

    def used() -> float:
        taken = resource.getrusage(resource.RUSAGE_CHILDREN)
        return taken.ru_utime + taken.ru_stime

    before, began = used(), perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return perf_counter() - began, used() - before


def main() -> None:
    """Print the table."""
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {TIMES} fresh processes")
    print(f"{'command':22}{'wall s':>8}{'CPU s':>8}")
    for name, words in COMMANDS.items():
        seconds(words)  # the page cache
        found = [seconds(words) for _ in range(TIMES)]
        wall, processor = (median(each) for each in zip(*found, strict=True))
        print(f"{name:22}{wall:8.2f}{processor:8.2f}", flush=True)


if __name__ == "__main__":
    main()
