"""Requests of the tasks to the engine, and its answers."""

from dataclasses import dataclass, field
from itertools import chain

# First forced token of each bin, the same for every answer, so that bins add up over answers of any length. The first
# bin is the token that the prompt's own pass predicts.
BINS = (0, 1, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)

# Circumstances of a score that its readers should know; see `SampleRecord.flags`.
FALLBACK, OUT_OF_TIME, SEVERAL = "fallback", "out_of_time", "several"
FLAGS = (FALLBACK, OUT_OF_TIME, SEVERAL)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Words said after an answer, and the right answer to them.

    Args:
        tokens: Token ids that are read after the answer: its end, what the user says, and what opens the next answer.
        gold: As `Request.gold`.
        answers: As `Request.answers`.
    """

    tokens: tuple[int, ...]
    gold: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Thoughts:
    """Rules for thoughts that an answer may begin with.

    Args:
        opened: The prompt ends inside them.
        budget_tokens: Most tokens of them, which do not count as the answer's; None = they count, and have no limit of
            their own.
        end: Token ids that are put after thoughts which have used up their budget, so that the answer begins.
    """

    opened: bool = False
    budget_tokens: int | None = None
    end: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to answer, with everything that can change the answer.

    Args:
        sample_id: Unique and stable within a task, for example `trec/17`.
        subset: Name of the group that scores are averaged over.
        segments: Token ids of the prompt, split where compression may happen in between. One segment means that the
            whole prompt is seen before anything is compressed; `(context, question)` compresses the context before the
            question is seen.
        gold: Token ids of the reference answer for teacher forcing; empty when the sample has none.
        warmup_tokens: First tokens of `gold` that are fed and not measured.
        answers: The right answers as the task has them, for people; nothing is computed from them.
        choices: Token ids of continuations to score by log-likelihood; each is scored on a fork of the one
            compressed prompt.
        turns: Later turns of a conversation: each is read into the cache after the answer before
            it, and answered in its turn.
        thoughts: Form of thoughts at the beginning of answers; None where the prompt is no chat.
        max_new_tokens: Length limit of each answer; 0 generates none, and only `gold` is forced.
        min_new_tokens: Stop rules are ignored before this many tokens.
        stop: The answer ends before the first of these strings.
        stop_token_ids: The answer ends before the first of these tokens.
        temperature: 0 is greedy; > 0 samples.
        top_p: Nucleus mass in (0, 1].
        num_samples: Number of answers; > 1 only makes sense with temperature > 0.
        instruction_tokens: First tokens of the prompt that stand before what the user says: a system prompt, with what
            a chat template puts around it; 0 = none, or not known.
        closing_tokens: Last tokens of the prompt that close what the user says and open the answer, as a chat template
            puts them; 0 = none, or not known.
        num_prompt_tokens_untruncated: Length of the prompt before the task's truncation rule.
        past_context: `gold` may go on beyond the model's context, as streams do.
        meta: Data of the task for the journal (JSON types only).
    """

    sample_id: str
    subset: str
    segments: tuple[tuple[int, ...], ...]
    gold: tuple[int, ...] = ()
    warmup_tokens: int = 0
    answers: tuple[str, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    turns: tuple[Turn, ...] = ()
    thoughts: Thoughts | None = None
    max_new_tokens: int = 32
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    num_samples: int = 1
    instruction_tokens: int = 0
    closing_tokens: int = 0
    num_prompt_tokens_untruncated: int = 0
    past_context: bool = False
    meta: dict = field(default_factory=dict)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the whole prompt."""
        return tuple(chain.from_iterable(self.segments))

    @property
    def closing(self) -> tuple[int, ...]:
        """The token ids that `closing_tokens` counts."""
        return self.prompt[len(self.prompt) - self.closing_tokens :]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens over all segments."""
        return sum(len(segment) for segment in self.segments)

    @property
    def answer_tokens(self) -> int:
        """Most tokens of one answer, its thoughts included."""
        if self.thoughts is None or self.thoughts.budget_tokens is None or not self.max_new_tokens:
            return self.max_new_tokens
        return self.max_new_tokens + self.thoughts.budget_tokens + len(self.thoughts.end)

    @property
    def conversation_tokens(self) -> int:
        """Most tokens of all that comes after the prompt: the answers, and what is said between them."""
        return self.answer_tokens * (len(self.turns) + 1) + sum(len(turn.tokens) for turn in self.turns)

    @property
    def most_steps(self) -> int:
        """Decode steps of its longest row at most: of the answers, or of a forced text."""
        return max(self.conversation_tokens, len(self.gold), *map(len, self.choices))

    @property
    def truncated(self) -> bool:
        """True when the task's truncation rule cut this prompt."""
        return self.num_prompt_tokens_untruncated > self.num_prompt_tokens


@dataclass(kw_only=True)
class Outcome:
    """The journal's entry of one finished sample, before it is scored.

    Fields are those of the same names in `kvbench.results.sample.SampleRecord`, which says what they hold. Of two
    identical runs only `timing` differs; it has `shares_context` where the context had been read for an earlier
    question, so that `prefill_s` is of the question alone.
    """

    sample_id: str
    repeat: int = 0
    status: str = "ok"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str = "none"
    first_end: int | None = None
    num_prompt_tokens: int = 0
    nan_layer: int | None = None
    message: str = ""
    flags: list[str] = field(default_factory=list)
    turns: list[dict] = field(default_factory=list)
    fidelity: dict | None = None
    drift: dict[str, list[float]] | None = None
    per_token: dict[str, list[float]] | None = None
    choices: list[dict] = field(default_factory=list)
    ledger: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)
    timing: dict = field(default_factory=dict)
