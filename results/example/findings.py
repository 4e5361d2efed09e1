"""Makes the tables and pictures of the study of a small model from its samples: `make findings`.

Tables go between the markers of `DOCUMENTS`.
benchmarks.py beside it makes those of the study on real benchmarks.

    python results/example/findings.py [PART ...]

The commands of kvbench that it gives are printed. Nothing is run on a model.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pandas as pd
from PIL import Image

from kvbench.cli.commands import compose_command
from kvbench.cli.main import main as kvbench
from kvbench.evidence import load
from kvbench.evidence.pareto import panels_of

load.read_samples = cache(load.read_samples)  # some thirty commands read the same 10,000 answers
HERE = Path(__file__).resolve().parent
STUDY, ROOT = HERE / "study", HERE.parent.parent
DOCUMENTS = tuple(ROOT / name for name in ("README.md", "docs/findings.md", "docs/reference/results.md"))
METRICS = ("nll", "partial", "score")
PAIRS = (("nll", "partial"), ("nll", "score"), ("partial", "score"))
BUDGETS = (0.5, 0.25, 0.125)
MAIN = "mean over"  # both lengths: the group of the tables
LENGTHS = ("512", "1024")  # tokens
KINDS_AT = 0.5  # of the tokens
AT, FROM, TO = 25, 17, 49  # % of the bytes: a point, and a range that all evicting methods span
EVICTING = (
    "random streaming_llm h2o tova snapkv pyramidkv ada_snapkv keydiff expected_attention chunkkv critical kv_compress"
).split()

CORRELATION = "group n metric other correlation low high half other_half".split()

Row = dict[str, str]

# What is ranked: name -> words of `kvbench report view=ranks`. All evicting methods store 16 bits here.
_EVICTING = [f"methods=[{','.join(EVICTING)}]"]
SETS = {
    **{f"{100 * b:g} % of the tokens": [*_EVICTING, f"where={{budget:{b},tier:fp16}}"] for b in BUDGETS},
    f"{AT} % of the bytes": [*_EVICTING, "where={tier:fp16}", f"at_bytes={AT}"],
    f"mean over {FROM} to {TO} % of the bytes": [*_EVICTING, "where={tier:fp16}", f"at_bytes=[{FROM},{TO}]"],
    "all runs": [],
}


def read(path: Path) -> pd.DataFrame:
    """A CSV file, its cells as they stand there."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def write(path: Path, table: pd.DataFrame) -> None:
    """A table as a CSV file."""
    table.to_csv(path, index=False)


def run(*words: str, study: Path = STUDY) -> None:
    """One command of kvbench over a study; its words are shown as a shell would take them."""
    print("python -m kvbench", *words, f"results_dir={study.relative_to(HERE.parent.parent)}", flush=True)
    if code := kvbench([*words, f"results_dir={study}"]):
        sys.exit(code)


def picture(path: Path, to: Path) -> None:
    """A picture in few colours, which takes a third of the bytes."""
    with Image.open(path) as drawn:
        drawn.convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE, kmeans=2).save(to, optimize=True)


def frontier(folder: Path) -> None:
    """The frontier by NLL, with its picture."""
    run("report", "view=pareto", "metric=nll", "axes=[resident]", "kinds=[png]", f"out={folder}")
    table = read(folder / "pareto.csv")
    write(HERE / "pareto.csv", table[table.group.str.contains(MAIN)])
    picture(next(folder.glob("mean*_resident.png")), HERE / "pareto.png")


def measures(folder: Path) -> None:
    """The other measures of every run, as `pareto` has them, without the thousand tests of which dominates which."""
    rows = []
    for metric in METRICS:
        cfg = compose_command("pareto", [f"metric={metric}", f"results_dir={STUDY}"])
        for panel in panels_of(load.load_groups(cfg), cfg):
            for point in panel.points:
                low, high = map(repr, point.interval) if point.interval else ("", "")
                names = {"group": panel.title, "run": point.label, "method": point.method, "metric": metric}
                found = {"value": repr(point.score), "difference": repr(point.quality), "low": low, "high": high}
                held = repr(point.costs["resident"].value)
                rows.append({**names, "n": str(panel.num_samples), **found, "resident": held})
    write(HERE / "measures.csv", pd.DataFrame(rows))


def orders(folder: Path) -> None:
    """The rank correlations."""
    found = []
    for title, words in SETS.items():
        for pair in PAIRS:
            run("report", "view=ranks", f"metrics=[{','.join(pair)}]", *words, f"out={folder / 'ranks.csv'}")
            rows = read(folder / "ranks.csv")
            each = rows.drop_duplicates("group")[CORRELATION]  # the correlation is the same in all rows of a group
            each.insert(0, "runs", title)
            each.insert(1, "count", each.group.map(rows.group.value_counts()))
            found.append(each)
    write(HERE / "ranks.csv", pd.concat(found))


def equal_bytes(folder: Path) -> None:
    """The methods beside the control, at the same bytes."""
    compared = []
    for metric in ("nll", "partial"):
        for where in (str(AT), f"[{FROM},{TO}]"):
            words = f"against=random metric={metric} at_bytes={where} regressions=0".split()
            run("compare", *words, f"out={folder / 'bytes.csv'}")
            compared.append(read(folder / "bytes.csv"))
            compared[-1].insert(0, "at", where)
    write(HERE / "equal_bytes.csv", pd.concat(compared))


def kinds(folder: Path) -> None:
    """The measure by kind of question."""
    words = [*_EVICTING, f"where={{budget:{KINDS_AT},tier:fp16}}", "metric=partial", "by=subset", "format=csv"]
    run("report", "view=table", *words, f"out={HERE / 'kinds.csv'}")


PARTS = {part.__name__: part for part in (frontier, measures, orders, equal_bytes, kinds)}


def number(value: str, metric: str, sign: bool = False) -> str:
    """A value as the commands show it: nats with two digits, scores in points."""
    digits = 2 if metric == "nll" else 1
    return f"{float(value) * (1 if metric == 'nll' else 100):{'+' if sign else ''}.{digits}f}"


def between(row: Row, name: str, metric: str, low: str, high: str) -> str:
    """A difference with its interval."""
    ends = f"[{number(row[low], metric, True)}, {number(row[high], metric, True)}]" if row[low] else "[no interval]"
    return f"{number(row[name], metric, True)} {ends}"


def markdown(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(name: str) -> list[Row]:
    """The rows of a CSV file of this folder."""
    return read(HERE / f"{name}.csv").to_dict("records")


def points() -> dict[str, dict[str, Row]]:
    """Run -> metric -> its point in the main group."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows_of("measures"):
        if MAIN in row["group"]:
            found.setdefault(row["run"], {})[row["metric"]] = row
    return found


def is_evicting(row: Row) -> bool:
    """A run of a table at equal tokens: it evicts by a budget and stores 16 bits."""
    return row["method"] in EVICTING and "budget=" in row["run"] and "k8v4" not in row["run"]


def ranks(runs: list[dict[str, Row]], metric: str) -> list[int]:
    """The place of each run by one metric, 1 for the best."""
    values = [float(run[metric]["value"]) * (1 if metric == "nll" else -1) for run in runs]
    return [1 + sum(other < value for other in values) for value in values]


NUMBERS = "bytes, %|gold NLL|NLL - full's [95 %]|partial, %|partial - full's [95 %]|score, %".split("|")


def numbers(run: dict[str, Row]) -> list[str]:
    """The cells of `NUMBERS`; the full cache has no difference to itself."""
    cells = [f"{100 * float(run['nll']['resident']):.1f}"]
    for metric in ("nll", "partial"):
        row = run[metric]
        cells.append(number(row["value"], metric))
        cells.append(between(row, "difference", metric, "low", "high") if row["method"] != "full" else "")
    return [*cells, number(run["score"]["value"], "score")]


def tables() -> Iterator[tuple[str, str]]:
    """Name and text of every table of the document."""
    found = points()
    for budget in BUDGETS:
        runs = [r for r in found.values() if is_evicting(r["nll"]) and f"budget={budget:g}" in r["nll"]["run"].split()]
        runs.sort(key=lambda run: float(run["nll"]["value"]))
        places = zip(*(ranks(runs, metric) for metric in METRICS), strict=True)
        lines = [
            [run["nll"]["method"], *numbers(run), ", ".join(map(str, place))]
            for run, place in zip(runs, places, strict=True)
        ]
        yield f"evict {budget:g}", markdown(["method", *NUMBERS, "places by NLL, partial, score"], lines)
    others = [run for run in found.values() if not is_evicting(run["nll"])]
    others.sort(key=lambda run: float(run["nll"]["resident"]))
    yield "others", markdown(["run", *NUMBERS], [[run["nll"]["run"], *numbers(run)] for run in others])
    yield (
        "ranks",
        markdown(
            [
                "questions",
                "runs",
                "how many",
                *(" and ".join(map(NAMES.get, pair)) for pair in PAIRS),
                "with itself: NLL, partial, score",
            ],
            _orders(),
        ),
    )
    yield "kinds", markdown(["method", *KINDS, "mean"], _kinds("512"))
    for title in LENGTHS:
        yield (
            f"bytes {title}",
            markdown(
                [
                    "method",
                    *(f"{NAMES[m]} at {AT} %" for m in ("nll", "partial")),
                    *(f"{NAMES[m]}, {FROM} to {TO} %" for m in ("nll", "partial")),
                ],
                _equal_bytes(title),
            ),
        )
    headings = "format|bytes, %|gold NLL|NLL - full's [95 %]|rotated: gold NLL|NLL - full's [95 %]".split("|")
    yield "formats", markdown(headings, _formats())
    if (HERE / "shipped.csv").exists():
        yield "shipped", markdown(["flags", "bytes a token", *SHIPPED.values()], _shipped())


# Statistics of all tokens, and what the table calls them.
SHIPPED = {
    "perplexity": "perplexity",
    "kl_mean": "KL mean, nats",
    "kl_99": "99 %",
    "kl_999": "99.9 %",
    "kl_max": "max",
    "dp_rms": "RMS dp, %",
    "same_first_choice": "same first choice, %",
}
IN_PERCENT = ("dp_rms", "same_first_choice")
KINDS = ("kv", "multikey", "passkey", "recall")
NAMES = {"nll": "NLL", "partial": "partial", "score": "score"}


def _orders() -> Iterator[list[str]]:
    for group in (MAIN, *(f"length={length}" for length in LENGTHS)):
        rows = [row for row in rows_of("ranks") if group in row["group"]]
        for title in SETS:
            cells, halves = [], {}
            for pair in PAIRS:
                mine = [row for row in rows if (row["runs"], row["metric"], row["other"]) == (title, *pair)]
                own = mine[0]
                cells.append(f"{float(own['correlation']):+.2f} [{float(own['low']):+.2f}, {float(own['high']):+.2f}]")
                halves |= dict(zip(pair, (own["half"], own["other_half"]), strict=True))
            yield [own["n"], title, own["count"], *cells, ", ".join(f"{float(halves[m]):.2f}" for m in METRICS)]


def _kinds(length: str) -> Iterator[list[str]]:
    cells: dict[str, dict[str, Row]] = {}
    for row in rows_of("kinds"):
        if f"length={length}" in row["group"]:
            cells.setdefault(row["method"], {})[row["column"]] = row
    order = sorted(cells, key=lambda name: -sum(float(cells[name][kind]["value"]) for kind in KINDS))
    for name in order:
        each = [cells[name][kind] for kind in KINDS]
        mean = sum(float(row["value"]) for row in each) / len(each)
        shown = [f"{100 * float(row['value']):.1f}" for row in each]
        bold = [f"**{text}**" if row["best"] == "1" else text for text, row in zip(shown, each, strict=True)]
        yield [name, *bold, f"{100 * mean:.1f}"]


def _equal_bytes(length: str) -> Iterator[list[str]]:
    keys = {"nll": "nll", "partial": "partial"}
    cells: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows_of("equal_bytes"):
        if f"length={length}" in row["group"]:
            name = row["run"].partition(" at ")[0].partition(",")[0]
            cells.setdefault(name, {})[row["metric"], row["at"]] = row
    order = sorted(cells, key=lambda name: float(cells[name].get(("nll", str(AT)), {}).get("difference", "inf")))
    for name in order:
        line = [name]
        for at in (str(AT), f"[{FROM},{TO}]"):
            for metric in keys:
                own = cells[name].get((metric, at))
                line.append(f"{between(own, 'difference', metric, 'low', 'high')}{verdict(own)}" if own else "")
        yield line


def _formats() -> Iterator[list[str]]:
    """A line for each format, by its bytes; those that rotate by themselves have no second form."""
    found: dict[str, dict[bool, Row]] = {}
    for row in rows_of("formats"):
        words = row["run"].split()
        name = next((word.removeprefix("tier=") for word in words if word.startswith("tier=")), words[0])
        found.setdefault(name, {})["rotation=hadamard" in words] = row
    for name, forms in sorted(found.items(), key=lambda item: float(item[1][False]["resident"])):
        line = [name, f"{100 * float(forms[False]['resident']):.1f}"]
        for row in (forms.get(False), forms.get(True)):
            beside = row is not None and name != "full"
            line.append(number(row["score"], "nll") if row else "")
            line.append(between(row, "quality", "nll", "quality_low", "quality_high") if beside else "")
        yield line


def _shipped() -> Iterator[list[str]]:
    """A line for each format that engines ship, by engine; distances are to a cache of the model's own type."""
    for row in rows_of("shipped"):
        share = f"{100 * float(row['bytes_per_token']) / float(row['bytes_full']):.1f} %"
        line = [f"`{row['engine']} {row['flags']}`" if row["engine"] else "16 bits"]
        line.append(f"{float(row['bytes_per_token']):,.0f} ({share})")
        for name in SHIPPED:
            factor, form = (100, ".1f") if name in IN_PERCENT else (1, ".2f" if name == "perplexity" else ".2g")
            value, *ends = (row[name + end] for end in ("", "_low", "_high"))
            text = f"{factor * float(value):{form}}" if value else ""
            if text and all(ends):
                text += f" [{', '.join(f'{factor * float(end):{form}}' for end in ends)}]"
            line.append(text)
        yield line


def verdict(row: Row) -> str:
    """The verdict of `compare`, where it has one."""
    return f" {row['verdict']}" if row["verdict"] in ("better", "worse", "equal") else ""


def put(texts: Iterable[str], made: Iterable[tuple[str, str]]) -> list[str]:
    """The documents with some tables renewed, each in every document that has its marker."""
    renewed = [*texts]
    for name, table in made:
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        if not any(start in text for text in renewed):
            raise SystemExit(f"no document has the marker of the table {name!r}")
        for index, text in enumerate(renewed):
            head, marker, rest = text.partition(start)
            if marker:
                renewed[index] = f"{head}{start}{table}\n{end}{rest.partition(end)[2]}"
    return renewed


def renew(made: Iterable[tuple[str, str]]) -> None:
    """Write tables into the documents."""
    texts = put((path.read_text(encoding="utf-8") for path in DOCUMENTS), made)
    for path, text in zip(DOCUMENTS, texts, strict=True):
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as name:
            PARTS[part](Path(name))
    renew(tables())
