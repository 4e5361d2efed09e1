"""Preflight of a cross-run batch: number of answers, seconds at a measured rate, bytes of memory and disk."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from kvbench.config.files import FULL
from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.requests import Outcome, Request
from kvbench.results import shards
from kvbench.results.provenance import machine
from kvbench.results.record import RunRecord
from kvbench.runs.cross_run_batch import needed_bytes
from kvbench.runs.experiment import Experiment, keys_of, prepare, prepared
from kvbench.runs.parts import Loaders

TRIAL_TOKENS = 16  # of an answer that is timed
TRIAL_ROWS = 4  # answers that are timed at once, at most


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Estimated work of runs of one task and model.

    Args:
        task: Its name.
        runs: Number of runs.
        samples: Prompts of each run.
        answers: Answers of all runs.
        there: Number of complete runs.
        prompt_tokens: Tokens of a prompt on average.
        usual_s: Seconds that the rest takes if answers are as long as the right ones; None where these are not known.
        most_s: If they are as long as they may be.
        memory_bytes: The model, and one full cache and its prompt at the longest sample.
        disk_bytes: Bytes of the records of all missing answers, at their greatest length.
        device: Description of the device that timed the answers.
    """

    task: str
    runs: int
    samples: int
    answers: int
    there: int
    prompt_tokens: float
    usual_s: float | None
    most_s: float
    memory_bytes: int
    disk_bytes: int
    device: str


def run_preflight(
    run_requests: Sequence[tuple[Mapping[str, Any], str]],
    parts: Loaders,
    say: Callable[[str], None] = lambda text: None,
) -> Preflight | None:
    """Prepare runs of one task, and time a few answers of the full cache to a prompt of usual length.

    Args:
        run_requests: Configuration and method name of each run. A run that cannot be prepared is left out; its error
            is raised when it is run.
        say: Called with the reason of each run that is left out.

    Returns:
        The preflight; None where no run can be prepared.
    """
    experiments = prepared(run_requests, parts, say)
    if not experiments:
        return None
    first, requests = experiments[0], experiments[0].task.requests
    there = [_there(one) for one in experiments]
    per_run = len(keys_of(requests))
    open_runs = [per_run - min(count, per_run) for count in there]
    read_s, step_s, record_bytes, token_bytes = _timed(prepare(first.config.of_full(), FULL, parts), parts)
    # A prompt is read once for all runs that lack it, so as often as the run that lacks most.
    reading_s = (
        read_s * fmean(request.num_prompt_tokens for request in requests) * max(open_runs) * len(requests) / per_run
    )
    lengths = [request.answer_tokens or len(request.gold) for request in requests]  # of a text, what is forced
    most = fmean(lengths)
    gold = [min(len(one.gold), length) for one, length in zip(requests, lengths, strict=True) if one.gold]
    row, prompt = needed_bytes(first)
    return Preflight(
        task=first.task.name,
        runs=len(experiments),
        samples=len(requests),
        answers=per_run * len(experiments),
        there=sum(there),
        prompt_tokens=fmean(request.num_prompt_tokens for request in requests),
        usual_s=reading_s + step_s * fmean(gold) * sum(open_runs) if gold else None,
        most_s=reading_s + step_s * most * sum(open_runs),
        memory_bytes=(first.model.weights_bytes or 0) + row + prompt,
        disk_bytes=int((record_bytes + token_bytes * most) * sum(open_runs)),
        device=machine(first.model.device).device,
    )


def _there(one: Experiment) -> int:
    """Answers of a run that are there, those included that workers have finished."""
    record = RunRecord.load(one.folder)
    if record is not None and record.status == "complete":
        return record.counts.done
    return len(shards.finished(one.folder, one.hash, frozenset(one.keys)))


def _timed(full: Experiment, parts: Loaders) -> tuple[float, float, float, float]:
    """Time a few answers to the prompt of median length, which is read once.

    Returns seconds per prompt token, seconds per answer token, bytes of a record without tokens, and bytes per token.
    """
    requests = sorted(full.task.requests, key=lambda request: request.num_prompt_tokens)
    middle = requests[len(requests) // 2]
    tokens = min(TRIAL_TOKENS, middle.answer_tokens or TRIAL_TOKENS)  # a task of forced texts has no answers
    outcomes, at = list[Outcome](), list[float]()  # what was answered; when each prompt was begun, and each step ended
    with parts.sharing(PromptCache(needed_bytes(full)[1], keeps_queries=True)):
        engine = parts.make_engine(full.config, full.model, full.policy)
        rows = min(TRIAL_ROWS, engine.most_requests, len(requests))
        trials = [_trial(middle, f"{number}", tokens) for number in range(rows)]
        running = engine.running(
            trials, on_outcome=outcomes.append, on_step=lambda numbers: at.append(time.perf_counter())
        )
        for _ in running:
            at.append(time.perf_counter())
    ok = [outcome for outcome in outcomes if outcome.status == "ok"]
    if not ok:
        return 0.0, 0.0, 0.0, 0.0
    steps = sum(outcome.timing["decode_tokens"] for outcome in ok)
    written = len(json.dumps(asdict(ok[0]), default=str))
    of_tokens = len(json.dumps([ok[0].text, ok[0].token_ids])) / max(1, len(ok[0].token_ids))
    return (
        (at[1] - at[0]) / middle.num_prompt_tokens,
        sum(outcome.timing["decode_share_s"] for outcome in ok) / steps if steps else 0.0,
        written - of_tokens * len(ok[0].token_ids),
        of_tokens,
    )


def _trial(request: Request, name: str, tokens: int) -> Request:
    """The same prompt, for one answer of so many tokens and no turn after it."""
    return replace(
        request,
        sample_id=name,
        gold=request.gold[:tokens],
        turns=(),
        thoughts=None,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        stop=(),
        stop_token_ids=(),
        temperature=0.0,
        num_samples=1,
    )
