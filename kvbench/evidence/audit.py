"""`kvbench published audit=true`: printed numbers that contradict each other, found by arithmetic alone.

Each function takes the rows of `published.rows()` and looks for one thing. Rounding is allowed for as far as it can go:
a number of one decimal stands for all within 0.05 of it, and cells off by as much in one direction are taken to be so.
Where several readings of a sentence are possible, one that holds is enough.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

AVERAGE = "mean_printed"  # metric of a row that averages the others of its line
PLACE = ["paper", "locator", "model"]
LINE = [*PLACE, "method", "variant"]
# Items of benchmarks that are right or wrong, one by one. LongBench's TREC is none: an answer that names two classes is
# half right. Sources: AIME 2024 I and II; Chen et al. 2021 (HumanEval); Cobbe et al. 2021 (GSM8K), section 2.
ITEMS = {"AIME24": 30, "HumanEval+": 164, "GSM8K": 1319}
FEWEST_TWINS = 6  # equal cells of two lines below which they may be equal by chance
GROUP = 128  # elements that share a scale and a zero where a paper does not say how many do: the channels of a head
EXACT = 1e-9  # what a sum of printed numbers is off by


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A contradiction, with the arithmetic that shows it."""

    kind: str
    """`average`, `fraction`, `prose`, `duplicate` or `bytes`."""
    where: str
    """Paper, table or section, and model."""
    words: str
    """What is wrong."""
    arithmetic: str
    """How that is computed from the printed numbers."""
    rows: tuple[int, ...]
    """Labels of the rows that it is about."""


def audit(found: "pd.DataFrame") -> list[Finding]:
    """All that contradicts itself in rows of `published.rows()`; cells that are left out leave findings out."""
    return [finding for check in CHECKS for finding in check(found)]


def half(printed: str) -> float:
    """Half of the last printed decimal."""
    return 0.5 * 10.0 ** -len(printed.partition(".")[2])


def averages(found: "pd.DataFrame") -> Iterator[Finding]:
    """Printed averages that are not those of the cells beside them; only of lines that have all their cells."""
    for keys, line in found.groupby(LINE, sort=False):
        is_mean = line["metric"] == AVERAGE
        if not is_mean.any():
            continue
        cells = line[~is_mean]
        for row in line[is_mean].itertuples():
            count = re.search(r"(\d+)$", row.task)
            if count is None or int(count[1]) != len(cells):
                continue
            mean, doubt, step = cells["value"].mean(), fmean(map(half, cells["printed"])), half(row.printed)
            if abs(row.value - mean) <= step + doubt + EXACT:
                continue
            is_cut = -EXACT <= mean - row.value < 2 * step + doubt
            digits = len(row.printed.partition(".")[2])
            text = f"{' + '.join(cells['printed'])} = {cells['value'].sum():.2f}; / {len(cells)} = {mean:.4f}"
            text += f", so {mean:.{digits}f}" + (": cut off, not rounded" if is_cut else "")
            table = found[(found[PLACE] == list(keys[:3])).all(axis=1) & (found["metric"] == AVERAGE)]
            low, high = sorted((row.value, mean))
            passed = [
                f"{one.method} {one.variant} ({one.printed})"
                for one in table.itertuples()
                if low < one.value < high and one.Index != row.Index
            ]
            text += f". Between the two lie {', '.join(passed)}" if passed else ""
            words = f"the average of {_who(row)} is printed as {row.printed}, and its {len(cells)} cells have another"
            yield Finding(
                kind="average", where=_where(row), words=words, arithmetic=text, rows=(row.Index, *cells.index)
            )


def fractions(found: "pd.DataFrame") -> Iterator[Finding]:
    """Shares that no number of right answers gives, where the paper says how often each item was asked.

    A share may have been rounded or cut off, and so may each run's have been before their mean was taken.
    """
    for row in found[(found["metric"] == "accuracy") & found["task"].isin(ITEMS)].itertuples():
        runs = _condition(row, "runs")
        if not runs.isdigit() or _condition(row, "bound"):
            continue
        answers, step = ITEMS[row.task] * int(runs), half(row.printed)
        below = int(row.value * answers / 100 + EXACT)
        near = [(count, 100 * count / answers) for count in (below, min(answers, below + 1))]
        if any(-2 * step - EXACT <= share - row.value <= 4 * step + EXACT for _, share in near):
            continue
        shares = " and ".join(f"{count} / {answers} = {share:.2f} %" for count, share in near)
        yield Finding(
            kind="fraction",
            where=_where(row),
            words=f"{row.task} of {_who(row)} is {row.printed} %, which {answers} answers do not give",
            arithmetic=f"{ITEMS[row.task]} problems x {runs} runs = {answers}; the nearest are {shares}, also where "
            "each run was rounded or cut at the same decimal",
            rows=(row.Index,),
        )


def prose(found: "pd.DataFrame") -> Iterator[Finding]:
    """Sentences that say something else than the table that they are about."""
    for row in found[~found["locator"].str.startswith("Table")].itertuples():
        made = SENTENCES.get(row.metric)
        if made is None or _condition(row, "bound") not in ("", "range_low", "range_high"):
            continue
        own = found[(found["paper"] == row.paper) & found["locator"].str.startswith("Table")]
        named = re.match(r"Table \w+", row.task)
        own = own[own["locator"] == named[0]] if named else own
        own = own[own["model"] == row.model] if row.model in set(own["model"]) else own
        readings, labels = made(row, own)
        step = half(row.printed)
        if not readings or any(abs(value - row.value) <= step + doubt + EXACT for _, value, doubt in readings):
            continue
        yield Finding(
            kind="prose",
            where=_where(row),
            words=f"{row.metric.replace('_', ' ')} of {row.method}, {row.task}: the text has {row.printed} {row.unit}, "
            "the table another",
            arithmetic="; ".join(f"{text} = {value:.4g}" for text, value, _ in readings),
            rows=(row.Index, *labels),
        )


Reading = tuple[str, float, float]  # how it is computed, what comes out, how far rounding may move it
Found = tuple[list[Reading], list[int]]


def _shares(row: Any, own: "pd.DataFrame") -> Found:
    """Mean, least or most of the memory that a table prints for a method."""
    cells = own[(own["method"] == row.method) & own["memory_pct"].notna()]
    if cells.empty or not row.task.startswith("Table"):
        return [], []
    values, doubt = cells["memory_pct"].tolist(), _doubt(cells)
    if row.task.endswith("mean"):
        text = f"({' + '.join(f'{v:g}' for v in values)}) / {len(values)}"
        return [(text, fmean(values), doubt)], list(cells.index)
    is_low = _condition(row, "bound") == "range_low"
    word, at = "least" if is_low else "most", cells["memory_pct"].idxmin() if is_low else cells["memory_pct"].idxmax()
    cell = cells.loc[at]
    text = f"the {word} of {len(values)} cells, {cell['model']} on {cell['task']} ({cell['locator']})"
    return [(text, float(cell["memory_pct"]), doubt)], [int(at)]


def _losses(row: Any, own: "pd.DataFrame") -> Found:
    """What a method lost in a table, in all the ways in which a mean of losses can be meant."""
    own = own[own["unit"] == "points"]
    own = own if row.task.startswith("Table") else own[own["task"] == row.task]
    keys = ["locator", "model", "task", "metric"]
    full, mine = own[own["method"] == "Full"], own[own["method"] == row.method]
    pairs = mine.reset_index().merge(full, on=keys, suffixes=("", "_full"))
    pairs = pairs[pairs["value_full"] > 0]
    if pairs.empty:
        return [], []
    full_values, values = pairs["value_full"], pairs["value"]
    points, shares = full_values - values, 100 * (1 - values / full_values)
    digits = fmean(map(half, pairs["printed"])) + fmean(map(half, pairs["printed_full"]))
    doubt = 100 * digits / full_values.min()
    readings: list[Reading] = []
    if len(pairs) <= len(set(pairs["model"])):  # one cell of each model, of which a sentence may mean any
        for one in pairs.itertuples():
            text = f"({one.printed_full} - {one.printed}) / {one.printed_full} of {one.model}, %"
            readings.append((text, 100 * (1 - one.value / one.value_full), doubt))
    count = f"{len(pairs)} cells"
    readings += [
        (f"mean of relative losses over {count}, %", float(shares.mean()), doubt),
        (f"loss of the means over {count}, %", float(100 * (1 - values.sum() / full_values.sum())), doubt),
        (f"mean loss over {count}, points", float(points.mean()), digits),
    ]
    return [readings[0], readings[-1]] if len(pairs) == 1 else readings, pairs["index"].tolist()


def _of_full(row: Any, own: "pd.DataFrame") -> Found:
    """A method's score as a share of the full cache's."""
    own = own[(own["task"] == row.task) & (own["unit"] == "points")]
    mine = own[(own["method"] == row.method) & (own["variant"] == row.variant)]
    full = own[own["method"] == "Full"]
    if len(mine) != 1 or len(full) != 1:
        return [], []
    above, below = mine.iloc[0], full.iloc[0]
    doubt = 100 * (half(above["printed"]) + half(below["printed"])) / below["value"]
    text = f"100 x {above['printed']} / {below['printed']}"
    return [(text, 100 * above["value"] / below["value"], doubt)], [*mine.index, *full.index]


def _not_highest(row: Any, own: "pd.DataFrame") -> Found:
    """Columns of a table in which a setting is not the highest of those with its budget."""
    budget = row.variant.split(" ")[0]
    own = own[(own["metric"] != AVERAGE) & (own["variant"].str.split(" ").str[0] == budget)]
    mine = own[(own["method"] == row.method) & (own["variant"] == row.variant)]
    others = own[own["method"] != row.method].groupby("task")["value"].max()
    cells = mine[mine["task"].isin(others.index)]
    if cells.empty:
        return [], []
    best = cells["task"].map(others)
    beaten, tied = cells[cells["value"] < best], int((cells["value"] == best).sum())
    text = ", ".join(f"{one.task} {one.printed} < {others[one.task]:g}" for one in beaten.itertuples())
    # A tie may be counted either way.
    readings = [(f"{text}: columns", float(len(beaten) + some), 0.0) for some in range(tied + 1)]
    return readings, list(beaten.index)


SENTENCES: dict[str, Callable[[Any, "pd.DataFrame"], Found]] = {
    "memory_share": _shares,
    "accuracy_loss": _losses,
    "share_of_full_cache_score": _of_full,
    "subsets_not_highest": _not_highest,
}


def duplicates(found: "pd.DataFrame") -> Iterator[Finding]:
    """Rows that are there twice, cells of a table with two values, and lines of two settings with the same cells."""
    cells: dict[tuple[str, ...], list[Any]] = {}
    tables: dict[tuple[str, ...], dict[str, list[Any]]] = {}  # place -> setting -> rows
    for row in found.itertuples():
        place, setting = (row.paper, row.locator, row.model), _who(row)
        is_cell = row.locator.startswith("Table")
        more = () if is_cell else (row.printed, row.conditions)  # a text may say two numbers of one thing
        cells.setdefault((*place, setting, row.task, row.metric, *more), []).append(row)
        if is_cell:
            tables.setdefault(place, {}).setdefault(setting, []).append(row)
    for same in (rows for rows in cells.values() if len(rows) > 1):
        values = dict.fromkeys(row.printed for row in same)
        words = "one cell has several values" if len(values) > 1 else "the same row is there more than once"
        text = f"{_who(same[0])}, {same[0].task}: {' and '.join(values)} in {len(same)} rows"
        yield _twice(same, words, text)
    for lines in tables.values():
        for (name, one), (other, two) in combinations(lines.items(), 2):
            if len(one) >= FEWEST_TWINS and {*map(_cell, one)} == {*map(_cell, two)}:
                text = (
                    f"{name} and {other}: {len(one)} of {len(one)} cells are equal, {', '.join(r.printed for r in one)}"
                )
                yield _twice([*one, *two], "two settings have the same cells", text)


def _cell(row: Any) -> tuple[str, str, str]:
    return row.task, row.metric, row.printed


def _twice(rows: Sequence[Any], words: str, text: str) -> Finding:
    labels = tuple(row.Index for row in rows)
    return Finding(kind="duplicate", where=_where(rows[0]), words=words, arithmetic=text, rows=labels)


def bits_alone(found: "pd.DataFrame") -> Iterator[Finding]:
    """Memory of quantised caches that is their codes' alone, without the scales and zeros that they cannot do without;
    and the same setting with another memory in another paper."""
    known = found[(found["memory_kind"] == "nominal") & found["memory_pct"].notna()]
    for (_, method, variant, share), rows in known.groupby(["paper", "method", "variant", "memory_pct"], sort=False):
        row = next(rows.itertuples())
        bits = _condition(row, "bits")
        if not bits.isdigit() or _condition(row, "group").isdigit() or abs(share - 100 * int(bits) / 16) > EXACT:
            continue
        more = int(bits) + 32 / GROUP
        yield Finding(
            kind="bytes",
            where=f"{row.paper}, {', '.join(sorted(set(rows['locator'])))}",
            words=f"{share:g} % for {method} {variant} ({len(rows)} cells) is of the codes alone",
            arithmetic=f"{bits} / 16 bits = {share:g} %; with a 16-bit scale and a 16-bit zero for each {GROUP} "
            f"elements ({bits} + 32 / {GROUP}) / 16 = {100 * more / 16:.1f} %",
            rows=tuple(rows.index),
        )
    coded = known[known["variant"].str.fullmatch(r"\d+ ?bit")]
    for (method, variant), rows in coded.groupby(["method", "variant"], sort=False):
        each = rows.drop_duplicates(["paper", "memory_pct"])
        if each["memory_pct"].nunique() > 1:
            text = "; ".join(
                f"{one.paper} {one.memory_pct:g} % (group={_condition(one, 'group') or 'unstated'})"
                for one in each.itertuples()
            )
            yield Finding(
                kind="bytes",
                where=", ".join(dict.fromkeys(each["paper"])),
                words=f"{method} {variant} has another memory in another paper, so that their rows cannot be compared",
                arithmetic=f"{text}: a factor of {each['memory_pct'].max() / each['memory_pct'].min():.3g}",
                rows=tuple(rows.index),
            )


def labels_of_budgets(found: "pd.DataFrame") -> Iterator[Finding]:
    """Tables in which one label of a budget stands for different numbers of keys and values."""
    pattern = found["conditions"].str.extract(r"budget=C\*(?P<layers>\d+)\*(?P<heads>\d+) KVs total;C=(?P<label>\d+)")
    known = found.join(pattern).dropna(subset=["label"])
    for keys, table in known.groupby(PLACE, sort=False):
        methods = table.groupby(["layers", "heads"], sort=False)["method"].unique()
        if len(methods) < 2:
            continue
        label = int(table["label"].iloc[0])
        each = {places: label * int(places[0]) * int(places[1]) for places in methods.index}
        text = "; ".join(
            f"{', '.join(methods[places])}: {label} x {places[0]} x {places[1]} = {count:,}"
            for places, count in each.items()
        )
        yield Finding(
            kind="bytes",
            where=", ".join(keys),
            words=f"the label C={label} stands for different numbers of keys and values in one table",
            arithmetic=f"{text}: a factor of {max(each.values()) / min(each.values()):g}, at every C",
            rows=tuple(table.index),
        )


def sizes(found: "pd.DataFrame") -> Iterator[Finding]:
    """Memory that is not the share of the gigabytes beside it, and memory saved where no more sequences fit."""
    for metric in ("kv_cache_size", "batch_size"):
        rows = found[(found["metric"] == metric) & ~found["conditions"].str.contains("bound=")]
        for row in rows[rows["method"] != "Full"].itertuples():
            keys = (rows["paper"] == row.paper) & (rows["model"] == row.model) & (rows["task"] == row.task)
            full = rows[keys & (rows["method"] == "Full")]
            if len(full) != 1:
                continue
            whole = next(full.itertuples())
            made = (_gigabytes if metric == "kv_cache_size" else _no_more_fit)(found, row, whole)
            if made is not None:
                words, text, labels = made
                labels = (row.Index, whole.Index, *labels)
                yield Finding(kind="bytes", where=_where(row), words=words, arithmetic=text, rows=labels)


Made = tuple[str, str, tuple[int, ...]]


def _gigabytes(found: "pd.DataFrame", row: Any, whole: Any) -> Made | None:
    share, steps = 100 * row.value / whole.value, (half(row.printed), half(whole.printed))
    low = 100 * (row.value - steps[0]) / (whole.value + steps[1])
    high = 100 * (row.value + steps[0]) / (whole.value - steps[1])
    said = [row.memory_pct]
    parts = re.match(r"(\d+) prompt \+ (\d+) generated", row.task)
    if parts is not None and _condition(row, "memory_basis").startswith("prompt"):  # of the prompt's tokens alone
        said.append(row.memory_pct * int(parts[1]) / (int(parts[1]) + int(parts[2])))
    if row.memory_pct != row.memory_pct or any(low - EXACT <= share <= high + EXACT for share in said):
        return None
    text = f"{row.printed} / {whole.printed} {row.unit} = {share:.1f} % (rounding allows {low:.1f} to {high:.1f})"
    return f"{_who(row)} is said to hold {row.memory_pct:g} %, and its bytes are another share ({row.task})", text, ()


def _no_more_fit(found: "pd.DataFrame", row: Any, whole: Any) -> Made | None:
    """The same number of sequences as with the full cache, beside cells that give half of its memory."""
    place = (found["paper"] == row.paper) & (found["model"] == row.model) & (found["method"] == row.method)
    cells = found[place & found["locator"].str.startswith("Table") & (found["memory_pct"] < 100)]
    if cells.empty or row.value != whole.value:
        return None
    share, tables = cells["memory_pct"].max(), ", ".join(sorted(set(cells["locator"])))
    words = f"{row.method} has {share:g} % of the memory in {tables}, and no more sequences than the full cache fit"
    text = f"sequences at once: {row.printed} with {row.method}, {whole.printed} with the full cache; {share:g} % of "
    return words, f"{text}it would leave room for {100 / share:g} times as many keys and values", tuple(cells.index)


CHECKS: tuple[Callable[["pd.DataFrame"], Iterator[Finding]], ...] = (
    averages,
    fractions,
    prose,
    duplicates,
    bits_alone,
    labels_of_budgets,
    sizes,
)


def _where(row: Any) -> str:
    return f"{row.paper}, {row.locator}, {row.model}"


def _who(row: Any) -> str:
    return f"{row.method} {row.variant}".strip()


def _condition(row: Any, name: str) -> str:
    """A condition that a paper states, in its words; empty where it does not."""
    found = re.search(rf"(?:^|;){name}=([^;]*)", row.conditions)
    return found[1] if found else ""


def _doubt(cells: "pd.DataFrame") -> float:
    """Half of the last decimal of memory shares, of which some may have lost a zero at the end."""
    return min(half(f"{value:g}") for value in cells["memory_pct"])
