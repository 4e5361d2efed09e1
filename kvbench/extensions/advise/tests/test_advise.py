"""`kvbench advise`: what is advised was measured on the model that is asked about, and fits; all else is named with the
command that would find out."""

import json
import re
import shlex
import shutil

import pytest
from places import ROOT
from stored import flips, store, yes_no

from kvbench.cli.commands import compose_command
from kvbench.cli.main import main
from kvbench.config.compose import compose
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.evidence.load import Group
from kvbench.extensions.advise import shipped
from kvbench.extensions.advise.advise import _task_words, read_tokens
from kvbench.runs.parts import make_policy
from kvbench.sizing.outline import outline
from kvbench.sizing.project import project
from kvbench.sizing.shapes import find_shape

MODEL = "smollm2-135m"
WORDS = ["advise", f"model={MODEL}", "context=1k", "batch=4", "margin=0.05", "resamples=500", "study=false", "why=true"]


def run(root, method, scores, **changes):
    """A stored run of one of kvbench's own methods; `model`, `task`, ... as `store` takes them, the rest settings."""
    where = {key: changes.pop(key) for key in ("model", "task", "statuses", "status") if key in changes}
    settings = as_dict(method_settings(method)) | changes
    return store(root, method, scores, settings=settings, **({"model": MODEL} | where))


def advise(capsys, root, *words):
    """The rows by method, and everything that was said, on one line."""
    assert main([*WORDS, f"results_dir={root}", *words]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(("  ", "! ")))
    rows = {line.split()[0]: line for line in out.splitlines()[2:] if re.search(r"(GB|MB|-) +([0-9.]+|-) ", line)}
    return rows, " ".join(out.split()), out


@pytest.fixture(autouse=True, scope="module")
def counted_once():
    """Counts the bytes of a method on a model at a length once for all tests: most of an advice's time."""
    known = {}

    def outlined(policy, *sizes):
        key = repr((type(policy), vars(policy), sizes))
        if key not in known:
            known[key] = outline(policy, *sizes)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.sizing.outline.outline", outlined)
        yield


@pytest.fixture
def results(tmp_path, stored_once):
    """A copy of these runs that a test may change."""
    return shutil.copytree(stored_once, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def stored_once(tmp_path_factory):
    """Runs of which one is as good as the full cache, one is worse, one was measured elsewhere, one has few samples."""
    tmp_path = tmp_path_factory.mktemp("results")
    scores = yes_no(0.7, {"a": 120, "b": 120})
    run(tmp_path, "full", scores)
    run(tmp_path, "snapkv", flips(scores, 1, 1), budget=0.25)
    run(tmp_path, "h2o", flips(scores, 60, 0))
    few = yes_no(0.7, {"a": 8, "b": 8})
    run(tmp_path, "full", few, task="short")
    run(tmp_path, "tova", flips(few, 1, 0), task="short")
    run(tmp_path, "full", scores, model="other", task="longctx")
    run(tmp_path, "int8", scores, model="other", task="longctx")
    return tmp_path


@pytest.mark.smoke
def test_what_was_measured_here_comes_first(results, capsys):
    """Each row says no more than was measured; the order is: advised, other model, cannot tell, loses more."""
    rows, said, _ = advise(capsys, results)
    assert [(name, rows[name].split()[-1]) for name in rows] == [
        ("snapkv", "advised"),
        ("full", "advised"),
        ("int8", "model"),
        ("tova", "tell"),
        ("h2o", "more"),
    ]
    assert f"Measured on {MODEL}, it fits and loses no more than the margin: snapkv (240 samples)." in said
    assert f"Not measured on {MODEL}, so not advised: int8" in said
    assert "Too few samples to tell" not in said  # of tova: its estimate is beyond the margin
    assert "*" in rows["int8"] and "*" not in rows["snapkv"]


def test_what_was_measured_elsewhere_alone_is_never_advised(results, capsys):
    """With the runs of the other model alone, nothing is advised and the command that would find out is there."""
    rows, said, out = advise(capsys, results, "models=other")
    assert "so none is advised" in said and rows["int8"].endswith("other model")
    (command,) = (line for line in out.splitlines() if line.startswith("  kvbench method=int8 task=longctx"))
    cfg = compose(shlex.split(command)[1:])
    assert cfg.task.name == "longctx" and cfg.method.tier == "int8"


@pytest.mark.long  # three commands, each of which makes caches of every method
def test_bytes_are_those_of_the_model_and_the_length(results, capsys):
    """The caches are what the store's own ledger counts for one sequence, times the batch; what does not fit is not
    advised, however good it is."""
    rows, _, _ = advise(capsys, results)
    shape = find_shape(MODEL).store_shape
    for method in ("snapkv", "full"):
        one, _ = project(make_policy(method_settings(method)), shape, 1024 - 64, 64)
        assert f"{4 * one.resident_bytes / 1e6:.3g} MB" in rows[method].replace("  ", " ")
    held, _ = project(make_policy(method_settings("snapkv")), shape, 1024 - 64, 64)
    rows, said, _ = advise(capsys, results, f"cache_memory={4 * held.resident_bytes - 1}")
    assert rows["snapkv"].endswith("too large") and rows["full"].endswith("too large")
    assert "The full cache does not fit." in said and "so none is advised" in said
    rows, said, _ = advise(capsys, results, f"cache_memory={4 * held.resident_bytes}")
    assert rows["snapkv"].endswith("advised") and "loses no more than the margin: snapkv" in said


def test_throughput_is_that_of_the_bench_or_unknown(results, capsys):
    """Rates come from a bench's file; methods without one have none, and the command for them can be given as it is."""
    document = json.loads((ROOT / "results" / "cpu" / "throughput" / "bench.json").read_text())
    rate = {
        row["name"]: row["tokens_per_call"] / row["median"]
        for row in document["cells"][0]["variants"]
        if row.get("tokens_per_call")
    }
    rows, said, out = advise(capsys, results, f"bench={ROOT / 'results' / 'cpu' / 'throughput'}")
    assert f" {rate['snapkv budget=0.25']:.3g} " in rows["snapkv"] and f" {rate['full']:.3g} " in rows["full"]
    assert f"No throughput was measured on {MODEL} of int8, tova, h2o." in said
    (command,) = (line for line in out.splitlines() if line.startswith("  kvbench bench"))
    cfg = compose_command("bench", shlex.split(command)[2:])
    assert cfg.what == "throughput" and list(cfg.throughput.methods) == ["full", "int8", "tova", "h2o"]
    rows, said, _ = advise(capsys, results)
    assert "tok/s" not in said and "No throughput was measured of" in said


def test_a_longer_context_is_another_question(results, capsys):
    """Quality at 90 tokens says nothing about 32k, and is said not to."""
    _, said, _ = advise(capsys, results, "context=2k", "rows=2")
    assert "Quality was measured on prompts of up to 90 tokens; at 2048 it is not known" in said
    assert "task.lengths=[2048]" in said
    assert "and 3 more (" in said


def test_missing_answers_are_as_bad_as_they_can_be(tmp_path, capsys):
    """Equal on what ended well, and a twelfth of the answers missing: the margin is not proven."""
    scores = yes_no(0.7, {"a": 120, "b": 120})
    run(tmp_path, "full", scores)
    run(tmp_path, "int8", scores, statuses=dict.fromkeys(range(20), "oom"))
    rows, said, _ = advise(capsys, tmp_path)
    assert rows["int8"].endswith("cannot tell") and "so none is advised" in said


ADVISE = ["advise", "model=llama3.1-8b", "gpu=l4", "context=8k", "batch=16", "margin=0.05", "why=true"]


def test_without_a_run_others_evidence_answers_and_is_marked(tmp_path, monkeypatch, capsys):
    """A folder without results gets exit 0, the study's losses, the papers' numbers, whose each is, and the run that
    tells most with its time."""
    monkeypatch.chdir(tmp_path)
    assert main([*ADVISE, "methods=[int8,fp8,kivi,snapkv]"]) == 0
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if re.search(r" (study|bytes) ", line)}
    assert rows["kivi bits=4"][-3:] == ["study", "cannot", "tell"] and rows["int8"][-2:] == ["too", "large"]
    assert rows["full"][-3:] == ["bytes", "too", "large"] and rows["snapkv budget=0.125"][-2:] == ["loses", "more"]
    said = " ".join(out.split())
    assert "7.94 GB (24.0 GB of L4 less 16.1 GB of weights)" in said and "so none is advised" in said
    assert "No run of yours counts: results_dir=results is not a folder" in said
    assert "Printed by papers for Llama3.1-8B" in said and "DiffKV, Table 2" in said and "not measured here" in said
    assert re.search(r"It takes about [0-9]+ (min|h) [0-9]+ (s|min) on one L4", said) and "with 209 questions" in said
    command = next(line for line in out.splitlines() if line.startswith("  kvbench method=kivi") and "items" in line)
    cfg = compose(shlex.split(command)[1:])
    assert cfg.task.lengths == [8192] and cfg.model.path == "meta-llama/Llama-3.1-8B" and cfg.method.bits == 4


def test_nothing_is_advised_from_a_broken_reference(results, monkeypatch, capsys):
    """A full cache whose answers cannot be judged gives no intervals; the reason is printed."""
    monkeypatch.setattr(Group, "unfit", lambda self, what: "most answers of full were cut")
    rows, said, _ = advise(capsys, results, "methods=snapkv")
    assert rows["snapkv"].endswith("cannot tell") and "so none is advised" in said
    assert "! most answers of full were cut" in said


def test_what_nobody_measured_has_the_order_of_others_and_not_their_losses(tmp_path, monkeypatch, capsys):
    """Two studies, one made here: how far two models agree is said with its interval, and how far a method's losses lie
    apart; a model of a study has its own row alone, and the study is named with its n."""
    mine = {"task": "code", "model": "qwen2.5-coder-0.5b", "run": "int4", "method": "int4", "metric": "score"}
    mine |= {"n": "120", "difference": "-0.02", "low": "-0.05", "high": "0.01", "longest_tokens": "300"}
    order = {"runs": "all", "count": "12", "metric": "score", "task": "longctx", "model": MODEL, "other_task": "code"}
    order |= {"other_model": mine["model"], "correlation": "0.62", "low": "0.31", "high": "0.84"}
    others = [order | {"model": mine["model"], "task": "code"}, order | {"metric": "nll"}]
    made = {"measures.csv": shipped._rows("measures.csv"), "benchmarks.csv": [mine], "across.csv": [order, *others]}
    monkeypatch.setattr(shipped, "_rows", made.get)
    shipped.losses.cache_clear()
    said = {}
    for model in ("llama3-8b", mine["model"], MODEL):
        words = ["context=1k", "margin=0.05", "methods=int4", "why=true", f"results_dir={tmp_path}"]
        assert main(["advise", f"model={model}", *words]) == 0
        said[model] = " ".join(capsys.readouterr().out.split())
    shipped.losses.cache_clear()
    other, measured, small = said.values()
    assert "Nothing was measured on llama3-8b. What may carry over is which method loses less" in other
    agree = (
        "longctx with smollm2-135m and code with qwen2.5-coder-0.5b: rank correlation +0.62 [+0.31, +0.84], 12 methods"
    )
    assert agree in other and other.count("rank correlation") == 1
    assert (
        "How much it loses does not: int4 loses +2.0 on code with qwen2.5-coder-0.5b, and +12.6 on longctx with "
        "smollm2-135m (points)." in other
    )
    assert "1 from results/example/study (longctx with smollm2-135m, n=200)" in other
    assert (
        "Measured on qwen2.5-coder-0.5b by the repository's study (code in results/example/benchmarks), it fits and "
        "loses no more than the margin: int4 (120 samples)." in measured
    )
    assert "1 from results/example/benchmarks (code with qwen2.5-coder-0.5b, n=120)" in measured
    assert "+12.6 [+7.3, +18.3]" in small and "Nothing was measured" not in measured + small


def test_a_package_without_the_study_counts_bytes(tmp_path, monkeypatch, capsys):
    """Methods without any measurement are listed with their bytes, and a note names the study."""
    monkeypatch.setattr(shipped, "study_folders", list)
    shipped.losses.cache_clear()
    assert main([*WORDS[:-2], "why=true", f"results_dir={tmp_path}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    shipped.losses.cache_clear()
    assert (
        shipped.ABSENT in said and "bytes not measured" in said and "study" not in said.split("Room")[0].split("!")[0]
    )


def test_the_weights_are_taken_off_the_device(tmp_path, capsys):
    """`memory` is the device's, `cache_memory` the caches' alone; what does not even hold the weights is said so."""
    weights = find_shape(MODEL).weights_bytes
    _, said, _ = advise(capsys, tmp_path, "methods=int8", f"memory={weights + 30_000_000}")
    assert "30.0 MB for caches" in said and "less 269 MB of weights" in said
    _, shown, _ = advise(capsys, tmp_path, "methods=int8", "cache_memory=30000000")
    assert "30.0 MB for caches" in shown
    _, said, _ = advise(capsys, tmp_path, "methods=int8", "memory=1GiB", "weights=1000MiB")
    assert "25.2 MB for caches" in said
    _, said, _ = advise(capsys, tmp_path, "methods=int8", f"memory={weights - 1}")
    assert "The weights alone do not fit" in said


def test_a_folder_above_the_runs_is_named(results, capsys):
    """A results folder that lies one level too high is answered with the one that has the runs."""
    inner = results / "deep"
    inner.mkdir()
    for folder in [item for item in results.iterdir() if item != inner]:
        folder.rename(inner / folder.name)
    _, said, _ = advise(capsys, results, "methods=int8")
    assert f"Runs lie in results_dir={inner}." in said


def recommended(capsys, root, *words):
    """The lines of the answer without `why`, each of which fits 80 columns unless it is a command."""
    assert main([*WORDS[:-1], f"results_dir={root}", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25 and all(len(line) <= 80 for line in lines if not line.startswith("  "))
    return lines, " ".join(" ".join(lines).split())


def test_the_answer_is_one_recommendation(results, capsys):
    """A proven recommendation: its bytes, measurements, the risk with its bound, and no further run."""
    lines, said = recommended(capsys, results)
    assert "Recommended: snapkv." in said and "n=240 (your runs)" in said
    assert re.search(r"Risk: no loss shown; at most [0-9.]+ points by 95 %", said)
    assert not [line for line in lines if line.startswith("  kvbench")]


def test_what_an_estimate_refutes_is_not_proposed(tmp_path, capsys):
    """Eight samples that lose 50 points and prove nothing: neither that method nor more samples of it; the full cache
    fits and is kept."""
    scores = yes_no(0.9, {"a": 8})
    run(tmp_path, "full", scores)
    run(tmp_path, "snapkv", flips(scores, 4, 0))
    lines, said = recommended(capsys, tmp_path)
    assert "snapkv" not in said and "Keep the full cache" in said
    assert not [line for line in lines if line.startswith("  kvbench")]


def test_the_run_with_more_samples_counts(tmp_path, capsys):
    """A quick try of 16 does not count beside 240 samples of another task."""
    scores, few = yes_no(0.7, {"a": 120, "b": 120}), yes_no(0.7, {"a": 8, "b": 8})
    for task, each, lost in (("longctx", scores, 1), ("short", few, 0)):
        run(tmp_path, "full", each, task=task)
        run(tmp_path, "int8", flips(each, lost, 1), task=task)
    _, said = recommended(capsys, tmp_path)
    assert "Recommended: int8." in said and "n=240" in said


def test_a_small_model_is_no_evidence_for_a_large_one(results, capsys):
    """Runs of 135M weights on 90 tokens are not shown for 8B at 8k; what to try first is in the words of engines, and
    the run that would settle it can be given as it is, within the model's context."""
    lines, said = recommended(capsys, results, "model=llama3-8b", "context=32k", "gpu=L40S")
    assert "Risk: unknown." in said and "n=240" not in said and "snapkv" not in said
    assert "In an engine:" in said and "was made for 8192 tokens" in said
    (command,) = (line for line in lines if line.startswith("  kvbench"))
    cfg = compose(shlex.split(command)[1:])
    assert cfg.task.lengths == [8192] and re.search(r"It takes about .* on one L40S", said)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("gpu=L5", "gpu=L5 does not exist. Did you mean L4"),
        ("study=maybe", "study=maybe must be true or false"),
        ("weights=1GiB", "weights=1GiB is taken off gpu or memory"),
        ("context=32kk", "context=32kk is no number of tokens; write a whole number, or text such as 32k"),
        ("context=0", "context=0 is no number of tokens"),
        ("memory=24GB", "memory='24GB' is no number of bytes"),
        ("margin=null", "margin=null says nothing; give the loss that you accept"),
        ("margin=-1", "margin=-1 is not a number above 0"),
        ("batch=0", "batch=0 must be a whole number of sequences"),
        ("answer=1024", "answer=1024 must be a whole number of tokens"),
        ("rows=0", "rows=0"),
        ("why=maybe", "why=maybe must be true or false"),
        ("model=gpt5", "model=gpt5 does not exist"),
    ],
)
def test_wrong_settings_are_named(results, capsys, word, message):
    """One message with the setting, its value and the remedy."""
    assert main([*WORDS, f"results_dir={results}", word]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_tokens():
    """k is 1024, as the field writes contexts."""
    assert [read_tokens(value) for value in (8, "128", "32k", "128K")] == [8, 128, 32768, 131072]


def test_a_task_that_runs_code_is_named_with_the_consent_that_it_asks_for():
    """A command that is printed can be given as it stands; a task that kvbench no longer has is named alone."""
    assert _task_words("humaneval_plus") == ["task=humaneval_plus", "task.allow_code_execution=true"]
    assert _task_words("longctx") == ["task=longctx"] and _task_words("gone") == ["task=gone"]
