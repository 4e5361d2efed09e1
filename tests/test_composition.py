"""The study of scores and allocations (results/example/composition.py): what it runs."""

import importlib.util
from collections import Counter

import pytest
from places import ROOT

from kvbench.rules import declared
from kvbench.runs.parts import make_policy, policy_class

PATH = ROOT / "results" / "example" / "composition.py"


@pytest.fixture(scope="module")
def script():
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("composition", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_score_meets_every_allocation_at_the_same_bytes(script):
    """At three budgets, which are half, a quarter and an eighth of the full cache of prompt and answer, `random` beside
    them; and every method takes its settings."""
    asked = script.settings_of([])
    found = list(script.runs(asked))
    whole = 2 * 2 * 30 * 3 * 64 * (512 + script.NEW_TOKENS)
    amounts = {f"{whole // part}B" for part in (2, 4, 8)}
    assert {settings["budget"] for _, settings in found} == amounts
    assert Counter(method for method, _ in found) == {"random": 3} | {m: 15 for m, _ in script.SCORES.values()}
    assert len({(method, *map(str, settings.values())) for method, settings in found}) == len(found)
    for method, settings in found:
        kind = policy_class(f"kvbench.methods.{MODULES.get(method, method)}.{CLASSES[method]}")
        assert set(settings) <= set(declared(kind))
        make_policy({"_target_": f"{kind.__module__}.{kind.__name__}", **settings})


MODULES = {"random": "random_control", "h2o_factory": "h2o"}
CLASSES = {
    "random": "RandomControl",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "h2o_factory": "H2O",
    "tova": "TOVA",
    "keydiff": "KeyDiff",
    "knorm": "KeyNorm",
    "lagkv": "LagKV",
    "vatp": "VATP",
    "expected_attention": "ExpectedAttention",
    "kvzip": "KVzip",
}


def test_the_study_goes_on_past_what_cannot_be_run(script, tmp_path, monkeypatch, capsys):
    """Refused runs are named, and the others are run."""
    ran = []

    def run(method, **settings):
        if method == "random":
            raise ValueError("too small")
        ran.append((method, settings["allocation"], settings["model"], settings["settings"]["model.preset"]))

    monkeypatch.setattr(script.kvbench, "run", run)
    words = ["model=tiny", "scores=[kvzip]", "allocations=[ada,global]", "parts=[0.5]"]
    script.study(tmp_path, script.settings_of(words))
    assert ran == [("kvzip", "ada", "random", "tiny"), ("kvzip", "global", "random", "tiny")]
    assert "not run: too small" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("item=3", "there is no setting item; there are items"),
        ("scores=[snap]", "scores has no snap; there are snapkv"),
        ("allocations=[table]", "allocations has no table; there are uniform"),
    ],
)
def test_wrong_settings_are_named(script, word, message):
    """With those that there are."""
    with pytest.raises(SystemExit, match=message):
        script.settings_of([word])
