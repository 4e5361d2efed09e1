"""The command `show`: one sample whole, with its prompt made again, so that a person can judge the answer."""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.text import Text

from kvbench.cli.rerun import check_trust
from kvbench.engine.requests import FALLBACK, OUT_OF_TIME, SEVERAL
from kvbench.errors import FileMissing, NameUnknown, SettingMissing, check_whole, did_you_mean, unknown_name
from kvbench.results.lines import read_samples
from kvbench.results.measures import AVERAGE, BYTES, FIDELITY, item_title, ledger_items
from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord, prompt_digest
from kvbench.runs.config import read_stored
from kvbench.show import terminal
from kvbench.show.progress import format_bytes
from kvbench.show.terminal import number
from kvbench.show.text import safe

if TYPE_CHECKING:
    from kvbench.engine.requests import Request

LISTED = 20  # samples that are listed where none was requested
WHOLE, TAIL = "whole", "tail"
FLAG_WORDS = {
    FALLBACK: "which marks no final answer: its last number was graded",
    SEVERAL: "which marks several unlike numbers as its answer",
    OUT_OF_TIME: "which could not be judged in time and counts as wrong",
}


def main(cfg: DictConfig) -> int:
    """Print the sample; 1 when the rebuilt prompt differs from the stored one."""
    if not cfg.run:
        raise SettingMissing(
            "show needs the folder of a stored run: python -m kvbench show FOLDER SAMPLE", setting="run"
        )
    if cfg.prompt not in (WHOLE, TAIL):
        raise unknown_name("prompt", cfg.prompt, (WHOLE, TAIL))
    check_whole("repeat", cfg.repeat, 0)
    folder = Path(cfg.run)
    stored = RunRecord.load(folder)
    if stored is None:
        raise FileMissing(
            f"run={folder} holds no stored run; give the folder that has run.json and samples.jsonl", setting="run"
        )
    samples, damaged = read_samples(folder / "samples.jsonl", stored.hash, sealed=stored.sealed)
    console = terminal.console(100)
    if damaged:
        console.print(Text(f"! {damaged} damaged lines of samples.jsonl do not count"))
    if len(samples) < stored.counts.done:
        console.print(Text(f"! {stored.counts.done - len(samples)} answers that the run had are not in samples.jsonl"))
    if not cfg.sample:
        names = list(dict.fromkeys(name for name, _ in samples))
        listed = ", ".join(safe(name) for name in names[:LISTED])
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        console.print(Text(f"{len(names)} samples: {listed}{more}"))
        return 0
    record = samples.get((str(cfg.sample), cfg.repeat))
    if record is None:
        raise NameUnknown(_missing(str(cfg.sample), cfg.repeat, samples), setting="sample")
    is_same = True
    if cfg.prompt == WHOLE:
        parts, is_same = _prompt(cfg, folder, record)
    else:
        parts = [("prompt, its end as stored", _tail(record))]
    for title, text in [*parts, *_answers(record)]:
        console.print(Text(f"--- {title}", style="bold"), soft_wrap=True)
        console.print(Text(text), soft_wrap=True)
    for line in _numbers(record):
        console.print(Text(line), soft_wrap=True)
    return 0 if is_same else 1


def _missing(sample: str, repeat: int, samples: dict) -> str:
    names = sorted({name for name, _ in samples})
    if sample in names:
        count = sum(name == sample for name, _ in samples)
        return f"repeat={repeat}: sample {safe(sample)} has {count} answers, counted from 0"
    hint = did_you_mean(sample, map(safe, names))
    return f"sample={safe(sample)} is not in the run's samples.jsonl.{hint} Without a sample, show lists them"


def _prompt(cfg: DictConfig, folder: Path, record: SampleRecord) -> tuple[list[tuple[str, str]], bool]:
    """The prompt under its title, and whether nothing contradicts it."""
    stored = record.get("prompt")
    try:
        request, text = rebuild(cfg, folder, record["sample_id"])
    except (ValueError, OSError, ImportError) as error:
        if not cfg.trust and "trust=true" in str(error):
            raise
        return [(f"prompt, its end as stored; the whole cannot be made here: {error}", _tail(record))], True
    pieces = f", in {len(request.segments)} parts" if len(request.segments) > 1 else ""
    size = f"{request.num_prompt_tokens} tokens{pieces}"
    if stored is None:
        return [(f"prompt, {size}; the journal is of before prompts had a hash, so nothing checks it", text)], True
    if stored["sha256"] == prompt_digest(request.prompt):
        return [(f"prompt, {size}, the same as was asked (sha256 {stored['sha256'][:12]})", text)], True
    return [
        (f"prompt as made now, {size}: NOT what was asked; data, tokenizer or code changed since", text),
        ("prompt as asked, its end as stored", _tail(record)),
    ], False


def rebuild(cfg: DictConfig, folder: Path, sample_id: str) -> "tuple[Request, str]":
    """Rebuild the prompt of a sample from the task's data and the model's tokenizer.

    Returns the request, and its text as read by the model, with the other turns of a conversation.
    """
    if not (folder / "config.yaml").is_file():
        raise FileMissing(f"{folder} has no config.yaml, which names task and model")
    settings = read_stored(folder)
    if not cfg.trust:
        check_trust(settings, folder, with_method=False)
    if cfg.data_dir is not None:
        settings["task"]["data_dir"] = str(cfg.data_dir)
    from kvbench.models.load import load_outline
    from kvbench.tasks import load_task

    model = load_outline(settings["model"])
    limit, seed, protocol = settings.get("limit"), settings.get("seed", 0), settings["protocol"]
    task = load_task(settings["task"], model, limit=limit, seed=seed, protocol=protocol)
    request = next((item for item in task.requests if item.sample_id == sample_id), None)
    if request is None:
        raise NameUnknown(f"the task, as its data are now, has no sample {safe(sample_id)}", setting="sample")
    said = [request.prompt, *(turn.tokens for turn in request.turns)]
    return request, "\n[the model's answer]\n".join(str(model.tokenizer.decode(list(ids))) for ids in said)


def _tail(record: SampleRecord) -> str:
    stored = record.get("prompt")
    return f"...{stored['tail']}" if stored else "(the journal is of before prompts were noted)"


def _answers(record: SampleRecord) -> list[tuple[str, str]]:
    gold = record.get("gold")
    if gold is None:
        answer = record["meta"].get("answer", record["meta"].get("answers"))
        gold = [] if answer is None else [str(one) for one in (answer if isinstance(answer, list) else [answer])]
    right = [(f"right answer {number + 1} of {len(gold)}", text) for number, text in enumerate(gold)]
    if len(right) == 1:
        right = [("right answer", right[0][1])]
    state = (
        f"{record['status']}{': ' + safe(record['message']) if record['message'] else ''}, ended by {record['finish']}"
    )
    state += "".join(f", {FLAG_WORDS[flag]}" for flag in record.get("flags", ()))
    turns = [
        (f"answer {number} ({turn['finish']})", turn["text"]) for number, turn in enumerate(record.get("turns", ()), 1)
    ]
    return [*turns, (f"answer ({state})", record["text"]), *(right or [("right answer", "(not in the journal)")])]


def _numbers(record: SampleRecord) -> list[str]:
    """Scores, fidelity and bytes, a line each."""
    lines = ["--- numbers"]
    lines += [
        f"{safe(name)}: {'not finite' if value is None else f'{value:.4g}'}" for name, value in record["scores"].items()
    ]
    fidelity = record["fidelity"] or {}
    for measure in FIDELITY.values():
        value = fidelity.get(measure.key)
        if value is not None:
            lines.append(f"{measure.title}: {number(value, measure.scale)} {measure.unit}")
    for choice, entry in enumerate(record.get("choices", [])):
        lines.append(f"choice {choice}: log-likelihood {entry['loglikelihood']:.4g}")
    ledger = record["ledger"]
    whole = ledger.get("fp16_bytes")
    for held in BYTES:
        count = ledger.get(f"{held.name}_bytes")
        if count is not None:
            # An average is over steps, each with an FP16 cache of its own.
            share = f" ({100 * count / whole:.1f} % of an FP16 full cache)" if whole and held is not AVERAGE else ""
            lines.append(f"{held.short}: {format_bytes(count)}{share}")
    items = [f"{item_title(name)} {format_bytes(count)}" for name, count in ledger_items(ledger).items() if count]
    return [*lines, *([f"resident are: {', '.join(items)}"] if items else [])]
