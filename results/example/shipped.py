"""What the cache formats that serving engines ship lose on running text, in the numbers of llama.cpp's perplexity.

    python results/example/shipped.py FOLDER [NAME=VALUE ...]      (make shipped FOLDER=...)

Each format is a command of its engine, read as `kvbench engine` reads it. `task=perplexity` measures it: every token of
the documentation that ships with Python goes through the cache, and the second half of each chunk counts. Run again, it
goes on where it was ended, and writes `shipped.csv` into the folder. The scales of fp8 are found first, on four prompts
of `task=longctx` with another seed.

Settings: `chunks` of the text (12), `tokens` of a chunk (256), `rows` per batch (12), `model` (qwen2.5-coder-0.5b;
tiny: random weights, to see that it works), `path` of its file, `only` (so many formats, from the first one).
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import kvbench
from kvbench.cli.main import main as command
from kvbench.extensions.advise.engines import SCALED, read_command
from kvbench.tasks.token_statistics import STATISTICS

TINY = "tiny"  # random weights
DEFAULTS: dict[str, Any] = {"chunks": 12, "tokens": 256, "rows": 12, "model": "qwen2.5-coder-0.5b", "path": None}
DEFAULTS |= {"only": None}
PAIRS = "q8_0 q8_0-q5_1 q8_0-q4_0 q5_1 q5_0 q4_1 iq4_nl q4_0".split()  # of llama.cpp: keys and values, or both
VLLM = (
    "fp8 fp8_e5m2 fp8_per_token_head int8_per_token_head int4_per_token_head turboquant_k8v4 turboquant_4bit_nc "
    "turboquant_k3v4_nc turboquant_3bit_nc nvfp4 nvfp4_4over6"
).split()
# What a checkpoint of llm-compressor brings, and what vLLM finds itself: name -> settings of `calibrate what=scales`.
SCALES = {
    "--kv-cache-dtype fp8, scales of a checkpoint per tensor": ("per=tensor", "tokens=task"),
    "--kv-cache-dtype fp8, scales of a checkpoint per head": ("per=head", "tokens=task"),
    "--kv-cache-dtype fp8 --calculate-kv-scales": ("per=tensor", "tokens=random"),
}


def settings_of(words: list[str]) -> dict[str, Any]:
    """The settings of a command line."""
    given = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}
    if unknown := set(given) - set(DEFAULTS):
        raise SystemExit(f"there is no setting {', '.join(sorted(unknown))}; there are {', '.join(DEFAULTS)}")
    return DEFAULTS | given


def commands() -> Iterator[tuple[str, str]]:
    """Engine, and its flags; without flags, a cache of 16 bits."""
    yield "", ""
    for pair in PAIRS:
        keys, _, values = pair.partition("-")
        yield "llama-server", f"-ctk {keys} -ctv {values or keys}"
    yield from (("vllm serve", f"--kv-cache-dtype {name}") for name in VLLM)
    yield from (("vllm serve", flags) for flags in SCALES)
    yield "sglang", "--kv-cache-dtype fp4_mx_block16"


def runs(folder: Path) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Engine, flags, method and its settings; the full cache first, which the others are compared with."""
    for engine, flags in commands():
        if flags in SCALES:
            yield engine, flags, SCALED, {"method.scales": str(_scales_file(folder, flags))}
            continue
        words = read_command(f"{engine or 'llama-server'} {flags}").words
        given = dict(word.split("=", 1) for word in words)
        yield engine, flags, given.pop("method"), {name: yaml.safe_load(value) for name, value in given.items()}


def _scales_file(folder: Path, flags: str) -> Path:
    return folder / f"scales-{'-'.join(word.partition('=')[2] for word in SCALES[flags])}.tsv"


def study(folder: Path, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row of the table for each format, of its run, which is made where it is not there yet."""
    model = "random" if asked["model"] == TINY else asked["model"]
    of_model = {"model.preset": TINY} if model == "random" else {}
    of_model |= {"model.path": asked["path"]} if asked["path"] else {}
    of_chunks = {"task.chunks": asked["chunks"], "task.chunk_tokens": asked["tokens"], "batch_size": asked["rows"]}
    shared = {"seed": 0, "prompt_cache_bytes": "2GiB"} | of_chunks | of_model
    folder.mkdir(parents=True, exist_ok=True)
    every = list(runs(folder))[: asked["only"]]
    for number, (engine, flags, method, own) in enumerate(every, 1):
        print(f"{number} of {len(every)}: {engine} {flags}", flush=True)
        if flags in SCALES and not (path := _scales_file(folder, flags)).exists():
            words = [
                f"model={model}",
                *(f"{name}={value}" for name, value in of_model.items()),
                f"scales.out={path}",
                "scales.prompts=1",
            ]
            if code := command(["scales", *(f"scales.{word}" for word in SCALES[flags]), *words]):
                raise SystemExit(code)
        made = kvbench.run(method, task="perplexity", model=model, results_dir=folder, settings=shared | own)
        yield {"engine": engine, "flags": flags} | row(made)


def row(made: kvbench.Result) -> dict[str, Any]:
    """The numbers of a run: bytes of a token over all layers, and the statistics of all measured tokens."""
    kept, found = made.run.samples[0]["kept"], made.record.task_aggregate["tokens"]
    full = made.record.ledger["fp16_bytes"] / kept["tokens_seen"]
    cells = {"bytes_per_token": kept["lists"] * kept["slot_bytes"], "bytes_full": full}
    cells["n"] = sum(sample["fidelity"]["num_measured"] for sample in made.run.samples)
    for name in STATISTICS:
        estimate = found.get(name) or {}
        cells |= {name: estimate.get("value"), f"{name}_low": estimate.get("low"), f"{name}_high": estimate.get("high")}
    return cells


def table(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Writes shipped.csv."""
    with (folder / "shipped.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    table(Path(sys.argv[1]), list(study(Path(sys.argv[1]), settings_of(sys.argv[2:]))))
