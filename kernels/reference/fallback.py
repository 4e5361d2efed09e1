"""Operations in plain torch, and the note that one was done in place of a kernel."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar


class Operations:
    """What the operations of a backend share; `Backend` describes the attributes."""

    is_reference: bool = True
    takes_lse: bool = False

    def __init__(self) -> None:
        self.fallbacks: set[str] = set()


Of = TypeVar("Of", bound=Operations)
P = ParamSpec("P")
R = TypeVar("R")


def in_plain_torch(operation: Callable[Concatenate[Of, P], R]) -> Callable[Concatenate[Of, P], R]:
    """Marks an operation for which faster backends have kernels: done in their place, it notes itself in `fallbacks`.

    Operations without the mark are what every backend wants: views, indexing of the tracked fields, torch's own
    attention of a prompt, and the reduction of scores.
    """

    @wraps(operation)
    def noted(backend: Of, *args: P.args, **kwargs: P.kwargs) -> R:
        if not backend.is_reference:
            backend.fallbacks.add(operation.__name__)
        return operation(backend, *args, **kwargs)

    return noted
