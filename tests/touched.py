"""Which extensions a change touches. The default run takes all tests of these, and of the others those marked `smoke`.

The change is what lies between the branch point from main and the working tree. Where that is not known - on main
itself, as in a clean clone of it, in a shallow clone, without git - every extension counts as touched.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvbench.config.extensions import Extension

BASE = "KVBENCH_BASE"  # a commit to compare with instead; `all` takes every extension
MAINS = ("origin/main", "main")
_TESTS = re.compile(r"extensions/(\w+)/tests/")


def extension_of(test: str) -> str | None:
    """The extension that a test belongs to, by its path; None for one of the core."""
    found = _TESTS.search(test)
    return found[1] if found else None


def git(root: Path, *words: str) -> str | None:
    """What git prints; None where it fails or is not installed."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def branch_point(root: Path) -> str | None:
    """The commit that a change begins at; None where it is not known."""
    if named := os.environ.get(BASE):
        found = None if named == "all" else git(root, "rev-parse", "--verify", "--quiet", f"{named}^{{commit}}")
        if found is None and named != "all":
            raise ValueError(f"{BASE}={named} is no commit of {root}; give one that `git show` knows, or all")
        return found
    top = git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():  # a copy inside of another checkout
        return None
    head = git(root, "rev-parse", "HEAD")
    for name in MAINS:
        found = git(root, "merge-base", "HEAD", name)
        if found and found != head:
            return found
    return None


def changed_since(root: Path, base: str) -> list[str] | None:
    """The files that differ from a commit, those that git does not know yet among them; None where git fails."""
    tracked = git(root, "diff", "--name-only", "--no-renames", base)
    new = git(root, "ls-files", "--others", "--exclude-standard")
    return None if tracked is None or new is None else [*tracked.splitlines(), *new.splitlines()]


def touched(files: Iterable[str], extensions: Mapping[str, Extension]) -> set[str]:
    """The extensions with a changed file, and those that use one of them, at any remove."""
    parts = [file.split("/") for file in files]
    found = {part[2] for part in parts if part[:2] == ["kvbench", "extensions"] and len(part) > 3} & set(extensions)
    while more := {name for name, one in extensions.items() if found & set(one.uses)} - found:
        found |= more
    return found


def described(root: Path, extensions: Mapping[str, Extension]) -> tuple[set[str], str]:
    """The extensions whose tests all run, and a sentence about the others."""
    base = branch_point(root)
    files = None if base is None else changed_since(root, base)
    if base is None or files is None:
        return set(extensions), "extensions: all tests of all (no branch point from main)"
    found = touched(files, extensions)
    left = sorted(set(extensions) - found)
    said = f"extensions: all tests of {', '.join(sorted(found)) or 'none'}, which changed since {base[:10]}"
    if left:
        said += f"; of {', '.join(left)} those marked smoke ({BASE}=all takes all of them)"
    return found, said
