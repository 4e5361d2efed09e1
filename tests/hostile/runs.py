"""Folders of results that somebody tampered with, for everything that reads them."""

import json
import lzma
import os
import random
import shutil
from pathlib import Path
from typing import Any

from hostile.case import HOSTILE_TEXTS, OUTSIDE, Case, edit, spots
from hostile.child import command, shared

from kvbench.results.sample import seal_of

SMALL = ["model=random", "model.preset=tiny", "backend=torch", "protocol.max_new_tokens=3", "results_dir=results"]
BASE = ["-m", "method=full,snapkv", *SMALL, "task=ruler", "task.lengths=[600]", "task.items=2"]
BASE += ["task.tasks=[niah_single_1]", "task.answer_prefix=false", "fidelity.per_token=true"]
AGAIN = ["method=snapkv", *BASE[2:]]  # a command that finds the tampered run where its own would be
ROOT = ["results_dir=results"]
READERS = {
    "compare": ["compare", *ROOT, "resamples=100"],
    "table": ["table", *ROOT, "resamples=100"],
    "ranks": ["ranks", *ROOT, "resamples=100"],
    "status": ["status", *ROOT],
    "drift": ["drift", *ROOT, "kinds=[svg]"],
    "advise": ["advise", *ROOT, "model=llama3-8b", "context=2k", "resamples=100"],
    "lm_eval": ["export", *ROOT, "format=lm_eval", "to=out"],
    "leaderboard": ["export", *ROOT, "format=leaderboard", "to=out/deep/er"],
    "parquet": ["export", *ROOT, "format=parquet", "to=out"],
    "bytes": ["bytes", "run=RUN", "length=512", "answer=8"],
    "list": ["show", "RUN"],
    "show": ["show", "RUN", "niah_single_1/600/0"],
    "tail": ["show", "RUN", "niah_single_1/600/0", "prompt=tail"],
    "again": AGAIN,
    "pareto": ["pareto", *ROOT, "resamples=100", "kinds=[svg]"],
    "rerun": ["rerun", "RUN"],
    "report": ["report", *ROOT, "resamples=100"],
}
QUICK = ("compare", "table", "ranks", "status", "lm_eval", "leaderboard", "bytes", "list", "tail", "advise", "drift")
SLOW = ("again", "pareto", "rerun", "report", "show", "parquet")
# What a record says of a run beside its numbers and of what made them.
ABOUT = (
    "message",
    "remark",
    "model_remark",
    "experiment",
    "machine",
    "versions",
    "git",
    "sessions",
    "started",
    "ended",
)


# Words that a field of a record may hold, by its name.
WORDS = {
    "status": ("running", "stopped", "failed", "complete"),
    "weighting": ("subset", "sample", "task"),
    "interval": ("wilson", "studentised bootstrap", "newcombe", ""),
    "method": ("full",),
    "task": ("ruler", "longctx", "gsm8k"),
    "backend": ("torch", "cpu", "gpu"),
}
NUMBERS = ("metrics", "ledger", "kept", "fidelity", "drift", "counts", "comparison", "task_aggregate")


def untouched(base: Path) -> Path:
    """The results of two runs that nobody tampered with."""
    return shared(base, "results", command(*BASE))


def copied(base: Path, folder: Path) -> Path:
    """Copy the untouched results; gives the folder of the run that is to be tampered with."""
    shutil.copytree(untouched(base), folder / "results")
    return next(folder.glob("results/ruler/*/snapkv/*"))


def reading(draw: random.Random, folder: Path, run: Path, *, must: tuple[str, ...] = ("compare",)) -> list[list[str]]:
    """Commands that read the results: those that must be among them, and some that are drawn."""
    asked = [*must, *draw.sample(QUICK, k=2), *(draw.sample(SLOW, k=1) if draw.random() < 0.4 else ())]
    path = str(run.relative_to(folder))
    return [[word.replace("RUN", path) for word in READERS[name]] for name in dict.fromkeys(asked)]


def record(draw: random.Random, folder: Path, base: Path) -> Case:
    """A `run.json` of which something was changed."""
    run = copied(base, folder)
    path = run / "run.json"
    content = json.loads(path.read_text())
    kind = draw.choice(("anything", "numbers", "numbers", "identity", "identity", "about", "status", "text", "twice"))
    if kind == "text":
        text = path.read_text()
        at = draw.randrange(len(text))
        cut = {"cut": text[:at], "noise": text[:at] + draw.choice('\x00{}[],:"\\9') + text[at:]}
        cut |= {"deep": "[" * 200_000, "empty": "", "spaces": " " * (1 << 24), "bom": "\ufeff" + text}
        kind = draw.choice(sorted(cut))
        path.write_text(cut[kind])
        what, wants = f"{kind} at {at}", "seen"
    elif kind == "twice":
        path.write_text(path.read_text().rstrip()[:-1] + ', "method": "full", "status": "complete"}')
        what, wants = "keys twice", "end"
    elif kind in ("numbers", "identity"):
        what, wants = _number(content, draw, NUMBERS if kind == "numbers" else ("identity",)), "seen"
        path.write_text(json.dumps(content))
    else:
        what = edit(content, draw, within={"about": ABOUT, "status": ("status", "counts")}.get(kind, ()))
        path.write_text(json.dumps(content))
        wants = "end" if kind == "about" or what.split()[-1].split(".")[0].split("=")[0] in ABOUT else "seen"
    return Case(what, reading(draw, folder, run), wants=wants)


def _number(content: dict, draw: random.Random, within: tuple[str, ...]) -> str:
    """Change a number of a record to another one that it might be."""
    inner: Any = content
    path = draw.choice([spot for spot in spots(content) if spot[0] in within and _is_number(content, spot)])
    for key in path[:-1]:
        inner = inner[key]
    value = inner[path[-1]]
    inner[path[-1]] = draw.choice([new for new in (0, 1, 2 * value, value + 1, value / 2) if new != value])
    return f"{'.'.join(map(str, path))}: {value} is {inner[path[-1]]}"


def words(draw: random.Random, folder: Path, base: Path) -> Case:
    """A `run.json` in which a boolean, or a word that decides something, is another one that it might be."""
    run = copied(base, folder)
    where = [run, *([next(folder.glob("results/ruler/*/full/*"))] if draw.random() < 0.5 else [])]
    paths = [one / "run.json" for one in where]
    content = json.loads(paths[0].read_text())
    deciding = [spot for spot in spots(content) if _decides(content, spot)]
    name = draw.choice(sorted({str(spot[-1]) for spot in deciding}))  # most are of the many means
    spot = draw.choice([spot for spot in deciding if str(spot[-1]) == name])
    value = _at(content, spot)
    others = [new for new in WORDS.get(str(spot[-1]), ("other", "full", "")) if new != value]
    new = not value if isinstance(value, bool) else draw.choice(others)
    for path in paths:
        content = json.loads(path.read_text())
        if spot in list(spots(content)):  # a full cache is compared with nothing
            _at(content, spot[:-1])[spot[-1]] = new
            path.write_text(json.dumps(content))
    what = f"{'.'.join(map(str, spot))}: {value!r} is {new!r}{' in all' * (len(paths) - 1)}"
    commands = reading(draw, folder, run)
    if spot == ("status",):  # a run that was not over ends without a word on it
        commands = [one for one in commands if one != AGAIN]
    return Case(what, commands, wants="seen")


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def _decides(content: dict, path: tuple) -> bool:
    """Whether a boolean or a word stands there that numbers, or what is said of them, follow from. A model's name is
    no more than that: its weights are in the identity."""
    named = path[0] in (*ABOUT, "model") or path[-1] == "description"
    return not named and isinstance(_at(content, path), bool | str)


def _is_number(value: Any, path: tuple) -> bool:
    for key in path:
        value = value[key]
    return isinstance(value, int | float) and not isinstance(value, bool)


def lines(draw: random.Random, folder: Path, base: Path) -> Case:
    """A `samples.jsonl` of which lines were changed, taken out, doubled, or are of somebody else."""
    run = copied(base, folder)
    path, digest = run / "samples.jsonl", json.loads((run / "run.json").read_text())["hash"]
    held = [json.loads(line) for line in path.read_text().splitlines()]
    kind = draw.choice(("broken", "broken", "resealed", "resealed", "unsealed", "unsealed", "order", "other", "stuff"))
    place, wants = draw.randrange(len(held)), "seen"
    if kind == "order":
        kind = draw.choice(("doubled", "turned", "dropped"))
        held = {"doubled": [*held, *held], "turned": held[::-1], "dropped": held[:place] + held[place + 1 :]}[kind]
        what = kind
    elif kind == "other":
        other = next(folder.glob("results/ruler/*/full/*/samples.jsonl"))
        held[place] = json.loads(other.read_text().splitlines()[place])
        what = "a line of another run"
    elif kind == "stuff":
        stuff = {"newlines": b"\n" * (1 << 23), "zeros": b"\x00" * (1 << 20), "brackets": b"[" * (1 << 20) + b"\n"}
        stuff |= {"endless": b'"' + b"x" * (1 << 26) + b'"\n', "torn": b'{"sample_id":', "latin": b"\xff\xfe\n"}
        what = draw.choice(sorted(stuff))
        content = path.read_bytes()
        path.write_bytes(stuff[what] + content if draw.random() < 0.5 else content + stuff[what])
        return Case(what, reading(draw, folder, run), wants=wants)
    else:
        for one in held if kind == "unsealed" else ():
            del one["seal"]
        before = json.dumps(held[place])
        what = f"{kind}: " + draw.choice((_score, _score, _text, _id, edit))(held[place], draw)
        if kind == "resealed" and json.dumps(held[place]) != before:
            held[place].pop("seal", None)
            wants = "end"  # a sealed line is what the run wrote, as far as anybody can tell
            try:
                held[place]["seal"] = seal_of(held[place], digest)
            except ValueError:
                what += " (no JSON)"
    path.write_text("".join(json.dumps(one) + "\n" for one in held))
    if draw.random() < 0.2:
        path.with_name("samples.jsonl.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
        what += ", packed"
    return Case(what, reading(draw, folder, run), wants=wants)


def _score(line: dict, draw: random.Random) -> str:
    line["scores"] = dict.fromkeys(line["scores"], draw.choice((0.25, 1.0, -5, 1e308, 7)))
    return f"scores={line['scores']}"


def _text(line: dict, draw: random.Random) -> str:
    name = draw.choice(("text", "subset", "message", "finish"))
    line[name] = draw.choice(HOSTILE_TEXTS)
    return f"{name}={line[name][:40]!r}"


def _id(line: dict, draw: random.Random) -> str:
    where = draw.choice(("sample_id", "repeat", "meta", "protocol"))
    if where == "repeat":
        line[where] = draw.choice((5, -1, 10**9))
    elif where == "sample_id":
        line[where] = draw.choice(("zzz/9", *HOSTILE_TEXTS))
    else:
        line[where] |= {"length": draw.choice((OUTSIDE, f"x/../../../{OUTSIDE}/y", "\x00", 10**400))}
    return f"{where}={str(line[where])[:60]!r}"


LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
YAMLS = {
    "laughs": LAUGHS,
    "itself": "a: &a [*a]\n",
    "merged": "a: &a {x: 1}\nb: {<<: *a, <<: *a}\n",
    "object": "x: !!python/object/apply:os.system ['touch ../outside/ran']\n",
    "tag": "x: !env SECRET\n",
    "twice": "seed: 1\nseed: 2\n",
    "circle": "seed: ${limit}\nlimit: ${seed}\n",
    "secret": "extra: ${oc.env:SECRET}\n",
    "deep": "a: " + "[" * 3000 + "]" * 3000 + "\n",
    "deeper": "{a: " * 300 + "1" + "}" * 300,
    "list": "- 1\n- 2\n",
    "text": "only text",
    "empty": "",
    "binary": "\x00\x01\x02",
    "tabs": "a:\n\t- b\n",
    "documents": "seed: 1\n---\nseed: 2\n",
    "number": "seed: " + "9" * 100_000 + "\n",
    "huge": "a: " + "x" * (1 << 24) + "\n",
    "sixty": "a: 190:20:30\nb: 0o17\nc: .inf\nd: 2001-12-14\n",
    "null key": "? \n: 1\n",
    "set": "a: !!set {x, y}\nb: !!binary aGk=\n",
}
SETTINGS_OF_A_CONFIG = {
    "results_dir": (OUTSIDE, "/proc/self/root", ""),
    "model.name": HOSTILE_TEXTS,
    "task.name": HOSTILE_TEXTS,
    "task.include_path": ("../outside", "/"),
    "task.allow_code_execution": (True,),
    "task.items": (-1, 0, "many", 2.5, 10**19),
    "task.lengths": ([10**12], [-1], [], "600", {"a": 1}),
    "task.tasks": (["../../x"], [], ["niah_single_1"] * 3, [[]], None),
    "method._target_": ("os.system", "kvbench.methods.snapkv.__class__", "kvbench.methods.nothing.X", 5, None),
    "method.calibration": ("pipe", "../outside/victim", "/proc/kmsg", "${oc.env:HOME}"),
    "method.table": ("pipe", "/proc/kmsg", "/dev/zero", [[1e308, 2]]),
    "method.allocation": ("table", "ada", 5, None),
    "method.budget": (10**400, "9" * 5000, -1, None, "1e400", [0.5]),
    "model.kind": ("hf", "gguf", "embedded", "other", 5, None),
    "model.path": ("pipe", "../outside", "/dev/zero"),
    "model.overrides": ({"hidden_size": 10**9}, {"model_type": "../x"}, {"auto_map": {"AutoConfig": "x.y"}}, "x", [1]),
    "model.num_layers": (10**9, 0, -1, "x"),
    "tracker": ("wandb", "../x", "mlflow", 5),
    "batch_size": (10**9, 0, "x", None),
    "seed": (-1, 2**64, "x", 1.5),
    "limit": ("first:0", "first:99999999999", -1, [1], True),
    "shard": ("1/0", "5/4", "1/99999999999"),
    "store.page_bytes": (3, 2**40, "x", -1),
    "store.budget_bytes": (1, "1e400GiB", "x"),
    "protocol.max_new_tokens": (-1, 10**12, "x"),
    "protocol.chat_template": ("always", "../x", 5),
    "backend.name": ("../x", "gpu", "cpu.../", None),
    "hydra": ({"run": {"dir": OUTSIDE}}, {"searchpath": ["file://.."]}),
}


def config(draw: random.Random, folder: Path, base: Path) -> Case:
    """A `config.yaml` that a stored run did not write, which `rerun` and `show` follow."""
    import yaml

    run = copied(base, folder)
    path = run / "config.yaml"
    os.mkfifo(folder / "pipe")
    usual, kind = yaml.safe_load(path.read_text()), draw.choice(("yaml", "yaml", "setting", "setting", "group", "edit"))
    if kind == "yaml":
        what = draw.choice(sorted(YAMLS))
        path.write_text(YAMLS[what] + (path.read_text() if draw.random() < 0.3 else ""))
    elif kind == "setting":
        name = draw.choice(sorted(SETTINGS_OF_A_CONFIG))
        value = draw.choice(SETTINGS_OF_A_CONFIG[name])
        inner, *_, key = usual, *name.split(".")
        for part in name.split(".")[:-1]:
            inner = inner.setdefault(part, {})
        inner[key] = value
        what = f"{name}={str(value)[:60]!r}"
        path.write_text(yaml.safe_dump(usual))
    elif kind == "group":
        name, value = draw.choice(sorted(usual)), draw.choice((None, "text", 5, [], {}, [{}], "${method}"))
        usual[name] = value
        what = f"{name}={value!r}"
        path.write_text(yaml.safe_dump(usual))
    else:
        what = edit(usual, draw)
        path.write_text(yaml.safe_dump(usual))
    case = Case(what, [], wants="end")
    case.commands = reading(draw, folder, run, must=draw.choice((("rerun",), ("rerun", "show"), ("show", "status"))))
    return case


def files(draw: random.Random, folder: Path, base: Path) -> Case:
    """A run's folder in which other things lie than files: pipes, links, folders, bombs; and folders of other names."""
    run = copied(base, folder)
    name = draw.choice(("run.json", "samples.jsonl", "config.yaml", "samples.jsonl.xz", ".lock", "result.png"))
    path, wants = run / name, "seen" if name in ("run.json", "samples.jsonl") else "end"
    kind = draw.choice(("pipe", "link", "loop", "folder", "gone", "device", "bomb", "beside", "odd"))
    if kind == "bomb":
        path, name = run / "samples.jsonl.xz", "samples.jsonl.xz"
        (run / "samples.jsonl").unlink()
        packed = lzma.compress(draw.choice((b"\n", b"[", b"{}\n", b"x")) * (1 << 27), preset=0)
        path.write_bytes(draw.choice((packed, packed[:-9], packed * 2, b"", b"\xfd7zXZ\x00")))
        wants = "seen"
    elif kind == "beside":
        for other in draw.sample(HOSTILE_TEXTS, k=4):
            part = other.replace("/", "").encode("utf-8", "replace")[:200].replace(b"\x00", b"")
            copy = os.fsencode(run.parent) + b"/" + (part or b" ")
            shutil.copytree(os.fsencode(run), copy, dirs_exist_ok=True)
            Path(os.fsdecode(copy), "run.json").write_text(draw.choice(("", "{}", "[]", "null", "\x00", "{" * 10_000)))
    elif kind == "odd":
        (folder / "results" / "itself").symlink_to("../results")
        (folder / "results" / "ruler" / "\udcff\n").mkdir()
        (folder / "results" / "ruler" / "victim").symlink_to("../../../outside")
        (folder / "results" / ".multirun" / "x").symlink_to("..")
    else:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(folder.parent / "outside" / draw.choice(("victim", "dir/victim.jsonl", "made", "dir")))
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "folder":
            (path / "inner").mkdir(parents=True)
        elif kind == "device":
            path.symlink_to(draw.choice(("/dev/zero", "/dev/null", "/proc/self/mem", "/dev/stdin")))
    case = Case(
        f"{kind} {name}",
        [],
        wants="end" if kind in ("beside", "odd") or (kind, name) == ("gone", "run.json") else wants,
    )
    case.commands = reading(draw, folder, run, must=("compare", draw.choice(("again", "rerun", "show", "status"))))
    return case


def sweep(draw: random.Random, folder: Path, base: Path) -> Case:
    """A record of a sweep, or of one of its jobs, that no sweep wrote."""
    run = copied(base, folder)
    path = draw.choice(sorted(folder.glob("results/.multirun/*/**/*.json")))
    content, kind = json.loads(path.read_text()), draw.choice(("edit", "edit", "run", "text"))
    if kind == "run":
        content["run"] = what = draw.choice(("../../outside", "/", "ruler/../../..", "\x00", "x" * 5000, "victim"))
    elif kind == "edit":
        what = edit(content, draw)
    path.write_text(json.dumps(content))
    if kind == "text":
        what = draw.choice(("", "[" * 100_000, "null", "\x00", "{", "[]"))
        path.write_text(what)
    commands = [["status", *ROOT, "sweeps=all", "jobs=null"], *reading(draw, folder, run, must=("status", "again"))]
    return Case(f"{path.name}: {what[:60]!r}", commands)
