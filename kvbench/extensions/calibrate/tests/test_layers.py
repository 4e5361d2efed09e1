"""The search over layers, on a method whose loss follows from its layers: what is measured, the way, the verdict, and
the file that comes of it."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import yaml
from fake_parts import altered
from graded import Bench, Graded, content_of, file_of, make_cfg
from omegaconf import OmegaConf
from refusals import refused

from kvbench.extensions.calibrate import command
from kvbench.extensions.calibrate.choose import value_text
from kvbench.extensions.calibrate.layers import greedy, spaced
from kvbench.policy import ByLayer, Tier, TierText
from kvbench.runs import calibration

WEIGHTS = (0.2, 0.01, 0.03, 0.1)  # loss of each layer at int4; a twentieth of it at int8
BYTES = {"k16v16": 250.0, "k8v8": 130.0, "k4v4": 70.0}


@dataclass(kw_only=True)
class Layered(ByLayer):
    """One precision per layer; what the fake engine asks for is the list of them."""

    tier: TierText = "int4"
    full: bool = False
    alpha_l = 0

    def __post_init__(self):
        self.tiers = (Tier.parse(self.tier),)
        self.spread()

    @property
    def alpha_h(self):
        """The precision of every layer."""
        if self.by_layer is None:
            return (self.tiers[0].name,) * len(WEIGHTS)
        return tuple(self.tiers[row[0]].name for row in self.by_layer.of_model(len(WEIGHTS), 1))


def lost(tiers, _):
    """Adds up over layers."""
    return sum(w * {"k16v16": 0.0, "k8v8": 0.05, "k4v4": 1.0}[t] for w, t in zip(WEIGHTS, tiers, strict=True))


def held(tiers, _):
    """Adds up over layers."""
    return sum(BYTES[tier] for tier in tiers)


@pytest.fixture(autouse=True)
def four_layers(monkeypatch, undrawn):
    """A model of four layers."""
    monkeypatch.setattr(command, "model_shape", lambda model: SimpleNamespace(num_layers=len(WEIGHTS)))


def start(folder, bench, **changes):
    """Calibrates the layers; the exit code."""
    cfg = make_cfg(folder, what="layers", calibrate__layers__tiers=["fp16", "int8", "int4"], **changes)
    cfg.method = {"_target_": "graded.Layered", "tier": "int4", "calibration": None}

    def policy(cfg):
        if "full" in cfg["_target_"]:
            return Graded(full=True)
        return Layered(**{name: cfg[name] for name in ("tier", "tiers_by_layer", "protect_layers") if name in cfg})

    parts = bench.parts()
    load = parts.load_model
    parts = altered(parts, make_policy=policy, load_model=lambda cfg: SimpleNamespace(model=None, **vars(load(cfg))))
    return command.main(cfg, parts)


@pytest.mark.every(2)
@pytest.mark.parametrize("around", ["gentle", "harsh"])
def test_the_cheapest_table_within_the_margin_is_chosen_and_proven(tmp_path, capsys, around):
    """Each layer alone at each precision, then the way by least loss per byte: all to int8 first, then layer 1 to int4;
    layer 2 would lose too much. The file has the table, in a form that the setting reads."""
    bench = Bench(lost, held)
    assert start(tmp_path, bench, calibrate__layers__around=around, calibrate__layers__points=99) == 0
    content = content_of(tmp_path, "yaml")
    assert content["settings"] == {"tiers_by_layer": "int8 int4 2*int8"} and content["confirmed"] is True
    assert content["replaces"] == {"tiers_by_layer": None}
    costs = content["layers"]["loss"]
    base = {"gentle": 0.0, "harsh": 1.0}[around]
    factors = {"fp16": 0.0, "int8": 0.05, "int4": 1.0}
    assert set(costs) == set(factors) - {"fp16" if around == "gentle" else "int4"}
    for tier, row in costs.items():
        assert row == pytest.approx([w * (factors[tier] - base) for w in WEIGHTS], abs=1e-9)
    (stage,) = content["tuning"]
    way = "4*fp16, fp16 int8 2*fp16, fp16 2*int8 fp16, fp16 3*int8, 4*int8, int8 int4 2*int8, int8 2*int4 int8, "
    way += "int8 3*int4, 4*int4"
    assert [point["tiers_by_layer"] for point in stage["grid"]] == way.split(", ")
    for (table, guess), point in zip(content_of(tmp_path, "json")["layers"]["path"], stage["grid"], strict=True):
        assert table == point["tiers_by_layer"]
        assert guess == pytest.approx(point["loss"]["nll"][0], abs=0.01), "here losses do add up"
    out = " ".join(capsys.readouterr().out.split())
    assert "of one layer alone" in out and "(3 int8, 1 int4): confirmed" in out


def test_what_was_measured_is_not_measured_twice(tmp_path, capsys):
    """Stopped in the middle of a layer, it goes on there, with the batch that was under way; given again, it measures
    nothing."""
    bench = Bench(lost, held, stop_after=50)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, bench)
    bench.stop_after = None
    assert start(tmp_path, bench) == 0
    assert 50 < len(bench.answered) < len(set(bench.answered)) + 4
    count = len(bench.answered)
    assert start(tmp_path, bench) == 0 and len(bench.answered) == count
    assert "Traceback" not in capsys.readouterr().out


def test_the_file_is_loaded_by_the_method_that_it_is_for(tmp_path):
    """The table is put into a method whose YAML does not list the setting; another table by hand contradicts it."""
    start(tmp_path, Bench(lost, held))
    path = file_of(tmp_path, "yaml")
    content = content_of(tmp_path, "yaml") | {"target": "kvbench.methods.uniform.Uniform", "method": "int4"}
    path.write_text(yaml.safe_dump(content))
    method = {"_target_": "kvbench.methods.uniform.Uniform", "tier": "int4", "calibration": str(path)}
    changed, _ = calibration.apply(OmegaConf.create(method))
    assert changed["tiers_by_layer"] == content["settings"]["tiers_by_layer"]
    with refused("settings-conflict", "method.tiers_by_layer", "method.tiers_by_layer=4*int8", "method.calibration"):
        calibration.apply(OmegaConf.create(method | {"tiers_by_layer": "4*int8"}))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"calibrate__layers__tiers": ["fp16"]}, ("setting-value", "calibrate.layers.tiers", "['fp16']", "2 to 4")),
        (
            {"calibrate__layers__tiers": ["fp16", "fp16"]},
            ("setting-value", "calibrate.layers.tiers", "['fp16', 'fp16']"),
        ),
        ({"calibrate__layers__tiers": ["fp16", "int5"]}, ("setting-value", "calibrate.layers.tiers", "'int5'")),
        (
            {"calibrate__layers__around": "middle"},
            ("name-unknown", "calibrate.layers.around", "calibrate.layers.around=middle"),
        ),
        ({"calibrate__layers__points": 1}, ("setting-value", "calibrate.layers.points", "calibrate.layers.points=1")),
        ({"what": "heads"}, ("name-unknown", "what", "what=heads")),
    ],
)
def test_settings_that_make_no_search_are_refused(tmp_path, changes, error):
    """Before a model is loaded."""
    bench = Bench(lost, held)
    cfg = make_cfg(tmp_path, **({"what": "layers"} | changes))
    parts = altered(bench.parts(), make_policy=lambda cfg: Layered(), load_model=None)
    with refused(*error):
        command.main(cfg, parts)
    with refused("settings-conflict", "method.tiers_by_layer", "method.protect_layers"):
        cfg = make_cfg(tmp_path, what="layers")
        command.main(cfg, altered(parts, make_policy=lambda cfg: Layered(protect_layers=[0])))
    with refused("unsupported", "method", "what=layers", "graded"):
        command.main(make_cfg(tmp_path, what="layers"), bench.parts())


def test_the_way_takes_the_least_loss_per_byte():
    """A step may pass over a precision; what saves no byte is never taken, and a gain by chance counts as none."""
    way = greedy([[0.0, 5.0, 0.1], [0.0, -0.2, 9.0]], [[10, 8, 2], [10, 7, 7]], base=0.0)
    assert [at for at, _ in way] == [(0, 0), (0, 1), (2, 1)]
    assert [loss for _, loss in way] == pytest.approx([0.0, 0.0, 0.1])
    start = greedy([[0.1, 0.3], [0.2, 0.3]], [[10, 8], [10, 8]], base=0.3)[0]
    assert start[1] == pytest.approx(0.0), "around the harsh end: what the gentle precisions give back adds up"


def test_tables_are_spaced_evenly_and_shown_by_their_counts():
    """Both ends are among them, and there are never more than there are; a long one is no column of a table."""
    for tables, count, expected in (("abcdefg", 3, "adg"), ("a", 8, "a"), ("ab", 9, "ab")):
        assert spaced(tables, count) == list(expected)
    assert value_text("2*fp16 26*int4 2*fp16") == "(4 fp16, 26 int4)" and value_text(0.25) == "0.25"
    assert value_text("8MiB") == "8MiB" and value_text(None) == "None" and value_text("30*int4") == "30*int4"
