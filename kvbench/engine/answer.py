"""An answer in the making: its tokens, its thoughts, and the rules that end it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbench.engine.requests import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, END_OF_THOUGHT = "<think>", "</think>"
_MARK_TOKENS = 12  # more than a tokenizer takes for one of the two marks, and for white space around it


@dataclass
class Answer:
    """An answer in progress: its tokens and the rule that ends it.

    It ends at the latest where the model's context has no `room` after the prompt. Stop strings are not searched in
    thoughts, and thoughts with a budget of their own do not count as the answer's length.
    """

    request: Request
    tokenizer: "PreTrainedTokenizerBase"
    end_ids: tuple[int, ...]
    room: int = 1 << 62
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    first_end: int | None = None
    num_thought_tokens: int = 0
    """Tokens of the thoughts, up to their end; all so far while they last."""

    def __post_init__(self) -> None:
        # A stop string of n bytes spans at most n tokens; one more covers a token that begins before it.
        self._tail = max((len(text.encode()) for text in self.request.stop), default=0) + 1
        thoughts = self.request.thoughts
        self._thinking = thoughts is not None and thoughts.opened
        self._due: list[int] = []  # of the end that is put after thoughts, what is still to come

    @property
    def banned(self) -> list[int]:
        """Tokens that may not come next, because the answer is still too short."""
        if len(self.token_ids) >= self.request.min_new_tokens:
            return []
        return sorted({*self.end_ids, *self.request.stop_token_ids})

    @property
    def due(self) -> int | None:
        """The token that comes next whatever the model says: thoughts have used up their budget."""
        thoughts = self.request.thoughts
        if self._thinking and not self._due and thoughts is not None and thoughts.budget_tokens is not None:
            self._due = list(thoughts.end) if self.num_thought_tokens >= thoughts.budget_tokens else []
        return self._due[0] if self._due else None

    @property
    def most_left(self) -> int:
        """Tokens that are still to come at most, each of which the model alone decides; 0 where a rule has a say."""
        thoughts = self.request.thoughts
        if self.banned or (thoughts is not None and thoughts.budget_tokens is not None):
            return 0
        return min(self._most_tokens, self.room) - len(self.token_ids)

    @property
    def unread(self) -> list[int]:
        """Tokens of a finished answer that the model has not read, and that a conversation goes on from."""
        return self.token_ids[-1:] if self.finish == "length" else []

    def wants_to_end(self) -> None:
        if self.first_end is None:
            self.first_end = len(self.token_ids)

    def add(self, token: int) -> None:
        """Takes the next token; sets `finish` when the answer is over."""
        if token in self.request.stop_token_ids and not self._thinking:
            self.finish = "stop"
            return
        if token in self.end_ids:
            self.finish = "eos"
            return
        self.token_ids.append(token)
        was_due = bool(self._due)
        if was_due:
            self._due.pop(0)
        self._follow_thoughts(was_due)
        if self._find_stop(max(self.num_thought_tokens, len(self.token_ids) - self._tail)) is not None:
            self.finish = "stop"
        elif len(self.token_ids) >= min(self._most_tokens, self.room):
            self.finish = "length"

    @property
    def text(self) -> str:
        """The decoded answer, cut before the first stop string; its thoughts with their marks."""
        thoughts, rest = self.token_ids[: self.num_thought_tokens], self.token_ids[self.num_thought_tokens :]
        cut = self._find_stop(self.num_thought_tokens) if self.finish == "stop" else None
        return (self._marked(thoughts) if thoughts else "") + self._decode(rest)[:cut]

    @property
    def _most_tokens(self) -> int:
        thoughts = self.request.thoughts
        if thoughts is None or thoughts.budget_tokens is None:
            return self.request.max_new_tokens
        if self._thinking:
            return self.request.answer_tokens
        return self.request.max_new_tokens + self.num_thought_tokens

    def _follow_thoughts(self, was_due: bool) -> None:
        """Notes where thoughts begin and end; all of the end that is put after them belongs to them."""
        if self.request.thoughts is None:
            return
        if not self._thinking and not self.num_thought_tokens and len(self.token_ids) <= _MARK_TOKENS:
            self._thinking = self._marked(self.token_ids).lstrip().startswith(THINK)
        if self._thinking:
            self.num_thought_tokens = len(self.token_ids)
            ended = not self._due if was_due else END_OF_THOUGHT in self._marked(self.token_ids[-_MARK_TOKENS:])
            self._thinking = not ended

    def _find_stop(self, first: int) -> int | None:
        """Position of the first stop string in the text of the tokens from `first` on.

        Those complete within the first `min_new_tokens` tokens do not count, not even once the answer is longer.
        """
        if not self.request.stop or len(self.token_ids) <= self.request.min_new_tokens or self._thinking:
            return None
        text = self._decode(self.token_ids[first:])
        ignored = len(self._decode(self.token_ids[first : self.request.min_new_tokens]))
        starts = [text.find(stop, max(0, ignored - len(stop) + 1)) for stop in self.request.stop]
        return min((index for index in starts if index >= 0), default=None)

    def _marked(self, token_ids: list[int]) -> str:
        """The text with special tokens, which the marks of thoughts are for some models."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _decode(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # one sequence gives one text
        return text
