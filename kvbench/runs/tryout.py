"""Trial of a user's method on one short prompt, before the full cache takes minutes to read all of them."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvbench.engine.prompt_cache import PromptCache
from kvbench.engine.requests import Outcome, Request
from kvbench.errors import BrokenRule
from kvbench.results.record import RunRecord
from kvbench.runs.verdict import complaint

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine
    from kvbench.policy import Policy

MOST_TOKENS = 512  # of the prompt; a longer one loses its beginning
NEW_TOKENS = 4
PROMPT_BYTES = 2**30  # most of a prompt that is kept for the second time


def try_out(experiment: Any, make_engine: "Callable[..., Engine]", say: Callable[[str], None]) -> None:
    """Run a method that is none of kvbench's on one short prompt of the task, where it has a run to make.

    Args:
        experiment: The run's `Experiment`.
        make_engine: Takes the configuration, the model and the policy, and `prompts`.
        say: Takes a line of text.

    Raises:
        BrokenRule: Its numbers are not finite, or it keeps more or less than it declares.
        Exception: Any error of the method.
    """
    target = str(experiment.config.method.get("_target_", ""))
    if target.startswith("kvbench.") or (RunRecord.load(experiment.folder) or RunRecord()).status == "complete":
        return
    shortest = min(experiment.task.requests, key=lambda request: request.num_prompt_tokens)
    engine = make_engine(experiment.config, experiment.model, experiment.policy, prompts=PromptCache(PROMPT_BYTES))
    say(f"trying {experiment.method} on one short prompt")
    broken = _broken(experiment.policy, engine, request := _short(shortest))
    if broken and shortest.num_prompt_tokens > MOST_TOKENS:  # a budget may be met by longer prompts alone
        broken = _broken(experiment.policy, engine, request := _short(shortest, whole=True))
    if broken:
        where = f"on {len(request.prompt)} tokens of {request.sample_id}, before anything else is run"
        raise BrokenRule(f"method {experiment.method}, {where}: {broken}")


def _broken(policy: "Policy", engine: "Engine", request: Request) -> str:
    """Fault of a method's answers to a request; empty where there is none."""
    outcomes: list[Outcome] = []
    again = replace(request, sample_id=f"{request.sample_id} again")  # shows what is kept of earlier prompts
    engine.run([request, again], on_outcome=outcomes.append)
    for one in outcomes:
        if one.status != "ok":
            return f"{one.status}: {one.message}"
        if said := complaint(policy, asdict(one)):
            return said
    return ""


def _short(request: Request, *, whole: bool = False) -> Request:
    """The end of a request's prompt, or the whole, with a short answer and none of what follows it."""
    prompt = request.prompt if whole else request.prompt[-MOST_TOKENS:]
    return replace(
        request,
        segments=(prompt,),
        gold=(),
        warmup_tokens=0,
        choices=(),
        turns=(),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=0,
        num_samples=1,
        instruction_tokens=0,
        num_prompt_tokens_untruncated=len(prompt),
    )
