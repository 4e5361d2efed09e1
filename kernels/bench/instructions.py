"""Counts machine instructions for the attention bench: `python -m kvbench.kernels.bench.instructions FILE.json`.

No GPU is needed: they are those of the kernels that the installed libraries make of a format, and go into a document
that was measured. Its table then says how near each row is to the rate at which the device issues them (`roofline`).
"""

import argparse
import json
import sys
from functools import cache
from pathlib import Path

from kvbench.kernels.bench.bench import plain_table, read_document, write

MOST_GROUP = 8  # query heads per KV head for which the kernels' main loop is the same


def count(document: dict) -> int:
    """Adds `instructions_per_call` to rows of an attention bench that ran on an NVIDIA GPU.

    All instructions of the kernels in CUDA C++, those of the main loop of Triton's. Returns the number of rows changed.

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
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.split("\n")[0])
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
