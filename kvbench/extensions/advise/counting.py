"""Counts of the command `bytes`: rows of its table, and notes on them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvbench.cache.layout import compile_formats
from kvbench.cache.options import OFFSETS, StoreOptions
from kvbench.config.files import FULL
from kvbench.errors import FileMissing, Unsupported
from kvbench.extensions.advise import shipped
from kvbench.extensions.advise.named import described
from kvbench.extensions.papers import published
from kvbench.policy import Policy
from kvbench.results.lines import read_samples
from kvbench.results.measures import RESIDENT
from kvbench.results.record import RunRecord
from kvbench.runs import choices
from kvbench.runs.config import store_options
from kvbench.runs.parts import make_policy
from kvbench.show.progress import format_bytes, note, said_when_slow
from kvbench.sizing.project import project
from kvbench.sizing.projection import Projection, is_one_number
from kvbench.sizing.shapes import NamedShape, find_shape
from kvbench.sizing.stored import policy_of, tier_shares

Row = tuple[str, int, Projection]  # what the row is, tokens of a sequence, its bytes


@dataclass(frozen=True, kw_only=True)
class SizedMethod:
    """A method and, where the text decides them, the known shares of its tiers."""

    name: str
    policy: Policy
    shares: Sequence[float] = ()
    """Those of the stored run that was named."""
    store: StoreOptions = field(default_factory=StoreOptions)


def shape_of(cfg: DictConfig) -> NamedShape:
    """The model of a command."""
    with said_when_slow(f"reading {cfg.model}"):
        return find_shape(cfg.model)


def methods_of(cfg: DictConfig) -> list[SizedMethod]:
    """The methods of a command."""
    if cfg.run:
        return [_stored(Path(cfg.run), shape_of(cfg))]
    store = store_options(cfg.store)
    if cfg.methods is not None:
        made = {str(text): choices.make_method(text) for text in cfg.methods}
        return [SizedMethod(name=text, policy=policy, store=store) for text, policy in made.items()]
    return [SizedMethod(name=name, policy=make_policy(method), store=store) for name, method in cfg._each_.items()]


def count(cfg: DictConfig, lengths: Sequence[int]) -> dict[str, Any]:
    """Fields of `kvbench.extensions.advise.bytes.Counted`, in plain values."""
    shape, methods = shape_of(cfg), methods_of(cfg)
    rows: list[Row] = []
    notes: list[str] = []
    with said_when_slow(f"counting the bytes of {', '.join(one.name for one in methods)}"):
        for one in methods:
            method_rows, said = _of_method(one, shape, lengths, cfg.answer)
            rows += method_rows
            notes += said
    layers = shape.store_shape
    there = {"windows": layers.other_kinds, "states": layers.state_bytes}
    return {
        "title": _title(shape),
        "model": shape.name,
        "off_page": [name for name, items in there.items() if items],
        "rows": [[label, length, asdict(one), _alone(one, shape, length)] for label, length, one in rows],
        "notes": [*_notes(rows, shape, cfg.answer), *notes],
    }


def _title(shape: NamedShape) -> str:
    layers = shape.store_shape
    if layers.keys_only:
        return f"Bytes on {shape.name}: {shape.layers} layers of one latent vector of {layers.head_dim} channels"
    return f"Bytes on {shape.name}: {shape.layers} layers, {layers.num_kv_heads} KV heads of {layers.head_dim} channels"


def _stored(folder: Path, shape: NamedShape) -> SizedMethod:
    """The method of a stored run, and the shares that it measured; in its pages, where they hold slots of the shape."""
    record = RunRecord.load(folder)
    if record is None:
        raise FileMissing(f"run={folder} holds no run.json; give the folder of a run", setting="run")
    policy = policy_of(record.identity)
    if policy is None:
        raise Unsupported(
            f"run={folder}: its method {record.method} is none of kvbench's own, has other settings now, or names a "
            "file, which a stored run never does",
            setting="run",
        )
    samples, damaged = read_samples(folder / "samples.jsonl", record.hash, sealed=record.sealed)
    if damaged:
        note(f"{damaged} damaged lines of {folder}/samples.jsonl do not count")
    held = dict(record.identity.get("store") or {})
    if held.get("key_offset") not in OFFSETS and isinstance(held.get("key_offset"), str):
        del held["key_offset"]  # an identity has a table's numbers, never its path, and no file that it names is opened
    store = replace(store_options(held), budget_bytes=None)
    try:
        compile_formats(policy, shape.store_shape, store)
    except ValueError as error:  # of the run's pages, or of what `project` refuses too
        note(f"with pages of store.page_bytes=auto, for that of the run does not fit: {error}")
        store = replace(store, page_bytes="auto")
    return SizedMethod(name=record.method, policy=policy, shares=tier_shares(samples.values()), store=store)


def _of_method(
    method: SizedMethod, shape: NamedShape, lengths: Sequence[int], answer: int
) -> tuple[list[Row], list[str]]:
    """Rows of a method, and notes on them."""
    name, rows, notes = method.name, list[Row](), list[str]()
    for length in lengths:
        sizes = shape.store_shape, length - answer, answer, method.store
        least, most = project(method.policy, *sizes, shares=method.shares)
        if is_one_number(least, most):
            rows.append((f"{name}, as measured" if most.measured else name, length, most))
            if most.measured:
                notes = [f"How much {name} keeps depends on the text: its shares are those of the stored run."]
            continue
        rows += [(f"{name}, at least", length, least), (f"{name}, at most", length, most)]
        more, notes = _known_elsewhere(method, shape, length, answer)
        rows += more
        why = (
            f"How much {name} keeps depends on the text: least where queries attend to one token, most where they "
            "attend to all alike; run=FOLDER takes what a stored run measured."
        )
        notes = [why, *notes]
    if name == FULL:
        notes.append("The full cache holds more than 100 %: page tables, and pages that are not full.")
    return rows, notes


def _known_elsewhere(method: SizedMethod, shape: NamedShape, length: int, answer: int) -> tuple[list[Row], list[str]]:
    """Rows from published or stored shares of a method whose memory the text decides, and the source of the shares."""
    name, rows, notes = method.name, list[Row](), list[str]()
    shares, model = shipped.shares_in_study(name, described(method.policy), shape.name)
    if shares:
        (projection, _) = project(method.policy, shape.store_shape, length - answer, answer, method.store, shares)
        rows.append((f"{name}, study", length, projection))
        notes.append(f"study: at the shares that the repository's study measured of {name} on {model}, another text.")
    elif not shipped.study_folders():
        notes.append(shipped.ABSENT)
    printed = published.shares(name, shape.name)
    if printed:
        fp16 = shape.store_shape.fp16_bytes(length)
        each = [row.memory_pct for row in printed]
        for share in sorted({min(each), max(each)}):
            items = {"resident_bytes": round(share / 100 * fp16)}
            rows.append((f"{name}, printed", length, Projection(items=items, fp16_bytes=fp16)))
        places = ", ".join(dict.fromkeys(f"{row.paper}, {row.locator}" for row in printed))
        notes.append(f"printed: the least and the most that {places} gives for {printed[0].model}, as printed.")
    return rows, notes


def _alone(projection: Projection, shape: NamedShape, length: int) -> str:
    """Share of the layers that see everything, of their own FP16 cache."""
    if "window_bytes" not in projection.items:
        return "-"
    off_page = projection.items["window_bytes"] + projection.items["state_bytes"]
    return (
        f"{RESIDENT.scale * (projection.resident_bytes - off_page) / shape.store_shape.layers_fp16_bytes(length):.1f}"
    )


def _notes(rows: Sequence[Row], shape: NamedShape, answer: int) -> list[str]:
    notes = [
        f"% and the parts are of an FP16 full cache for the same tokens, of which {answer} were written behind the "
        f"prompt. Shape: {shape.source}. The peak while a prompt is compressed, weights and activations do not count."
    ]
    others, layers = [], shape.store_shape
    for window in dict.fromkeys(each.window for each in layers.other_kinds if each.window is not None):
        kept = "tokens of the last chunk of" if window.in_chunks else "last"
        count = sum(each.num_layers for each in layers.other_kinds if each.window == window)
        others.append(f"{count} more keep their {kept} {window.num_tokens} tokens")
    if shape.state_layers:
        others.append(f"{shape.state_layers} hold states of {format_bytes(layers.state_bytes)} together")
    if others:
        notes.append(
            f"The method acts on the {shape.layers} layers that see everything, and {', '.join(others)}, which count "
            "in FP16 and in every row; '% alone' is of the former without them."
        )
    if layers.shared:
        notes.append(f"{len(layers.shared)} layers attend to what another one holds, and hold nothing.")
    if shape.context and (longest := max(length for _, length, _ in rows)) > shape.context:
        notes.append(f"{shape.name} was made for {shape.context} tokens; {longest} are more.")
    return notes
