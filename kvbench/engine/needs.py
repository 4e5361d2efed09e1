"""What requests need of an engine: rows, room for their tokens, and what is forced of them."""

from dataclasses import dataclass

from kvbench.engine.conversation import Forced
from kvbench.engine.requests import Request
from kvbench.models.load import LoadedModel


@dataclass(frozen=True)
class Needs:
    """What the requests of one run need.

    Args:
        model: Its context bounds answers.
        fidelity_max_tokens: Tokens to force of each answer at most, None for all, 0 for none.
        own: The first answer that each request gets is forced, in place of its gold answer.
    """

    model: LoadedModel
    fidelity_max_tokens: int | None
    own: bool = False

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that does not fit the model, or that asks for nothing."""
        if not 0 < request.num_prompt_tokens < self.model.max_tokens or not all(request.segments):
            raise ValueError(
                f"{request.sample_id}: a prompt of {request.num_prompt_tokens} tokens (segments "
                f"{[len(s) for s in request.segments]}) must be > 0 and < the model's {self.model.max_tokens}; "
                "truncate it in the task"
            )
        if not self.rows(request):
            raise ValueError(
                f"{request.sample_id} asks for no answer, and there is nothing to force either; set "
                "fidelity.max_tokens=null"
            )
        longest = max(request.conversation_tokens, len(self.forced(request).behind) + 1)
        if request.turns and longest > self.room(request):
            raise ValueError(
                f"{request.sample_id}: a conversation of {request.num_prompt_tokens} tokens and up to "
                f"{longest} more must fit in the model's {self.model.max_tokens}; shorten its "
                "texts, or lower protocol.max_new_tokens"
            )

    def rows(self, request: Request) -> int:
        """Rows at once: for answers, for what is forced, for choices."""
        if not request.max_new_tokens:
            return bool(self.forced(request).gold) + len(request.choices)
        return request.num_samples + bool(self.own or self.forced(request).gold) + len(request.choices)

    def forced(self, request: Request) -> Forced:
        """What is forced from the start; beyond the model's context only where the request says so."""
        if self.own and request.max_new_tokens:
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
        """Most tokens that are read behind a request's first segment; the last one of an answer is only predicted."""
        answers = min(request.conversation_tokens, self.room(request))
        return sum(map(len, request.segments[1:])) + self._longest(request, answers) - 1

    def _longest(self, request: Request, answers: int) -> int:
        return max(answers, len(self.forced(request).behind) + 1, *map(len, request.choices))

    def room(self, request: Request) -> int:
        """Tokens that fit behind the prompt; the last one is only predicted, never read."""
        return self.model.max_tokens - request.num_prompt_tokens + 1
