"""Settings that did nothing: runs of one method that differ in a setting and in no sample."""

import hashlib
import json
from collections.abc import Iterator, Sequence

from kvbench.evidence.audit import Finding
from kvbench.evidence.load import Group, StoredRun
from kvbench.results.identity import differences
from kvbench.show.text import LINE_LENGTH, MESSAGE_LENGTH, safe

# Of a sample, all that a setting of a method can change; times differ anyway.
PARTS = ("status", "text", "answer", "finish", "turns", "scores", "fidelity", "drift", "ledger", "kept")
KIND = "dead setting"


def dead_settings(groups: Sequence[Group]) -> Iterator[Finding]:
    """Find the settings of stored runs that changed neither a text, nor a byte, nor a likelihood of any sample.

    A setting may act on other prompts: a window does nothing to a prompt that it covers.
    """
    for group in groups:
        alike: dict[tuple[str, ...], list[StoredRun]] = {}
        for run in group.runs:
            if run.complete:
                alike.setdefault((run.method, run.apart, *run.conditions, _digest(run)), []).append(run)
        for runs in alike.values():
            first = runs[0]
            told: dict[str, list[str]] = {}
            for other in runs[1:]:
                for part in ("method", "store"):
                    pair = (run.record.identity.get(part, {}) for run in (first, other))
                    for name, mine, theirs in differences(*pair):
                        told.setdefault(name, [mine]).append(theirs)
            if not told:
                continue
            words = ", ".join(f"{name}={' | '.join(dict.fromkeys(values))}" for name, values in told.items())
            records = list(first.samples.values())
            tokens = sum(int(record["answer"].get("tokens", 0)) for record in records)
            measured = sum(bool(record["fidelity"]) for record in records)
            names = ", ".join(run.name for run in runs)
            text = f"{len(records)} samples, {tokens} tokens: all texts are equal in {names}; the "
            text += f"items of the ledger too, and NLL and KL to the last bit in the {measured} samples that have them"
            yield Finding(
                kind=KIND,
                where=group.title,
                words=f"{first.method}: {safe(words, LINE_LENGTH)} changes nothing in any sample",
                arithmetic=safe(text, MESSAGE_LENGTH),
                rows=(),
            )


def _digest(run: StoredRun) -> str:
    """Everything of a run's samples that is no time, as one number."""
    found = hashlib.sha256()
    for key in sorted(run.samples):
        record = run.samples[key]
        part = [key, *(record.get(name) for name in PARTS)]
        found.update(json.dumps(part, sort_keys=True, default=str).encode(errors="replace"))
    return found.hexdigest()
