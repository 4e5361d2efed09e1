"""`method.calibration=auto`: the shipped file of a method and a model, where nobody chose otherwise."""

import shlex

import pytest
import yaml

from kvbench.config import calibrated, files
from kvbench.config.compose import compose

SMALL = "diffkv_smollm2-135m"
QWEN = "diffkv_qwen2.5-coder-0.5b"
GEMMA = "diffkv_gemma-3-270m"


def resolved(words):
    """The file that a run's words lead to."""
    words = shlex.split(words)
    cfg = compose(words)
    calibrated.resolve(cfg, words)
    return cfg.method.calibration


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("", SMALL),
        ("model=qwen2.5-coder-0.5b", QWEN),
        ("model=gemma-3-270m", GEMMA),
        ("model.dtype=bfloat16 seed=3", SMALL),
        ("method.window=32", None),
        ("model=qwen2.5-coder-1.5b", None),
        ("model=qwen2.5-coder-0.5b model.path=other.gguf", None),
        ("method=kivi", None),
        ("method=diffkv_artifact", None),
        ("method.alpha_l=0.02", None),  # also where it is the value that the method has anyway
        ("method.alpha_h=2.0", None),
        ("method.calibration=null", None),
        (f"method.calibration={SMALL} model=qwen2.5-coder-0.5b", SMALL),  # which the run refuses
    ],
)
def test_the_file_of_the_method_and_the_model(words, file):
    """A threshold or another setting that is given, another model, other weights or another method has none."""
    assert resolved(words) == file


def test_values_of_an_experiments_file_are_a_choice(monkeypatch, tmp_path):
    """Thresholds that a file of the user's own sets are not replaced."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\nmethod: {alpha_h: 3.0}\n")
    with files.with_config_dirs([tmp_path]):
        assert resolved("experiment=mine") is None


def test_settled_settings_name_no_file():
    """The values of a file in place of its name."""
    found = calibrated.settled({"calibration": QWEN, "alpha_h": 1.0, "alpha_l": 0.02, "window": 64})
    assert found == {"calibration": None, "alpha_h": 0.04, "alpha_l": 0.04, "window": 64}
    assert calibrated.settled({"calibration": "my.yaml", "alpha_h": 1.0}) == {"calibration": "my.yaml", "alpha_h": 1.0}


def test_suites_and_papers_name_their_thresholds():
    """What is to be the same everywhere does not hang on a shipped file."""
    named = set()
    for path in files.path_of("suite", "quick").parent.glob("*.yaml"):
        lines = yaml.safe_load(path.read_text()).get("methods", ())
        assert all("alpha_h" in line for line in lines if line.split()[0] == "method=diffkv"), path
        named |= {path.stem for line in lines if "diffkv" in line}
    assert {"quick", "mission"} <= named
