"""Checks the GPU backend against the reference on a device: `python -m kvbench.kernels.check_device`.

Needs torch and triton alone. Every operation runs on the device and, by the plain torch reference, in main memory, on
the same random pages; page bytes must be identical, results within a bound. The kernels that made the attention of
steps are named after the results. On a GPU, operations also run under torch's detector of synchronisation, and a whole
decode step is captured in a CUDA graph and replayed. Exit status 0 when everything passed, with the requested decoder.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from kvbench.kernels.device_checks import CHECKS
from kvbench.kernels.device_inputs import ALL, QUICK, QUICK_CUDA, SHORT, Finding, Plan
from kvbench.kernels.dispatch import HOST, gpu_backend
from kvbench.kernels.names import DECODES, TRITON


def main(argv: list[str] | None = None) -> int:
    """Runs the checks, prints one line each, and returns 0 when all passed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.kernels.check_device", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with TRITON_INTERPRET=1 (slow)")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--quick", action="store_true", help="four formats, one head dim, short lists, fp32 queries")
    parser.add_argument("--decode", default=TRITON, choices=[*DECODES, HOST], help="what makes the attention of steps")
    parser.add_argument("--jobs", type=int, default=1, help="processes that check, and so compile, in parallel")
    parser.add_argument("--share", default="0/1", help="one share of the checks, such as 3/16; --jobs gives them out")
    chosen = parser.parse_args(argv)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees none here; run this on a machine with one", file=sys.stderr)
        return 2
    try:
        backend = gpu_backend(device, chosen.decode)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    print(f"{name}, torch {torch.__version__}, TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET', '')}", flush=True)
    if chosen.jobs > 1:
        words = ["--device", chosen.device, "--decode", chosen.decode, "--only", *chosen.only]
        words += ["--quick"] if chosen.quick else []
        return in_shares("kvbench.kernels.check_device", words, chosen.jobs)
    part, parts = (int(x) for x in chosen.share.split("/"))
    in_cuda = chosen.decode not in (TRITON, "torch")
    kinds, tokens = (QUICK_CUDA if in_cuda else QUICK, SHORT) if chosen.quick else (ALL, Plan.tokens)
    plan = Plan(device, backend, kinds, tokens, (part, parts))
    failed = report((finding for check in chosen.only for finding in CHECKS[check](plan)), may_be_empty=parts > 1)
    for said in sorted(backend.decodes):
        print(f"{DECODED}{said}")
    is_checked = not in_cuda or parts > 1 or "attention" not in chosen.only or "cuda" in backend.decodes
    return int(failed or not is_checked)


def in_shares(module: str, words: list[str], jobs: int) -> int:
    """Runs a module that takes `--share I/N` in N processes, prints what they found, and adds it up.

    Args:
        module: Name of the module to run.
        words: Its other arguments.
        jobs: N.

    Returns:
        0 when every process ended well and something was checked, else 1.
    """
    commands = [[sys.executable, "-m", module, *words, "--share", f"{index}/{jobs}"] for index in range(jobs)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    with ThreadPoolExecutor(jobs) as pool:  # read together, so that none waits for a full pipe
        printed = list(pool.map(lambda process: process.communicate()[0], running))
    failed = [process.returncode for process in running if process.returncode]
    lines = [line for text in printed for line in text.splitlines()]
    for line in lines if failed else []:
        if not line.startswith(VERDICTS[True]):
            print(line)
    passed = [line for line in lines if line.startswith(VERDICTS[True])]
    for line in passed:
        print(line)
    for line in sorted({line for line in lines if line.startswith(DECODED)}):
        print(line)
    wrong = sum(line.startswith(VERDICTS[False]) for line in lines)
    print(f"{len(passed)} passed, {wrong} failed, {len(failed)} of {jobs} processes ended with an error")
    return int(bool(failed) or not passed)


DECODED = "decode attention by "
VERDICTS = {True: "ok  ", False: "FAIL"}


def report(findings: Iterator[Finding], may_be_empty: bool = False) -> int:
    """Prints findings as they come; 0 when there were some (or there need not be) and all passed."""
    count = failed = 0
    for finding in findings:
        count, failed = count + 1, failed + (not finding.passed)
        verdict = VERDICTS[finding.passed]
        print(f"{verdict} {finding.difference:9.2e} (bound {finding.bound:.0e})  {finding.name}", flush=True)
    print(f"{count - failed} passed, {failed} failed")
    return int(failed > 0 or (count == 0 and not may_be_empty))


if __name__ == "__main__":
    raise SystemExit(main())
