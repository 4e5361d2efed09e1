"""Finds the amount of filler with which a generated prompt has the requested length."""

from collections.abc import Callable

from kvbench.errors import SettingValue

# A prompt this close to the requested length is accepted without another round of counting.
LENGTH_SLACK_TOKENS = 4


class TooShort(SettingValue):
    """A length in tokens that a prompt does not fit into even without filler, with which it takes `needed`."""

    def __init__(self, length: int, needed: int) -> None:
        super().__init__(
            f"task.length={length} is too short: a prompt takes {needed} tokens without any filler; raise it to at "
            "least that",
            setting="task.length",
        )
        self.needed = needed


def fill_length(
    count: Callable[[int], int], length: int, limit: int, *, least: int = 0, guess: int | None = None
) -> int:
    """Find how many units of filler, `least` to `limit`, fill a prompt.

    Args:
        count: Number of units -> tokens of the whole prompt; the same number gives the same count.
        length: Most tokens.
        limit: Most units.
        least: Fewest units that make a prompt.
        guess: First number to try; None guesses two tokens a unit.

    Returns:
        A number of units whose prompt has at most `length` tokens, within a few tokens of it unless a unit is longer.

    Raises:
        TooShort: Not even the prompt with the fewest units fits.
    """
    fits, fits_tokens = least, count(least)
    if fits_tokens > length:
        raise TooShort(length, fits_tokens)
    over, over_tokens = limit + 1, None
    guess = least + (length - fits_tokens) // 2 if guess is None else guess
    rounds = 0
    while over - fits > 1 and length - fits_tokens > LENGTH_SLACK_TOKENS:
        rounds += 1
        if over_tokens is not None:
            # Between two known points by interpolation; halving now and then bounds the rounds whatever the text is
            # like.
            share = (length - fits_tokens) / (over_tokens - fits_tokens)
            guess = (fits + over) // 2 if rounds % 3 == 0 else fits + int(share * (over - fits))
        units = min(max(guess, fits + 1), over - 1)
        tokens = count(units)
        if tokens <= length:
            # Beyond the last point that fits by its own slope, a little more so that the length gets bracketed.
            guess = units + int(1.05 * (length - tokens) * (units - fits) / max(tokens - fits_tokens, 1)) + 1
            fits, fits_tokens = units, tokens
        else:
            over, over_tokens = units, tokens
    return fits
