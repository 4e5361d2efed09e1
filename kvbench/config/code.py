"""Hashes of source code: which files count, and what of them."""

import ast
import hashlib
from pathlib import Path

SOURCE_SUFFIXES = {".py", ".yaml", ".cpp", ".c", ".h", ".cu", ".jinja", ".json", ".txt"}


def sources(folder: Path) -> list[Path]:
    """The source files of a folder and of those beneath it, sorted."""
    return sorted(
        path for path in folder.rglob("*") if path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts
    )


def meaning(path: Path) -> bytes:
    """What of a source file counts: of Python the syntax tree without docstrings, so that comments, formatting and
    documentation do not; of other files every byte."""
    content = path.read_bytes()
    if path.suffix != ".py":
        return content
    tree = ast.parse(content)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree).encode()


def hash_files(files: dict[str, Path]) -> str:
    """Hash names and contents of files; comments, formatting and docstrings of Python do not count.

    Args:
        files: Name under which each file counts (so that the place of the installation does not matter), and its path.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = meaning(path)
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
