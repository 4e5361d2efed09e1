"""`kvbench compare`: is a method worse than the full cache, or than another method, on the same samples?

Differences with intervals and tests, verdicts, and the table of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from omegaconf import DictConfig
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.errors import SettingsConflict, SettingValue
from kvbench.evidence import answer_traits
from kvbench.evidence.budget_curves import OutOfRange, at_bytes, series_of
from kvbench.evidence.compared import ComparedRun, count, difference, worst
from kvbench.evidence.legends import compared_line
from kvbench.evidence.load import Group, StoredRun, fits_settings, sentences
from kvbench.evidence.samples import Change, Curve, NoCommonSample, changes, curve_of, measure, noise, pair
from kvbench.evidence.settings import Bytes, bytes_wanted
from kvbench.evidence.view import Grid, Part, View, ViewResult, frame_of, line, notes
from kvbench.results.measures import Measure
from kvbench.results.refusals import NoResults
from kvbench.show.csv_file import Cell, csv_row
from kvbench.show.terminal import number, p_text
from kvbench.show.text import safe
from kvbench.stats.paired import holm
from kvbench.stats.studentised import resamples_for

TEXT_LENGTH = 160  # characters of an answer on the terminal


def find(group: Group, name: str, where: Mapping[str, object] | None = None) -> StoredRun | None:
    """Find the run of a group by name: `full` for the reference, a method, a label, or the first digits of a hash.

    Settings choose among several runs that fit the name; raises ValueError where several still fit.
    """
    if name == FULL:
        return group.reference
    fits = [run for run in group.runs if name in (run.method, run.label)]
    fits = fits or [run for run in group.runs if len(name) >= 4 and run.record.hash.startswith(name)]
    if len(fits) > 1 and where:
        fits = [run for run in fits if fits_settings(run.settings, where)] or fits
    if len(fits) > 1:
        listed = ", ".join(f"{run.record.hash[:6]} ({run.label})" for run in fits)
        raise SettingValue(
            f"against={name} fits {len(fits)} runs of {group.title}; give the digits of one: {listed}",
            setting="against",
        )
    return fits[0] if fits else None


def margin_of(cfg: DictConfig, what: Measure) -> float:
    """The margin of the setting, or the default of the metric."""
    return what.margin if cfg.margin is None else float(cfg.margin)


def _compare(
    sides: Sequence[tuple[Curve, Curve]],
    cfg: DictConfig,
    what: Measure,
    why: str,
    tolerance: float,
    notes: list[str],
    has_verdicts: bool = True,
) -> list[ComparedRun]:
    """Compare pairs of curves; those without a common sample get a note. `why` there is no verdict: `unfit`."""
    rows, margin = [], margin_of(cfg, what)
    for mine, theirs in sides:
        try:
            pairs = replace(pair(mine, theirs, what), unfit=why)
        except NoCommonSample as error:
            notes.append(f"not compared: {error}")
            continue
        is_full = theirs.run is not None and theirs.run.method == FULL
        rows.append(
            ComparedRun(
                what=what,
                pairs=pairs,
                difference=pairs.paired(what, cfg.resamples, cfg.seed),
                extremes=pairs.extremes(what, cfg.resamples, cfg.seed),
                margin=margin,
                null=margin if what.is_fidelity and is_full else 0.0,
                changes=changes(pairs, what, tolerance),
                longer=answer_traits.longer(mine.run, theirs.run, cfg.resamples, cfg.seed) if has_verdicts else None,
            )
        )
        if mine.run and theirs.run and mine.run.conditions != theirs.run.conditions:
            both = f"{mine.label} and {theirs.label}"
            notes.append(f"{both} ran with another batch size or backend, which adds noise")
    for row in rows:
        row.num_family = len(rows)
    if has_verdicts:
        correct(rows)
    return rows


def compare_group(group: Group, cfg: DictConfig, *, has_verdicts: bool = True) -> tuple[list[ComparedRun], list[str]]:
    """Compare every run of a group with one of them, or every method with one at equal bytes.

    Returns rows, whose p values are corrected over this group, and one sentence for each run that could not be
    compared.

    Args:
        has_verdicts: False where intervals alone are looked at, each by itself: the tests take most of the time.

    Raises:
        ValueError: The metric does not exist, or `against` fits several runs.
    """
    wanted = bytes_wanted(cfg.get("at_bytes"))
    what = measure(str(cfg.metric), group, shares=True)
    if what.of is not None and str(cfg.against) != FULL:
        raise SettingsConflict(
            f"metric={cfg.metric} is in % of the full cache's, and against={cfg.against} is another run; leave out one",
            setting="metric",
        )
    tolerance, source = noise(group, what)
    why = group.unfit(what)
    notes = [why] if why else []
    if source:
        notes.append(f"{what.title}: differences of a sample up to {tolerance:.2g} count as noise ({source})")
    if margin_of(cfg, what) < tolerance:
        notes.append(f"margin={margin_of(cfg, what):g} is below the noise of a sample, so it proves nothing small")
    if wanted is not None:
        said: list[str] = []
        sides = _at_equal_bytes(group, what, wanted, str(cfg.against), said)
        # Interpolated values are neither yes nor no, and may leave [0, 1].
        rows = _compare(sides, cfg, replace(what, bounded=False), why, tolerance, said)
        return rows, [*said, *(notes if rows else [])]
    against = find(group, str(cfg.against), cfg.get("where"))
    if against is None:
        return [], [f"{group.title}: no run fits against={cfg.against}, so nothing is compared"]
    sides, repeats = [], group.repeats
    for run in group.runs:
        if run is not against:
            # A full cache of the run's own batch size and backend where there is one.
            same = (full for full in repeats if full.conditions == run.conditions)
            other = against if against.method != FULL or run.method == FULL else next(same, against)
            sides.append((curve_of(run, what), curve_of(other, what)))
    return _compare(sides, cfg, what, why, tolerance, notes, has_verdicts), notes


def _at_equal_bytes(
    group: Group, what: Measure, wanted: Bytes, name: str, notes: list[str]
) -> list[tuple[Curve, Curve]]:
    """Each method's budget curve at equal bytes, paired with the other run of that name.

    The full cache is taken unchanged.
    """
    curves: dict[str, Curve] = {}
    for title, runs in series_of([run for run in group.runs if run.method != FULL and run.complete]).items():
        try:
            curves[title] = at_bytes(title, runs, what, wanted, next(iter(group.axes.values())))
        except OutOfRange as error:
            notes.append(f"not compared: {error}")
    against: Curve | None = None
    if name != FULL:
        fits = [title for title in curves if name in (title, title.split()[0])]
        if len(fits) > 1:
            raise SettingValue(
                f"against={name} fits {len(fits)} curves; give one of them in quotes: {', '.join(fits)}",
                setting="against",
            )
        against = curves.pop(fits[0]) if fits else None
    elif group.reference is not None:
        against = curve_of(group.reference, what)
    if against is None:
        notes.append(f"{group.title}: no curve fits against={name}, so nothing is compared")
        return []
    return [(curve, against) for curve in curves.values()]


def correct(rows: Sequence[ComparedRun]) -> None:
    """Correct the p values of a family, in place: those of a difference, and those of equality."""
    for row in rows:
        row.num_family = len(rows)
        least = row.difference.resamples
        if resamples_for(len(rows), least) != resamples_for(row.difference.num_tests, least):
            row.difference = row.difference.among(len(rows))
    for row, p, equal in zip(rows, holm([r.p for r in rows]), holm([r.p_equal for r in rows]), strict=True):
        row.p_holm, row.p_equal_holm = p, equal


def _columns(rows: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Heading -> the cells of all runs; the verdict follows the difference that it judges."""
    what, margin = rows[0].what, number(rows[0].margin, rows[0].what.scale)
    missing = any(row.extremes is not None for row in rows)
    return {
        "n": [count(row) for row in rows],
        f"difference, {what.unit}": [difference(row) for row in rows],
        **({"worst\ncase": [worst(row) for row in rows]} if missing else {}),
        "verdict": [row.verdict for row in rows],
        "lost/gained": [f"{row.num_lost}/{row.num_gained}" for row in rows],
        f"p\n>{margin}" if rows[0].null else "p": [p_text(row.p) for row in rows],
        "p Holm": [p_text(row.p_holm) for row in rows],
        f"p equal\n+-{margin}": [p_text(row.p_equal_holm) for row in rows],
        "would\nshow": [number(row.detectable, what.scale) for row in rows],
        **answer_traits.columns([(row.run, row.longer) for row in rows]),
    }


def change_lines(change: Change, scale: float, names: tuple[str, str]) -> list[str]:
    """A lost or gained answer as lines of text; `names` are those of the other run and of the run."""
    head = f"{'lost' if change.lost else 'gained'} {safe(change.sample)} ({safe(change.subset)}): "
    head += f"{number(change.theirs, scale)} -> {number(change.mine, scale)}"
    lines = [head + (f", expected: {safe(change.expected, TEXT_LENGTH)}" if change.expected else "")]
    width = max(map(len, names)) + 1
    if not (change.other_text or change.text):  # runs may be kept without their texts
        return lines
    for name, text in zip(names, (change.other_text, change.text), strict=True):
        lines.append(f"    {name + ':':<{width}} {safe(text, TEXT_LENGTH)}")
    return lines


def _rank(row: ComparedRun) -> tuple[int, float]:
    """Place of a row: by verdict, the best first, then by effect; what has no verdict stands last."""
    worse, better = row.what.verdicts
    verdicts = [better, "equal", "cannot tell", worse]
    place = verdicts.index(row.verdict) if row.verdict in verdicts else len(verdicts)
    return place, -row.value if row.what.higher_is_better else row.value


def texts(tables: Sequence[tuple[Group, list[ComparedRun], list[str]]], cfg: DictConfig) -> Iterator[Part]:
    """One table for each group, notes on it, and `cfg.regressions` answers that changed."""
    for group, compared, said in tables:
        rows = sorted(compared, key=_rank)
        yield Text()
        if rows:
            references = " and ".join(dict.fromkeys(row.pairs.theirs.label for row in rows))
            direction = "higher" if rows[0].what.higher_is_better else "lower"
            title = f"{group.title}: {rows[0].what.title} ({direction} is better), difference to {references}"
            yield from notes(filter(None, [rows[0].pairs.unfit]))
            columns, names = list(_columns(rows).items()), [row.label for row in rows]
            yield Grid(title=title, names=names, columns=columns, ends=("verdict", "would\nshow"))
        yield from notes([*group.notes, *(note for note in said if not rows or note != rows[0].pairs.unfit)])
        for row in rows:
            shown = [c for lost in (True, False) for c in [c for c in row.changes if c.lost == lost][: cfg.regressions]]
            if shown:
                yield Text(f"\n{row.label}: {row.num_lost} lost, {row.num_gained} gained", style="bold")
            for change in shown:
                yield from map(line, change_lines(change, row.what.scale, (row.pairs.theirs.label, row.label)))
    yield Text()
    yield Text(compared_line(sum(len(rows) for _, rows, _ in tables)), style="dim")


def record_of(group: Group, row: ComparedRun) -> dict[str, Cell]:
    """A row of the CSV with all its numbers, unrounded, in the metric's own unit."""
    (low, high), kind = row.interval or (None, None), row.difference.interval[1]
    mine = row.run.record.hash[:12] if row.run else None
    tests = ("null", "p", "p_holm", "margin", "p_equal", "p_equal_holm", "detectable", "needed", "verdict")
    return (
        csv_row(group=group.title, run=row.label, hash=mine, against=row.pairs.theirs.label, metric=row.what.csv_name)
        | csv_row(n=row.pairs.num_samples, of=row.pairs.total, difference=row.value, low=low, high=high)
        | csv_row(interval=kind, worst=row.worst, lost=row.num_lost, gained=row.num_gained)
        | answer_traits.csv_cells(row.run, row.longer)
        | {"test": row.difference.test, **{name: getattr(row, name) for name in tests}}
    )


def compute(groups: Sequence[Group], cfg: DictConfig) -> ViewResult:
    """The comparisons of all groups, corrected together; raises ValueError where there is none."""
    tables = [(group, *compare_group(group, cfg)) for group in groups]
    rows = [row for _, table_rows, _ in tables for row in table_rows]
    if not rows:
        reasons = [note for group, _, said in tables for note in (*said, *group.notes)]
        raise NoResults(f"nothing to compare. {sentences(reasons) or 'There is only one run.'}")
    correct(rows)
    frame = frame_of(record_of(group, row) for group, table_rows, _ in tables for row in table_rows)
    frame.attrs["notes"] = [text for group, _, said in tables for text in (*group.notes, *said)]
    return ViewResult(parts=list(texts(tables, cfg)), frame=frame, names_files=False)


main = View(name="compare", compute=compute)
