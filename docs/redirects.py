"""A hook of mkdocs: pages of the site that lead from where a document was to where it is."""

from collections.abc import Mapping
from pathlib import Path
from posixpath import dirname, relpath

REFERENCE = "beyond large limits measures methods models official statistics tasks"
MOVED = {
    "docs/usage.md": "docs/run.md",
    "docs/journeys.md": "docs/run.md",
    "docs/choosing.md": "docs/choose.md",
    "docs/evidence.md": "docs/read.md",
    "docs/extending.md": "docs/extend.md",
    "docs/reference.md": "docs/reference/python.md",
    **{f"docs/{name}.md": f"docs/reference/{name}.md" for name in REFERENCE.split()},
}
PAGE = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={link}">
<a href="{link}">moved</a>
"""


def on_post_build(config: Mapping[str, str]) -> None:
    """Write the pages into the built site."""
    for old, new in MOVED.items():
        page = Path(config["site_dir"]) / old.replace(".md", ".html")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(PAGE.format(link=relpath(new.replace(".md", ".html"), dirname(old))), encoding="utf-8")
