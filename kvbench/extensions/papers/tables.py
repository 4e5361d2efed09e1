"""Writes tables.md from conf/paper/: `python -m kvbench.extensions.papers.tables > tables.md`; `make docs` does so."""

import shlex
import textwrap

from kvbench.config import files
from kvbench.extensions.papers import papers
from kvbench.extensions.papers.paper import here
from kvbench.extensions.papers.papers import Entry, Paper
from kvbench.show.formats import markdown_table

WIDTH = 120
HEAD = """# Printed tables of papers and kvbench

Generated from the papers' YAML files by `make docs`; a test keeps it so, and another one keeps the list complete. Every
table and figure of these papers stands here by its number, with the command that makes it, or the reason why there is
none.

```
python -m kvbench paper                                    # the papers
python -m kvbench paper diffkv                             # its tables and figures
python -m kvbench paper diffkv table=1 plan=true allow_code_execution=true   # what would run; plan=timed: how long
python -m kvbench paper diffkv table=2 model=hf model.path=meta-llama/Llama-3.1-8B-Instruct task.data_dir=DIR
python -m kvbench paper minikv table=1 model=hf model.path=meta-llama/Llama-2-7b-chat-hf hydra/launcher=submitit_slurm
python -m kvbench paper diffkv figure=13 quick=true        # a figure that a bench makes
```

A table is a sweep: each task goes through all methods prompt by prompt, and a sweep that is stopped goes on when the
same command is given again. It ends in the paper's own table with our intervals (`table_1.md`) and one line for each
cell (`table_1.csv`). `table_1_memory.csv` has each row's size as the paper counts it next to the bytes that were
resident. Each printed cell has a verdict:

- *reproduced*: the printed value lies in our 95 % interval, with the same model (by its name) and the same protocol as
  far as the paper states it. With few samples an interval is wide: read it, too.
- *not reproduced*: it lies outside; the difference stands beside it, and below the table what is known to differ.
- *cannot tell*: the paper prints a bound ("more than 65 %"), and our interval has it inside.
- *other model*, *other machine*, *other protocol*: never a match. A `limit=` is another protocol. Cells of speed and
  memory stand beside what the entry's bench measured, with quartiles over its rounds, and are always one of the three:
  the authors' machines and baselines are not at hand. Bytes that are counted can be *reproduced*: digit for digit.
- *not run*: no complete run answers it.
- *cannot be*: with the reason.

Every picture that a command draws says above it whose it is, and *other model* where the model is not the paper's.

SnapKV, PyramidKV, Ada-KV, KIVI and H2O have no tables of their own in published.csv. Their cells are those that the
papers below print: KV-Compress's tables 1 and 2, MiniKV's table 1, DiffKV's tables 1 to 3.

**Where the list is from.** Tables, prose and captions were read; a picture was not, where it has no numbers in its
text. A figure whose axes the text states is drawn over these. What a paper only draws - pages, blocks, bytes of a few
tokens - is a *checked example*: the command carries it out on the store's own code and prints it, and a test holds it
to what the paper says.
"""


def render() -> str:
    """The whole document."""
    return "\n".join([HEAD, *map(section, papers.every())])


def section(paper: Paper) -> str:
    """One paper."""
    about = f"{paper.about} {paper.note}".strip()
    head = ["at", "shows", "command", "printed cells", "took"]
    table = markdown_table([head, *(_row(paper, entry) for entry in paper.entries)])
    models = ", ".join(f"{printed} = `{hub}`" for printed, hub in paper.models.items())
    said = f"Models that count as the paper's: {models}." if models else "It names no model."
    parts = [f"## {paper.name}", _filled(about), _filled(said), table, *_details(paper)]
    return "\n\n".join(parts) + "\n"


def _row(paper: Paper, entry: Entry) -> list[str]:
    kind, _, number = entry.at.partition(" ")
    num_printed = len(entry.printed(paper))
    command = f"`kvbench paper {paper.key} {kind}={number}`: {here(entry)}"
    if entry.cannot:
        command = here(entry)
    cells = (entry.at, entry.shows, command, f"{num_printed or '-'}", entry.took or "-")
    return [cell.replace("|", "\\|") for cell in cells]


def _details(paper: Paper) -> list[str]:
    """Commands of each entry, and known differences."""
    parts = []
    for entry in paper.entries:
        if not (entry.tasks or entry.then or (entry.example and entry.differs)):
            continue
        lines = [f"### {paper.name}, {entry.at}", *([] if entry.example else [f"```\n{_lines(entry)}\n```"])]
        differs = [*(f"{row}: {why}" for row, why in entry.without.items()), *entry.differs]
        if differs:
            lines.append("\n".join(_filled(f"- {text}", "  ") for text in differs))
        parts.append("\n\n".join(lines))
    return parts


def _lines(entry: Entry) -> str:
    lines = [f"every: {entry.every}"] if entry.tasks else []
    lines += [f"task: {line}" for line in entry.tasks]
    for name, method_words in entry.methods.items():
        each = {"": method_words} if isinstance(method_words, str) else method_words
        lines += [f"{name}{f' on {model}' if model else ''}: {line}" for model, line in each.items()]
    for word, commands in (("first", entry.first), ("then", entry.then)):
        for line in commands:
            name, *words = shlex.split(line)
            lines.append(f"{word}: kvbench {files.spelled(name)} {shlex.join(words)}")
    lines += [f"{metric}: {said}" for metric, said in entry.measured.items()]
    return "\n".join(lines)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    print(render(), end="")
