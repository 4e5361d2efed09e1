"""How near rows of the attention bench come to what a device can do: bytes over its bandwidth, instructions over the
rate at which it issues them, whichever takes longer.

Machine instructions are counted without a GPU, of the kernels that the installed libraries make of a format, and go
into a document that was measured: `python -m kvbench.kernels.bench.roofline FILE.json`.
"""

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

SCHEDULERS = 4  # of a multiprocessor of NVIDIA's, each of which issues a warp instruction per cycle
MOST_GROUP = 8  # query heads per KV head for which the kernels' main loop is the same


def peaks(device: torch.device | str) -> dict[str, Any]:
    """What an NVIDIA GPU can do by its clocks: `target`, such as sm_90, `peak_bytes_per_s` of its memory, and
    `peak_instructions_per_s` of warps; empty for other devices, without what the driver does not say."""
    if torch.device(device).type != "cuda" or torch.version.hip is not None:
        return {}
    properties = torch.cuda.get_device_properties(device)
    clock, memory_clock, bits = (
        getattr(properties, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )  # kHz, kHz, and bits that go twice in a cycle
    known = {
        "peak_bytes_per_s": 2 * 1e3 * memory_clock * bits / 8,
        "peak_instructions_per_s": 1e3 * clock * properties.multi_processor_count * SCHEDULERS,
    }
    return {"target": f"sm_{properties.major}{properties.minor}"} | {
        name: value for name, value in known.items() if value
    }


def limits(row: dict, cell: dict, environment: dict) -> dict[str, float]:
    """The least seconds of a row's call: by its `bytes`, at the device's bandwidth, or, where that is not known, as the
    cell's probe measured it; by its `instructions`, where they were counted."""
    least = {}
    rate = environment.get("peak_bytes_per_s") or (cell.get("probe") or {}).get("bytes_per_s")
    if rate and row.get("bytes_per_call"):
        least["bytes"] = row["bytes_per_call"] / rate
    if (rate := environment.get("peak_instructions_per_s")) and row.get("instructions_per_call"):
        least["instructions"] = row["instructions_per_call"] / rate
    return least


def share(row: dict, cell: dict, environment: dict) -> str:
    """The share of a row's time that the larger of its `limits` takes, and which one that is, such as
    `62 % (bytes)`."""
    known = limits(row, cell, environment)
    if not known:
        return "-"
    name = max(known, key=lambda each: known[each])
    return f"{100 * known[name] / row['median']:.0f} % ({name})"


def count(document: dict) -> int:
    """Adds `instructions_per_call` to rows of a document of the attention bench that were measured on an NVIDIA GPU:
    of the kernels in CUDA C++ all, of Triton's those of the main loop. Returns to how many.

    Raises:
        ValueError: It is no such document.
    """
    target = document.get("environment", {}).get("target")
    if document.get("what") != "attention" or target is None:
        raise ValueError("instructions are counted of what=attention on an NVIDIA GPU; give the bench.json of one")
    counted = 0
    for cell in document["cells"]:
        heads_of_queries, heads, dim = (int(part) for part in cell["cell"]["shape"].split("x"))
        for row in cell["variants"]:
            if row.get("kind") != "paged" or heads_of_queries // heads > MOST_GROUP:
                continue
            tokens = row["bytes_per_call"] / row["token_bytes"]
            form = (row["format"], dim, heads_of_queries // heads, document["settings"]["queries"])
            more = (row["scores"] != "none", cell["cell"].get("ring", 0) > 0, target)
            lists = round(tokens / (cell["cell"]["batch"] * heads))
            each = _in_cuda(*form, *more, lists) if row.get("decode") == "cuda" else _in_triton(*form, *more)
            if each is not None:
                row["instructions_per_call"], counted = round(each * tokens), counted + 1
    return counted


@cache
def _in_cuda(
    formats: str, dim: int, group: int, query: str, scores: bool, ring: bool, target: str, tokens: int
) -> float | None:
    """Warp instructions of the kernels in CUDA C++ per token and KV head, of lists of so many."""
    from kvbench.kernels.gpu.cuda_counts import form_named, usage

    more = {"queries": group, "query": query, "out": "fp32", "scores": scores, "ring": query if ring else ""}
    return usage(form_named(formats, dim, **more), target, tokens).per_token


@cache
def _in_triton(
    formats: str, dim: int, group: int, query: str, scores: bool, ring: bool, target: str
) -> float | None:  # fmt: skip
    """Warp instructions of the main loop of Triton's kernel per token and KV head."""
    from kvbench.kernels.gpu.registers import Form, compiled, loop_instructions

    form = Form(formats, dim, query, ring=ring, scores=scores)
    return next(map(loop_instructions, compiled(form, target, ("_attend",))), None)


def main(argv: list[str] | None = None) -> int:
    """Counts for documents and prints their tables; 0 done, 2 where one is none of the attention bench."""
    from kvbench.kernels.bench.bench import plain_table, read_document, write

    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.split("\n\n")[1])
    parser.add_argument("file", type=Path, nargs="+", help="a document that the attention bench wrote on a GPU")
    for path in parser.parse_args(argv).file:
        try:
            document = read_document(path)
            counted = count(document)
        except ValueError as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            return 2
        write(document, path)
        print(plain_table(document))
        print(json.dumps({"counted": counted, "file": str(path)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
