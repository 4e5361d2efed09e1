"""Counted bytes are those of a cache in which every list takes every token, whatever the method, its settings and the
model."""

import sys
from dataclasses import replace
from subprocess import run

import pytest
import torch
from omegaconf import OmegaConf
from open_settings import open_settings
from places import need_extension
from refusals import refused
from selection import per_path

import kvbench.policy as kv
import kvbench.sizing.count as sizing_count
from kvbench.cache.options import StoreOptions
from kvbench.cache.store import CompressedStore
from kvbench.config import files
from kvbench.config.methods import method_settings
from kvbench.kernels.operands import Window
from kvbench.methods.diffkv import DiffKV
from kvbench.runs.parts import make_policy
from kvbench.sizing.count import count
from kvbench.sizing.project import project
from kvbench.sizing.shadow import act_out
from kvbench.sizing.shapes import find_shape

LAYERS, HEADS = 3, 3
SHAPE = replace(find_shape("smollm2-135m").store_shape, num_layers=LAYERS)
WINDOWED = replace(SHAPE, num_layers=2, window=Window(64), numbers=(1, 3))
SHAPES = {
    "windows": replace(SHAPE, num_layers=2, numbers=(0, 2), other_kinds=(WINDOWED,)),
    "chunks": replace(
        SHAPE, num_layers=2, numbers=(0, 2), other_kinds=(replace(WINDOWED, window=Window(64, in_chunks=True)),)
    ),
    "states": replace(SHAPE, numbers=(0, 1, 2), state_bytes=4096),
    "shared": replace(SHAPE, numbers=(0, 1, 2), shared={3: 2, 4: 2}),
    "alike": replace(SHAPE, num_layers=1, num_q_heads=HEADS),
    "latent": replace(find_shape("deepseek-v3").store_shape, num_layers=LAYERS),
}


def same(name, settings, shape, prompt=150, new=10, options=None):
    """Checks a method at both ends of attention: every item, or what refuses it."""

    def found(how, is_even):
        open_ones = open_settings(name, kv_heads=shape.num_kv_heads, layers=shape.num_layers)
        policy = make_policy(OmegaConf.merge(method_settings(name), open_ones, settings))
        try:
            return how(policy, shape, prompt, new, options, is_even=is_even)
        except ValueError as error:
            return str(error)

    for is_even in (False, True):
        items = found(count, is_even)
        assert items == found(act_out, is_even), (name, settings, is_even)


@pytest.mark.parametrize("name", per_path(sorted(files.options("method"))))
def test_every_method_is_counted_as_it_is_acted_out(name):
    """Below and beyond windows and budgets, with steps behind the prompt."""
    for prompt in (20, 200):
        same(name, {}, SHAPE, prompt, 6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("int4", {"tiers_by_layer": "1*fp16 1*int4 1*fp16"}),
        ("kivi", {"protect_layers": [0, -1]}),
        ("snapkv", {"budget": "300KiB"}),
        ("snapkv", {"decode_every": 8}),
        ("snapkv", {"allocation": "ada"}),
        ("snapkv", {"granularity": "q_head"}),
        ("h2o", {"budget": 40}),
        ("h2o", {"budget": "300KiB"}),
        ("tova", {"budget": 40}),
        ("tova", {"budget": 40, "per_head": True}),
        ("kv_compress", {"continual": True, "budget": 96}),
        ("scissorhands", {"budget": 60}),
        ("random", {"budget": 40}),
        ("snapkv", {"budget": "50%seen", "window": 8}),
        ("h2o", {"budget": "30%seen", "allocation": "pyramid"}),
        ("ada_snapkv", {"budget": "30%seen", "window": 8}),
        ("kvzip", {"budget": "30%seen"}),
        ("keydiff", {"budget": "30%seen"}),
        ("kv_compress", {"budget": "50%seen"}),
        ("streaming_llm", {"budget": "50%seen"}),
        ("diffkv", {"alpha_l": 0, "alpha_h": 5}),
        ("diffkv", {"decode_rule": "released", "threshold": "i"}),
    ],
)
def test_settings_that_part_lists_or_let_them_compete_are_counted(name, settings):
    """Layers of another precision, budgets in bytes, evictions in bulk and one by one, ranks over heads and layers."""
    same(name, settings, SHAPE)


@pytest.mark.parametrize("name", ["full", "snapkv", "h2o", "kivi", "diffkv"])
@pytest.mark.parametrize("kind", SHAPES)
def test_models_of_every_kind_are_counted(kind, name):
    """Windows, chunks, states, layers that share keys, heads that do not share any, and latent vectors."""
    same(name, {}, SHAPES[kind])


@pytest.mark.parametrize(
    "options",
    [
        StoreOptions(page_bytes=8192),
        StoreOptions(windows="method"),
        StoreOptions(windows="method", key_offset="prompt"),
        StoreOptions(key_offset=((0.5,) * 3 * 64,) * 2),
        StoreOptions(track=("pos",)),
    ],
)
@pytest.mark.parametrize("name", ["int4", "h2o"])
def test_options_of_the_store_are_counted(name, options):
    """Pages of another size, windows in the method's precision, offsets of keys, tracked positions."""
    same(name, {}, SHAPES["windows"], options=options)


def test_heads_that_differ_only_while_decoding_are_told_apart(monkeypatch):
    """DuoAttention's heads hold the same of a short prompt, and other tokens of a long answer: no two are one then."""
    acted = []
    monkeypatch.setattr(sizing_count, "act_out", lambda *asked, **how: acted.append(1) or act_out(*asked, **how))
    table = [[1.0, 0.0, 1.0]] * LAYERS
    settings = {"table": table, "sinks": 4, "recent": 20, "sparsity": 0.5}
    same("duo_attention", settings, SHAPE, prompt=15, new=30)
    assert acted


class ByNumber(kv.Policy):
    """Keeps as many tokens as a layer's number says, which it reads in one of several ways."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def plan_prefill(self, view):
        tier_of = view.filled(0)
        tier_of[..., : self.read(view.layers)] = kv.EVICT
        return kv.PrefillPlan(tier_of=tier_of)


@pytest.mark.parametrize(
    "read",
    [
        lambda layers: 9 * int(layers[0]),
        lambda layers: 9 * layers.tolist()[0],
        lambda layers: 9 * layers.item(),
        lambda layers: 9 * int(layers.numpy()[0]),
        lambda layers: 9 * int(torch.stack([layers, layers]).max()),
        lambda layers: 9 * next(iter(layers)).item(),
        lambda layers: 9 * int(layers.clone()),
    ],
)
def test_a_policy_that_reads_the_numbers_of_layers_is_asked_about_each(read):
    """However it reads them; one that looks at their device and number alone is asked once."""
    asked = ByNumber(read), SHAPE, 100, 5, None
    found = count(*asked, is_even=True)
    assert found == act_out(*asked, is_even=True)
    every = count(kv.Policy(), *asked[1:], is_even=True)
    assert found["payload_bytes"] == every["payload_bytes"] * (3 * 105 - 9 * 3) // (3 * 105)


class Acting(kv.Policy):
    """Keeps fewer tokens in later layers, lets heads begin with scores of their own, and drops a token of the prompt at
    each step where `drops` says so."""

    acts_in_decode = True
    needs_instruction = True

    def __init__(self, drops):
        super().__init__()
        self.drops = drops
        self.score = kv.ScoreSpec(track=("score", "pos"))

    def plan_prefill(self, view):
        tier_of = view.filled(0)
        layers, heads, _ = tier_of.shape
        for layer, number in enumerate(view.layers.tolist()):
            tier_of[layer, :, : 9 * number] = kv.EVICT
        score = torch.linspace(0, 1, heads)[None, :, None].expand(layers, heads, tier_of.shape[2])
        return kv.PrefillPlan(tier_of=tier_of, score=score)

    def plan_decode(self, view):
        goes, lightest = self.drops(view)
        return kv.DecodePlan(slot=torch.where(goes & lightest.exists, lightest.slot, kv.APPEND))


def by_layer(view):
    """Lists that hold more than their layer may."""
    most = 100 - 25 * torch.arange(view.shape[1])[:, None]
    return view.num_slots(0) > most, view.argmin(0, by="score", before=view.prompt_tokens)


def by_mean(view):
    """Lists whose layer's lowest mean of a token of the prompt is small: it is that of no head."""
    lightest = view.argmin(0, by="score", before=view.prompt_tokens, over_layer=True)
    return lightest.value < 0.4, lightest


def by_instruction(view):
    """Lists that hold more than the instruction and some."""
    most = 85 + view.instruction_tokens[:, None, None]
    return view.num_slots(0) > most, view.argmin(0, by="score", before=view.prompt_tokens)


@pytest.mark.parametrize("drops", [by_layer, by_mean, by_instruction])
def test_layers_and_heads_that_act_apart_are_counted_apart(drops, monkeypatch):
    """One list of each kind takes the steps, with the plan of that kind, and none is acted out."""
    monkeypatch.setattr(sizing_count, "act_out", lambda *asked, **how: pytest.fail("was acted out"))
    asked = Acting(drops), SHAPE, 90, 12, None
    found = count(*asked, is_even=True)
    assert found == act_out(*asked, is_even=True)
    whole = count(Acting(lambda view: (torch.tensor(False), by_layer(view)[1])), *asked[1:], is_even=True)
    assert (found == whole) == (drops is by_mean)


def test_evictions_in_bulk_are_counted_apart(monkeypatch):
    """A plan says of every slot whether it stays."""
    monkeypatch.setattr(sizing_count, "act_out", lambda *asked, **how: pytest.fail("was acted out"))
    policy = make_policy(OmegaConf.merge(method_settings("snapkv"), {"budget": 40, "decode_every": 4}))
    asked = policy, SHAPE, 150, 10, None
    assert count(*asked, is_even=True) == act_out(*asked, is_even=True)


class OneHead(Acting):
    """Plans for one head of a layer."""

    def plan_decode(self, view):
        return kv.DecodePlan(slot=torch.zeros(1, LAYERS, 1, dtype=torch.long))


def test_a_plan_of_another_form_is_refused():
    """As the store refuses it."""
    with refused("method-broken", None, "slot", "(1, 3, 1)"):
        count(OneHead(by_layer), SHAPE, 90, 2, None, is_even=True)


def test_work_does_not_grow_with_layers_and_heads(monkeypatch):
    """DiffKV on a deep model: one plan of a prompt, and one list that takes steps, for each end of attention."""
    seen = []
    attend, plan = CompressedStore.attend, DiffKV.plan_prefill
    monkeypatch.setattr(CompressedStore, "attend", lambda *given: seen.append("step") or attend(*given))
    monkeypatch.setattr(DiffKV, "plan_prefill", lambda *given: seen.append("plan") or plan(*given))
    deep = replace(find_shape("llama3-8b").store_shape, num_layers=80)
    least, most = project(DiffKV(), deep, 2000, 8)
    assert least.resident_bytes < most.resident_bytes
    assert seen.count("step") == 2 * 8
    assert seen.count("plan") <= 2 * 2 * 2  # a glance and the whole, of a model's lists and then of those that differ


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["list"], "torch hydra rich pandas"),
        (["help"], "torch hydra rich pandas"),
        *(
            pytest.param(*case, marks=need_extension("advise"))
            for case in (
                (["engine", "llama-server -ctk q8_0"], "transformers pandas"),  # its bytes are counted by the method
                (["bytes", "method=diffkv", "model=llama3-8b", "length=100"], "transformers pandas scipy"),
            )
        ),
    ],
)
def test_a_short_command_loads_no_more_than_it_needs(words, absent):
    """`python tests/startup.py` shows what each takes."""
    script = """
import sys
from kvbench.cli.main import main
code = main(sys.argv[2:])
sys.exit(code or " ".join({*sys.argv[1].split()} & {*sys.modules}) or 0)
"""
    done = run([sys.executable, "-c", script, absent, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_value_out_of_range_is_refused_before_transformers_is_imported(tmp_path):
    """As quickly as a name that does not exist: importing what computes takes seconds."""
    script = """
import sys
from kvbench.cli.main import main
sys.exit(10 * main(sys.argv[1:]) + ("transformers" in sys.modules))
"""
    words = ["method=snapkv", "budget=1.5", f"results_dir={tmp_path}"]
    done = run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 20 and "1.5" in done.stderr and "loading" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_usual_settings_are_those_of_the_folders_at_hand(tmp_path, monkeypatch):
    """A method of another configuration folder leaves nothing behind for a method of its name."""
    from kvbench.config import files
    from kvbench.sizing.stored import usual_settings

    usual = usual_settings("kivi")
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "kivi.yaml").write_text("# Another.\n_target_: kvbench.methods.kivi.Kivi\nbits: 4\n")
    with monkeypatch.context() as patch:
        patch.setattr(files, "conf_folder", lambda: tmp_path)
        assert usual_settings("kivi")["bits"] == 4 and usual_settings("snapkv") == {}
    assert usual_settings("kivi") == usual and usual["bits"] == 2 and usual_settings("snapkv")
