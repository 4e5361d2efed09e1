"""Makes the tables and pictures of the study of docs/study.md from the runs that are packed.

    python results/example/mission_report.py [FOLDER]    # `make findings` does this; FOLDER has runs before packing

A study that is under way has what is there: every row names its number of problems.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from pathlib import Path
from statistics import median

import pandas as pd
from benchmarks import DIFFERENCE, rows_of, shown, words
from findings import HERE, markdown, picture, renew, write
from mission import MEASURES, PACKED

import kvbench as kb
from kvbench.cli.commands import compose_command
from kvbench.cli.main import main as kvbench
from kvbench.config.files import FULL
from kvbench.evidence.load import Group, StoredRun, find_runs, load_groups
from kvbench.results.record import RunRecord
from kvbench.show.terminal import p_text
from kvbench.stats.intervals import estimate
from kvbench.stats.paired import paired_difference

METRICS = ("score", "kl", "kl_new", "nll")  # a run that was stopped has its score by the task's measure alone
PAIRED = "n of difference low high lost gained p p_holm".split()
# Pictures of each benchmark: name -> methods, and the least share of the problems that a setting has answers to. A
# picture has the problems that all its settings have, so one that was stopped early would leave few.
SHOWN = {
    "methods": ("full h2o snapkv pyramidkv ada_snapkv kv_compress random kivi minikv diffkv".split(), 0.5),
    "formats": ("full int4 engine_format kivi diffkv".split(), 0.0),
}
# Settings of the short table, which README and the findings have: as a run names them, and as it does.
SHORT = {
    "engine_format pre_rope=True tier=q4_0 store.rotation=off store.key_offset=bias": "`q4_0`, less the keys' bias",
    "int4 pre_rope=True store.key_offset=bias": "`int4`, less the keys' bias",
    "engine_format tier=q4_0 store.rotation=off store.key_offset=prompt": "`q4_0`, less the prompt's mean",
    "int4 store.key_offset=prompt": "`int4`, less the prompt's mean",
    "engine_format tier=q4_0 store.rotation=off": "`q4_0`",
    "int4": "`int4`",
    "diffkv": "`diffkv`",
    "diffkv alpha_h=0.04 alpha_l=0.04": "`diffkv`, calibrated",
    "kivi bits=2": "`kivi bits=2`",
    "minikv bits=2": "`minikv`",
    "h2o budget=50%seen": "`h2o`",
    "snapkv budget=50%seen": "`snapkv`",
    "pyramidkv budget=50%seen": "`pyramidkv`",
    "ada_snapkv budget=50%seen": "`ada_snapkv`",
    "kv_compress budget=50%seen": "`kv_compress`",
    "random budget=50%seen": "`random`",
}
BRIEF = [
    "engine_format pre_rope=True tier=q4_0 store.rotation=off store.key_offset=bias",
    "engine_format tier=q4_0 store.rotation=off",
    "diffkv",
    "kivi bits=2",
    "minikv bits=2",
    "h2o budget=50%seen",
    "snapkv budget=50%seen",
    "random budget=50%seen",
]
# Benchmarks of the short table: their names here, and where they are read.
TITLES = {"humaneval_plus": "HumanEval+", "gsm8k": "GSM8K", "math500": "MATH-500", "longbench": "LongBench"}
MODEL = "qwen2.5-coder-0.5b"  # of the short tables
FIDELITY = ("aime24",)  # scores are at the floor: what is compared is KL along the full cache's answer
# Questions of suite=mission-offsets: as they are named here, and as a column's head has it.
OFFSETS = {
    "gsm8k with qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B, GSM8K",
    "longctx_512 with smollm2-135m": "SmolLM2-135M, 512 tokens",
    "longctx_4096 with smollm2-135m": "SmolLM2-135M, 4,096 tokens",
    "longctx_512 with gemma-3-270m": "Gemma-3-270M, 512 tokens",
    "longctx_4096 with gemma-3-270m": "Gemma-3-270M, 4,096 tokens",
}
LAYOUTS = {f"gsm8k_last with {MODEL}": "instruction last", f"gsm8k_first with {MODEL}": "first"}
LAYOUT_ITEMS = "first:80"
# Formats of 4 bits and their repairs, and prompts by their tokens: task -> more than, at most.
REPAIRED = [name for name in SHORT if name.startswith(("int4", "engine_format"))]
# Parts of a benchmark's items: prompts of more and at most so many tokens, and LongBench's subsets of long answers.
EVERY, WHOLE, CUT = (0, inf), (0, 6143), (6143, inf)  # of LongBench: what is cut has 6,144 tokens and its template's
SUMMARIES = ("gov_report", "multi_news")  # answers of up to 512 tokens, others of 32 to 128
PARTS = {task: {"all": EVERY} for task in ("humaneval_plus", "gsm8k", "math500")}
PARTS["longbench"] = {
    "short": (0, 3500),
    "middle": (3500, 6143),
    "cut": CUT,
    "whole": WHOLE,
    "brief": EVERY,
    "long": EVERY,
}
LENGTHS = ("all", "short", "middle", "cut")
KINDS = {"whole": "read whole", "cut": "cut to 6,144 tokens", "brief": "short answers", "long": "summaries"}
BEHIND = "longbench_behind"
DRAWN = (*TITLES, BEHIND, *FIDELITY)
LEVEL = 0.05  # of Holm's correction over the settings of a benchmark
USUAL = 0.8  # of the most problems that a setting has: a benchmark's heading has the numbers from here on
LABELS = ("labels.engine_format=q4_0", "figure.width=7")


def benchmark(record: RunRecord) -> str:
    """Name of a run's questions: its task, and what else of them makes answers others."""
    protocol, name = record.protocol, record.task
    if not protocol["query_aware"]:
        name += "_behind"
    if protocol.get("instruction") == "first":
        name += "_first"
    elif record.identity["task"]["limit"] == LAYOUT_ITEMS:
        name += "_last"
    if "length" in protocol:
        name += f"_{protocol['length']}"
    return f"{name} with {record.model}"


def parted(study: Path, folder: Path) -> dict[str, Path]:
    """Benchmark -> folder that has links to its runs alone; each is a family of Holm's correction.

    A benchmark that the full cache has not answered to the end is packed to go on from, and left out here.
    """
    parts = {}
    runs = [*find_runs(study, {})]
    through = {benchmark(one) for _, one in runs if one.method == FULL and one.status == "complete"}
    for run, record in runs:
        if benchmark(record) not in through:
            continue
        part = folder / benchmark(record).replace(" ", "_")
        link = part / run.relative_to(study)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(run)
        parts[benchmark(record)] = part
    return dict(sorted(parts.items()))


def _group(folder: Path) -> Group:
    (group,) = load_groups(compose_command("compare", [f"results_dir={folder}"]))
    return group


def compared(parts: dict[str, Path], groups: dict[str, Group]) -> pd.DataFrame:
    """A row for each setting and metric: the paired difference to the full cache, with bytes and lengths."""
    found = []
    for title, part in parts.items():
        answers, group = kb.load(part, samples=True), groups[title]
        for metric in METRICS:
            if metric != "score" and not (metric in answers and answers[metric].notna().any()):
                continue  # of short answers every token is in the prompt
            name = MEASURES[group.task] if metric == "score" else metric
            paired = kb.compare(part, metric=name, regressions=0)
            by_hash = {row["hash"]: row for row in paired.to_dict("records")}
            found += [_cells(title, one, metric, by_hash, answers) for one in group.runs]
    return pd.DataFrame(found)


def _cells(group: str, one: StoredRun, metric: str, by_hash: dict, answers: pd.DataFrame) -> dict[str, object]:
    mine = answers[(answers["hash"] == one.record.hash) & (answers["status"] == "ok")]
    column = {"score": f"scores.{MEASURES.get(one.record.task, '')}"}.get(metric, metric)
    values = mine[column if column in mine else "score"].astype(float)
    row = by_hash.get(one.record.hash[:12], {})
    return {
        "group": group,
        "task": one.record.task,
        "run": words(one),
        "hash": one.record.hash,
        "metric": metric,
        "answers": len(mine),
        "total": one.record.counts.total,
        "value": values.groupby(mine["subset"]).mean().mean(),
        "bytes": mine["resident_bytes"].sum() / mine["fp16_bytes"].sum(),
        "prompt_tokens": mine["num_prompt_tokens"].median(),
        **{key: row.get(key, "") for key in PAIRED},
        "commit": one.record.git.commit,
    }


def by_part(groups: dict[str, Group]) -> pd.DataFrame:
    """A row for each setting and part of a benchmark: KL of the gold answer, and the difference of the score."""
    found = []
    for title, group in groups.items():
        task = title.partition(" ")[0]
        if task not in PARTS or not title.endswith(MODEL):
            continue
        full = next(one.samples for one in group.runs if words(one) == "full")
        for one, part in product(group.runs, PARTS[task]):
            here = {key: sample for key, sample in full.items() if _is_of(sample, task, part)}
            both = [(one.samples[key], here[key]) for key in here if key in one.samples]
            kls = [mine["fidelity"]["kl_mean"] for mine, _ in both]
            kl = estimate({"": [value for value in kls if value is not None]}, bounds=(0, inf))
            scores = [tuple(sample["scores"][MEASURES[task]] for sample in pair) for pair in both]
            score = paired_difference({"": scores})
            tokens = median(sample["num_prompt_tokens"] for sample in here.values())
            row = {"task": task, "part": part, "tokens": tokens, "run": words(one), "n": len(both)}
            row |= {"kl": kl.value, "kl_low": kl.low, "kl_high": kl.high}
            found.append(row | {"difference": score.value, "low": score.low, "high": score.high})
    return pd.DataFrame(found)


def _is_of(sample: dict, task: str, part: str) -> bool:
    least, most = PARTS[task][part]
    kind = part not in ("brief", "long") or (sample["subset"] in SUMMARIES) == (part == "long")
    return kind and least < sample["num_prompt_tokens"] <= most


def pictures(parts: dict[str, Path], folder: Path) -> None:
    """The frontiers of each benchmark, methods and formats apart."""
    for title, part in parts.items():
        task, _, model = title.split(" ")
        if task not in DRAWN or title in OFFSETS:
            continue
        for name, (methods, least) in SHOWN.items():
            drawn, runs = folder / f"{task}_{model}_{name}_runs", _drawn(part, methods, least)
            if len(runs) < 2:  # the full cache alone
                continue
            for run in runs:
                (drawn / run.relative_to(part)).parent.mkdir(parents=True, exist_ok=True)
                (drawn / run.relative_to(part)).symlink_to(run.resolve())
            out = folder / f"{task}_{model}_{name}"
            metric = "kl" if task in FIDELITY else MEASURES[task.removesuffix("_behind")]
            asked = [f"metric={metric}", f"methods=[{','.join(methods)}]", f"out={out}", f"results_dir={drawn}"]
            if kvbench(["report", "view=pareto", *asked, "incomplete=true", "kinds=[png]", "axes=[resident]", *LABELS]):
                raise SystemExit(f"no picture of {title}")
            for number, path in enumerate(sorted(out.glob("*_resident.png"))):
                picture(path, HERE / f"mission_{task}_{model}_{name}{number or ''}.png")


def _drawn(part: Path, methods: Sequence[str], least: float) -> list[Path]:
    """Folders of the methods' runs that answered at least a share of their problems, of several seeds the first."""
    return [
        folder
        for folder, record in find_runs(part, {})
        if record.method in methods and record.counts.ok >= least * record.counts.total
        if record.identity["method"].get("seed", 0) == 0
    ]


def tables() -> Iterator[tuple[str, str]]:
    """Name and text of the table of every group."""
    groups: dict[str, dict[str, dict[str, dict]]] = {}
    for row in rows_of("mission"):
        groups.setdefault(row["group"], {}).setdefault(row["run"], {})[row["metric"]] = row
    headings = (
        "setting|answers|bytes, %|score, %|n|score - full's [95 %]|p (Holm)|lost, gained|KL to full|KL of what is new"
    )
    for title, runs in groups.items():
        if title in OFFSETS or title in LAYOUTS:
            continue
        if title.partition(" ")[0] in FIDELITY:
            yield f"mission: {title}", _fidelity(runs)
        else:
            lines = sorted(runs.values(), key=lambda own: -float(own["score"]["difference"] or 1))
            yield f"mission: {title}", markdown(headings.split("|"), map(_line, lines))
    if groups.keys() & OFFSETS:
        yield "mission: offsets", _offsets(groups)
    if groups.keys() & LAYOUTS:
        yield "mission: layout", _layout(groups)
    yield "mission: length", _lengths()
    yield "mission: kinds", _kinds()
    yield "mission: gold", _gold(groups)
    yield "mission in short", _short(groups, list(SHORT))
    yield "mission in brief", _short(groups, BRIEF)


def _fidelity(runs: dict[str, dict[str, dict]]) -> str:
    """KL of each setting along the full cache's answer, least first."""
    lines = sorted((own for own in runs.values() if own["kl"]["low"]), key=lambda own: float(own["kl"]["difference"]))
    heads = ["setting", "answers", "bytes, %", "KL [95 %]", "KL of what is new"]
    return markdown(heads, ([*_line(own)[:3], _nats(own["kl"]), _line(own)[-1]] for own in lines))


def _offsets(groups: dict[str, dict[str, dict[str, dict]]]) -> str:
    """KL of 4-bit formats with and without an offset per prompt, a column for each of `suite=mission-offsets`."""
    titles = [title for title in OFFSETS if title in groups]
    most = {title: max(int(own["kl"]["answers"]) for own in groups[title].values()) for title in titles}
    names = [name for name in REPAIRED if any(name in groups[title] for title in titles)]
    lines = ([SHORT[name], *(_nats(groups[title].get(name, {}).get("kl")) for title in titles)] for name in names)
    return markdown(["setting", *(f"{OFFSETS[title]}, n={most[title]}" for title in titles)], lines)


def _layout(groups: dict[str, dict[str, dict[str, dict]]]) -> str:
    """Differences and KL of each setting, by where the instruction stands."""
    titles = [title for title in LAYOUTS if title in groups]
    heads = ["setting", "bytes, %"]
    for title in titles:
        full = groups[title]["full"]["score"]
        heads.append(f"{LAYOUTS[title]}: full {100 * float(full['value']):.1f} %, n={full['answers']}")
    heads += [f"KL, {LAYOUTS[title]}" for title in titles]
    lines = []
    for run in dict.fromkeys(run for title in titles for run in groups[title] if run != "full"):
        both = [groups[title].get(run, {}) for title in titles]
        cells = [shown(one["score"], DIFFERENCE, form="+.1f") if one else "" for one in both]
        held = next(_line(one)[2] for one in both if one)
        lines.append([f"`{run}`", held, *cells, *(_nats(one.get("kl")) for one in both)])
    return markdown(heads, lines)


def _nats(row: dict | None) -> str:
    return shown(row, DIFFERENCE, 1, ".3f") if row else ""


def _lengths() -> str:
    """KL of each format and repair, a column for each part of prompt lengths, shortest prompts first."""
    rows = [row for row in rows_of("mission_parts") if row["part"] in LENGTHS]
    parts = {(row["task"], row["part"]): float(row["tokens"]) for row in rows}
    cells = {(row["run"], row["task"], row["part"]): shown(row, ("kl", "kl_low", "kl_high"), 1, ".3f") for row in rows}
    order = sorted(parts, key=lambda part: parts[part])
    heads = [f"{TITLES[part[0]]}, median {parts[part]:,.0f} tokens" for part in order]
    lines = ([SHORT[name], *(cells.get((name, *part), "") for part in order)] for name in REPAIRED)
    return markdown(["setting", *heads], lines)


def _kinds() -> str:
    """Differences of LongBench's scores by kind of prompt and of answer."""
    rows = [row for row in rows_of("mission_parts") if row["task"] == "longbench" and row["run"] in SHORT]
    cells = {(row["run"], row["part"]): (int(row["n"]), shown(row, DIFFERENCE, form="+.1f")) for row in rows}
    heads = [f"{name}, n={max(n for (_, at), (n, _) in cells.items() if at == part)}" for part, name in KINDS.items()]
    runs = [run for run in SHORT if (run, "cut") in cells]
    return markdown(["setting", *heads], ([SHORT[run], *(cells[run, part][1] for part in KINDS)] for run in runs))


def _gold(groups: dict[str, dict[str, dict[str, dict]]]) -> str:
    """Table of the paired NLL difference to the full cache, by setting and benchmark; significant losses in bold."""
    tasks = TITLES | {BEHIND: "LongBench, question behind"}
    columns = {tasks[task]: groups[title] for task in tasks if (title := f"{task} with {MODEL}") in groups}
    heads, lines = ["setting"], {setting: [name] for setting, name in SHORT.items()}
    for title, runs in columns.items():
        rows = {run: own["nll"] for run, own in runs.items() if own.get("nll", {}).get("difference")}
        most = max(float(row["n"]) for row in rows.values())
        heads.append(f"{title}, n={most:.0f}")
        for setting, cells in lines.items():
            row = rows.get(setting, {})
            cell = shown(row, DIFFERENCE, 1, "+.3f")
            told = cell and float(row["p_holm"]) <= LEVEL
            early = f" (n={float(row['n']):.0f})" if cell and float(row["n"]) < USUAL * most else ""
            cells.append(f"**{cell}**{early}" if told else f"{cell}{early}")
    return markdown(heads, lines.values())


def _short(groups: dict[str, dict[str, dict[str, dict]]], settings: Sequence[str]) -> str:
    """Bytes of settings, and their difference to the full cache on every benchmark."""
    columns = []
    by_name = {title.partition(" ")[0]: runs for title, runs in groups.items() if title.endswith(MODEL)}
    for task in TITLES:
        runs = by_name[task]
        scores = {own["score"]["run"]: own["score"] for own in runs.values()}
        full, most = scores.pop("full"), max(float(score["n"]) for score in scores.values())
        usual = [n for score in scores.values() if (n := float(score["n"])) >= USUAL * most]
        n = f"{most:.0f}" if min(usual) == most else f"{min(usual):.0f} to {most:.0f}"
        head = f"{TITLES[task]}: full {100 * float(full['value']):.1f} %, n={n}"
        columns.append((head, scores, USUAL * most))
    rows = []
    for setting in settings:
        held = [100 * float(scores[setting]["bytes"]) for _, scores, _ in columns if setting in scores]
        bounds = dict.fromkeys(f"{bound:.0f}" for bound in (min(held), max(held)))
        cells = (_cell(scores.get(setting), least) for _, scores, least in columns)
        rows.append([SHORT[setting], "-".join(bounds), *cells])
    return markdown(["setting", "bytes, %", *(head for head, *_ in columns)], rows)


def _cell(score: dict | None, least: float) -> str:
    """Points and interval of a setting; the number of problems where it was stopped earlier than others."""
    if score is None:
        return ""
    n = float(score["n"])
    return shown(score, DIFFERENCE, form="+.1f") + (f" (n={n:.0f})" if n < least else "")


def _line(own: dict[str, dict]) -> list[str]:
    score, kl, new = (own.get(metric, {}) for metric in METRICS[:3])
    stopped = "" if score["answers"] == score["total"] else f" of {score['total']}"
    paired = ["", "", "", ""]  # the full cache is compared with nothing
    if score["difference"]:
        changed = f"{float(score['lost']):.0f}, {float(score['gained']):.0f}"
        p = p_text(float(score["p_holm"])) if score["p_holm"] else ""  # a run that is under way may have none
        paired = [f"{float(score['n']):.0f}", shown(score, DIFFERENCE, form="+.1f"), p, changed]
    nats = [f"{float(row['value']):.3f}" if row.get("value") else "" for row in (kl, new)]
    percent = [f"{100 * float(score[name]):.1f}" for name in ("bytes", "value")]
    return [f"`{score['run']}`", f"{score['answers']}{stopped}", *percent, *paired, *nats]


def main(study: Path) -> None:
    """Make everything."""
    with tempfile.TemporaryDirectory() as name:
        if parts := parted(study, Path(name)):
            groups = {title: _group(folder) for title, folder in parts.items()}
            write(HERE / "mission.csv", compared(parts, groups))
            write(HERE / "mission_parts.csv", by_part(groups))
            pictures(parts, Path(name))
    renew(tables())


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else PACKED)
