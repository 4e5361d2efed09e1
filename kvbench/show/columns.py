"""Columns of the tables of runs, for `kvbench help columns`; a table itself has one line that points here."""

from kvbench.results.measures import AVERAGE, KL, KL_NEW, NLL, PEAK, PREFILL, RATE, READ, RESIDENT
from kvbench.show.text import meaning

LEGEND = "[a, b]: 95 % interval; vs full: same samples. More: `kvbench help columns`"
COLUMNS = {
    "[a, b]": "a 95 % interval: Wilson's and Newcombe's of scores that are 0 or 1, Clopper and Pearson's where fewer "
    "than 6 scores differ, else the studentised bootstrap's. run.json names which.",
    "n": "samples that were scored; `60 of 64` where some were not.",
    "vs full": "the difference to the full cache on the same samples, in points, with the samples that are worse and "
    "better than with it.",
    NLL.short: "mean negative log-likelihood of a forced answer, in nats per token: the task's right answer "
    "(fidelity.on=gold) or the full cache's own (own), its first fidelity.max_tokens tokens but the first, which every "
    "method predicts exactly. Means over a sample's tokens, a subset's samples, and subsets.",
    KL.short: "how far the predicted distribution is from the full cache's along the same answer.",
    KL_NEW.short: "the same over the tokens that do not end a run of three which the prompt has, too. A gold answer "
    "may copy much of its prompt: its KL need not rank runs as scores do.",
    RESIDENT.short: "bytes of the cache when the answer has ended, and in % of an FP16 full cache of the same tokens.",
    AVERAGE.short: "the same, on average over an answer's steps.",
    PEAK.short: "the most that was held, while a prompt is compressed too.",
    f"{PEAK.short} at once": "with prefill.chunk: what would have been held, had the prompt been read at once.",
    READ.short: "bytes that attention read while decoding, of what reading all that is kept takes.",
    "tokens": "of a prompt and of what follows it, where answers differ in length: bytes are then of different texts.",
    f"{PREFILL.short}, {RATE.short}": "no evidence of a difference between runs: each was timed by itself, with "
    "whatever else the machine did, and a batch whose answers end early is emptier and slower. `kvbench bench` times "
    "methods in turn.",
    "full": "the full cache keeps every token in 16 bits (method.tier; native is the model's own type).",
}


def explained(width: int) -> str:
    """Every column with its meaning, as lines of a width."""
    return "\n".join(line for name, text in COLUMNS.items() for line in meaning(name, text, width))
