"""Seconds of steps and prompts, as a bench measured them, looked up by rows and length."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.errors import FileContent, SettingsConflict, Unsupported, unknown_name
from kvbench.extensions.bench.decode import GRAPH
from kvbench.kernels.bench.bench import read_document
from kvbench.sizing.shapes import SIZES, NamedShape, sized

PROMPT_GROUPS = 8  # of lengths, in what is kept of a load


@dataclass
class Times:
    """Measured times of one method's steps and prompts.

    Args:
        steps: Rows, tokens that all of them hold together, seconds, and of how many steps this is the mean.
        prompts: Tokens, seconds, and of how many prompts this is the mean.
        ends: Tokens of prompts, tokens read after them, and bytes that a row then held.
    """

    steps: list[tuple[float, float, float, float]] = field(default_factory=list)
    prompts: list[tuple[float, float, float]] = field(default_factory=list)
    ends: list[tuple[int, int, float]] = field(default_factory=list)

    def step_s(self, rows: int, tokens: int) -> float:
        """Seconds of a step, interpolated between measured numbers of rows, and beyond them by a line through all.

        Tokens held beyond their mean at that number of rows cost the average.
        """
        return self._steps(rows, tokens)

    def prompt_s(self, tokens: int) -> float:
        """Seconds of a prompt: a fixed part, one for each token and one for each pair, fitted to what was measured."""
        return float(self._prompts @ (1.0, tokens, tokens**2))

    def fit(self) -> "Times":
        """Build the lookup tables; raises ValueError without measurements."""
        from scipy.optimize import nnls  # a simulation needs it; a machine that only measures may lack it

        if not self.steps or not self.prompts:
            raise ValueError("it has no times of prompts and steps; a load that was read in chunks has none")
        rows, tokens, seconds, count = np.array(self.steps, dtype=float).T
        places, group = np.unique(rows, return_inverse=True)
        weight = np.bincount(group, count)
        mean_tokens, mean_s = (np.bincount(group, count * each) / weight for each in (tokens, seconds))
        apart = tokens - mean_tokens[group]
        spread = (count * apart**2).sum()
        per_token = max(0.0, (count * apart * (seconds - mean_s[group])).sum() / spread) if spread else 0.0
        base = mean_s - per_token * mean_tokens
        per_row = np.polyfit(places, base, 1, w=np.sqrt(weight))[0] if len(places) > 1 else 0.0

        def step_s(rows: int, tokens: int) -> float:
            beyond = max(0.0, rows - places[-1]) * max(0.0, per_row)
            return float(np.interp(rows, places, base) + beyond + per_token * tokens)

        self._steps = step_s
        length, seconds, count = np.array(self.prompts, dtype=float).T
        terms = np.stack([np.ones_like(length), length, length**2], 1)
        scale = np.sqrt(count) / seconds  # all lengths count alike, by their relative error
        self._prompts = nnls(terms * scale[:, None], seconds * scale)[0]
        return self


def summary(
    steps: Sequence[tuple[int, int, float]], prompts: Sequence[tuple[int, float]], ends: Sequence[tuple[int, int, int]]
) -> dict[str, list]:
    """Summarise a load for a document, in the form of `Times`.

    Means over steps with equal rows, split into those that hold less and more, and over prompts of about one length.
    """
    by_rows = defaultdict(list)
    for step in sorted(steps):
        by_rows[step[0]].append(step)
    return {
        "steps": [mean for same in by_rows.values() for mean in _means(same, 2)],
        "prompts": _means(sorted(prompts), PROMPT_GROUPS),
        "ends": [list(end) for end in ends],
    }


def _means(items: Sequence[tuple], groups: int) -> list[list[float]]:
    """Means of items in so many groups at most, in their order, each with how many it is of."""
    size = max(1, -(-len(items) // groups))
    parts = [items[begin : begin + size] for begin in range(0, len(items), size)]
    return [[*np.mean(part, 0).tolist(), len(part)] for part in parts]


@dataclass
class Measured:
    """Times in bench documents of one model on one machine."""

    shape: NamedShape
    max_tokens: int
    device_name: str
    methods: dict[str, Times]
    cells: list[tuple[dict, dict]]
    """Settings of a document, and each of its cells."""

    def times(self, method: str) -> Times:
        if method not in self.methods:
            raise unknown_name("method in serve.times", method, self.methods)
        try:
            return self.methods[method].fit()
        except ValueError as error:
            raise Unsupported(f"{method} in serve.times: {error}", setting="serve.times") from error


def read_times(paths: Sequence[Path]) -> Measured:
    """Read times from documents of `bench what=serve` and `what=decode`.

    Raises ValueError where one has none, or they are of several models or machines.
    """
    methods: dict[str, Times] = defaultdict(Times)
    cells: list[tuple[dict, dict]] = []
    said: dict[tuple, Path] = {}
    for path in paths:
        document = read_document(path)
        model, where = document.get("model", {}), document["environment"]["device_name"]
        if document["what"] not in ("serve", "decode") or "shape" not in model:
            raise FileContent(
                f"serve.times={path} has no times and shape of a model; give bench.json of what=serve or what=decode, "
                "made by this version",
                setting="serve.times",
            )
        said[model["fingerprint"], model["dtype"], model["linear"], where] = path
        if len(said) > 1:
            raise SettingsConflict(
                f"serve.times: {' and '.join(map(str, said.values()))} are of several models or machines",
                setting="serve.times",
            )
        for cell in document["cells"]:
            cells.append((document["settings"], cell))
            for row in cell["variants"]:
                _take(methods, cell["cell"], row)
    shape = sized(
        model["name"],
        source=str(paths[0]),
        context=model["max_tokens"],
        dtype=model["dtype"].removeprefix("torch."),
        **{size: model["shape"][size] for size in SIZES},
    )
    return Measured(shape, model["max_tokens"], where, dict(methods), cells)


def _take(methods: dict[str, Times], cell: dict[str, Any], row: dict[str, Any]) -> None:
    """Adds what a row of a table measured to its method's times; a method's replayed steps go before its others."""
    if (times := row.get("times")) is not None:
        times_of_method = methods[row["name"]]
        times_of_method.steps += map(tuple, times["steps"])
        times_of_method.prompts += map(tuple, times["prompts"])
        times_of_method.ends += map(tuple, times["ends"])
    elif cell.get("phase") == "prompt":
        methods[row["name"]].prompts.append((cell["context"], row["median"], 1.0))
    elif cell.get("phase") == "decode":
        name, batch, held = row["name"].removesuffix(GRAPH), cell["batch"], cell["context"]
        step = (batch, batch * held, row["median"] * batch / row["tokens_per_call"], 1.0)
        known = [each for each in methods[name].steps if each[:2] != step[:2] or not row["name"].endswith(GRAPH)]
        methods[name].steps = [*known, step]
        methods[name].ends.append((held, 0, row["cache_bytes"] / batch))
