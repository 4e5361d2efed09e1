"""Writes docs/reference/errors.md from the classes of errors: `make docs` redirects its output."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench.config import files

HEAD = """# Codes of errors

Generated from the code by `make docs`. The command line prints `error[CODE]: ...` for what a user can act on. In Python
it is a `kvbench.errors.KvbenchError`, a ValueError: its `code` stays when the words of its message change, and its
`setting` is the setting as it is written on the command line (`method.budget`), or the argument of a call; None where
it is about none.

| code | meaning |
|---|---|
"""


@dataclass(frozen=True)
class Coded:
    """A class with a code."""

    code: str
    module: str
    meaning: str
    """First paragraph of its docstring."""


def coded() -> Iterator[Coded]:
    """Classes of kvbench and its extensions that have a code; nothing is imported, since some need a library."""
    package = files.package_folder()
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        if "tests" not in inner.parts:
            yield from _coded_in(path, ".".join([package.name, *inner.with_suffix("").parts]).removesuffix(".__init__"))


def _coded_in(path: Path, module: str) -> Iterator[Coded]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for keyword in node.keywords:
            if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                meaning = (ast.get_docstring(node) or "").partition("\n\n")[0]
                yield Coded(str(keyword.value.value), module, " ".join(meaning.split()))


def render() -> str:
    """The whole document."""
    rows = sorted((one.code, one.meaning) for one in coded())
    return HEAD + "".join(f"| `{code}` | {meaning} |\n" for code, meaning in rows)


if __name__ == "__main__":
    print(render(), end="")
