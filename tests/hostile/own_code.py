"""Methods, tasks and metrics of somebody's own that raise, leave, answer nonsense or change what is not theirs."""

import json
import random
from pathlib import Path

from hostile.case import Case
from hostile.inputs import ROW, RUN, write_rows
from hostile.runs import ROOT, SMALL

METHOD = '''"""A method of somebody's own."""

import os
import random
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from kvbench.policy import EVICT, Policy, PrefillPlan, ScoreSpec

{before}
SEEN = []


class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@dataclass(kw_only=True)
class Toy(Policy):
    """Keeps the first half of every prompt."""

    share: {kind} = 0.5

    def declare(self):
        self.score = ScoreSpec(prefill_queries=8)
        {declare}

    def plan_prefill(self, view):
        SEEN.append(view)
        tier_of = view.filled(0)
        tier_of[..., max(1, int(0.5 * view.num_tokens)) :] = EVICT
        plan = PrefillPlan(tier_of=tier_of)
        {prefill}
        return plan

    def plan_decode(self, view):
        {decode}
        return super().plan_decode(view)
'''
RAISES = (
    *(
        "raise KeyError('x')",
        "raise SystemExit(0)",
        "raise SystemExit('bye')",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
    ),
    *(
        "raise MemoryError",
        "raise RecursionError",
        "raise StopIteration",
        "raise OSError(28, 'full')",
        "raise Odd",
        "sys.exit()",
    ),
    *(
        "raise BaseException('base')",
        "raise ValueError('\\x1b]0;title\\x07')",
        "raise ValueError('m' * 10**6)",
        "1 / 0",
    ),
    *(
        "raise AssertionError",
        "raise BrokenPipeError",
        "raise ImportError('x')",
        "raise NotImplementedError",
        "raise Warning",
    ),
    *(
        "torch.zeros(2) + torch.zeros(3)",
        "raise ExceptionGroup('g', [ValueError('a')])",
        "raise TimeoutError",
        "raise EOFError",
    ),
    *(
        "torch.zeros(1 << 50)",
        "self.missing",
        "view.missing",
        "[].pop()",
        "exec('(')",
        "raise UnicodeDecodeError('u', b'', 0, 1, 'x')",
    ),
)
NONSENSE = (
    *(
        "return None",
        "return 5",
        "return tier_of",
        "return [plan]",
        "return PrefillPlan(tier_of=None)",
        "plan.tier_of = 'x'",
    ),
    "plan.tier_of = plan.tier_of.float() + 0.5",
    "plan.tier_of = plan.tier_of.bool()",
    "plan.tier_of = plan.tier_of.numpy()",
    "plan.tier_of = plan.tier_of.to('meta')",
    "plan.tier_of = plan.tier_of.to_sparse()",
    "plan.tier_of = plan.tier_of[..., :-1]",
    "plan.tier_of = plan.tier_of[0]",
    "plan.tier_of = torch.full_like(plan.tier_of, 7)",
    "plan.tier_of = torch.full_like(plan.tier_of, EVICT)",
    "plan.tier_of = plan.tier_of.long() + 2**40",
    "plan.score = torch.full(plan.tier_of.shape, float('nan'))",
    "plan.score = torch.zeros(3)",
    "plan.channels = torch.zeros(1, 1, 2, dtype=torch.long)",
    "plan = type('Plan', (), {'tier_of': tier_of, 'score': None, 'channels': None})()",
    "plan = type(plan)(tier_of=[[[0] * view.num_tokens]])",
)
CHEATS = (
    "view.num_tokens = 5; plan.tier_of = plan.tier_of[..., :5]",
    "view.score.data.zero_()",
    "view.score.numpy()[:] = 0",
    "view.score.fill_(0)",
    "view.layers.data.zero_()",
    "view.num_layers = 99",
    "view.token_bytes = (0.0,)",
    "view.filled = None",
    "tier_of[..., len(SEEN) % 7] = EVICT if len(SEEN) > 4 else 0",
    "tier_of[..., random.randrange(view.num_tokens // 2)] = EVICT",
    "tier_of[..., int(torch.randint(view.num_tokens // 2, ()))] = EVICT",
    "tier_of[..., int(np.random.randint(view.num_tokens // 2))] = EVICT",
    "tier_of[..., time.perf_counter_ns() % (view.num_tokens // 2)] = EVICT",
    "SEEN[0].score.data.zero_()",
)
ELSEWHERE = (  # what libraries do to the process that they are in
    *("os.chdir('/')", "os.chdir('../outside')", "os.environ['HOME'] = '/'", "os.environ.clear()", "os.umask(0o777)"),
    *("random.seed(0)", "torch.manual_seed(0)", "np.random.seed(0)", "torch.set_default_dtype(torch.float64)"),
    *("torch.set_grad_enabled(True)", "torch.use_deterministic_algorithms(True)", "torch.set_num_threads(2)"),
    *("import gc; gc.disable()", "import warnings; warnings.warn('x')", "import locale; locale.setlocale(0, 'C')"),
)
AT_IMPORT = (
    *(
        "raise SystemExit(0)",
        "raise KeyError('x')",
        "import nothing_such",
        "x = (",
        "sys.exit(3)",
        "raise KeyboardInterrupt",
    ),
    *("__file__ = None", "Policy = int", "__name__ = 'kvbench'", "dataclass = lambda **_: lambda kind: kind"),
)
KINDS = ("'no such type'", "int", "list", "dict", "None", "float | str", "'float'", "(1, 2)", "torch.Tensor", "type")


def method(draw: random.Random, folder: Path, base: Path) -> Case:
    """A method of one's own in a sweep, which goes on with the next one."""
    write_rows(folder, ROW, ROW | {"question": "What is the key?"}, ROW | {"id": "c"})
    parts = {"before": "", "kind": "float", "declare": "", "prefill": "", "decode": ""}
    kinds = (
        "raises",
        "raises",
        "raises",
        "nonsense",
        "nonsense",
        "cheats",
        "cheats",
        "elsewhere",
        "import",
        "kind",
        "yaml",
    )
    kind, wants, says = draw.choice(kinds), "end", ()
    yaml = "# Mine.\n_target_: own_toy.Toy\nshare: 0.5\n"
    if kind == "raises":
        where = draw.choice(("declare", "prefill", "prefill", "decode"))
        parts[where], wants, says = draw.choice(RAISES), "refused", ("toy", "Toy")
        if where == "declare":
            parts[where] = parts[where].replace("view", "self")
    elif kind == "nonsense":
        parts["prefill"], wants, says = draw.choice(NONSENSE), "refused", ("Toy", "toy")
    elif kind == "cheats":
        parts["prefill"], wants, says = draw.choice(CHEATS), "named", ("Toy", "toy")
    elif kind == "elsewhere":
        parts["prefill"] = draw.choice(ELSEWHERE)
    elif kind == "import":
        parts["before"], wants = draw.choice(AT_IMPORT), "refused"
        wants = "refused" if parts["before"][0] in "risx" else "end"
    elif kind == "kind":
        parts["kind"] = draw.choice(KINDS)
    else:
        odd = (
            "_target_: own_toy.Nothing",
            "_target_: own_toy",
            "_target_: os.system",
            "_target_: 5",
            "- x",
            "",
            "_target_:",
        )
        odd += (
            "_target_: own_toy.Toy\n_partial_: true",
            "_target_: own_toy.Toy\ndefaults: [x]",
            "a: &a [*a]",
            "\x00",
            "share: !!python/object:x {}",
        )
        yaml, wants = draw.choice(odd), "refused"
        parts["what"] = yaml
    (folder / "mine" / "method").mkdir(parents=True)
    (folder / "mine" / "method" / "toy.yaml").write_text(yaml)
    (folder / "mine" / "own_toy.py").write_text(METHOD.format(**{name: text or "pass" for name, text in parts.items()}))
    what = ", ".join(f"{name}: {text}" for name, text in parts.items() if text and (name, text) != ("kind", "float"))
    words = ["--config-dir", "mine", "-m", "method=toy,snapkv", *RUN[1:], "batch_size=2"]
    commands = [words, ["compare", *ROOT, "resamples=100"], ["status", *ROOT]]
    if kind == "yaml" or draw.random() < 0.3:
        commands.insert(
            1, ["--config-dir", "mine", draw.choice(("list", "help")), *draw.choice((["methods"], ["toy"]))]
        )
    return Case(f"{kind}: {what}", commands, wants=wants, says=says, guest=True)


TASK = """task: own
test_split: test
dataset_path: json
dataset_kwargs: {{data_files: {{test: rows.json}}}}
output_type: {output}
doc_to_text: {text}
doc_to_target: {target}
process_results: !function own.score
metric_list:
  - {{metric: acc, aggregation: {aggregation}, higher_is_better: true}}
"""
SCORES = (
    *(
        "raise KeyError('x')",
        "raise SystemExit(0)",
        "return None",
        "return {}",
        "return {'acc': 'x'}",
        "return {'acc': None}",
    ),
    *(
        "return {'acc': float('nan')}",
        "return {'acc': 1e308}",
        "return {'other': 1}",
        "return {'acc': [1]}",
        "return 5",
    ),
    *("raise KeyboardInterrupt", "raise MemoryError", "import sys; sys.exit('bye')", "return {'acc': -5}"),
    *("return {'acc': 10**400}", "raise BaseException('x')", "return {'acc': float('inf')}", "return {5: 1}"),
)


def task(draw: random.Random, folder: Path, base: Path) -> Case:
    """A task of lm-eval of one's own, whose metric is a program."""
    score = draw.choice(SCORES)
    texts = ('"Q: {{question}}"', '"{{ cycler.__init__.__globals__.os.system(1) }}"', '"{{ nothing.x }}"', "5", '"{{"')
    parts = {"text": draw.choice(texts) if draw.random() < 0.3 else texts[0], "target": '"{{answer}}"'}
    parts |= {"output": draw.choice(("generate_until", "generate_until", "loglikelihood", "other"))}
    parts |= {"aggregation": draw.choice(("mean", "mean", "mean", "nothing", "!function own.score"))}
    (folder / "mine").mkdir()
    (folder / "mine" / "own.yaml").write_text(TASK.format(**parts))
    (folder / "mine" / "own.py").write_text(f"def score(doc, results):\n    {score}\n")
    (folder / "rows.json").write_text('[{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]')
    words = ["method=snapkv", "task=lm_eval", "task.name=own", "task.include_path=mine", "reference=none", *SMALL]
    return Case(f"{score}, {parts}", [words, ["compare", *ROOT, "resamples=100"]], guest=True)


# Graders, the files beside them, and what may change of these: a file, its old text and its new one.
HELPED = {
    "own.py": "import os\nimport sys\n\nsys.path.insert(0, os.path.dirname(__file__))\n"
    "import helper_of_own\nfrom parts_of_own.inner import FACTOR\n\nC = 0.25\n\n\n"
    "def judge(results):\n    return C * FACTOR * helper_of_own.VALUE  # so far\n\n\n"
    "def score(doc, results):\n    return {'acc': judge(results)}\n",
    "helper_of_own.py": "VALUE = 0.5\n",
    "parts_of_own/__init__.py": "",
    "parts_of_own/inner.py": "FACTOR = 1.0\n",
}
NEW_GRADES = (
    *(("own.py", "C = 0.25", "C = 0.75"), ("own.py", "return C *", "return 1 - C *")),
    *(("own.py", "judge(results)}", "1 - judge(results)}"), ("helper_of_own.py", "0.5", "1.0")),
    *(
        ("parts_of_own/inner.py", "1.0", "2.0"),
        ("parts_of_own/__init__.py", "", "from . import inner\n\ninner.FACTOR = 2.0\n"),
    ),
)
SAME_GRADES = (
    *(("own.py", "# so far", "# until now"), ("helper_of_own.py", "0.5\n", "0.5\n\n# A comment.\n")),
    *(("beside.py", "", "VALUE = 9\n"), ("own.py", "def judge(results):", 'def judge(results):\n    """The score."""')),
)
HELPED_METHOD = (
    *(
        ("helper_of_toy.py", "0.5", "0.25"),
        ("own_toy.py", "0.5 * view", "0.3 * view"),
        ("own_toy.py", "helper_of_toy.S", "0.75 * helper_of_toy.S"),
    ),
)


def helpers(draw: random.Random, folder: Path, base: Path) -> Case:
    """Code beside a task or a method that is changed between two runs: another run, unless it decides nothing."""
    (folder / "mine").mkdir()
    of_method, differs = draw.random() < 0.2, True
    if of_method:
        words, change = _helped_method(folder), draw.choice(HELPED_METHOD)
    else:
        differs = draw.random() < 0.8
        words, change = _helped_task(folder), draw.choice(NEW_GRADES if differs else SAME_GRADES)
    file, old, new = change

    def between() -> None:
        path = folder / "mine" / file
        text = path.read_text() if path.exists() else ""
        assert old in text
        path.write_text(text.replace(old, new, 1) if old else text + new)

    def check(ended: list[tuple[str, str]]) -> list[str]:
        if [code for code, _ in ended] != ["0", "0"]:
            return [f"a run with code of one's own fails: {ended[-1][1][-500:]}"]
        found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("results/*/*/[!f]*/*/run.json")}
        values = [{name: metric["value"] for name, metric in one["metrics"].items()} for one in found.values()]
        faults = [] if len(found) == 1 + differs else [f"{len(found)} runs, with the scores {values}"]
        if not of_method and len(found) == 2 and values[0] == values[1]:
            faults.append(f"the new grader's scores are the old one's: {values}")
        return faults

    return Case(f"{file}: {old!r} is {new!r}", [words, words], between=between, check=check, guest=True)


def _helped_task(folder: Path) -> list[str]:
    """A task of lm-eval whose grader has files beside it; the words of its run."""
    for name, text in HELPED.items():
        (folder / "mine" / name).parent.mkdir(exist_ok=True)
        (folder / "mine" / name).write_text(text)
    parts = {"output": "generate_until", "text": '"Q: {{question}}"', "target": '"{{answer}}"', "aggregation": "mean"}
    (folder / "mine" / "own.yaml").write_text(TASK.format(**parts))
    (folder / "rows.json").write_text('[{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]')
    return ["method=snapkv", "task=lm_eval", "task.name=own", "task.include_path=mine", "reference=none", *SMALL]


def _helped_method(folder: Path) -> list[str]:
    """A method that has a module beside it; the words of its run."""
    write_rows(folder)
    (folder / "mine" / "method").mkdir()
    (folder / "mine" / "method" / "toy.yaml").write_text("# Mine.\n_target_: own_toy.Toy\nshare: 0.5\n")
    parts = {"before": "import helper_of_toy\n", "kind": "float", "declare": "pass", "decode": "pass"}
    parts["prefill"] = "tier_of[..., : int(helper_of_toy.SHARE * 8)] = 0"
    (folder / "mine" / "own_toy.py").write_text(METHOD.format(**parts))
    (folder / "mine" / "helper_of_toy.py").write_text("SHARE = 0.5\n")
    return ["--config-dir", "mine", "method=toy", *RUN[1:]]
