"""The record of one sample: a line of `samples.jsonl`, how it is made, and how it is read.

`kvbench.results.journal` decides when a line is written; nothing else knows what is on it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from kvbench.engine.requests import Outcome, Request

Key = tuple[str, int]  # which sample, which of its answers


class SampleRecord(TypedDict):
    """One answer to one prompt, as strict JSON: a number that is not finite is None.

    Two runs of the same thing write the same records, `timing` apart.
    """

    sample_id: str
    """Unique and stable within a task, for example `trec/17`."""
    subset: str
    """Group that scores are averaged over."""
    repeat: int
    """Which of the answers to this prompt, from 0."""
    status: str
    """`ok`; `nan`: logits or scores were not finite; `oom`: it did not fit in memory or in the page budget."""
    text: str
    """The answer, cut at the stop rule; empty when the status is not ok."""
    token_ids: NotRequired[list[int]]
    """The answer's tokens, stop token excluded. `read_samples` leaves them out."""
    finish: str
    """Why the answer ended: `stop`, `eos`, `length`, or `none` when the status is not ok."""
    scores: dict[str, float | None]
    """Name of a metric -> score in [0, 1]; empty when the status is not ok."""
    fidelity: dict[str, float | None] | None
    """Teacher forcing on the gold answer, beside the full cache; None without a gold answer or when the status is not
    ok. `nll` and `nll_full` (nats per token), `kl_mean` and `kl_max` (nats per token; None where no gold token was read
    from the compressed cache), `top1_agreement` (share of these tokens, None likewise), `gold_argmax_share` (share of
    the gold tokens), `gold_exact` (0 or 1), `num_tokens`."""
    choices: NotRequired[list[dict[str, float | bool]]]
    """One entry for each continuation that the task asked about: `loglikelihood` (nats), `greedy` (every token was the
    most likely one), `num_tokens`. Absent when the task asked about none."""
    ledger: dict[str, float]
    """Bytes of this sample. When the answer ended: the items (`payload_bytes`, `quant_meta_bytes`, `track_bytes`,
    `slack_bytes`, `residual_bytes`, `residual_slack_bytes`, `table_bytes`, `free_list_bytes`), their sum
    `resident_bytes`, and `fp16_bytes`, an FP16 full cache of the same tokens. Over time: `average_bytes` (mean over
    decode steps), `average_ratio` (mean of each step's share of its FP16 cache), `peak_bytes`, `staging_peak_bytes`
    (uncompressed prompt held while it was compressed). Shares of the FP16 cache: `ratio`, `payload_ratio`. And the
    size of a page, `page_bytes`. Empty when the status is not ok."""
    kept: dict[str, Any]
    """What the method did: `tokens_seen`, `slots_per_tier` (list, over layers and KV heads), `slot_ratio` (share of the
    tokens that is held), `prompt_tokens`, `prompt_slots`, `prompt_slots_min`, `prompt_slots_max`, `lists`,
    `page_tokens`, `slot_bytes`; `read_ratio` (bytes read in decode steps, as a share of reading everything) where the
    method chooses what to read. Empty when the status is not ok."""
    num_prompt_tokens: int
    """Length of the prompt as run, in tokens."""
    num_prompt_tokens_untruncated: int
    """Length of the prompt before the task's truncation rule, in tokens."""
    truncated: bool
    """The task's rule shortened the prompt."""
    nan_layer: int | None
    """First layer whose attention output was not finite; -1: the logits only; None unless the status is `nan`."""
    message: str
    """Why the status is not ok, for people; else empty."""
    protocol: dict[str, Any]
    """Every choice of how the task is posed and scored."""
    meta: dict[str, Any]
    """What the task keeps with the sample, for example the right answer."""
    timing: NotRequired[dict[str, float]]
    """`prefill_s`, `decode_s` (of the whole batch), `decode_share_s` (this sample's share of it), `decode_tokens`,
    `batch_rows`. Absent from the points of a calibration, whose prompts are replayed."""


def journal_record(
    request: Request, outcome: Outcome, scores: Mapping[str, float], protocol: dict[str, Any]
) -> SampleRecord:
    """Make the record of a finished sample.

    Args:
        request: What was asked.
        outcome: What the engine answered.
        scores: The scores of the answer; none for one that did not end well.
        protocol: How the task is posed and scored.

    Returns:
        The record, with its keys in the order of the file.
    """
    record: SampleRecord = {
        "sample_id": outcome.sample_id,
        "subset": request.subset,
        "repeat": outcome.repeat,
        "status": outcome.status,
        "text": outcome.text,
        "token_ids": list(outcome.token_ids),
        "finish": outcome.finish,
        "scores": dict(scores),
        "fidelity": outcome.fidelity,
        "choices": outcome.choices,
        "ledger": outcome.ledger,
        "kept": outcome.kept,
        "num_prompt_tokens": outcome.num_prompt_tokens,
        "num_prompt_tokens_untruncated": request.num_prompt_tokens_untruncated,
        "truncated": request.truncated,
        "nan_layer": outcome.nan_layer,
        "message": outcome.message,
        "protocol": protocol,
        "meta": request.meta,
        "timing": outcome.timing,
    }
    if not request.choices:
        del record["choices"]
    return record


def key_of(record: SampleRecord) -> Key:
    """The identity of a record inside its run: which sample, which of its answers."""
    return record["sample_id"], record["repeat"]


def parse(line: bytes) -> SampleRecord | None:
    """The record on a line, or None when the line is not a whole record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if isinstance(record, dict) and isinstance(record.get("sample_id"), str) and isinstance(record.get("repeat"), int):
        return record  # type: ignore[return-value] # of the other keys nothing is asked: older versions may lack one
    return None


def read_lines(content: bytes) -> Iterator[tuple[bytes, SampleRecord | None]]:
    """Go through the content of a journal, line by line.

    Args:
        content: What is in the file, in whatever state a crash left it.

    Returns:
        Each line without its newline, and its record; None for a line that is not a whole record.
    """
    *lines, rest = content.split(b"\n")
    for line in lines:
        yield line, parse(line)
    # A line without its newline may look complete and yet lack its end (a number cut short parses), so it never counts.
    if rest:
        yield rest, None


def read_samples(path: Path) -> tuple[dict[Key, SampleRecord], int]:
    """Read a journal without changing it, also while a run is writing.

    Args:
        path: `samples.jsonl`; a missing one is an empty one.

    Returns:
        Records by sample and repeat, without their token ids, and the number of lines that are no whole record.
    """
    found: dict[Key, SampleRecord] = {}
    damaged = 0
    for _, record in read_lines(path.read_bytes() if path.exists() else b""):
        if record is None:
            damaged += 1
        else:
            record.pop("token_ids", None)
            found.setdefault(key_of(record), record)
    return found, damaged
