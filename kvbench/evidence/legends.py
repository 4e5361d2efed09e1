"""Legends of `compare` and `report view=pareto`: a line below a table, the rest in `kvbench help columns`."""

from kvbench.show.terminal import NO_INTERVAL
from kvbench.show.text import meaning
from kvbench.stats.paired import ALPHA

BEST, NEAR, OPEN, DOMINATED = "best estimate", "within margin", "open", "dominated"
MEANING = {
    BEST: "the estimate is better than every cheaper run's by more than the margin; no test",
    NEAR: "no cheaper run has a better estimate, but one is as good within the margin; no test",
    OPEN: "a cheaper run has a better estimate, which can be chance",
    DOMINATED: f"a cheaper run is better (p < {ALPHA:.2g}, Holm over all pairs of the table)",
}
EQUAL_LEVEL = ALPHA / 2  # one-sided: `equal` needs the whole 95 % interval inside the margin
MORE = "More: `kvbench help columns`"
ESTIMATORS = (
    "Newcombe's for yes or no, Clopper and Pearson's where fewer than 6 scores differ, else the studentised "
    "bootstrap's; of shares Fieller's, or Donner and Zou's for yes or no; it reaches zero where the test does not "
    "exclude zero"
)
COMPARED = {
    "difference": f"paired, on the same samples. [a, b]: its 95 % interval, {ESTIMATORS}. {NO_INTERVAL}: too few "
    "samples for one.",
    "worst case": "the difference if every missing answer were wrong and every one that the other run lacks right.",
    "verdict": f"worse, better: p Holm < {ALPHA:.2g}, and no missing answer could change the sign. equal: p equal < "
    f"{EQUAL_LEVEL:.3g}. `cannot tell` is not `equal`. Below 90 % of the answers there is no verdict.",
    "p": "sign-flip test with the weights of the mean; for yes-or-no scores that weigh alike it is McNemar's exact "
    "test; for other values the larger p of it and of the studentised bootstrap. `p >margin`, for nearness to the "
    "full cache: of a difference no larger than the margin.",
    "p Holm": "p, corrected over all rows of the command (a narrower filter makes a smaller family).",
    "p equal": "one-sided test of a difference within the margin, with the same correction and the worst case of "
    "missing answers.",
    "would show": "the smallest true difference that p Holm shows with 80 % probability, at the upper end of the share "
    "of answers that change at all.",
    "answer longer by": "tokens, paired, with a 95 % interval; metric=tokens tests it.",
    "loops": "answers that end in the same tokens three times in a row or more, 16 tokens at least; metric=loops tests "
    "them.",
}
FRONTIER = {
    "[a, b]": f"a 95 % interval, {ESTIMATORS}.",
    **{f"standing: {name}": f"{text}." for name, text in MEANING.items()},
}


def compared_line(num_family: int) -> str:
    """The line below tables whose p values are corrected over so many rows."""
    return f"[a, b]: 95 % interval. p Holm: over {num_family} rows. {MORE}"


def compared_sentences(num_family: int) -> list[str]:
    """Meanings of the columns, for a page that has room for them."""
    rows = f"The p values of this page are corrected over {num_family} rows."
    return [*(f"{name}: {text}" for name, text in COMPARED.items()), rows]


def explained(width: int) -> str:
    """Every column of the two commands with its meaning, as lines of a width."""
    return "\n".join(
        line
        for title, columns in (("kvbench compare", COMPARED), ("kvbench report view=pareto", FRONTIER))
        for line in ("", title, *(each for name, text in columns.items() for each in meaning(name, text, width)))
    )
