"""Building policy and engine from the configuration: what does not fit is refused by name."""

from threading import Event

import pytest
from omegaconf import OmegaConf
from refusals import refused

from kvbench.config.methods import method_settings
from kvbench.engine.engine import GROUP
from kvbench.models.load import load_model
from kvbench.runs.config import RunConfig, read_bytes
from kvbench.runs.parts import Loaders, make_policy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"_target_": "kvbench.methods.full.Ful"},
            ("name-unknown", "method._target_", "method._target_=kvbench.methods.full.Ful"),
        ),
        (
            {"_target_": "kvbench.methods.nothing.X"},
            ("name-unknown", "method._target_", "method._target_=kvbench.methods.nothing.X"),
        ),
        (
            {"_target_": "kvbench.config.files.describe"},
            ("setting-value", "method._target_", "method._target_=kvbench.config.files.describe"),
        ),
        ({"teir": "k8v8"}, ("setting-unknown", "method.teir", "method.tier")),
        ({"tier": "k5v3"}, ("setting-value", "method.tier", "tier=k5v3", "k_bits=5", "q5_0", "q5_1")),
    ],
)
def test_policy_errors(changes, message):
    """A wrong class, key or value gives one ValueError that names it, not an error of the configuration library."""
    cfg = OmegaConf.create({"_target_": "kvbench.methods.full.Full", "tier": "fp16"} | changes)
    with refused(*message):
        make_policy(cfg)


def test_engine_from_configuration(tiny_model):
    """The engine gets every setting of the configuration; an unknown store key is refused by name."""
    store = {"page_bytes": 4096, "budget_bytes": None, "track": ["pos"]}
    settings = {"store": store, "batch_size": 3, "seed": 5, "backend": {"name": "torch"}, "fidelity": {"max_tokens": 7}}
    policy = make_policy(method_settings("full"))
    engine = Loaders().make_engine(RunConfig.read(settings), tiny_model(), policy)
    assert (engine.batch_size, engine.seed, engine.fidelity_max_tokens, engine.backend.name) == (3, 5, 7, "torch")
    assert (engine.runner.options.page_bytes, engine.runner.options.track) == (4096, ("pos",))
    store["page_bites"] = 1
    with refused("setting-unknown", "store.page_bites", "store.page_bytes"):
        Loaders().make_engine(RunConfig.read(settings), tiny_model(), policy)
    tiny_model().model.set_attn_implementation("sdpa")  # other tests use the same model without an engine


@pytest.mark.parametrize(
    ("linear", "backend", "asked", "size", "group"),
    [
        ("plain", "auto", 3, 3, 3),
        ("plain", "auto", "auto", GROUP, GROUP),
        ("auto", "torch", "auto", GROUP, GROUP),
        ("auto", "auto", 3, 3, None),
        ("auto", "auto", "auto", "auto", None),
    ],
)
def test_requests_are_answered_in_groups_where_an_answer_may_hang_on_others(linear, backend, asked, size, group):
    """As many as were asked for, or `GROUP`; where model and backend both vouch for their rows there are no groups."""
    model = load_model({"kind": "random", "preset": "tiny", "dtype": "float32", "device": "cpu", "linear": linear})
    if linear == "auto" and not model.rows_are_alone:
        pytest.skip("products are not streamed here")
    config = RunConfig.read({"batch_size": asked, "backend": {"name": backend}})
    engine = Loaders().make_engine(config, model, make_policy(method_settings("full")))
    assert (engine.batch_size, engine.group) == (size, group)


@pytest.mark.parametrize(("value", "count"), [(0, 0), (4096, 4096), ("512MiB", 2**29), ("1.5GiB", 3 * 2**29)])
def test_bytes_settings(value, count):
    """A number of bytes can be written out or with a unit."""
    assert read_bytes("x", value) == count


def test_last_one_is_shared():
    """The same settings give the same object, other settings a new one, and a failed load is not remembered."""
    made = []

    def load(value):
        made.append(value)
        if value < 0:
            raise ValueError("no")
        return [value]

    last = Loaders()
    first = last._kept("model", {"a": 1}, lambda: load(1))
    assert last._kept("model", {"a": 1}, lambda: load(1)) is first
    assert last._kept("model", {"a": 2}, lambda: load(2)) == [2]
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            last._kept("model", {"a": 3}, lambda: load(-1))
    assert made == [1, 2, -1, -1]


def test_loaders_share_model_task_and_prompts():
    """The jobs of one sweep get the same model, task and prompts; other loaders have their own."""
    model = OmegaConf.create({"kind": "random", "preset": "tiny", "num_layers": 1, "seed": 0, "device": "cpu"})
    task = OmegaConf.create({"name": "longctx", "kinds": ["kv"], "length": 300, "items": 1})
    one, other, rule = Loaders(), Loaders(), {"limit": None, "seed": 0, "protocol": OmegaConf.create({})}
    loaded = one.load_model(model)
    assert one.load_model(OmegaConf.merge(model)) is loaded
    assert one.load_task(task, loaded, **rule) is one.load_task(OmegaConf.merge(task), loaded, **rule)
    assert one.load_task(task, loaded, **rule) is not one.load_task(task, loaded, **(rule | {"limit": 1}))
    kept = RunConfig.read({"prompt_cache_bytes": "1MiB"}).prompt_cache_bytes
    assert one.prompts(kept) is one.prompts(2**20)
    assert one.prompts(kept) is not one.prompts(0) and one.prompts(kept) is not other.prompts(kept)
    assert other.load_model(model) is not loaded


def test_kernels_are_compiled_while_the_model_loads(monkeypatch):
    """The compiler has begun before the model is there."""
    begun = Event()
    monkeypatch.setattr("kvbench.kernels.cpu.abi.load", begun.set)
    monkeypatch.setattr("kvbench.models.load.load_model", lambda group: begun.wait(60))
    assert Loaders().load_model({"kind": "random"})
