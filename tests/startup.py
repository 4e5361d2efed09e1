"""Seconds of the commands that run no model: `python tests/startup.py`.

Each command runs in fresh processes, one after the other, with the page cache warm. Medians are of the wall clock and
of the processor (user and system), which says more on a machine with other work. `first` is a process that finds no
count in the cache folder and makes it, for which it imports torch; the others find what it left. `import torch` is
there for comparison.
"""

import os
import resource
import subprocess
import sys
import tempfile
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
    "advise": [
        *KVBENCH,
        "advise",
        *"model=llama3-8b context=32k batch=16 gpu=H100 results_dir=results/example".split(),
    ],
}


def seconds(words: list[str], cache: str) -> tuple[float, float]:
    """Seconds of one fresh process with a cache folder, on the wall and of the processor."""
    environment = os.environ | {"KVBENCH_CACHE": cache}

    def used() -> float:
        taken = resource.getrusage(resource.RUSAGE_CHILDREN)
        return taken.ru_utime + taken.ru_stime

    before, began = used(), perf_counter()
    nowhere = subprocess.DEVNULL
    subprocess.run([sys.executable, *words], check=True, env=environment, stdout=nowhere, stderr=nowhere)
    return perf_counter() - began, used() - before


def main() -> None:
    """Print the table."""
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {TIMES} fresh processes")
    print(f"{'command':22}{'first, s':>10}{'CPU s':>8}{'wall s':>10}{'CPU s':>8}")
    for name, words in COMMANDS.items():
        with tempfile.TemporaryDirectory() as cache:
            seconds(["-c", "import torch"], cache)  # the page cache
            first = seconds(words, cache)
            later = [seconds(words, cache) for _ in range(TIMES)]
        wall, processor = (median(each) for each in zip(*later, strict=True))
        print(f"{name:22}{first[0]:10.2f}{first[1]:8.2f}{wall:10.2f}{processor:8.2f}", flush=True)


if __name__ == "__main__":
    main()
