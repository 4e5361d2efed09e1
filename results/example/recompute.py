"""Scores, differences and intervals of packed runs anew, by numpy and scipy alone: nothing of kvbench is imported.

    python results/example/recompute.py [FOLDER ...]     # results/example/benchmarks and mission, where they are

One line a run: task, model, method, n, score with its 95 % interval, its difference to the full cache with its own.
Yes or no: Wilson 1927, and method 10 of Newcombe 1998 for a pair. Else the studentised bootstrap over samples within
subsets, 30,000 resamples, so that ends agree with kvbench's to the noise of its 9,999. Subsets weigh alike.
"""

import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.stats import norm

HERE, Z, DRAWS = Path(__file__).resolve().parent, norm.ppf(0.975), np.random.default_rng(0)
Ends, Scores = tuple[float, float], dict[str, dict[str, float]]


def wilson(k: float, n: int) -> Ends:
    """Interval of k of n."""
    rate, z2 = k / n, Z * Z
    half = Z * np.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return (rate + z2 / (2 * n)) / (1 + z2 / n) - half, (rate + z2 / (2 * n)) / (1 + z2 / n) + half


def newcombe(own: np.ndarray, full: np.ndarray) -> Ends:
    """Interval of the difference of two rates on the same samples."""
    n, (a, b), (c, d) = len(own), wilson(own.sum(), len(own)), wilson(full.sum(), len(full))
    p, q, both, one, other = own.mean(), full.mean(), (own * full).sum(), (own > full).sum(), (own < full).sum()
    product = both * (n - both - one - other) - one * other
    product = max(product - n / 2, 0) if product > 0 else product
    scale = np.sqrt(own.sum() * (n - own.sum()) * full.sum() * (n - full.sum()))
    phi = product / scale if scale else 0.0
    width = lambda s, t: np.sqrt(max(0.0, s * s - 2 * phi * s * t + t * t))  # noqa: E731
    return p - q - width(p - a, d - q), p - q + width(b - p, q - c)


def bootstrap(groups: list[np.ndarray]) -> Ends:
    """Interval of the mean of the groups' means, where t is resampled."""

    def estimate(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        error = np.sqrt(sum(part.var(axis=-1, ddof=1) / part.shape[-1] for part in parts)) / len(parts)
        return np.mean([part.mean(axis=-1) for part in parts], axis=0), error

    groups = [group for group in groups if len(group) > 1] or groups
    mean, error = estimate(groups)
    if not error:  # all alike, as the full cache less itself
        return mean, mean
    drawn, errors = estimate([group[DRAWS.integers(len(group), size=(30_000, len(group)))] for group in groups])
    low, high = np.quantile(((drawn - mean) / np.where(errors > 0, errors, np.inf))[errors > 0], [0.025, 0.975])
    return mean - high * error, mean - low * error


def primary(record: dict) -> str:
    """Name of the task's first measure, of which a run that was stopped may have no record."""
    return next((key for key, value in record["metrics"].items() if value["primary"]), "")


def read(folder: Path, name: str) -> Scores:
    """Subset -> sample -> score by a measure; failed answers are left out."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in lzma.decompress((folder / "samples.jsonl.xz").read_bytes()).splitlines():
        one = json.loads(line)
        if one["status"] == "ok" and one["scores"].get(name) is not None:
            found.setdefault(one["subset"], {}).setdefault(one["sample_id"], []).append(one["scores"][name])
    return {part: {key: float(np.mean(values)) for key, values in rows.items()} for part, rows in found.items()}


def line(folder: Path, own: Scores, full: Scores) -> list:
    """Cells of one run."""
    alike = [[(own[part][key], full[part][key]) for key in own[part] if key in full.get(part, {})] for part in own]
    pairs = [np.array(part).T for part in alike if part]
    scores = [np.array(list(rows.values())) for rows in own.values()]
    is_yes_no = len(scores) == 1 and np.isin(np.concatenate([*scores, *map(np.ravel, pairs)]), (0, 1)).all()
    n, mean = sum(map(len, scores)), float(np.mean([part.mean() for part in scores]))
    low, high = wilson(scores[0].sum(), n) if is_yes_no else bootstrap(scores)
    less = float(np.mean([part[0].mean() - part[1].mean() for part in pairs]))
    ends = newcombe(*pairs[0]) if is_yes_no else bootstrap([part[0] - part[1] for part in pairs])
    return [*folder.parts[-4:], n, *(round(100 * value, 2) for value in (mean, low, high, less, *ends))]


def rows(root: Path) -> Iterator[list]:
    """Cells of all runs below a folder; a run is compared with the full cache under its protocol."""
    records = {path.parent: json.loads(path.read_text()) for path in sorted(root.glob("*/*/*/*/run.json"))}
    asked = {folder: (*folder.parts[-4:-2], json.dumps(one["protocol"])) for folder, one in records.items()}
    names = {asked[folder]: primary(one) for folder, one in records.items() if folder.parts[-2] == "full"}
    fulls = {asked[key]: read(key, names[asked[key]]) for key in records if key.parts[-2] == "full"}
    for folder, key in asked.items():
        if fulls.get(key) and (own := read(folder, names[key])):
            yield line(folder, own, fulls[key])


if __name__ == "__main__":
    print("task,model,method,hash,n,score,low,high,less,less_low,less_high")
    for root in map(Path, sys.argv[1:] or (HERE / "benchmarks", HERE / "mission")):
        for cells in rows(root):
            print(*cells, sep=",")
