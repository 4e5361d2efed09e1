"""Stage of a GPU's evidence: a real model's answers to requests that were written where the data is.

`--prepare FOLDER` writes the files of requests, with hydra and the data. On the GPU, which needs neither, the stage
answers them, in the order of their names, from FOLDER (KVBENCH_REQUESTS, else build/requests): FOLDER/weights is the
model's folder, perhaps in parts. Answers lie next to the stage's document, in a folder of its name; they are
kept, and `kvbench offline what=grade` makes records of them.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.requests import Request
from kvbench.extensions.bench import evidence_gpu
from kvbench.extensions.offline import answer, requests_file
from kvbench.extensions.offline.requests_file import Head, OfflineRun, tokenizer_hash
from kvbench.kernels.bench import machine
from kvbench.kernels.bench.bench import REFUSED, SCHEMA, check_document, write
from kvbench.results import shards
from kvbench.results.record import RunRecord
from kvbench.results.writing import plain
from kvbench.runs import choices
from kvbench.runs.config import RunConfig
from kvbench.show.progress import note

FOLDER, WEIGHTS = "build/requests", "weights"
MODEL = "model=qwen2.5-coder-0.5b model.dtype=bfloat16"
METHODS = ["full", "method=h2o,snapkv,pyramidkv,ada_snapkv,kv_compress,random method.budget=0.5"]
METHODS += ["method=kivi method.bits=2", "minikv", "diffkv", "int4"]
# By the name of the file; the first ones are answered first.
TASKS = {
    "10-humaneval_plus": "task=humaneval_plus task.form=chat limit=first:120 protocol.max_new_tokens=512",
    "20-gsm8k": "task=gsm8k task.form=zeroshot limit=first:200 protocol.max_new_tokens=384",
    "30-math500": "task=math500 task.form=boxed limit=first:100 protocol.max_new_tokens=640",
    "40-longbench": "task=longbench limit=20 task.max_prompt_tokens=8192 "
    "task.subsets=[2wikimqa,hotpotqa,lcc,passage_retrieval_en,qasper,samsum,trec,triviaqa]",
}
DRY_METHODS = ("full", "kivi bits=2 residual_tokens=32")


def asking(folder: Path) -> list[list[str]]:
    """The words of `kvbench` that write each file of requests."""
    methods = "[" + ",".join(f'"{line}"' for line in METHODS) + "]"
    return [
        ["offline", "what=ask", f"file={folder / name}.jsonl", *shlex.split(f"{words} {MODEL}"), f"methods={methods}"]
        for name, words in TASKS.items()
    ]


def prepare(folder: Path) -> int:
    """Writes the files of requests that are not there; 0 when all are."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for words in asking(folder):
        if not Path(words[2].partition("=")[2]).exists():
            failed += subprocess.run([sys.executable, "-m", "kvbench", *words], check=False).returncode != 0
    note(f"{folder}: put the model's folder there, as {WEIGHTS}, and take all of it to the GPU")
    return int(failed > 0)


def prepare_dry(folder: Path, device: str) -> None:
    """Writes a file of requests to a model of random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model = choices.make_model("random preset=tiny num_layers=1", device)
    make = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(1, 257, (size,), generator=make).tolist()) for size in (24, 9)]
    requests = [
        Request(sample_id=str(i), subset="dry", segments=(ids,), max_new_tokens=2) for i, ids in enumerate(prompts)
    ]
    lines, runs = requests_file.request_lines(requests), list[OfflineRun]()
    for text in DRY_METHODS:
        settings: dict[str, Any] = {"method": choices.read_choice("method", text), "results_dir": "results"}
        settings |= {"model": choices.read_choice("model", "random preset=tiny num_layers=1 device=cpu")}
        settings |= {"backend": {"name": "triton"}, "fidelity": {"max_tokens": 0}}
        full = runs[0].key if runs else None
        values: Any = plain(RunConfig.read(settings).settings())
        runs.append(OfflineRun(label=text, method=text.split()[0], protocol={}, settings=values, reference=full))
    head = Head(
        format=requests_file.FORMAT, task="dry", model="tiny", tokenizer=tokenizer_hash(model.tokenizer),
        requests=requests_file.digest_of(lines), runs=runs,
    )  # fmt: skip
    requests_file.write(folder / "dry.jsonl", head, lines)


def summary(files: list[Path], answers: Path, device: str, begin: float) -> dict:
    """Summarise the folder of answers as a bench document.

    A cell for each file, a row for each method with its seconds and its number of answers.
    """
    cells = []
    for file in files:
        head, requests = requests_file.read(file)
        rows = []
        for run in head.runs:
            for path in sorted((requests_file.folder_of(answers / file.stem, run)).glob(f"*/*/{shards.RECORD}")):
                if (record := RunRecord.load(path.parent)) is None:
                    continue
                seconds = sum(session.wall_s for session in record.sessions)
                times: dict[str, Any] = {
                    "seconds": [seconds],
                    "median": seconds,
                    "q1": seconds,
                    "q3": seconds,
                    "ratios": {},
                }
                rows.append(
                    {
                        "name": run.label,
                        **times,
                        "answers": sum(session.num_done for session in record.sessions),
                        "status": record.status,
                    }
                )
        cells.append({"cell": {"file": file.stem, "requests": len(requests)}, "variants": rows, "refused": []})
    return {
        "schema": SCHEMA,
        "what": "answers",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
        "elapsed_s": time.time() - begin,
        "settings": {},
        "environment": evidence_gpu.describe(device) | {"load_average_end": machine.load_average()},
        "notes": [],
        "cells": cells,
    }


def carry_out(folder: Path, out: Path, device: str) -> int:
    """Answer the remaining requests; returns 0 when all answers are there, `REFUSED` without requests."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        note(f"no requests in {folder}: write them with --prepare where the data is, and bring them here")
        return REFUSED
    weights, answers, begin = folder / WEIGHTS, out.with_suffix(""), time.time()
    for file in files:
        note(f"{file.stem}: {', '.join(run.label for run in requests_file.read(file)[0].runs)}")
        answer.answer(file, answers / file.stem, folder=weights if weights.is_dir() else None)
        document = summary(files, answers, device, begin)
        check_document(document)
        write(document, out)
    for cell in document["cells"]:
        for row in cell["variants"]:
            print(f"{cell['cell']['file']:20} {row['name']:40} {row['answers']:5} answers {row['median']:8.1f} s")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Carries out the stage, or prepares it."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.split("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="write the files of requests, and end")
    parser.add_argument("--folder", type=Path, help="where requests and weights are; KVBENCH_REQUESTS by default")
    parser.add_argument("--out", type=Path, default=Path("answers.json"), help="document; answers go into its folder")
    parser.add_argument("--device", default="cuda", help="what the document describes: cuda or cpu")
    parser.add_argument("--dry", action="store_true", help="requests to a model of random weights, on the CPU")
    chosen = parser.parse_args(argv)
    if chosen.prepare is not None:
        return prepare(chosen.prepare)
    folder = chosen.folder or Path(os.environ.get("KVBENCH_REQUESTS") or FOLDER)
    if chosen.dry:
        folder = chosen.out.with_suffix("") / "requests"
        prepare_dry(folder, "cpu")
    return carry_out(folder, chosen.out, chosen.device)


if __name__ == "__main__":
    raise SystemExit(main())
