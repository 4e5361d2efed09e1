"""Hostile settings, questions, calibrations, tables and paths for a run."""

import json
import os
import random
import shutil
from pathlib import Path

from hostile.case import HOSTILE_TEXTS, Case, edit
from hostile.runs import ROOT, SMALL, YAMLS, untouched
from wrong_values import wrong

RUN = ["method=snapkv", "task=custom", "task.file=rows.jsonl", "reference=none", *SMALL]
ROW = {"context": "The key is 41. " * 9, "question": "Which key?", "answers": ["41"]}


def write_rows(folder: Path, *rows: object) -> None:
    """A file of questions."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or (ROW,)), encoding="utf-8")


def word_of(key: str, value: object) -> str:
    """A setting as a word of the command line."""
    text = json.dumps(value).replace("Infinity", "inf") if not isinstance(value, str) else json.dumps(value)
    return f"{key}={text}" if not isinstance(value, dict) else f"+{key}={text}".replace('"', "'")


WRONG = {
    "limit": (0, -1, 1.5, True, "first:", "first:-1", "last:3", [1], "1" * 12),
    "seed": (-1, 2**63, 1.5, "x", True, None, [0]),
    "batch_size": (0, -4, 2**20, 1.5, "4 rows", None, True),
    "shard": ("0/2", "3/2", "1/0", "x", 5, "1/2/3", "-1/2", "1.5/2"),
    "prompt_cache_bytes": (-1, "1XiB", "many", "1e400GiB", "nan", [1], None, True),
    "store.page_bytes": (1, -4096, "4 pages", 2.5, [4096], 10**30, None, True),
    "store.budget_bytes": (-1, "1", "12 apples", [1], "-1GiB", "nanGiB"),
    "store.memory_share": (0, -0.5, 1.5, "half", None, True),
    "store.rotation": ("hademard", 5, None, True),
    "store.key_offset": ("victim/x", 5, None, True, [], [[]], [[1], [1, 2]], [["x"]]),
    "store.track": ("everything", [5], ["score", "score"], None),
    "fidelity.on": ("mine", 5, None, True),
    "fidelity.max_tokens": (-1, 2.5, "all", True),
    "prefill.chunk": (0, -1, 2.5, "all", True),
    "protocol.temperature": (-1, "hot", None, 1e400, True),
    "protocol.top_p": (0, -1, 2, "x", None),
    "protocol.num_samples": (0, -1, 1.5, "x", None),
    "protocol.max_new_tokens": (0, -1, 1.5, "x", True),
    "protocol.date": ("2024-13-01", "today", 5, "2024-02-30"),
    "protocol.chat_template": ("perhaps", 5, True),
    "reference": ("full", 5, None, True),
    "model.preset": ("huge", 5, None, "../x"),
    "model.num_layers": (0, -1, 2.5, "x"),
    "model.dtype": ("float8", "complex64", 5, None),
    "model.device": ("cuda:99", "tpu", 5, "../x", ["cpu", "x"]),
    "model.linear": ("fast", 5, None),
    "model.max_tokens": (0, -1, "x", 10**12),
    "task.metric": ("f2", 5, None, "../x"),
    "task.max_new_tokens": (0, -1, "x", 1.5),
    "task.file": ("", 5, None, "nothing.jsonl", "\x00"),
    "task.stop": (5, [5], [""], {"a": 1}),
    "tracker": ("wandbb", 5, None),
    "results_dir": ("", 5, None, "victim", "victim/x", "\x00"),
    "backend": ("nothing", "../x", "torch/cpu"),
    "resume": ("perhaps", 5, None),
}


def settings(draw: random.Random, folder: Path, base: Path) -> Case:
    """Values that a setting does not take, of another kind or range, or a setting that is none."""
    from hydra.utils import get_class

    from kvbench.config.files import options
    from kvbench.config.methods import method_settings
    from kvbench.rules import declared

    write_rows(folder)
    words, kind = list(RUN), draw.choice(("method", "method", "run", "run", "run", "name"))
    if kind == "method":
        method = draw.choice([name for name in sorted(options("method")) if name != "kvpress"])
        fields = declared(get_class(method_settings(method)["_target_"]))
        name = draw.choice(sorted(fields))
        values = [value for value in wrong(fields[name]) if not isinstance(value, set)]
        plain = [value for value in values if not isinstance(value, dict) or all(isinstance(key, str) for key in value)]
        key, value = f"method.{name}", draw.choice(plain)
        words[0] = f"method={method}"
    elif kind == "run":
        key = draw.choice(sorted(WRONG))
        value = draw.choice(WRONG[key])
    else:
        key = draw.choice(
            ("method.bugdet", "limt", "task.file.x", "store.size", "protocol..x", "hydra.run.dir.x", "a.b.c")
        )
        value = draw.choice((1, None, "x", [1], {"a": 1}))
    words = [word for word in words if word.partition("=")[0] != key] + [word_of(key, value)]
    wants = "end" if isinstance(value, dict) else "refused"
    return Case(word_of(key, value)[:90], [words], wants=wants, says=(key.rpartition(".")[2], str(value)))


def data(draw: random.Random, folder: Path, base: Path) -> Case:
    """A file of questions that no tool wrote."""
    path, words = folder / "rows.jsonl", list(RUN)
    metric = draw.choice(("exact", "contains", "f1", "rouge_l", "code", "regex", "choice"))
    words.append(f"task.metric={metric}")
    kind = draw.choice(("edit", "edit", "edit", "line", "line", "pattern", "pattern", "file", "many", "large"))
    row = ROW | {"choices": ["41", "42"], "id": "a", "subset": "s", "turns": [{"question": "And?", "answers": ["4"]}]}
    what, wants = kind, "end"
    if kind == "edit":
        what = edit(row, draw)
        write_rows(folder, ROW | {"choices": ["41", "42"]}, row)
    elif kind == "line":
        odd = ("{", "[]", "null", "NaN", '{"a":' * 5000, "\x00", '"' + "x" * 11_000_000 + '"', "\ufeff{}", "\r", " ")
        path.write_text(draw.choice(odd) + "\n" + json.dumps(ROW | {"choices": ["41", "42"]}) + "\n")
    elif kind == "pattern":
        words[-1] = "task.metric=regex"
        patterns = (
            "(a+)+$",
            "(.*)*x",
            "(",
            "(?P<x>",
            "(?:a{1000}){1000}{1000}",
            "(" * 5000,
            r"(\w+\s?)+\1{9}z",
            "(?i:\ud800)",
        )
        what = draw.choice(patterns)[:40]
        write_rows(folder, ROW | {"answers": [draw.choice(patterns)]}, ROW)
    elif kind == "many":
        write_rows(folder, *[ROW | {"id": "same", "subset": name} for name in (*HOSTILE_TEXTS, "s", "s")])
        words.append("limit=1")
    elif kind == "large":
        path.write_bytes(
            draw.choice((b"\n" * (1 << 25), b"\x00" * (1 << 25), (json.dumps(ROW) + "\n").encode() * 40_000))
        )
        words.append("limit=1")
    else:
        kind = draw.choice(("pipe", "folder", "loop", "device", "utf16", "gzip", "empty"))
        what = f"rows.jsonl is {kind}"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "device":
            path.symlink_to(draw.choice(("/dev/zero", "/dev/null", "/dev/stdin", "/proc/kmsg")))
        else:
            path.write_bytes(
                {"utf16": json.dumps(ROW).encode("utf-16"), "gzip": b"\x1f\x8b\x08\x00", "empty": b""}[kind]
            )
        wants = "refused"
    return Case(f"{metric}, {what}", [words, ["compare", *ROOT, "resamples=100"]], wants=wants)


def calibration(draw: random.Random, folder: Path, base: Path) -> Case:
    """A calibration file that `calibrate` did not write."""
    import yaml

    content = {
        "schema_version": 1,
        "method": "snapkv",
        "target": "kvbench.methods.snapkv.SnapKV",
        "settings": {"budget": 0.25},
        "replaces": {"budget": 0.5},
        "base": {"window": 32},
        "confirmed": True,
        "model": {"name": "random-tiny", "fingerprint": "ab" * 32, "dtype": "torch.float32"},
        "code": {"method": "0" * 64},
    }
    write_rows(folder)
    path, kind = folder / "c.yaml", draw.choice(("edit", "edit", "edit", "yaml", "yaml", "file"))
    wants = "refused"
    if kind == "edit":
        kind = edit(content, draw)
        path.write_text(yaml.safe_dump(content))
    elif kind == "yaml":
        kind = draw.choice(sorted(YAMLS))
        path.write_text(YAMLS[kind] + (yaml.safe_dump(content) if draw.random() < 0.5 else ""))
    elif draw.random() < 0.5:
        kind = draw.choice(("pipe", "folder"))
        (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    else:
        kind = draw.choice(("/dev/zero", "/proc/kmsg", "/dev/stdin", "../outside/victim"))
        path.symlink_to(kind)
    return Case(kind, [[*RUN, "method.calibration=c.yaml"]], wants=wants, says=("c.yaml", "calibrat"))


def table(draw: random.Random, folder: Path, base: Path) -> Case:
    """A table of numbers by layer and head that is none."""
    write_rows(folder)
    name = draw.choice(("t.json", "t.tsv"))
    path = folder / name
    texts = ("", "[]", "[[]]", "[[1,2],[3]]", "nan nan\nnan nan", "inf\n", "-1 2\n3 4", "[[1e999,1],[1,1]]", "x y\n")
    texts += (
        "[" * 100_000,
        "1 2\n" * 10**6,
        '{"a": 1}',
        "\x00",
        '[["1","2"]]',
        "[[true,false]]",
        "9" * 10**6,
        "1,,2\n3,,4",
    )
    kind = draw.choice((*texts, "pipe", "/dev/zero", "/proc/kmsg"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind.startswith("/"):
        path.symlink_to(kind)
    else:
        path.write_text(kind)
    words = draw.choice(([*RUN, "method.allocation=table"], ["method=duo_attention", *RUN[1:]]))
    return Case(f"{name} is {kind[:40]!r}", [[*words, f"method.table={name}"]], wants="refused", says=(name, "table"))


def paths(draw: random.Random, folder: Path, base: Path) -> Case:
    """Paths to write to that are no such thing, or that a hostile name among the results would lead away from."""
    shutil.copytree(untouched(base), folder / "results")
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("nothing/there")
    (folder / "loop").symlink_to("loop")
    (folder / "file").write_text("untouched\n")
    (folder / "folder").mkdir()
    odd = (
        "pipe",
        "loop",
        "file/x",
        "folder",
        "link",
        "\x00",
        "n" * 300,
        "d/" * 2500,
        "",
        "a\nb",
        "\x1b[31m",
        "$SECRET",
    )
    where = draw.choice(odd)
    commands = {
        "export": ["export", *ROOT, f"format={draw.choice(('lm_eval', 'parquet', 'leaderboard'))}", f"to={where}"],
        "compare": ["compare", *ROOT, "resamples=100", f"out={where}"],
        "table": ["table", *ROOT, "resamples=100", f"out={where}", "format=csv"],
        "pareto": ["pareto", *ROOT, "resamples=100", "kinds=[svg]", f"out={where}"],
        "report": ["report", *ROOT, "resamples=100", f"out={where}"],
        "published": ["published", f"out={where}"],
        "bytes": ["bytes", "length=512", f"out={where}"],
        "run": ["method=snapkv", *SMALL[:-1], "task.length=600", "task.items=1", f"results_dir={where}"],
        "status": ["status", f"results_dir={where}"],
        "show": ["show", where],
        "rerun": ["rerun", where],
        "data": ["data", "task=longbench", f"check={where}"],
        "advise": ["advise", f"results_dir={where}", f"bench={where}"],
        "config": ["--config-dir", where, "list"],
    }
    name = draw.choice(sorted(commands))
    commands[name] = [word.replace(f"={where}", f'="{where}"') if not where else word for word in commands[name]]
    named = [
        "in/folder",
        "in/" + "n" * 300,
        "in/d",
        "in/nothing",
        "in/$SECRET",
        "in/a\nb",
        "in/\x1b[31m",
        "in/results/pareto",
        "in/results/report.html",
        "in/results",
    ]
    return Case(f"{name} {where[:40]!r}", [commands[name]], named=named)
