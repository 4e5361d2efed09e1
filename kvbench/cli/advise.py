"""The command `advise`: which method fits a memory and loses no more than is accepted, by what was measured."""

import re
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from kvbench.cli import advise_table
from kvbench.cli.advice import Advice, Asked, Quality, Speed
from kvbench.config.files import FULL
from kvbench.errors import check_whole
from kvbench.evidence.comparison import ComparedRun, compare_group
from kvbench.evidence.load import Group, StoredRun, load_groups
from kvbench.evidence.settings import check_margin
from kvbench.policy import MAX_TOKENS
from kvbench.rules import Whole
from kvbench.runs.config import read_bytes
from kvbench.sizing.shapes import NamedShape, find_shape
from kvbench.sizing.stored import policy_of, projected

BENCHES = ("throughput", "decode")  # what of `kvbench bench` measures tokens per second of a whole model


def main(cfg: DictConfig) -> int:
    """Print the table."""
    asked = read_asked(cfg)
    most = None if cfg.rows is None else check_whole("rows", cfg.rows, 1)
    shape = find_shape(cfg.model)
    settings = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(settings, dict)
    comparing = OmegaConf.create(settings | {"against": FULL, "at_bytes": None, "where": None})
    groups = load_groups(comparing)
    bench = Path(str(cfg.bench)) if cfg.bench is not None else Path(str(cfg.results_dir)) / "bench"
    speeds, notes = read_speeds(bench)
    found, said = gather(groups, comparing, shape, asked, speeds)
    advise_table.show(found, asked, shape, [*notes, *said], has_speeds=bool(speeds), most=most)
    return 0


def read_asked(cfg: DictConfig) -> Asked:
    """Check what is asked for."""
    context = read_tokens(cfg.context)
    Whole(0, context - 1, unit="tokens").check("answer", cfg.answer)
    Whole(1, 2**20, unit="sequences").check("batch", cfg.batch)
    if cfg.margin is None:
        raise ValueError("margin=null says nothing; give the loss that you accept, for example margin=0.01")
    check_margin(cfg.margin)
    for name, least in (("resamples", 100), ("seed", 0)):
        check_whole(name, cfg[name], least)
    memory = None if cfg.memory is None else read_bytes("memory", cfg.memory)
    return Asked(
        context_tokens=context, answer_tokens=cfg.answer, batch=cfg.batch, memory_bytes=memory, margin=float(cfg.margin)
    )


def read_tokens(value: object) -> int:
    """Read a number of tokens, or text such as 32k."""
    match = re.fullmatch(r"([0-9]{1,9})([kK]?)", str(value)) if not isinstance(value, bool) else None
    found = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if not 1 < found <= MAX_TOKENS:
        raise ValueError(f"context={value} is no number of tokens; write a whole number, or text such as 32k")
    return found


def gather(
    groups: list[Group], cfg: DictConfig, shape: NamedShape, asked: Asked, speeds: Mapping[str, list[Speed]]
) -> tuple[list[Advice], list[str]]:
    """Gather what is known of every stored method and setting, one entry each, and what must be known beside them."""
    found: dict[str, Advice] = {}
    notes: list[str] = []
    for group in groups:
        try:
            rows, said = compare_group(group, cfg)
        except ValueError as error:
            notes.append(f"{group.title}: {error}")
            continue
        notes += [*group.notes, *said]
        quality = {row.run.name: row for row in rows if row.run is not None}
        for run in group.runs:
            if run in group.repeats:
                continue
            key = _key(run)
            if key not in found:
                found[key] = _entry(run, shape, asked, speeds)
            if row := quality.get(run.name):
                found[key].quality.append(_quality(row, group, run, shape))
    return list(found.values()), list(dict.fromkeys(notes))


def _key(run: StoredRun) -> str:
    policy = policy_of(run.record.identity)
    return repr(policy) if policy is not None else f"{run.method} {run.record.identity.get('method')}"


def _entry(run: StoredRun, shape: NamedShape, asked: Asked, speeds: Mapping[str, list[Speed]]) -> Advice:
    prompt = asked.context_tokens - asked.answer_tokens
    bytes_of = projected(run.record.identity, run.samples.values(), shape, prompt, asked.answer_tokens)
    return Advice(
        label=run.label,
        method=run.method,
        settings=advise_table.own_settings(run.method, run.record.identity.get("method") or {}),
        bytes_of=bytes_of,
        speeds=list(speeds.get(_key(run), ())),
    )


def _quality(row: ComparedRun, group: Group, run: StoredRun, shape: NamedShape) -> Quality:
    lengths = [record["num_prompt_tokens"] for record in run.samples.values()]
    return Quality(
        row=row,
        task=group.task,
        model=group.model,
        own=group.model == shape.name,
        longest_tokens=max(lengths, default=0),
    )


def read_speeds(folder: Path) -> tuple[dict[str, list[Speed]], list[str]]:
    """Read the measured throughput of every method, by the text of its policy, and say which files cannot be read."""
    from kvbench.bench.choices import make_method
    from kvbench.bench.command import read_document

    found: dict[str, list[Speed]] = {}
    notes = []
    for path in sorted(folder.glob("**/bench.json")):
        try:
            document = read_document(path)
        except ValueError as error:
            notes.append(f"{path} is left out: {error}")
            continue
        if document["what"] not in BENCHES:
            continue
        model = str((document.get("model") or {}).get("name", "unknown"))
        for cell in document["cells"]:
            for row in cell["variants"]:
                if not row.get("tokens_per_call"):
                    continue
                try:
                    key = repr(make_method(row["name"]))
                except ValueError:  # a baseline, such as transformers' own cache
                    continue
                rate = row["tokens_per_call"] / row["median"]
                speed = Speed(
                    tokens_per_s=rate,
                    model=model,
                    context_tokens=int(cell["cell"].get("context", 0)),
                    batch=int(row.get("batch") or cell["cell"].get("batch") or 0),
                    device=str(document["environment"].get("device_name", "")),
                )
                found.setdefault(key, []).append(speed)
    return found, notes
