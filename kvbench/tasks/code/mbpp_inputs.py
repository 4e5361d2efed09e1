"""Arguments of MBPP+ as its tasks expect them: the release stores tuples, sets and complex numbers as JSON."""

from collections.abc import Callable, Sequence

# One name per argument: how it is turned. A row with fewer names than arguments leaves the rest, or repeats the last
# name where it ends in `*`.
_SHAPES = {
    "rows*": "2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809",
    "rows_of*": "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780",
    "rows_of": "75 413 444 753",
    "same rows": "106 750",
    "sets": "115",
    "float complex": "124",
    "rows": "250 405 446 617 720 763 808 307",
    "rows_of_rows*": "259 401 445",
    "mixed_rows": "278",
    "values": "722",
    "complex": "252",
    "deep*": "580 615 791",
}


def _deep(value: object) -> object:
    return tuple(map(_deep, value)) if isinstance(value, list) else value


_TURNS: dict[str, Callable] = {
    "same": lambda value: value,
    "rows": tuple,
    "rows_of": lambda value: [tuple(entry) for entry in value],
    "rows_of_rows": lambda value: tuple(tuple(entry) for entry in value),
    "mixed_rows": lambda value: tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value),
    "sets": lambda value: [set(entry) if isinstance(entry, list) and entry else {} for entry in value],
    "values": lambda value: {key: tuple(entry) for key, entry in value.items()},
    "float": float,
    "complex": complex,
    "deep": _deep,
}
_BY_TASK = {int(number): names for names, numbers in _SHAPES.items() for number in numbers.split()}


def restore_inputs(task_id: str, inputs: Sequence[Sequence[object]]) -> list[list[object]]:
    """Give stored arguments the types that the task's reference solution takes.

    Args:
        task_id: For example `Mbpp/124`.
        inputs: Arguments of each call, as read from JSON.

    Returns:
        Arguments of each call. Tasks that need no change get them as they are.

    Source: EvalPlus 0.3.1, `evalplus/data/mbpp.py` (which task holds which types).
    """
    names = _BY_TASK.get(int(task_id.rpartition("/")[2]))
    if names is None:
        return [list(arguments) for arguments in inputs]
    if names.endswith("*"):
        turn = _TURNS[names[:-1]]
        return [[turn(value) for value in arguments] for arguments in inputs]
    turns = [_TURNS[name] for name in names.split()]
    return [
        [turn(value) for turn, value in zip(turns, arguments, strict=False)] + list(arguments[len(turns) :])
        for arguments in inputs
    ]
