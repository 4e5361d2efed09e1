"""Losses of each storage format at its bytes: runs the study, and makes its table from the samples.

    python results/example/formats.py FOLDER [NAME=VALUE ...]      (make formats FOLDER=...)

Every token is kept, in one format after another, as it is and (`rotated`) with its channels rotated first. One process
reads each prompt once for all of them. Run again, it goes on where it was ended; with all runs there it only writes
`formats.csv` and `formats.png` into the folder. With `tables=only` it runs nothing.

Settings: `items` questions of each of four kinds (25), `length` tokens of a prompt (512), `rows` per batch (25),
`memory` for prompts (5GiB), `formats`, `rotated` and `methods` (those below), `model` (tiny: random weights, to see
that it works).
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

import kvbench
from kvbench.cli.main import main as command

TINY = "tiny"  # random weights
DEFAULTS: dict[str, Any] = {
    "items": 25,
    "length": 512,
    "rows": 25,
    "memory": "5GiB",
    "model": "smollm2-135m",
    "tables": "too",
    # By the names of their methods: full first, since the others are compared with it.
    "methods": (
        "full fp8 int8 fp8_per_token_head int8_per_token_head turboquant_k8v4 turboquant_4bit turboquant_3bit nvfp4"
    ).split(),
    # By the names of their tiers, for all tokens.
    "formats": "int4 k4v2 k3v3 k2v2 mxfp4 lloyd-k4v4 lloyd-k4v3 lloyd-k3v3 lloyd-k4v2 lloyd-k3v2".split(),
    "rotated": "int4 k4v2 k3v3 k2v2 mxfp4 nvfp4".split(),  # the Lloyd codes have a rotation of their own
}


def settings_of(words: list[str]) -> dict[str, Any]:
    """The settings of a command line."""
    given = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}
    if unknown := set(given) - set(DEFAULTS):
        raise SystemExit(f"there is no setting {', '.join(sorted(unknown))}; there are {', '.join(DEFAULTS)}")
    return DEFAULTS | given


def runs(asked: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Method, its settings, and settings of the run."""
    yield from ((method, {}, {}) for method in asked["methods"])
    yield from (("int4", {"tier": tier}, {}) for tier in asked["formats"])
    yield from (("int4", {"tier": tier}, {"store.rotation": "hadamard"}) for tier in asked["rotated"])


def study(folder: Path, asked: dict[str, Any]) -> None:
    """Makes the runs that are not there yet."""
    shared = {"task.length": asked["length"], "task.items": asked["items"], "seed": 0, "batch_size": asked["rows"]}
    shared |= {"prompt_cache_bytes": asked["memory"]}
    model = "random" if asked["model"] == TINY else asked["model"]
    shared |= {"model.preset": TINY} if model == "random" else {}
    every = list(runs(asked))
    for number, (method, own, more) in enumerate(every, 1):
        print(f"{number} of {len(every)}: {method} {own | more}", flush=True)
        kvbench.run(method, task="longctx", model=model, results_dir=str(folder), settings=shared | more, **own)


def table(folder: Path) -> None:
    """Writes what `kvbench report view=pareto` says of the runs, formats.csv and formats.png."""
    with tempfile.TemporaryDirectory() as place:
        words = ["pareto", "metric=nll", "axes=[resident]", "kinds=[png]"]
        words += [f"results_dir={folder}", f"out={place}"]
        if code := command(words):
            raise SystemExit(code)
        shutil.copy(Path(place) / "pareto.csv", folder / "formats.csv")
        (picture,) = Path(place).glob("*.png")
        with Image.open(picture) as drawn:  # few colours take a third of the bytes
            drawn.convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE).save(folder / "formats.png", optimize=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    wanted, target = settings_of(sys.argv[2:]), Path(sys.argv[1])
    if wanted["tables"] != "only":
        study(target, wanted)
    table(target)
