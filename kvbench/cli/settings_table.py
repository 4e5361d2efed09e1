"""Writes docs/reference/settings.md from the classes of tasks and protocols: `make docs` redirects its output."""

from kvbench.cli.choice_help import choice_help
from kvbench.config import files

HEAD = """# Settings of tasks and protocols

Generated from the code by `make docs`; `kvbench help NAME` prints the same. On the command line a setting is
`task.KEY=VALUE` or `protocol.KEY=VALUE`; the defaults below are those of `conf/`. [Tasks](tasks.md) says what each task
asks and how it is scored.
"""
WIDE = 1_000_000  # characters: no text is wrapped


def markdown_of(group: str, name: str) -> str:
    """Purpose and settings of a task or a protocol as Markdown.

    Args:
        group: `task` or `protocol`.
        name: A choice of the group.
    """
    about, _, rest = choice_help(group, name, WIDE).partition(f"\nsettings ({group}.KEY=VALUE)\n")
    lines, fenced = [f"### {name}", *about.splitlines()[1:], ""], False
    for line in rest.splitlines():
        text = line.strip()
        if not text:
            continue
        if not line.startswith(" "):  # what it sets besides, as YAML, or whose other settings it has
            fenced = text == "it sets, too"
            lines += ["", f"{text[0].upper()}{text[1:]}{':' if fenced else '.'}", *(["", "```yaml"] if fenced else [])]
        elif fenced:
            lines.append(line.removeprefix("  "))
        elif line.startswith("      "):
            lines[-1] += f": {text}" if lines[-1].endswith("`") else f". {text[:1].upper()}{text[1:]}"
        else:
            setting, _, rule = text.partition("  ")  # both on one line, where they fit
            lines.append(f"- `{setting}`" + (f": {rule}" if rule else ""))
    return "\n".join([*lines, *(["```"] if fenced else [])]) + "\n"


def render() -> str:
    """The whole document."""
    parts = [HEAD]
    for group, title in (("task", "Tasks"), ("protocol", "Protocols")):
        parts += [f"## {title}\n", *(markdown_of(group, name) for name in files.options(group))]
    return "\n".join(parts)


if __name__ == "__main__":
    print(render(), end="")
