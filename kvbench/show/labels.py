"""Short names for runs in tables and pictures: the method, and the settings that distinguish it from its other runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvbench.results.record import CHUNK_LABEL
from kvbench.show.text import safe

if TYPE_CHECKING:
    from kvbench.results.record import RunRecord

LONGEST = 24  # characters of a value; a table of numbers would fill the line
ALIKE = 0.02  # of the tokens: texts that differ by less are as long as each other
# Parts of the identity that may differ when the method does not.
APART = ("seed", "batch_size", "batch", "backend", "limit")


def label_runs(records: "Sequence[RunRecord]", separator: str = " ") -> list[str]:
    """A name for each of the runs that are shown together; `separator` parts the method from its settings.

    Returns:
        `snapkv` where there is one run of it, else `snapkv budget=0.25`, or the start of the hash where no setting
        differs; `rotation=hadamard` where the store rotates, `key_offset=prompt` where it shifts keys, and
        `prefill.chunk=512` where prompts were read so.
    """
    labels = []
    for record in records:
        same = {other.hash: other.identity for other in records if other.method == record.method}
        words = differing(record.identity.get("method", {}), [item.get("method", {}) for item in same.values()])
        words += differing({key: record.identity.get(key) for key in APART}, list(same.values()))
        rotation = (record.identity.get("store") or {}).get("rotation", "none")
        words += [f"rotation={rotation}"] if rotation != "none" else []  # always: the name of the method hides it
        offset = (record.identity.get("store") or {}).get("key_offset", "none")
        words += [f"key_offset={offset if isinstance(offset, str) else 'table'}"] if offset != "none" else []
        chunk = record.protocol.get(CHUNK_LABEL)
        words += [f"prefill.chunk={chunk}"] if chunk else []
        words = [_cut(word) for word in words]
        labels.append(separator.join([safe(record.method), *([" ".join(words)] if words else [])]))
    names: dict[str, set[str]] = {}
    for label, record in zip(labels, records, strict=True):
        names.setdefault(label, set()).add(record.hash)
    pairs = zip(labels, records, strict=True)  # shortened labels may not distinguish two runs
    return [f"{label} {record.hash[:6]}" if len(names[label]) > 1 else label for label, record in pairs]


def differ_in_length(records: "Sequence[RunRecord]") -> bool:
    """True where prompt and answer of some run are longer than of another, so that bytes are of different texts."""
    seen = [tokens for record in records if (tokens := record.kept.get("tokens_seen"))]
    return bool(seen) and max(seen) > (1 + ALIKE) * min(seen)


def differing(settings: Mapping[str, object], others: Iterable[Mapping[str, object]]) -> list[str]:
    """Settings that are not the same in all others, as `key=value`.

    The others may be with or without the run's settings.
    """
    others = list(others)
    return [f"{key}={value}" for key, value in settings.items() if any(other.get(key) != value for other in others)]


def _cut(word: str) -> str:
    key, _, value = word.partition("=")
    return safe(word if len(value) <= LONGEST else f"{key}={value[: LONGEST - 2]}..")
