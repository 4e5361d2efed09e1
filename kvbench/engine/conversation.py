"""Conversations: what is said behind an answer is read into the same compressed cache, and answered in its turn.

The cache keeps what it holds of the prompt and of the answers so far; nothing is read again. A policy that only appends
reads a turn at once, any other one token by token, as it reads a question behind a shared context.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.engine.answer import Answer
from kvbench.engine.requests import Request
from kvbench.engine.rows import AnswerRow, ForcedRow, Row
from kvbench.engine.runner import Runner


@dataclass(frozen=True)
class Forced:
    """The answers of a request that are forced, one behind the other.

    Args:
        gold: Their tokens.
        ends: How many tokens there are up to the end of each answer but the last.
        behind: All that is read behind the prompt: these tokens without the last one, and what is said between them.
        places: Which of the logits behind the prompt, and behind each token of `behind`, predict the tokens.
    """

    gold: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: Request, answers: Sequence[Sequence[int]]) -> "Forced":
        """Puts answers together, up to the first that is empty.

        Args:
            request: What is said between them.
            answers: Tokens of the first answer, and of that of each turn.
        """
        gold: list[int] = []
        behind: list[int] = []
        places: list[int] = []
        ends = []
        for place, answer in enumerate(answers):
            if not answer:
                break
            if place:
                ends.append(len(gold))
                behind += request.turns[place - 1].tokens
            places += range(len(behind), len(behind) + len(answer))
            behind += answer
            gold += answer
        return cls(tuple(gold), tuple(ends), tuple(behind[:-1]), tuple(places))


def next_turn(runner: Runner, state: Row) -> bool:
    """Reads the next turn into the row of an answer that is over.

    Args:
        runner: Has the row open.
        state: The row; it goes on with the next answer.

    Returns:
        False where the conversation is over.

    Raises:
        NotFinite: A logit is not finite.
    """
    turns = state.request.turns
    if isinstance(state, AnswerRow):
        if len(state.turns) == len(turns):
            return False
        turn, unread = turns[len(state.turns)], state.answer.unread
    elif isinstance(state, ForcedRow) and not state.meter.done:
        done = len(state.meter.nll)
        turn, unread = turns[state.ends.index(done)], [state.meter.gold[done - 1]]
    else:
        return False
    begin = time.perf_counter()
    if isinstance(state, AnswerRow):
        _note(runner, state, len(turn.tokens))
    with runner.store.ledger.aside(state.row):  # averages are over the answers
        state.logits = runner.append(state.row, [*unread, *turn.tokens])
    state.timing["turns_s"] = state.timing.get("turns_s", 0.0) + time.perf_counter() - begin
    return True


def _note(runner: Runner, state: AnswerRow, num_turn_tokens: int) -> None:
    """Keeps what an answer leaves in the journal, and begins the next one."""
    answer, (held, kept) = state.answer, runner.report(state.row)
    state.turns.append(
        {
            "text": answer.text,
            "token_ids": list(answer.token_ids),
            "finish": answer.finish,
            "resident_bytes": held["resident_bytes"],
            "fp16_bytes": held["fp16_bytes"],
            "tokens_seen": kept["tokens_seen"],
            "num_turn_tokens": num_turn_tokens,
        }
    )
    taken = len(answer.token_ids) + num_turn_tokens
    state.answer = Answer(state.request, answer.tokenizer, answer.end_ids, answer.room - taken)
