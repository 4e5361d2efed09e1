"""Admission of requests: rows, room for their tokens, forced answers, and a first segment that some share."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvbench.engine.long_logits import Logits
from kvbench.engine.requests import Request
from kvbench.engine.runner import Runner
from kvbench.errors import PromptLength, SettingsConflict
from kvbench.models.load import LoadedModel
from kvbench.models.rotary import Lengths


@dataclass(frozen=True)
class Forced:
    """Forced answers of a request, concatenated.

    Their tokens; the number of tokens up to the end of each answer but the last; everything read after the prompt
    (these tokens without the last one, and the text between answers); and which of the logits after the prompt, and
    after each token of `behind`, predict the tokens.
    """

    gold: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    indices: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: Request, answers: Sequence[Sequence[int]]) -> "Forced":
        """Puts the first answer and that of each turn together, up to the first that is empty."""
        gold: list[int] = []
        behind: list[int] = []
        indices: list[int] = []
        ends = []
        for number, answer in enumerate(answers):
            if not answer:
                break
            if number:
                ends.append(len(gold))
                behind += request.turns[number - 1].tokens
            indices += range(len(behind), len(behind) + len(answer))
            behind += answer
            gold += answer
        return cls(tuple(gold), tuple(ends), tuple(behind[:-1]), tuple(indices))


@dataclass(frozen=True)
class Admission:
    """Rows and token room of the requests of one run, and the checks that admit them.

    Args:
        model: Model of the run.
        fidelity_max_tokens: Most tokens of an answer that are forced; None for all, 0 for none.
        force_generated: Force the first answer that each request gets, in place of its gold answer.
        lengths: Rotary tables that depend on a text's length.
        chunk: Tokens of a prompt that are read at once; None for all.
    """

    model: LoadedModel
    fidelity_max_tokens: int | None
    force_generated: bool = False
    lengths: Lengths = Lengths()
    chunk: int | None = None

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that does not fit the model, or requests no tokens."""
        if not 0 < request.num_prompt_tokens < self.model.max_tokens or not all(request.segments):
            raise PromptLength(
                f"{request.sample_id}: a prompt of {request.num_prompt_tokens} tokens (segments "
                f"{[len(s) for s in request.segments]}) must be > 0 and < the model's {self.model.max_tokens}; "
                "truncate it in the task"
            )
        if not self.rows(request):
            raise SettingsConflict(
                f"{request.sample_id} asks for no answer, and there is nothing to force either; set "
                "fidelity.max_tokens=null",
                setting="fidelity.max_tokens",
            )
        longest = max(request.conversation_tokens, len(self.forced(request).behind) + 1)
        if request.turns and longest > self.room(request):
            raise PromptLength(
                f"{request.sample_id}: a conversation of {request.num_prompt_tokens} tokens and up to "
                f"{longest} more must fit in the model's {self.model.max_tokens}; shorten its "
                "texts, or lower protocol.max_new_tokens"
            )
        self._check_tables(request)

    def _check_tables(self, request: Request) -> None:
        """Raises ValueError where a rotary table would change after a part of a request was read.

        Its keys would then be rotated by one table and its queries by another.

        Differs: transformers' Phi-3 reads a text anew when its answer grows past the border; that would bring back what
            a method has dropped. A table that changes with every token (`dynamic`) is as in its `generate`, of which a
            prompt in one pass and a free answer are the same in any order.
        """
        read = len(request.segments[0])
        in_chunks = self.chunk is not None and read > self.chunk
        first = (read % self.chunk or self.chunk) if self.chunk is not None and in_chunks else read
        total = read + self.new_tokens(request)
        if (table := self.lengths.crossed(first, total)) is None:
            return
        most = table.border - request.num_prompt_tokens + 1
        remedies = {
            "set prefill.chunk=null": in_chunks,
            "set protocol.query_aware=true": len(request.segments) > 1 and (table.grows or read <= table.border),
        }
        if table.grows:
            remedies["set fidelity.max_tokens=0"] = self.force_generated or bool(self.forced(request).gold)
            if not (any(remedies.values()) or request.choices or request.turns):
                return
            why = "it changes with every token"
        else:
            remedies[f"lower protocol.max_new_tokens and fidelity.max_tokens to {most}"] = most > 0
            why = "there is another one, by which all of it would have to be read again"
        remedies[f"set model.max_tokens={table.border}"] = True
        raise PromptLength(
            f"{request.sample_id}: its first {first} tokens are read together and it may grow to {total}, but behind "
            f"{table.border} tokens the model's rotary table is not the same: {why}; "
            + ", or ".join(remedy for remedy, helps in remedies.items() if helps)
        )

    def rows(self, request: Request) -> int:
        """Rows at once: for answers, for what is forced, for choices."""
        if not request.max_new_tokens:
            return bool(self.forced(request).gold) + len(request.choices)
        return request.num_samples + bool(self.force_generated or self.forced(request).gold) + len(request.choices)

    def forced(self, request: Request) -> Forced:
        """The text that is forced from the start; beyond the model's context only where the request says so."""
        if self.force_generated and request.max_new_tokens:
            return Forced()
        most = 1 << 62 if request.past_context else self.room(request) - 1
        if request.turns and request.max_new_tokens:
            most = request.max_new_tokens  # a conversation was made to fit with answers of this length
        if self.fidelity_max_tokens is not None:
            most = min(self.fidelity_max_tokens, most)
        return Forced.of(request, [gold[:most] for gold in (request.gold, *(turn.gold for turn in request.turns))])

    def most_behind(self, request: Request) -> int:
        """Most tokens of an answer, of a conversation or of a text that is forced, however long the model's context."""
        return self._longest(request, request.conversation_tokens)

    def new_tokens(self, request: Request) -> int:
        """Most tokens that are read after a request's first segment; the last one of an answer is only predicted."""
        answers = min(request.conversation_tokens, self.room(request))
        return sum(map(len, request.segments[1:])) + self._longest(request, answers) - 1

    def _longest(self, request: Request, answers: int) -> int:
        return max(answers, len(self.forced(request).behind) + 1, *map(len, request.choices))

    def room(self, request: Request) -> int:
        """Tokens that fit after the prompt; the last one is only predicted, never read."""
        return self.model.max_tokens - request.num_prompt_tokens + 1


def keep_tables(lengths: Lengths, sizes: set[int], left: int, *, is_said: bool) -> int:
    """Most tokens, up to `left`, after prompts of some sizes with which each keeps its rotary table.

    Raises ValueError where they are fewer and the caller fixed their number (`is_said`), of which the last is not read.
    """
    for size in sorted(sizes):
        table = lengths.crossed(size, size + left - is_said)
        if table is None or table.grows:
            continue
        if is_said:
            raise PromptLength(
                f"a prompt of {size} tokens and an answer of {left} go past {table.border} tokens, where the model "
                "takes another rotary table and all of it would have to be read again; lower max_new_tokens (or "
                f"compress' room_tokens) to {table.border - size + 1}"
            )
        left = table.border - size
    return left


class SharedContexts:
    """Opens the rows of requests with several segments.

    `begins_with` is everything that the compressed first segment of a request depends on; `read` reads it into a row.
    """

    def __init__(
        self,
        runner: Runner,
        requests: Sequence[Request],
        begins_with: Callable[[Request], Hashable],
        read: Callable[[Request], tuple[int, Logits]],
    ) -> None:
        self._runner, self._begins_with, self._read = runner, begins_with, read
        self._held: tuple[Hashable, int] | None = None  # what was read for the next requests, too, and its row
        self._followed = {
            one.sample_id
            for one, other in pairwise(requests)
            if begins_with(one) == begins_with(other) and min(len(one.segments), len(other.segments)) > 1
        }

    @property
    def num_rows(self) -> int:
        """Most open rows in addition to those of the requests."""
        return int(bool(self._followed))

    @property
    def is_open(self) -> bool:
        """True if a first segment is held for requests to come."""
        return self._held is not None

    def holds(self, request: Request) -> bool:
        """True if the first segment of a request was read for an earlier one."""
        return self._held is not None and self._held[0] == self._begins_with(request)

    def open_row(self, request: Request) -> int:
        """A row with the first segment of a request: of its own, or a fork of what the requests around it share."""
        is_last = request.sample_id not in self._followed
        if not self.holds(request):
            self.close()
            row, _ = self._read(request)
            if is_last:
                return row
            self._held = self._begins_with(request), row
        assert self._held is not None
        row = self._held[1]
        if is_last:
            self._held = None
            return row
        return self._runner.fork(row)

    def close(self) -> None:
        """Gives up what is held for requests that did not come."""
        if self._held is not None and self._held[1] in self._runner.open_rows:
            self._runner.close(self._held[1])
        self._held = None

    def forget_closed(self) -> None:
        """Notes that rows were closed by others; to be called before the next row is opened."""
        if self._held is not None and self._held[1] not in self._runner.open_rows:
            self._held = None
