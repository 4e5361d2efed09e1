"""Words that kvbench uses in a sense of its own; `kvbench help glossary` shows them, `kvbench help tier` one."""

from kvbench.show.text import meaning

GLOSSARY = {
    "list": "the keys and values of one KV head in one layer. A method decides for each list which tokens stay.",
    "tier": "a precision in which a method stores tokens, such as 16, 8 or 4 bits. A method has one to four.",
    "slot": "the place of one token in a list: its key, its value, and what is tracked of it.",
    "page": "the unit in which memory is taken: a fixed number of bytes, which hold slots of one list and tier.",
    "slack": "bytes of pages that are taken and hold no token yet. They count as held.",
    "ledger": "the bytes of a cache by what they are: payload, scales and zeros, track, slack, buffers, tables.",
    "resident": "bytes that a cache holds when the answer has ended; `peak` is the most that it held before.",
    "budget": "how much of a prompt a method keeps: a ratio (0.25), tokens (256), bytes (8MiB), or 50%seen.",
    "full": "the full cache, which keeps every token in 16 bits. Every method is compared with it on the same samples.",
    "gold": "the right answer as the task has it.",
    "forced": "a forced answer is fed in place of the model's own, and it is measured how likely its tokens were.",
    "gold NLL": "the mean negative log-likelihood of the forced gold answer, in nats per token; lower is better.",
    "KL to full": "how far the predicted distribution is from the full cache's, along the forced answer; 0 = the same.",
    "sample": "one answer to one prompt. A subset is a group of samples of a task, such as its kind of question.",
    "points": "percentage points of a score: from 75 % to 70 % is a loss of 5 points.",
    "embedded": "the embedded model is SmolLM2-135M-Instruct, which is fetched from the package index.",
    "hash": "names a run: SHA-256 over everything that can change an answer. The same settings are the same run.",
    "seal": "a checksum on each line of samples.jsonl, so that a changed or half-written line does not count.",
}


def glossary(width: int) -> str:
    """Every word with its meaning."""
    return "\n".join(line for word, text in GLOSSARY.items() for line in meaning(word, text, width))
