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

MOST_TOKENS = 512  # of the prompt; a longer one loses its beginning
NEW_TOKENS = 4


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
    cut, request = shortest.num_prompt_tokens > MOST_TOKENS, _short(shortest)
    engine = make_engine(experiment.config, experiment.model, experiment.policy, prompts=PromptCache())
    outcomes: list[Outcome] = []
    engine.run([request], on_outcome=outcomes.append)
    for outcome in outcomes:
        where = f"on {len(request.prompt)} tokens of {request.sample_id}, before anything else is run"
        if outcome.status != "ok":
            raise BrokenRule(f"method {experiment.method}, {where}: {outcome.status}: {outcome.message}")
        if broken := complaint(experiment.policy, asdict(outcome)):
            if not cut:
                raise BrokenRule(f"method {experiment.method}, {where}: {broken}")
            say(f"! method {experiment.method}, {where}: {broken}; the run fails where that is so of whole prompts")


def _short(request: Request) -> Request:
    """The end of a request's prompt, with a short answer and none of what follows it."""
    return replace(
        request,
        segments=(request.prompt[-MOST_TOKENS:],),
        gold=(),
        warmup_tokens=0,
        choices=(),
        turns=(),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=0,
        num_samples=1,
        instruction_tokens=0,
        num_prompt_tokens_untruncated=min(request.num_prompt_tokens, MOST_TOKENS),
    )
