"""What one run is: the hash over everything that changes an answer, and the settings that are refused."""

import dataclasses
import sys

import pytest
import torch
from fake_parts import FakePolicy, FakeTask, altered, make_cfg, make_parts, make_requests, run_fake
from refusals import refused

from kvbench.config import code
from kvbench.engine.requests import Request, Turn
from kvbench.errors import ExitRequested
from kvbench.kernels.cpu.abi import best_isa
from kvbench.methods.kvzip import KVzip
from kvbench.models import load
from kvbench.results import provenance
from kvbench.results.identity import canonical
from kvbench.rules import counting
from kvbench.runs import experiment
from kvbench.runs.config import RunConfig
from kvbench.runs.parts import make_policy

QUIET = {"say": lambda text: None}


def prepared(results, parts=None, **changes):
    """The run of a configuration on fakes."""
    return experiment.prepare(RunConfig.read(make_cfg(results, **changes)), "half", parts or make_parts())


def test_a_method_does_not_leave_while_it_is_made(tmp_path):
    """`sys.exit()` in a method's declaration is an error, also for lm-eval, which makes no run."""
    parts = altered(make_parts(), make_policy=lambda group: sys.exit(0))
    with pytest.raises(ExitRequested, match=r"<lambda> raised SystemExit: 0 \(test_experiment.py:\d+\)"):
        experiment.load_method(RunConfig.read(make_cfg(tmp_path)), parts, print)


CHANGES = {
    "method__ratio": 0.25,
    "protocol__temperature": 0.5,
    "store__page_bytes": 4096,
    "store__budget_bytes": 10**6,
    "store__track": ["pos"],
    "batch_size": 5,
    "seed": 1,
    "limit": 7,
    "fidelity__max_tokens": 3,
    "prefill__chunk": 64,
    "backend__decode": "cuda",
    "model__fingerprint": "weights-2",
    "model__dtype": "bfloat16",
    "model__device": "cuda",
    "model__linear": "packed",
    "model__quantisation": "int8 weights (torchao 0.18.0)",
    "model__tensor_parallel": 2,
}


@pytest.mark.parametrize("key", CHANGES)
def test_hash_sees_each_setting(tmp_path, key):
    """Changing one thing that can change an answer gives another run."""
    assert prepared(tmp_path, **{key: CHANGES[key]}).hash != prepared(tmp_path).hash


def test_the_default_decode_is_no_part_of_the_identity(tmp_path):
    """Runs of before, which had no such choice, are the same runs."""
    assert "backend_decode" not in prepared(tmp_path, backend__decode="triton").identity
    assert prepared(tmp_path, backend__decode="triton").hash == prepared(tmp_path).hash
    assert prepared(tmp_path, backend__decode="cuda").identity["backend_decode"] == "cuda"
    with refused("setting-value", "backend.decode", "backend.decode='opencl'"):
        prepared(tmp_path, backend__decode="opencl")


def test_the_pages_that_a_gpu_has_are_in_the_hash(tmp_path):
    """`auto` is not the same layout on every device; what is asked for by name is, and a CPU's stays as it was."""
    on_gpu = prepared(tmp_path, model__device="cuda:0")
    assert on_gpu.identity["store"]["page_bytes"] == "tiles" and on_gpu.config.store.page_bytes == "auto"
    assert prepared(tmp_path, model__device="cuda:0", store__page_bytes="tiles").hash == on_gpu.hash
    assert prepared(tmp_path).identity["store"]["page_bytes"] == "auto"
    assert prepared(tmp_path, store__page_bytes="tiles").hash != prepared(tmp_path).hash


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("protocol__temperature", 0.0, 0),
        ("protocol__temperature", 0.0, -0.0),
        ("protocol__temperature", 1.0, 1),
        ("protocol__top_p", 1.0, 1),
        ("protocol__chat_template", "never", False),
        ("store__track", ["score", "pos"], ["pos", "score"]),
        ("store__memory_share", 1.0, 1),
        ("limit", 7, "7"),
        ("limit", "first:7", "first:07"),
    ],
)
def test_hash_sees_what_a_setting_says_and_not_how_it_is_written(tmp_path, key, one, other):
    """A value counts as its rule reads it."""
    parts = altered(make_parts(), load_task=lambda *a, **k: FakeTask(make_requests(7)))
    assert prepared(tmp_path, parts, **{key: one}).hash == prepared(tmp_path, parts, **{key: other}).hash


@pytest.mark.parametrize(
    ("name", "one", "other", "apart"),
    [
        ("alpha", 1.0, 1, 0.5),
        ("protect_layers", [0, -1], [-1, 0], [0, 1]),
        ("budget", 0.25, "0.25", "8MiB"),
        ("budget", 64, "64", 1.0),
    ],
)
def test_a_method_is_its_settings_as_they_are_read(name, one, other, apart):
    """Floats are floats, lists without an order are sorted, numbers that are text are numbers."""
    group = {"_target_": "kvbench.methods.snapkv.SnapKV"} if name == "budget" else {}
    group = group or {"_target_": f"kvbench.methods.{'kvzip.KVzip' if name == 'alpha' else 'uniform.Uniform'}"}
    read = [canonical(make_policy(group | {name: value})) for value in (one, other, apart)]
    assert read[0] == read[1] != read[2]
    assert repr(read[0]) == repr(read[1]) != repr(read[2])


def test_data_count_by_content(tmp_path):
    """The name of a file is on record, and no part of which run it is."""
    one, other = (
        prepared(tmp_path, make_parts(task={"protocol": {"query_aware": True, "file": name}}))
        for name in ("a.jsonl", "b.jsonl")
    )
    assert one.hash == other.hash and other.task.protocol["file"] == "b.jsonl"


def test_hash_sees_how_libraries_compute(tmp_path, monkeypatch):
    """torch's instruction set on a CPU, and modes that the environment sets; not the number of threads."""
    base = prepared(tmp_path)
    assert base.identity["code"]["torch_isa"] == torch.backends.cpu.get_cpu_capability()
    assert "torch_isa" not in prepared(tmp_path, model__device="cuda:0").identity["code"]
    found = {base.hash}
    for name in ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            found.add(prepared(tmp_path).hash)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    found.add(prepared(tmp_path).hash)
    assert len(found) == 5
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert prepared(tmp_path).hash == base.hash


def test_reading_in_chunks_is_a_protocol_of_its_own(tmp_path):
    """The task's protocol names it, in the run and in its full cache; a configuration of before, which does not say,
    is the run that reads prompts at once."""
    plain, null = prepared(tmp_path), prepared(tmp_path, prefill__chunk=None)
    assert null.hash == plain.hash and "prefill_chunk" not in null.task.protocol
    chunked = prepared(tmp_path, prefill__chunk=64)
    assert chunked.task.protocol == {**plain.task.protocol, "prefill_chunk": 64}
    assert chunked.identity["task"]["protocol"]["prefill_chunk"] == 64
    assert chunked.config.of_full().prefill.chunk == 64
    with refused("setting-unknown", "prefill.size"):
        RunConfig.read(make_cfg(tmp_path, prefill__size=64))


def never(*arguments):
    """A loader that must not be asked."""
    raise AssertionError("the model was loaded first")


def test_a_method_that_cannot_read_in_chunks_loads_no_model(tmp_path):
    """It is refused before, in one sentence."""
    parts = altered(make_parts(), load_model=never, make_policy=lambda cfg: KVzip(budget=0.5))
    with refused("settings-conflict", "prefill.chunk", "prefill.chunk=64", "KVzip", "prefill.chunk=null"):
        prepared(tmp_path, parts, prefill__chunk=64)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("device", ["cuda:0", "cuda:1", "cuda:1"], r"model.device spreads its layers over 3 devices; .*one device"),
        ("tensor_parallel", 2, r"model.tensor_parallel=2 divides its heads; .*or model.tensor_parallel=null"),
    ],
)
def test_chunks_of_a_spread_model_load_no_model(tmp_path, key, value, message):
    """They are refused before, by both settings and the remedy; without chunks the same model is not."""
    RunConfig.read(make_cfg(tmp_path, **{f"model__{key}": value}))
    with pytest.raises(ValueError, match=f"^prefill.chunk=64 needs a cache in one place, and {message}"):
        RunConfig.read(make_cfg(tmp_path, prefill__chunk=64, **{f"model__{key}": value}))


def test_hash_ignores_what_changes_no_answer(tmp_path):
    """Where results go, whether to resume, and the comparison are not part of the identity."""
    other = prepared(tmp_path / "elsewhere", resume=False, reference="auto")
    assert prepared(tmp_path).hash == other.hash


def test_hash_sees_places_only_where_they_divide_a_limit(tmp_path):
    """Layers compute the same on several devices; a limit on the pool is then one for each, and what fits differs."""

    def digest(places, budget_bytes):
        parts = make_parts()
        spread = altered(parts, load_model=lambda cfg: parts.load_model({**cfg, "device_spans": places}))
        return prepared(tmp_path, spread, store__budget_bytes=budget_bytes).hash

    spread, other = [["cuda:0", 2], ["cuda:1", 2]], [["cuda:0", 1], ["cuda:1", 3]]
    assert digest(spread, None) == digest([], None)
    assert len({digest(places, 1 << 20) for places in ([], spread, other)}) == 3


def with_backend(**changes):
    """Loaders whose engines have another backend."""
    parts = make_parts()

    def make_engine(*given):
        engine = parts.make_engine(*given)
        vars(engine.backend).update(changes)
        return engine

    return altered(parts, make_engine=make_engine)


def test_hash_sees_code_data_and_hidden_defaults(tmp_path, monkeypatch):
    """The data, the task's protocol, the code, the libraries, the backend, and a default that no YAML names all
    count."""
    base = prepared(tmp_path).hash
    changed = ({"fingerprint": "data-2"}, {"protocol": {"query_aware": False}})
    found = {base, prepared(tmp_path, with_backend(name="cpu")).hash}
    found |= {prepared(tmp_path, make_parts(task=task)).hash for task in changed}
    for owner, name, value in (
        (provenance, "harness_hash", lambda *backends: "other code"),
        (code, "hash_files", lambda files: "other method"),
        (code, "versions", lambda names: dict.fromkeys(names, "9.9")),
        (FakePolicy.__init__, "__kwdefaults__", {"ratio": 1.0, "hidden": 4, "does_nothing": False}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            found.add(prepared(tmp_path).hash)
    assert len(found) == 8
    assert prepared(tmp_path).hash == base


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("batch_size", 0, "batch_size=0 must be a whole number of samples from 1 to 65536"),
        ("limit", 0, "limit=0 is no number of samples; write a whole number"),
        ("limit", True, "limit=True is no number of samples"),
        ("reference", "atuo", "reference='atuo' must be 'auto' or 'none'. Did you mean auto?"),
        ("resume", "maybe", "resume='maybe' must be true or false"),
        ("results_dir", None, "results_dir=None must be the path of a folder, for example results_dir=results"),
        ("method__ratio", 1.5, r"method.ratio=1.5 is outside \(0, 1\]"),
    ],
)
def test_bad_settings(tmp_path, key, value, message):
    """A setting out of range is refused before anything is loaded, with value, rule and remedy."""
    with pytest.raises(ValueError, match=message):
        run_fake(tmp_path, altered(make_parts(), load_model=never), **{key: value})
    assert list(tmp_path.iterdir()) == []


def test_empty_and_doubled_tasks(tmp_path):
    """A task without samples, or with two of one id, is refused."""
    with refused("file-content", "task", "fake", "2"):
        prepared(tmp_path, make_parts(count=0, task={"quarantined": [{}, {}]}))
    doubled = FakeTask(make_requests(1) * 2)
    with refused("file-content", "task", "a/0"):
        prepared(tmp_path, altered(make_parts(), load_task=lambda *a, **k: doubled))


def test_hash_sees_the_instruction_set_of_the_kernels(tmp_path):
    """Two builds of the kernels sum in another order, and int4 moved by 0.05 nats between two: they are two runs. A
    backend without builds says nothing."""
    found = {isa: prepared(tmp_path, with_backend(isa=isa)) for isa in ("", "avx2", "avx512vnni")}
    assert len({experiment.hash for experiment in found.values()}) == 3
    assert found["avx2"].identity["code"]["isa"] == "avx2"
    assert "isa" not in found[""].identity["code"]


def test_what_only_the_method_imports_is_the_methods(tmp_path, monkeypatch):
    """A library of the method alone makes another run, and stands apart from those that every run has: kvpress, numpy
    and the like tell nothing of the code that the full cache ran with."""
    own = tmp_path / "own.py"
    own.write_text("import kvpress, numpy, torch")
    plain = prepared(tmp_path)
    monkeypatch.setattr(provenance, "method_files", lambda policy_class: {"own": own})
    monkeypatch.setattr(code, "hash_files", lambda files: plain.identity["code"]["method"])
    found = prepared(tmp_path)
    assert found.identity["code"].pop("method:numpy") and found.hash != plain.hash
    assert found.identity["code"].pop("method:kvpress") == code.versions(["kvpress"])["kvpress"]
    assert found.identity == plain.identity


def test_a_streamed_model_counts_the_kernels_that_it_runs(tmp_path, monkeypatch):
    """Whatever backend the cache has, the code of the CPU's kernels counts, and which build of them multiplies."""
    asked = []
    monkeypatch.setattr(provenance, "harness_hash", lambda *backends: asked.append(backends) or "the same")
    assert prepared(tmp_path, model__linear="streamed").identity["model"]["linear"] == f"streamed {best_isa()}"
    prepared(tmp_path)
    assert asked == [(*asked[1], "cpu"), asked[1]] and "cpu" not in asked[1]


def test_batches_are_no_part_of_a_run_whose_answers_do_not_depend_on_them(tmp_path):
    """Without groups that are answered together, another batch size is the same run; with them it is another one."""
    for is_alone in (True, False):
        found = [prepared(tmp_path, model__rows_are_alone=is_alone, batch_size=size) for size in (4, 5)]
        assert (found[0].hash == found[1].hash) == is_alone
        assert [each.identity.get("batch_size") for each in found] == ([None] * 2 if is_alone else [4, 5])


def test_every_turn_is_forced_with_its_own_answer():
    """Of the first repeat; a sample without an answer is forced to give none, in no turn."""
    turns = (Turn(tokens=(7, 8), gold=(1,)), Turn(tokens=(9,), gold=(2,)))
    asked = [
        Request(sample_id="talk", subset="a", segments=((1, 2),), gold=(3,), turns=turns),
        Request(sample_id="plain", subset="a", segments=((1,),), gold=(3,)),
        Request(sample_id="failed", subset="a", segments=((1,),), gold=(3,), turns=turns),
    ]
    fields = {item.name: None for item in dataclasses.fields(experiment.Experiment)} | {"task": FakeTask(asked)}
    records = [
        {"sample_id": "talk", "repeat": 0, "turns": [{"token_ids": [4]}, {"token_ids": [5, 5]}], "token_ids": [6]},
        {"sample_id": "talk", "repeat": 1, "turns": [{"token_ids": [0]}, {"token_ids": [0]}], "token_ids": [0]},
        {"sample_id": "plain", "repeat": 0, "token_ids": [6, 6]},
        {"sample_id": "failed", "repeat": 0, "turns": [], "token_ids": []},
    ]
    forced = {request.sample_id: request for request in experiment.Experiment(**fields).forcing(records).task.requests}
    golds = {name: [request.gold, *(turn.gold for turn in request.turns)] for name, request in forced.items()}
    assert golds == {"talk": [(4,), (5, 5), (6,)], "plain": [(6, 6)], "failed": [(), (), ()]}
    assert [turn.tokens for turn in forced["talk"].turns] == [(7, 8), (9,)]


# Identity is opt-out ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flavoured(RunConfig):
    """The settings of a run with one more, of which no list knows."""

    flavour: str = "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spiced(type(RunConfig().store)):
    """The layout of memory with one more setting."""

    spice: int = 0


def test_a_new_setting_counts(tmp_path):
    """A field that somebody adds to the settings, or to a group of them, and a key of a model, are in the hash."""
    config = RunConfig.read(make_cfg(tmp_path))
    given = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    store = {item.name: getattr(config.store, item.name) for item in dataclasses.fields(config.store)}
    changed = [Flavoured(**given), Flavoured(**given, flavour="sweet")]
    changed += [RunConfig(**given | {"store": Spiced(**store, spice=spice)}) for spice in (0, 1)]
    changed += [RunConfig(**given | {"model": {**config.model, "flavour": one}}) for one in "ab"]
    hashes = [experiment.prepare(one, "half", make_parts()).hash for one in changed]
    assert len({*hashes}) == len(hashes)


def test_every_setting_counts_or_says_why_not(tmp_path):
    """Each field of the settings and of their groups is in the identity as it stands, by what it resolves to, or
    outside of it for a reason; and each key of a model."""
    identity = prepared(tmp_path, prefill__chunk=64).identity

    def lies_in(where):
        part = identity
        for name in where.split("."):
            if name not in part:
                return False
            part = part[name]
        return True

    optional = {"model.quantisation", "model.tensor_parallel", "backend_decode"}  # absent where they have no effect
    config = RunConfig.read(make_cfg(tmp_path))
    for held in (config, config.store, config.fidelity, config.prefill, config.backend):
        name = next((item.name for item in dataclasses.fields(config) if getattr(config, item.name) is held), "")
        for field, mark in counting.marks_of(type(held)).items():
            where = f"{name}.{field}" if name else field
            if isinstance(mark, counting.Outside):
                assert len(mark.why.split()) > 2, where
            elif isinstance(mark, counting.Unless):
                assert not lies_in(where), f"{where} is what runs had before there was the setting"
                other = dataclasses.replace(held, **{field: "prompt"})
                assert counting.counted(other) == {**counting.counted(held), field: "prompt"}
            else:
                at = mark.where if mark else where
                assert lies_in(at) or at in optional or (not name and field in ("prefill",)), where
    for key, mark in load.MARKS.items():
        assert isinstance(mark, counting.Outside) or mark.where in optional or lies_in(mark.where), key
    keys = load._COMMON_KEYS.union(*(keys for _, keys in load._LOADERS.values()))
    assert keys == set(load.MARKS)
