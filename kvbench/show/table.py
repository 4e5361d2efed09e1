"""The table at the end of a run: quality and cost of each method and the full cache, on the terminal."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvbench.config.files import FULL
from kvbench.results.faults import Read
from kvbench.results.faults import notes as notes_of
from kvbench.results.measures import (
    BYTES,
    FULL_LAYERS,
    KL,
    KL_NEW,
    NLL,
    ONE_SHOT_PEAK,
    PREFILL,
    RATE,
    READ,
    RESIDENT,
    SCORE,
    Measure,
)
from kvbench.results.record import CHUNK_LABEL, RunRecord
from kvbench.show import terminal
from kvbench.show.across import NONE, across, along_answers, long_tables
from kvbench.show.columns import LEGEND
from kvbench.show.labels import differ_in_length, label_runs
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import number, span
from kvbench.show.text import MESSAGE_LENGTH, safe
from kvbench.show.unfit import unfit_run
from kvbench.stats.intervals import Estimate

Cell = Callable[[RunRecord], str]
KEPT = ("prompt_tokens", "tokens_seen", "prompt_slots", "lists")
LIFTED = 0.05  # of the tokens: that answers must add to a prompt's share before it is shown
ENDS = {
    "num_answers": ("answers", "{:.0f}"),
    "mean_tokens": ("mean tokens", "{:.1f}"),
    "cut_share": ("cut by the limit, %", "{:.1%}"),
    "loop_share": ("end in a loop, %", "{:.1%}"),
    "num_unparsed": ("nothing to grade", "{:.0f}"),
    "num_fallback": ("graded by last number", "{:.0f}"),
    "num_several": ("several answers marked", "{:.0f}"),
    "num_out_of_time": ("no verdict in time: wrong", "{:.0f}"),
}
FLAGGED = ("num_fallback", "num_several", "num_out_of_time")  # shown where there are any


def percent(estimate: Estimate | None, signed: bool = False) -> str:
    """A score as percent with its 95 % interval, for example `96.9 [89.3, 99.1]`."""
    if estimate is None or estimate.value is None:
        return NONE
    return f"{number(estimate.value, SCORE.scale, signed)} {span(estimate.ends, SCORE.scale, signed)}"


def _score(record: RunRecord) -> str:
    return percent(record.metrics.get(record.primary))


def _num(record: RunRecord) -> str:
    metric = record.metrics.get(record.primary)
    scored = metric.num_samples if metric else 0
    if record.counts.ok == record.counts.total:
        return f"{scored}"
    return f"{scored} of {'?' if record.num_prompts is None else record.num_prompts}"


def _difference(record: RunRecord) -> str:
    if record.comparison is None:
        return NONE
    text = percent(record.comparison.difference, signed=True)
    if text == NONE:
        return NONE
    return f"{text}\n{record.comparison.num_worse} worse, {record.comparison.num_better} better"


def _value(record: RunRecord, what: Measure, form: str, missing: float | None = None) -> str:
    """A measure in shown units; `missing` is the value of runs that do not have it."""
    measured = what.of_run(record)
    value = missing if measured is None else measured
    return NONE if value is None else format(what.scale * value, form)


def _bytes(record: RunRecord, what: Measure) -> str:
    count, ratio = record.ledger.get(f"{what.name}_bytes"), what.of_run(record)
    return format_bytes(count) if ratio is None else f"{format_bytes(count)}\n{what.scale * ratio:.1f} %"


def _loses_to(record: RunRecord, chance: RunRecord) -> bool:
    """True if a run scores less than another run on as many samples that holds no more bytes."""
    both = [each.metrics.get(record.primary) for each in (record, chance)]
    held = [RESIDENT.of_run(each) for each in (record, chance)]
    if record.counts.total != chance.counts.total or None in held:
        return False
    mine, other = (metric.value if metric else None for metric in both)
    return mine is not None and other is not None and mine < other and held[0] >= 0.95 * held[1]  # type: ignore[operator]


def _reads_parts(records: Sequence[RunRecord]) -> bool:
    """True when decode steps of some run choose what to read."""
    return any((share := READ.of_run(record)) is not None and share < 1.0 for record in records)


def _chunked(records: Sequence[RunRecord]) -> bool:
    """True when prompts of some run were read in chunks."""
    return any(CHUNK_LABEL in record.protocol for record in records)


def _table(title: str, records: Sequence[RunRecord], columns: Sequence[tuple[str, Cell]]) -> Table:
    table = terminal.plain_table(title)
    table.add_column("method", justify="left", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for label, record in zip(label_runs(records, "\n"), records, strict=True):
        table.add_row(label, *(cell(record) for _, cell in columns))
    return table


def _seen(record: RunRecord) -> str:
    """The mean tokens of a prompt and of what follows it: `100 + 65`."""
    prompt, seen = (record.kept.get(name) for name in ("prompt_tokens", "tokens_seen"))
    return NONE if prompt is None or seen is None else f"{prompt:.0f} + {seen - prompt:.0f}"


def _shares(records: Sequence[RunRecord]) -> list[str]:
    """Note on how a share of the prompt became the shown share of the bytes, where answers are long."""
    said = []
    for label, record in zip(label_runs(records), records, strict=True):
        prompt, seen, slots, lists = (record.kept.get(name, 0.0) for name in KEPT)
        if not (record.prompt_only and prompt and slots and lists and record.method != FULL):
            continue
        part, whole = slots / lists / prompt, (slots / lists + seen - prompt) / seen
        if whole - part > LIFTED:
            said.append(
                f"{label}: {SCORE.scale * part:.0f} % of a prompt's {prompt:.0f} tokens stay, and all "
                f"{seen - prompt:.0f} that follow: {SCORE.scale * whole:.0f} % of the {seen:.0f}."
            )
    return said


def _speed_notes(records: Sequence[RunRecord]) -> list[str]:
    """Notes on speeds that are no claim, with reasons."""
    notes = []
    if slow := ", ".join(record.method for record in records if record.backend == "torch"):
        notes.append(f"Speed is no claim for {slow}: backend torch is the plain reference, made to be right.")
    for record in records:
        if record.backend_fallbacks:
            done = ", ".join(record.backend_fallbacks)
            notes.append(f"Speed is no claim for {record.method}: backend {record.backend} did {done} in plain torch.")
    return notes


def _notes(records: Sequence[RunRecord]) -> list[str]:
    """Notes without which the numbers would be misread."""
    notes = [LEGEND]
    if _chunked(records):
        notes.append(
            "prefill.chunk: prompts were read so many tokens at a time, and compressed before the next, so that later "
            "tokens saw a compressed past: another protocol, with its own full cache."
        )
    notes += _fidelity_notes(records[-1])
    alone = [r.method for r in records if r.prompt_only and r.method != FULL and r.task_aggregate.get("tokens")]
    if alone:
        notes.append(f"Compress the prompt alone and keep all that follows whole: {', '.join(dict.fromkeys(alone))}.")
    notes += _shares(records)
    if differ_in_length(records):
        notes.append(
            "Answers differ in length here, so bytes are of different texts: each % is of an FP16 full cache of the "
            "row's own."
        )
    notes += _speed_notes(records)
    notes += [f"{remark}." for remark in dict.fromkeys(record.model_remark for record in records) if remark]
    whole = next((RESIDENT.of_run(record) for record in records if record.method == FULL), None)
    chance = next((record for record in records if record.method == "random" and record.status == "complete"), None)
    for record in records:
        if chance is not None and record.method != FULL and _loses_to(record, chance):
            words = "scores less than `random` beside it, which holds no more: nothing here speaks for its choice."
            notes.append(f"{record.method} {words}")
        ratio = RESIDENT.of_run(record)
        if record.method != FULL and whole and ratio and ratio > 0.99 * whole:
            words = "holds as much as the full cache: at this setting it compresses nothing here."
            notes.append(f"{record.method} {words}")
        counts = record.counts
        odd = {"gave NaN": counts.nan, "ran out of memory": counts.oom, "could not be graded": counts.ungraded}
        odd["not done"] = max(0, counts.total - counts.done)
        if any(odd.values()):
            what = ", ".join(f"{count} {words}" for words, count in odd.items() if count)
            notes.append(f"{record.method}: of {counts.total} answers {what}; not in the score.")
        if several := record.task_aggregate.get("answers", {}).get("num_several"):
            words = "mark several unlike numbers as the answer; few-shot forms take the first, chats the last."
            notes.append(f"{record.method}: {several} answers {words}")
        if record.remark:
            notes.append(f"{record.method}: {record.remark}.")
        if record.status == "failed":
            notes.append(f"{record.method} FAILED, do not use its numbers: {record.message}")
    labelled = zip(label_runs(records), records, strict=True)
    notes += [f"{note}." for note in notes_of([Read(label=label, record=record) for label, record in labelled])]
    protocol, last = records[-1].protocol, records[-1].counts
    if protocol.get("query_aware") is False:
        notes.append("Query-agnostic: the context was compressed before the question was seen.")
    if protocol.get("thinking") in ("on", "off"):
        notes.append(f"Thinking was {protocol['thinking']} in the chat template; thoughts are not graded.")
    for count, words in (
        (last.truncated, "Prompts longer than the task or model allows, which were shortened"),
        (last.quarantined, "Rows of the data that were set aside (listed in run.json)"),
        (last.copies, "Rows of the data that are copies of others, or have the same id, and count again"),
    ):
        notes += [f"{words}: {count}."] if count else []
    listed = [("Fields of the data that nothing reads", names) for names in records[-1].unused_fields]
    listed += [("Subsets that were left out, as their data was not at hand", ", ".join(records[-1].missing_subsets))]
    return notes + [f"{words}: {safe(names, MESSAGE_LENGTH)}." for words, names in listed if names]


def _fidelity_notes(record: RunRecord) -> list[str]:
    """Note where NLL and KL are of fewer samples than the score."""
    if KL.key not in record.fidelity:
        return []
    held = [(what.short, record.fidelity.get(what.key)) for what in (NLL, KL)]
    counts = [(name, one.num_samples) for name, one in held if one and one.num_samples]
    metric = record.metrics.get(record.primary)
    most = max([count for _, count in counts] + ([metric.num_samples] if metric else []), default=0)
    each = ", ".join(f"{name} n={count}" + (f" of {most}" if count < most else "") for name, count in counts)
    if not any(count < most for _, count in counts):
        return []
    why = "the others' answer to force has one token, or none"
    return [f"{NLL.short} and {KL.short} have fewer samples: {each}; {why}."]


def _by(records: Sequence[RunRecord]) -> list[Table]:
    """The score for each task, length or depth, where a task groups its samples by one."""
    last, tables = records[-1], []
    for key, groups in last.task_aggregate.get("by", {}).items():
        if len(groups) < 2:
            continue
        rows = []
        for name, numbers in groups.items():
            scores = [r.task_aggregate.get("by", {}).get(key, {}).get(name, {}).get(r.primary) for r in records]
            cells = [NONE if value is None else f"{SCORE.scale * value:.1f}" for value in scores]
            rows.append((safe(name), [*cells, str(numbers["num_samples"])]))
        title = f"{last.primary or 'score'} by {safe(key)}, %"
        tables.append(across(title, safe(key), records, rows))
    return tables


def _answer(record: RunRecord, name: str, form: str) -> str:
    value = record.task_aggregate.get("answers", {}).get(name)
    return NONE if value is None else form.format(value).removesuffix("%")


def _sampled(record: RunRecord, name: str) -> str:
    estimate = record.task_aggregate.get("sampling", {}).get(name)
    return percent(Estimate(**estimate) if estimate else None)


def _answers(records: Sequence[RunRecord]) -> list[Table]:
    """Ends of the answers, and statistics of several answers to one problem."""
    last = records[-1].task_aggregate
    tables = []
    if "answers" in last:
        columns = [
            (heading, partial(_answer, name=name, form=form))
            for name, (heading, form) in ENDS.items()
            if name not in FLAGGED or any(r.task_aggregate.get("answers", {}).get(name) for r in records)
            if name != "num_unparsed" or name in last["answers"]
        ]
        tables.append(_table("Answers: how they ended", records, columns))
    if sampling := last.get("sampling"):
        # pass@1 is avg@n; the largest k say most.
        names = [name for name in sampling if name.startswith("avg@")]
        for kind, most in (("pass@", 3), ("maj@", 2)):
            names += [name for name in sampling if name.startswith(kind) and name != f"{kind}1"][-most:]
        title = f"Sampling: {sampling['num_samples']} answers to each of {sampling['num_problems']} problems"
        tables.append(_table(title, records, [(f"{name}, %", partial(_sampled, name=name)) for name in names]))
    return tables


def render(records: Sequence[RunRecord]) -> Group:
    """Make the tables of one task and model, the full cache first; 80 columns are enough."""
    last = records[-1]
    quality: list[tuple[str, Cell]] = [
        (f"{last.primary or 'score'}, %", _score),
        ("n", _num),
        (f"vs full, {SCORE.unit}", _difference),
        (NLL.short, partial(_value, what=NLL, form=".4f")),
        (KL.short, partial(_value, what=KL, form=".2g")),
    ]
    if any(KL_NEW.of_run(record) is not None for record in records):
        quality.append((KL_NEW.short.replace(", ", ",\n"), partial(_value, what=KL_NEW, form=".2g")))
    cost: list[tuple[str, Cell]] = [("tokens", _seen)] if differ_in_length(records) else []
    cost += [(what.short, partial(_bytes, what=what)) for what in BYTES]
    if any(FULL_LAYERS.of_run(record) is not None for record in records):
        cost.append((FULL_LAYERS.short, partial(_bytes, what=FULL_LAYERS)))
    if _chunked(records):
        cost.append((ONE_SHOT_PEAK.short, partial(_bytes, what=ONE_SHOT_PEAK)))
    if _reads_parts(records):
        cost.append((f"{READ.short}, {READ.unit}", partial(_value, what=READ, form=".1f", missing=1.0)))
    cost += [
        (f"{PREFILL.short} {PREFILL.unit}", partial(_value, what=PREFILL, form=".3g")),
        (f"{RATE.short} {RATE.unit}", partial(_value, what=RATE, form=".3g")),
        ("backend", lambda record: record.backend),
    ]
    tables = [
        _table(f"Quality: {safe(last.task)} with {safe(last.model)}", records, quality),
        _table("Cost: cache bytes per sample, and time", records, cost),
        *(table for some in (_by, _answers, long_tables, along_answers) for table in some(records)),
    ]
    notes = [Text(safe(note, MESSAGE_LENGTH), style="dim") for note in _notes(records)]
    whys = dict.fromkeys(unfit_run(record) for record in records if record.method == FULL)
    first = [Text(f"! {safe(why, MESSAGE_LENGTH)}", style="bold") for why in whys if why]
    return Group(*first, *(part for table in tables for part in (table, Text())), *notes)


def show(records: Sequence[RunRecord], paths: Sequence[Path] = (), *, console: Console | None = None) -> None:
    """Print the tables, one for each task and model, and where the files are.

    Runs come in any order; one that is there twice counts once. Stdout is at least 100 columns wide when it is no
    terminal.
    """
    if console is None:
        console = terminal.console(100)
    groups: dict[tuple[str, str], dict[tuple[str, str], RunRecord]] = {}
    for record in records:
        # Two names of one method have the same hash.
        groups.setdefault((record.task, record.model), {})[record.method, record.hash] = record
    for group in groups.values():
        rows = sorted(group.values(), key=lambda record: record.method != FULL)
        console.print()
        console.print(render(rows))
    terminal.print_paths(paths, console)
