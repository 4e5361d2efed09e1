"""Requests for the log-likelihoods of continuations instead of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import TYPE_CHECKING

from kvbench.engine.requests import Request
from kvbench.errors import PromptLength
from kvbench.tasks.taskset import TaskSet

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel


@dataclass(kw_only=True)
class ChoiceSet(TaskSet):
    """A task of one right choice among several; `right` is its place, for each sample that has choices."""

    right: dict[str, int] = field(default_factory=dict)

    def score_choices(self, request: Request, choices: list[dict]) -> dict[str, float]:
        """See `TaskSet`: 1 when no other choice is as likely as the right one."""
        likely = [choice["loglikelihood"] for choice in choices]
        right = self.right[request.sample_id]
        return {"score": float(all(likely[right] > other for at, other in enumerate(likely) if at != right))}


def with_choices(request: Request, model: "LoadedModel", continuations: Sequence[str], gold: int) -> Request:
    """The request that scores continuations of a prompt, instead of generating an answer.

    The prompt is kept, truncation included; as in `choice_request`, its last token is read after compression.

    Args:
        continuations: Each begins with a space.
        gold: Index of the right one.
    """
    choices = tuple(tuple(model.tokenizer.encode(text, add_special_tokens=False)) for text in continuations)
    *before, last = request.segments
    return replace(
        request,
        segments=tuple(before) + (tuple(part for part in (last[:-1], last[-1:]) if part) if not before else (last,)),
        gold=choices[gold],
        choices=choices,
        thoughts=None,
        max_new_tokens=1,
    )


def choice_request(
    model: "LoadedModel",
    *,
    sample_id: str,
    subset: str,
    context: str,
    continuations: Sequence[str],
    question: str = "",
    rendered: bool = False,
    gold: int | None = None,
    meta: dict | None = None,
) -> Request:
    """Make the request that scores several continuations of one prompt.

    The last token of the prompt is a segment of its own. It is fed after compression, through the pages, so that the
    first token of every continuation depends on the method: the letters that multiple-choice tasks score are one token
    long and would otherwise come out of the prompt's exact pass, alike for all methods.

    Args:
        continuations: At least one, none of them empty; each continues `context + question`.
        question: Rest of the prompt, which is not seen before compression; empty for a query-aware prompt.
        rendered: The prompt is what a chat template made: no special tokens are put around it.
        gold: Index of the right continuation, which is also compared with the full cache; None for none.

    Source: lm-eval 0.4.13, TemplateLM._encode_pair: white space between prompt and continuation belongs to the
        continuation, and both are tokenised together; a long prompt loses its beginning.
    Differs: Where the joint tokens do not begin with the prompt's own, the continuation is tokenised alone; lm-eval
        takes as many joint tokens as are left, which then repeat or lose some of the prompt.
    """
    tokenizer = model.tokenizer
    prompt = context + question
    stripped = prompt.rstrip()
    head = tokenizer.encode(stripped, add_special_tokens=not rendered) if stripped else []
    if not head:
        # Nothing to continue: what begins a text stands for it, as in lm-eval.
        head = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]
    tails = []
    for continuation in continuations:
        continuation = prompt[len(stripped) :] + continuation
        whole = tokenizer.encode(stripped + continuation, add_special_tokens=not rendered)
        tail = whole[len(head) :] if whole[: len(head)] == head else []
        tails.append(tuple(tail or tokenizer.encode(continuation, add_special_tokens=False)))
    shortest, longest = min(map(len, tails)), max(map(len, tails))
    # The last token of a continuation is only predicted, never read.
    room = model.max_tokens - longest
    if not shortest or room < 2:
        raise PromptLength(
            f"{sample_id}: a continuation of {longest if shortest else 0} tokens cannot be scored: it must have at "
            f"least one token and leave room for a prompt in the {model.max_tokens} tokens of model {model.name}"
        )
    cut = max(len(head) - room, 0)
    border = len(head) - 1
    if question:
        seen = tokenizer.encode(context, add_special_tokens=not rendered)
        border = min(len(commonprefix([seen, head])), border)
    kept, border = head[cut:], max(border - cut, 0)
    return Request(
        sample_id=sample_id,
        subset=subset,
        segments=tuple(part for part in (tuple(kept[:border]), tuple(kept[border:])) if part),
        gold=tails[gold] if gold is not None else (),
        answers=(continuations[gold],) if gold is not None else (),
        choices=tuple(tails),
        max_new_tokens=1,
        num_prompt_tokens_untruncated=len(head),
        meta=meta or {},
    )
