"""Settings of the run, the store and the choice of groups: a wrong one is refused before anything is loaded."""

import math

import pytest
from engine_helpers import engine as make_engine
from engine_helpers import random_tokens, request
from fake_parts import make_cfg
from omegaconf import OmegaConf
from refusals import refused
from wrong_values import wrong

from kvbench.cache.options import StoreOptions
from kvbench.config import extensions
from kvbench.config.compose import compose
from kvbench.methods.full import Full
from kvbench.models.random_weights import random_config
from kvbench.rules import declared
from kvbench.runs.config import Fidelity, Prefill, RunConfig, store_options
from kvbench.tasks.protocol import Protocol


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("seed", value) for value in (-1, 1.0, True, "one", 2**63, 10**26, None)),
        *(("batch_size", value) for value in (0, 1.0, True, 2**16 + 1, math.nan)),
        *(("fidelity.max_tokens", value) for value in (-1, 0.5, False, 2**24 + 1)),
        *(("resume", value) for value in (1, "true", None)),
        *(("store.page_bytes", value) for value in (8, 24, 2**40, True, "big", 4096.0, math.nan, None)),
        *(("store.budget_bytes", value) for value in (0, -1, "8 MB", math.nan, 2**51, True)),
        *(("store.track", value) for value in (None, ["age"], "pos", ["pos", "pos"], 3)),
        *(("prompt_cache_bytes", value) for value in (-1, 1.5, 0.5, "0.5", "256", "8 gigs", "8 MB", None, True)),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path, key, value):
    """Wrong types, NaN, and what lies out of range name the setting."""
    cfg = make_cfg(tmp_path / "results")
    RunConfig.read(cfg)
    OmegaConf.update(cfg, key, value, force_add=True)
    with refused("setting-value", key, f"{key}="):
        RunConfig.read(cfg)


@pytest.mark.parametrize(
    ("group", "kind", "setting"),
    [
        *(("store", StoreOptions, name) for name in declared(StoreOptions)),
        *(("protocol", Protocol, name) for name in declared(Protocol)),
        *(("fidelity", Fidelity, name) for name in declared(Fidelity)),
        *(("prefill", Prefill, name) for name in declared(Prefill)),
    ],
)
def test_what_is_declared_is_checked(group, kind, setting):
    """Of the store and of the protocol, each value that a setting's rule excludes is refused by name; a new setting is
    covered as soon as it is a field."""
    field = declared(kind)[setting]
    for value in wrong(field):
        with refused("setting-value", f"{group}.{setting}", f"{group}.{setting}="):
            kind(**{setting: value})
    assert kind(**{setting: getattr(kind(), setting)}) == kind()


def test_a_run_has_the_defaults_of_its_file():
    """What conf/config.yaml says is what a run has that says nothing, and no setting of the file is unknown."""
    cfg = compose([])
    groups = {name: RunConfig.read(cfg).settings()[name] for name in ("method", "task", "model", "protocol")}
    assert RunConfig.read(cfg) == RunConfig(**groups)
    assert set(cfg) == set(RunConfig.read(cfg).settings())


def test_a_byte_limit_of_the_store_is_written_as_every_other():
    """`8MiB` and its number are one layout."""
    options = {"page_bytes": "auto", "budget_bytes": "8MiB", "track": ["pos"]}
    assert store_options(options) == StoreOptions(budget_bytes=2**23, track=("pos",))


@pytest.mark.parametrize(
    "word", ["method=../method/full", "method=./full", "method=a//b", "-m method=full,../method/full"]
)
def test_a_choice_goes_by_its_own_name(word):
    """Another way to the same file would give the run another name, and `full` would not be the reference."""
    with refused("name-unknown", "method"):
        compose([word.removeprefix("-m ")])


def test_a_group_cannot_be_taken_away():
    """Every run needs its groups."""
    with refused("setting-missing", "method", "method=diffkv"):
        compose(["~method=diffkv"])


def test_overrides_of_a_random_model_are_written_as_documented():
    """The example of conf/model/random.yaml composes, and what makes no model is refused by name."""
    cfg = compose(["model=random", "model.overrides={num_key_value_heads:1}"])
    assert random_config("tiny", overrides=cfg.model.overrides).num_key_value_heads == 1
    for field, value in (
        ("num_key_value_heads", 0),
        ("head_dim", 33),
        ("num_attention_heads", -4),
        ("hidden_size", 1.5),
    ):
        with refused("setting-value", None, f"{field}={value}"):
            random_config("tiny", overrides={field: value})


def test_rows_are_never_more_than_the_requests_need(tiny_model, monkeypatch):
    """A batch size far above the samples makes no larger tables."""
    seen, asked = [], request("a", random_tokens(5), max_new_tokens=3, num_samples=2)
    with make_engine(tiny_model("llama", "gqa3", 64), Full(), batch_size=1_000_000) as engine:
        reserve = engine.runner.reserve
        monkeypatch.setattr(engine.runner, "reserve", lambda **sizes: (seen.append(sizes["rows"]), reserve(**sizes)))
        engine.run([asked], on_outcome=id)
        engine.run([asked], on_outcome=id, sizing=[asked] * 7)
    assert seen == [2, 14]


def test_a_tracker_needs_an_extension(monkeypatch):
    """Without one that knows trackers, any name but none is refused before a run."""
    monkeypatch.setattr(extensions, "hooks", lambda point: iter(()))
    assert RunConfig(tracker="none").tracker == "none"
    with refused("name-unknown", "tracker", "tracker=mlflow"):
        RunConfig(tracker="mlflow")
