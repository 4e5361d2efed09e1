"""Random valid settings through a run and through everything that reads it: what a run writes can be read.

    python tests/roundtrip.py 300 --seed 0        # make roundtrip

Each case is one command drawn from a seed, with settings of the run, the method, the store, the protocol, fidelity,
prefill and the model, over the tasks that need no data. It is given twice, and every reader is given its folder.
"""

import argparse
import contextlib
import io
import json
import math
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hydra.utils import get_class
from refusals import ERROR

from kvbench.cli.main import main
from kvbench.config.files import options
from kvbench.config.methods import method_settings
from kvbench.policy.settings import BudgetRule, TierRule
from kvbench.rules import FLAG, Choice, Declared, Number, Several, Whole, declared

TASKS = {
    "longctx": {"length": (600, 700), "items": (1, 2), "kinds": ("[kv]", "[passkey,recall]", "[multikey]")},
    "ruler": {
        "lengths": ("[600]", "[600,700]"),
        "items": (1,),
        "tasks": ("[niah_single_1]", "[niah_multikey_1]"),
        "answer_prefix": ("false",),
    },
    "needle": {
        "lengths": ("[500]",),
        "depths": ("3", "[0,50]"),
        "items": (1,),
        "needles": (1, 2),
        "values": ("uuids",),
    },
    "stream": {"prompt_tokens": (16, 40), "tokens": (3, 12), "items": (1, 2)},
    "perplexity": {"chunk_tokens": (8, 21), "chunks": (1, 2)},
    "drift": {
        "prompt_tokens": (16, 40),
        "tokens": (3, 12),
        "items": (1, 2),
        "temperature": (0.7, 1),
        "top_p": (0.9, 1),
    },
    "custom": {
        "metric": ("exact", "contains", "f1", "rouge_l"),
        "separator": ('" "',),
        "answer_prefix": ('"So "',),
        "stop": ('["."]',),
    },
}
SMALL = {
    "longctx": "length=600 items=1",
    "ruler": "lengths=[600] items=1 tasks=[niah_single_1]",
    "drift": "tokens=6 items=2",
}
SMALL |= {
    "needle": "lengths=[500] depths=2 items=1",
    "stream": "prompt_tokens=24 tokens=6 items=2",
    "perplexity": "chunk_tokens=12 chunks=2",
    "custom": "max_new_tokens=4",
}
SETTINGS = {
    "limit": ("1", "2", "first:1", "first:2", "null"),
    "seed": ("1", "7"),
    "batch_size": ("1", "3"),
    "prompt_cache_bytes": ("1MiB", "64MiB"),
    "reference": ("none",),
    "resume": ("false",),
    "fidelity.on": ("own",),
    "fidelity.max_tokens": ("0", "3", "null"),
    "fidelity.per_token": ("true",),
    "prefill.chunk": ("64", "200"),
    "store.page_bytes": ("4096", "32768"),
    "store.budget_bytes": ("64MiB", "1GiB"),
    "store.rotation": ("hadamard",),
    "store.key_offset": ("prompt",),
    "store.track": ("[score]", "[pos,score]", "[pos]"),
    "protocol.query_aware": ("false",),
    "protocol.temperature": ("0", "1", "0.8"),
    "protocol.top_p": ("1", "0.9"),
    "protocol.num_samples": ("2", "1"),
    "protocol.max_new_tokens": ("1", "5"),
    "protocol.chat_template": ("never",),
    "protocol.date": ('"2025-01-31"',),
    "backend": ("torch", "cpu"),
    "model.dtype": ("bfloat16", "float32"),
    "model.linear": ("streamed", "plain"),
    "model.seed": ("3",),
    "model.num_layers": ("1", "3"),
    "model.max_tokens": ("1024",),
}
# What a reader may say instead of an answer, where a case has nothing for it: no full cache to compare with, no score.
NOTHING = (
    *("nothing to compare", "nothing to rank", "nothing can be shown", "nothing can be drawn", "no table can be made"),
    *("no finished sample", "fits against=full"),
    *("says what was measured of every token", "has depths and lengths", "takes runs of task=ruler alone"),
    "tables and buffers may take",  # a budget in bytes that is too small for the length that `bytes` is asked about
)


@dataclass
class Outcome:
    """What became of one case."""

    words: list[str]
    refused: str = ""
    """The refusal of the settings, which came before the first prompt was read; empty for a run."""
    faults: list[str] = field(default_factory=list)


def value_of(setting: Declared, draw: random.Random) -> str | None:
    """An allowed value of a setting, as the command line has it; None where the rule alone does not tell."""
    rule = setting.rule
    if setting.optional and draw.random() < 0.2:
        return "null"
    if rule is FLAG:
        return draw.choice(("true", "false"))
    if isinstance(rule, Choice):
        return str(draw.choice(rule.options))
    if isinstance(rule, Whole):
        step, low = max(rule.multiple_of, 1 + rule.odd), rule.low or 0
        first = math.ceil(low / rule.multiple_of) * rule.multiple_of
        first += rule.odd and first % 2 == 0
        found = first + step * draw.randrange(0, 12)
        return str(found if rule.high is None or found <= rule.high else first)
    if isinstance(rule, Number):
        low, high = rule.low or 0.0, rule.high if rule.high is not None else (rule.low or 0.0) + 2.0
        return f"{draw.uniform(low + 0.01 * (high - low), high):.3g}"
    if isinstance(rule, BudgetRule):
        return draw.choice(("0.5", "0.25", "1.0", "64", "16", "1MiB"))
    if isinstance(rule, TierRule):
        return draw.choice(("fp16", "int8", "int4", "k8v4"))
    if isinstance(rule, Several) and isinstance(rule.item, Choice):
        return f"[{draw.choice(rule.item.options)}]"
    return None


def case(seed: int, folder: Path) -> list[str]:
    """The words of a command; a file that it needs is written into `folder`."""
    draw = random.Random(seed)
    task = draw.choice(sorted(TASKS))
    method = draw.choice([name for name in sorted(options("method")) if name != "kvpress"])
    words = [f"task={task}", f"method={method}", "model=random", "model.preset=tiny"]
    words += [f"task.{word}" for word in SMALL[task].split()]
    if task == "custom":
        rows = [{"context": "The key is 41. " * n, "question": "Which key?", "answers": ["41"]} for n in (9, 17)]
        file = folder / "questions.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        words.append(f"task.file={file}")
    given = {key: draw.choice(values) for key, values in SETTINGS.items() if draw.random() < 0.2}
    given |= {f"task.{key}": draw.choice(values) for key, values in TASKS[task].items() if draw.random() < 0.3}
    settings = declared(get_class(method_settings(method)["_target_"]))
    for name in draw.sample(sorted(settings), k=min(len(settings), draw.choice((0, 1, 2)))):
        value = value_of(settings[name], draw)
        if value is not None:
            given[f"method.{name}"] = value
    if task not in ("stream", "perplexity"):  # which answer nothing
        words.append("protocol.max_new_tokens=3")
    else:
        given = {key: value for key, value in given.items() if not key.startswith("protocol.")}
    if given.get("protocol.num_samples") == "2":
        given["protocol.temperature"] = "0.8"
    return words + [f"{key}={value}" for key, value in given.items()]


def give(*words: str) -> tuple[int, str]:
    """One command in this process: its exit code, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(words))
    return code, said.getvalue()


def readers(results: Path, run: Path) -> Iterator[tuple[str, ...]]:
    """Commands that read a results folder, and one run of it."""
    root = f"results_dir={results}"
    yield from (("compare", root), ("table", root), ("pareto", root, "kinds=[png]", "resamples=100"))
    yield from (("report", root, "resamples=100"), ("status", root), ("drift", root, "kinds=[png]"))
    yield from (
        ("heatmap", root, "kinds=[png]"),
        ("ranks", root),
        ("bytes", f"run={run}", "length=512", "answer=8"),
        ("show", str(run)),
    )
    record = json.loads((run / "samples.jsonl").read_text(encoding="utf-8").partition("\n")[0])
    yield "show", str(run), record["sample_id"]
    yield "rerun", str(run), f"results_dir={results.with_name('again')}"
    for form in ("lm_eval", "parquet", "leaderboard"):
        yield "export", root, f"format={form}", f"to={results.with_name(form)}"


def trip(seed: int, folder: Path, *, first: int = 0, step: int = 1) -> Outcome:
    """One case from its settings to the last reader, by every so many readers from the first one named."""
    results = folder / "results"
    found = Outcome(case(seed, folder))
    command = [*found.words, f"results_dir={results}"]
    code, said = give(*command)
    if code == 2 and "Traceback" not in said and not list(results.rglob("run.json")):
        found.refused = said.strip().splitlines()[-1] if said.strip() else ""
        if not re.match(ERROR, found.refused) or re.search(r" on \w+: \d+ samples", said):
            found.faults.append(f"the refusal came late or is none: {said[-400:]}")
        return found
    runs = [path.parent for path in results.glob("*/*/*/*/run.json")]
    own = [run for run in runs if run.parts[-2] != "full"] or runs
    record = json.loads((own[0] / "run.json").read_text(encoding="utf-8")) if own else {}
    if code not in (0, 1) or not own or record["status"] not in ("complete", "failed"):
        found.faults.append(f"exit {code}: {said[-600:]}")
        return found
    again, said = give(*command)
    if again != code or ("already there" not in said and "resume=false" not in found.words):
        found.faults.append(f"given again, exit {again} after {code}: {said[-400:]}")
    for words in [*readers(results, own[0])][first::step]:
        if words[0] == "report" and seed % 4 != 1:  # as long as all others together, and in no case of the default run
            continue
        code, said = give(*words)
        nothing = code == 2 and any(text in said for text in NOTHING)
        if (code and not nothing) or "Traceback" in said or "fault of kvbench" in said or "left out" in said:
            found.faults.append(f"{' '.join(words)}: exit {code}: {said[-400:]}")
    return found


def main_trips(argv: list[str]) -> int:
    """Take the trips and say what fell."""
    parser = argparse.ArgumentParser(description="Random valid settings through a run and all of its readers.")
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case; the others follow")
    asked = parser.parse_args(argv)
    fell = refused = 0
    for seed in range(asked.seed, asked.seed + asked.count):
        with tempfile.TemporaryDirectory() as folder:
            found = trip(seed, Path(folder))
        refused += bool(found.refused)
        fell += bool(found.faults)
        for fault in found.faults:
            print(f"seed {seed}: {' '.join(found.words)}\n  {fault}", flush=True)
    print(f"{asked.count} cases: {fell} fell, {refused} were refused before a prompt was read")
    return int(bool(fell))


if __name__ == "__main__":
    sys.exit(main_trips(sys.argv[1:]))
