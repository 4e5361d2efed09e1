"""Made-up LongBench rows."""

import json
from pathlib import Path


def row(**fields: object) -> dict:
    """A row as the official files have it, some fields changed; it does not say of which subset it is."""
    base = {
        "input": "Where is it?",
        "context": "It is in the box. " * 40,
        "answers": ["in the box"],
        "length": 200,
        "language": "en",
        "all_classes": None,
        "_id": "0",
    }
    return base | fields


def write(path: Path, *lines: bytes | dict) -> Path:
    """A jsonl file; dicts become one line each, bytes stay as they are."""
    texts = [json.dumps(line, ensure_ascii=False).encode() if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path
