"""The record of one sample: a line of `samples.jsonl`, how it is made, and how it is read.

A line is bound to its run by a seal, a digest over the run's hash and the rest of the line. It finds accidents and
mix-ups: a line that was edited, or that another run wrote. It is no signature and
prevents no forgery.

`kvbench.results.journal` decides when a line is written; the format of a line is defined here alone.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict, cast

from kvbench.engine.requests import Outcome, Request
from kvbench.results.typed import Misfit, parse, read_json
from kvbench.results.writing import encode_line, plain
from kvbench.stats.repetition import ends_in_loop

Key = tuple[str, int]  # which sample, which of its answers
SEAL_DIGITS = 16
TAIL_LENGTH = 200  # characters
TAIL_TOKENS = 256  # tokens that are decoded for them: a token is a character at least, except for parts of one
LONGEST_LINE = 1 << 26  # bytes; the longest answers need a hundredth
SHARES = {"top1_agreement", "gold_argmax_share", "gold_exact", "dp_rms"}  # of the fidelity
ROUNDING = 1e-9  # by which a mean of shares may exceed them


class Kept(TypedDict, total=False):
    """The work of a method on the tokens of one sample; methods may say more than this."""

    tokens_seen: int
    slots_per_tier: list[float]
    """Slots over layers and KV heads."""
    slot_ratio: float
    """Share of the tokens that is held."""
    prompt_tokens: int
    prompt_slots: float
    prompt_slots_min: float
    prompt_slots_max: float
    lists: int
    page_tokens: int
    slot_bytes: float
    prompt_chunks: int
    """Parts in which the prompt was read; absent where it was one."""
    replay_tokens: int
    """Tokens read in a second pass over the prompt; where the method asks for one."""
    read_ratio: float
    """Bytes read in decode steps, as a share of reading everything; where the method chooses what to read."""


class Prompt(TypedDict):
    """The question, in short: the whole prompt of a benchmark is large, and not ours to pass on."""

    sha256: str
    """Of the token ids in order, each as 4 bytes, the lowest first."""
    tail: str
    """The last `TAIL_LENGTH` characters as the model read them, special tokens shown."""


class TurnRecord(TypedDict):
    """One answer of a conversation that went on, and the cache when it ended."""

    text: str
    """The answer, as in the record."""
    token_ids: list[int]
    """Its tokens."""
    finish: str
    """Reason of its end."""
    gold: list[str]
    """The right answers to it."""
    resident_bytes: int
    fp16_bytes: int
    """An FP16 full cache of the same tokens."""
    tokens_seen: int
    """Tokens that the model had read by then, from the beginning of the prompt."""
    num_turn_tokens: int
    """Tokens that were read behind it, before the next answer."""


class SampleRecord(TypedDict):
    """One answer to one prompt, as strict JSON: a number that is not finite is None.

    Two runs of the same thing write the same records, `timing` apart.
    """

    sample_id: str
    """Unique and stable within a task, for example `trec/17`."""
    subset: str
    """Group that scores are averaged over."""
    repeat: int
    """Number of the answer among those to this prompt, from 0."""
    status: Literal["ok", "nan", "oom", "ungraded"]
    """`ok`; `nan`: logits or scores were not finite; `oom`: it did not fit in memory or in the page budget; `ungraded`:
    there is an answer, and its grader failed, or cannot judge the right answer in time either."""
    text: str
    """The answer, cut at the stop rule; empty without one. Of a conversation the last one."""
    token_ids: NotRequired[list[int]]
    """The answer's tokens, stop token excluded. `read_samples` leaves them out."""
    answer: NotRequired[dict[str, float]]
    """Never on a line: what `read_samples` found in the tokens that it leaves out (`answer_facts`)."""
    finish: str
    """Reason of the answer's end: `stop`, `eos`, `length`, or `none` without an answer."""
    first_end: NotRequired[int | None]
    """Tokens before the answer first wanted to end, where the task made it go on (`min_new_tokens`); None where it did
    not want to. Not in older journals."""
    turns: NotRequired[list[TurnRecord]]
    """Of a conversation, the answers before the last one. The ledger is the last one's; its averages are over all."""
    gold: NotRequired[list[str]]
    """The right answers, as the task has them; empty where it has none. Not in older journals."""
    prompt: NotRequired[Prompt]
    """The question; `kvbench show` makes the whole of it again. Not in older journals."""
    scores: dict[str, float | None]
    """Name of a metric -> score in [0, 1]; empty when the status is not ok."""
    flags: NotRequired[list[Literal["fallback", "out_of_time", "several"]]]
    """Unusual ways of grading. `fallback`: the answer marks nothing as its final
    answer, and its last number (or last mathematics) was graded. `out_of_time`: it could not be judged in time, while
    the right answer can, and counts as wrong. `several`: it marks several unlike numbers as its answer, of which the
    task's form takes the first or the last. Absent without any, and in older journals."""
    fidelity: dict[str, float | None] | None
    """Teacher forcing on the gold answer, or on the full cache's own (`fidelity.on`), against the full cache; None
    without such an answer or when the status is not ok. `nll`, `nll_full`, `kl_mean`, `kl_99`, `kl_999`, `kl_max` (nats
    per token), `dp_rms` (root mean square of what the probability of the forced token changed by), `top1_agreement`,
    `gold_argmax_share` (shares), all over the same `num_measured` tokens: those that were predicted from the compressed
    cache, which the first one is not; None where there is none, and for a quantile where there are fewer than 100 or
    1,000. `gold_exact` (0 or 1) is over all `num_tokens`. `kl_new` is the mean over the `num_new` measured tokens
    that do not copy the prompt (`kvbench.engine.fidelity.copied_tokens`). Journals of before lack `kl_99`, `kl_999`,
    `dp_rms`, `kl_new` and `num_new`."""
    drift: NotRequired[dict[str, list[float]] | None]
    """The same along the answer, in the bins of `kvbench.engine.requests.BINS`, up to the last that has a token: sums
    of `nll`, `nll_full` and `kl` over the `tokens` of each bin, and how many had the `same_first_choice`."""
    per_token: NotRequired[dict[str, list[float]] | None]
    """The same token by token, with `fidelity.per_token`: `nll`, `nll_full`, `kl`, `same_first_choice`,
    `right_first_choice`, `copied` (not in older journals), each from the first token on, and `exact`, how many at
    the beginning the means leave out."""
    choices: NotRequired[list[dict[str, float | bool]]]
    """One entry for each continuation that the task asked about: `loglikelihood` (nats), `greedy` (every token was the
    most likely one), `num_tokens`. Absent when the task asked about none."""
    ledger: dict[str, float]
    """Bytes of this sample. When the answer ended: the items (`payload_bytes`, `quant_meta_bytes`, `track_bytes`,
    `slack_bytes`, `residual_bytes`, `residual_slack_bytes`, `table_bytes`, `free_list_bytes`, `book_bytes`; of a
    model with layers of several kinds, `window_bytes` and `state_bytes`), their sum `resident_bytes`, and `fp16_bytes`,
    what the model itself would hold of the same tokens in FP16. Of the layers on which a method acts, where there are
    others: `full_layers_bytes`, and `full_layers_fp16_bytes`. Over time: `average_bytes` (mean over
    decode steps), `average_ratio` (mean of each step's share of its FP16 cache), `peak_bytes`, `staging_peak_bytes`
    (uncompressed prompt, and what a second pass gave, held while it was compressed), and where the prompt was read in
    chunks `one_shot_peak_bytes` (the peak, had it been read at once). Shares of the FP16 cache:
    `ratio`, `payload_ratio`. And the size of a page, `page_bytes`. Empty without an answer."""
    kept: Kept
    """The method's work. Empty without an answer."""
    num_prompt_tokens: int
    """Length of the prompt as run, in tokens."""
    num_prompt_tokens_untruncated: int
    """Length of the prompt before the task's truncation rule, in tokens."""
    truncated: bool
    """The task's rule shortened the prompt."""
    nan_layer: int | None
    """First layer whose attention output was not finite; -1: the logits only; None unless the status is `nan`."""
    message: str
    """Readable reason of a status other than ok; else empty."""
    protocol: dict[str, Any]
    """Every choice of how the task is posed and scored."""
    meta: dict[str, Any]
    """Facts that the task keeps with the sample, for example the right answer."""
    timing: NotRequired[dict[str, float]]
    """`prefill_s`, `probe_s` (of it, a second pass over the prompt), `decode_s` (of the whole batch), `decode_share_s`
    (this sample's share of it), `decode_tokens`, `batch_rows`. Absent from the points of a calibration, whose
    prompts are replayed."""
    seal: NotRequired[str]
    """Digest of the run's hash and the rest of the line. It is on the line only: readers check it and take it off."""


def prompt_digest(ids: Iterable[int]) -> str:
    """SHA-256 of token ids in order, each as 4 bytes, the lowest first; 64 hex digits."""
    return hashlib.sha256(b"".join(one.to_bytes(4, "little") for one in ids)).hexdigest()


def journal_record(
    request: Request, outcome: Outcome, scores: Mapping[str, float], protocol: dict[str, Any], tail: str = ""
) -> SampleRecord:
    """Make the record of a finished sample, with its keys in the order of the file.

    Without scores where it did not end well.
    """
    record: SampleRecord = {
        "sample_id": outcome.sample_id,
        "subset": request.subset,
        "repeat": outcome.repeat,
        "status": cast(Literal["ok", "nan", "oom", "ungraded"], outcome.status),
        "text": outcome.text,
        "token_ids": list(outcome.token_ids),
        "finish": outcome.finish,
        "first_end": outcome.first_end,
        "gold": list(request.answers),
        "prompt": {"sha256": prompt_digest(request.prompt), "tail": tail[-TAIL_LENGTH:]},
        "scores": dict(scores),
        "flags": cast(list[Literal["fallback", "out_of_time", "several"]], list(outcome.flags)),
        "fidelity": outcome.fidelity,
        "drift": outcome.drift,
        "per_token": outcome.per_token,
        "choices": outcome.choices,
        "ledger": outcome.ledger,
        "kept": cast(Kept, outcome.kept),
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
    if not outcome.flags:
        del record["flags"]
    if request.turns:
        right = [list(request.answers), *(list(turn.answers) for turn in request.turns)]
        turns = [answer | {"gold": gold} for answer, gold in zip(outcome.turns, right, strict=False)]
        record |= {"turns": cast(list[TurnRecord], turns), "gold": right[-1]}
    return record


def seal_of(record: Mapping[str, Any], run: str) -> str:
    """Seal a record (JSON types, without a seal) of a run, whatever the order of its keys."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{run}\n{text}".encode("ascii")).hexdigest()[:SEAL_DIGITS]


def write_line(record: SampleRecord, run: str) -> bytes:
    """Write one record as a sealed line of ASCII JSON, newline included.

    Raises:
        TypeError: It is no whole record, or its line would be too long: a reader would drop it.
    """
    content = cast(dict[str, Any], plain(record))
    try:
        _check(content)
    except Misfit as error:
        raise TypeError(f"the record of sample {record.get('sample_id')!r} cannot be written: {error}") from error
    line = encode_line(content | {"seal": seal_of(content, run)})
    if len(line) > LONGEST_LINE:
        raise TypeError(f"the record of sample {record['sample_id']!r} has {len(line)} bytes")
    return line


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a journal, as it was read."""

    content: bytes
    """Without its newline."""
    record: SampleRecord | None
    """Without its seal; None where the line does not count."""
    is_sealed: bool = True
    """The record had a seal."""
    fault: str = ""
    """Reason why it does not count: `torn line`, ..."""


def read_line(line: bytes, run: str, *, is_sealed: bool = True) -> Line:
    """Read one line without its newline. Before there were seals, no line had one: `is_sealed=False` takes those."""
    if len(line) > LONGEST_LINE:
        return Line(content=line, record=None, fault=f"line of {len(line)} bytes or more, too long for a record,")
    try:
        record = read_json(line)
        _check(record)
        seal = record.pop("seal", None)
        if seal is None and is_sealed:
            return Line(content=line, record=None, is_sealed=False, fault="line without a seal")
        if seal is not None and seal != seal_of(record, run):
            return Line(content=line, record=None, fault="edited line, or line of another run,")
    except (Misfit, RecursionError) as error:
        return Line(content=line, record=None, fault=f"line that is no record ({_short(error)})")
    except ValueError:
        return Line(content=line, record=None, fault="unreadable line")
    return Line(content=line, record=record, is_sealed=seal is not None)


def _short(error: BaseException) -> str:
    text = str(error)
    return ascii(text[:80])[1:-1]


def _check(record: Any) -> None:
    """Raise Misfit for an incomplete record, or one with an impossible number."""
    parse(record, SampleRecord)
    check_scores(record["scores"])
    shares = record["fidelity"] or {}
    for name in SHARES & shares.keys():
        _check_range(f"fidelity.{name}", shares[name], 1.0)
    counts = {name: record[name] for name in ("repeat", "num_prompt_tokens", "num_prompt_tokens_untruncated")}
    for name, held in _ledgers(record):
        counts |= {f"{name}.{key}": count for key, count in held.items()}
        if held.get("fp16_bytes") == 0:
            raise Misfit(f"{name}.fp16_bytes is 0, and a full cache holds something")
    counts |= {f"timing.{name}": seconds for name, seconds in record.get("timing", {}).items()}
    for name, count in counts.items():
        _check_range(name, count)


def check_scores(scores: Mapping[str, float | None]) -> None:
    """Refuse a score outside [0, 1]; non-finite ones are handled elsewhere.

    Raises:
        ValueError: Names the score.
    """
    for name, score in scores.items():
        _check_range(f"scores.{name}", score, 1.0)


def _ledgers(record: SampleRecord) -> Iterator[tuple[str, Mapping[str, float]]]:
    """The bytes of a record by location: at its end, and at the end of each answer of a conversation."""
    yield "ledger", record["ledger"]
    for index, turn in enumerate(record.get("turns", ())):
        yield f"turns[{index}]", {name: turn[name] for name in ("resident_bytes", "fp16_bytes")}


def _check_range(where: str, value: float | None, most: float = math.inf) -> None:
    """Raise Misfit for a number that is negative or too large, beyond rounding; None is none, and NaN neither."""
    if value is not None and value < -ROUNDING:
        raise Misfit(f"{where} is negative")
    if value is not None and most + ROUNDING < value < math.inf:
        raise Misfit(f"{where} is {value:g}, more than {most:g}")


def answer_facts(record: SampleRecord) -> dict[str, float]:
    """Facts of an answer's tokens, of a conversation's in sum.

    `tokens`, their number, and `loops`, the share of answers that end in a loop. Empty where there is no answer, or its
    tokens are not stored.
    """
    parts = [*record.get("turns", ()), record]
    if record["finish"] == "none" or not all("token_ids" in each for each in parts):
        return {}
    ids = [each["token_ids"] for each in parts]
    return {"tokens": float(sum(map(len, ids))), "loops": sum(map(ends_in_loop, ids)) / len(ids)}


def answers_of(record: SampleRecord) -> list[str]:
    """The answers to a sample in the order in which they were given: several of a conversation, else one."""
    return [*(turn["text"] for turn in record.get("turns", ())), record["text"]]


def key_of(record: SampleRecord) -> Key:
    """The identity of a record inside its run: which sample, which of its answers."""
    return record["sample_id"], record["repeat"]
