"""The documents that are generated from the code, and the published protocols."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench import listing, method_table

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = sorted(listing.options("experiment"))


def test_method_document_is_the_codes():
    """docs/methods.md is what `make docs` writes today."""
    assert (ROOT / "docs" / "methods.md").read_text() == method_table.render(), "run `make docs`"


@pytest.mark.parametrize("name", sorted(listing.options("method")))
def test_every_method_is_in_the_document(name):
    """A method has a row and a section that say where it comes from and what differs."""
    text = (ROOT / "docs" / "methods.md").read_text()
    assert f"| [{name}](#{name}) |" in text
    part = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert "- Source: " in part and "- Differs: " in part and "methods.md" not in part


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_published_protocol_composes(name):
    """A protocol names its source, sets what it says, and works with any model."""
    path = ROOT / "conf" / "experiment" / f"{name}.yaml"
    assert "# source: " in path.read_text()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=[f"experiment={name}", "model=random"])
    wanted = OmegaConf.load(path)
    for group in ("method", "task"):
        for key, value in wanted.get(group, {}).items():
            assert config[group][key] == value
    assert config.model.kind == "random"
    instantiate(config.method)
