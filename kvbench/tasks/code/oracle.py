"""Judges one output of a solution, also in tasks where equality with the reference is the wrong question.

Everything here runs in the trusted process, on builtin values that `cage.wire.decode` made.

Source: EvalPlus 0.3.1, `evalplus/eval/__init__.py` and `_special_oracle.py` (read, not copied).
Differs: there, the first float among the expected outputs of a task loosens the comparison of all that follow it; here
each output is judged alone. There, a tolerance goes through numpy, which would also stretch one shape over another and
takes no ragged lists.
"""

import cmath
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

# An argument or an output: any builtin value. An operation that it lacks raises TypeError, which `is_right` takes for
# a wrong output.
Value = Any

_FLOAT_TOLERANCE = 1e-6
_RELATIVE_TOLERANCE = 1e-7
# The order of these results is not part of the task.
_SET_TASKS = frozenset(
    "similar_elements find_char_long common_in_nested_lists extract_singly larg_nnum intersection_array find_dissimilar"
    " Diff".split()
)
# These return a match object or None, or a bool: only whether they found something counts.
MATCH_TASKS = frozenset(("check_str", "text_match_three", "text_starta_endb"))


def is_right(task: str, entry_point: str, inputs: Sequence[Value], output: Value, expected: Value, atol: float) -> bool:
    """Judge one output as the benchmark does.

    Args:
        task: `humaneval_plus` or `mbpp_plus`; the special cases belong to one of them.
        entry_point: Name of the function, which names the problem.
        inputs: Arguments of the call.
        output: Return value of the solution; builtin types.
        expected: Return value of the reference; for `MATCH_TASKS` whether it was not None.
        atol: Absolute tolerance; 0 means exact, but 1e-6 where the expected output is made of floats.
    """
    try:
        if has_special_rule(task, entry_point):
            if task == "humaneval_plus":
                return _is_root(inputs, output, atol)
            return _MBPP[entry_point](inputs, output, expected, atol)
        return _matches(output, expected, atol)
    except (TypeError, ValueError, OverflowError, RecursionError, ZeroDivisionError):
        return False  # an output of a kind for which the question makes no sense


def has_special_rule(task: str, entry_point: str) -> bool:
    """True for a problem whose output is judged otherwise than by equality, or nearness, to the reference's."""
    return entry_point == "find_zero" if task == "humaneval_plus" else entry_point in _MBPP


def is_match_question(task: str, entry_point: str) -> bool:
    """True for a problem whose output only says whether there is a match, of whatever type."""
    return task == "mbpp_plus" and entry_point in MATCH_TASKS


def _matches(output: object, expected: object, atol: float) -> bool:
    if output == expected:
        return True
    if atol == 0 and _made_of_floats(expected):
        atol = _FLOAT_TOLERANCE
    return atol != 0 and type(output) is type(expected) and _close(output, expected, atol)


def _made_of_floats(value: object) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(entry, float) for entry in value)
    return isinstance(value, float)


def _close(output: object, expected: object, atol: float) -> bool:
    if isinstance(expected, list | tuple):
        if not isinstance(output, list | tuple) or len(output) != len(expected):
            return False
        return all(_close(*pair, atol) for pair in zip(output, expected, strict=True))
    if not (_is_number(output) and _is_number(expected)):
        return False
    if output == expected:
        return True
    # A tolerance around an infinity would take in every number, and nothing lies near what is no number.
    if not (cmath.isfinite(output) and cmath.isfinite(expected)):
        return False
    return abs(output - expected) <= atol + _RELATIVE_TOLERANCE * abs(expected)


def _is_number(value: object) -> TypeGuard[complex]:
    return isinstance(value, int | float | complex)


def _is_root(inputs: Sequence[Value], output: Value, atol: float) -> bool:
    """HumanEval/32: any root of the polynomial is right, not only the reference's."""
    if not isinstance(output, int | float):
        return False
    (coefficients,) = inputs
    return abs(sum(factor * math.pow(output, power) for power, factor in enumerate(coefficients))) <= atol


def _pyramid_surface(inputs: Sequence[Value], output: Value, expected: Value, atol: float) -> bool:
    """Mbpp/581: the height may be the slant height (the reference) or the distance of the tip from the base."""
    base, height = inputs
    upright = round(base**2 + 2 * base * math.sqrt((base / 2) ** 2 + height**2))
    return _matches(output, expected, atol) or abs(output - upright) <= atol


def _digit_distance(inputs: Sequence[Value], output: Value, expected: Value, atol: float) -> bool:
    """Mbpp/558: digit by digit after leading zeros, or the digits of the difference (the reference)."""
    texts = [str(number) for number in inputs]
    width = max(map(len, texts))
    aligned = sum(abs(int(one) - int(other)) for one, other in zip(*(text.zfill(width) for text in texts), strict=True))
    return _matches(output, expected, atol) or output == aligned


_Judge = Callable[[Sequence[Value], Value, Value, float], bool]
_MBPP: dict[str, _Judge] = {
    **dict.fromkeys(_SET_TASKS, lambda inputs, output, expected, atol: set(output) == set(expected)),
    **dict.fromkeys(
        MATCH_TASKS,
        lambda inputs, output, expected, atol: expected == (output if isinstance(output, bool) else output is not None),
    ),
    # Mbpp/164: the benchmark takes every answer; the statement does not say what makes numbers equivalent.
    "are_equivalent": lambda inputs, output, expected, atol: True,
    # Mbpp/295: 0 is the other reading of a task about divisors.
    "sum_div": lambda inputs, output, expected, atol: _matches(output, expected, atol) or output == 0,
    "surface_Area": _pyramid_surface,
    "digit_distance_nums": _digit_distance,
}
