"""Run as a program: lines and code lines of each room of the core and of each extension, tests apart, and the words of
documents by kind.

Code lines are lines without docstrings, comments and blanks. Words are those of `wc -w`: tables and code count.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

from places import ROOT

SUFFIXES = (".py", ".cpp", ".h", ".jinja")
QUIET = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(path: Path) -> int:
    """Code lines of a file.

    Args:
        path: A Python, C++ or Jinja file.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        text = re.sub(r"/\*.*?\*/|\{#.*?#\}", "", text, flags=re.DOTALL)
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in text.splitlines())
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():  # docstrings, and those of fields
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                docs.update(range(item.lineno, item.end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in QUIET:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def room_of(path: Path) -> tuple[bool, str]:
    """Whether a file is an extension's, and the name of its room."""
    parts = path.relative_to(ROOT).parts
    if parts[:2] == ("kvbench", "extensions") and len(parts) > 3:
        return True, f"extensions/{parts[2]}"
    return False, parts[0] if parts[0] != "kvbench" else f"kvbench/{parts[1]}" if len(parts) > 2 else "kvbench"


def sizes() -> dict[tuple[bool, str], tuple[int, int, int]]:
    """Files, lines and code lines by room."""
    found: dict[tuple[bool, str], tuple[int, int, int]] = {}
    for folder in ("kvbench", "kernels", "methods"):
        for path in sorted((ROOT / folder).rglob("*")):
            parts = path.relative_to(ROOT).parts
            if path.suffix in SUFFIXES and "tests" not in parts and "__pycache__" not in parts:
                room = room_of(path)
                count = found.get(room, (0, 0, 0))
                lines = path.read_text(encoding="utf-8").count("\n")
                found[room] = count[0] + 1, count[1] + lines, count[2] + code_lines(path)
    return found


# Kinds of documents: those that are meant to be read, reference that is found by search, and records of measurements.
KINDS = ("read", "reference", "generated", "records")
MOST_READ = 20_000
_GENERATED = tuple(f"docs/reference/{name}.md" for name in ("methods", "settings", "models", "errors"))


def kind_of(name: str) -> str:
    """The kind of a document.

    Args:
        name: Its path in the repository.
    """
    if name.startswith("results/") or name == "docs/reference/results.md":
        return "records"
    if name in _GENERATED or name.endswith("papers/tables.md"):
        return "generated"
    return "reference" if name.startswith("docs/reference/") else "read"


def words_of(name: str) -> int:
    """Words of a document, code and tables included.

    Args:
        name: Its path in the repository.
    """
    return len((ROOT / name).read_text(encoding="utf-8").split())


def documents() -> dict[str, dict[str, int]]:
    """Words of every document, by kind."""
    found: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for pattern in ("*.md", "docs/**/*.md", "kvbench/extensions/*/*.md", "results/*/*.md"):
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            found[kind_of(name)][name] = words_of(name)
    return found


def print_documents() -> None:
    """Print the words of documents by kind."""
    for kind, names in documents().items():
        bound = f" of at most {MOST_READ:,}" if kind == "read" else ""
        print(f"\n{'documents: ' + kind:48} {'words':>8}")
        for name, count in names.items():
            print(f"  {name:46} {count:8,}")
        print(f"  {'all':46} {sum(names.values()):8,}{bound}")


def main() -> None:
    """Print the tables."""
    found = sizes()
    total = [0, 0, 0]
    for extension in (False, True):
        rooms = sorted((room, count) for (is_extension, room), count in found.items() if is_extension == extension)
        print(f"{'extensions' if extension else 'core':24} {'files':>6} {'lines':>8} {'code':>8}")
        for room, count in rooms:
            print(f"  {room:22} {count[0]:6} {count[1]:8,} {count[2]:8,}")
        part = [sum(count[i] for _, count in rooms) for i in range(3)]
        total = [a + b for a, b in zip(total, part, strict=True)]
        print(f"  {'all':22} {part[0]:6} {part[1]:8,} {part[2]:8,}\n")
    print(f"{'core and extensions':24} {total[0]:6} {total[1]:8,} {total[2]:8,}")
    print_documents()


if __name__ == "__main__":
    main()
