"""Configuration files of kvbench and of the user, as Hydra gets them."""

import pytest
from refusals import refused

from kvbench.config.compose import compose
from kvbench.config.files import with_config_dirs

SNAPKV = "_target_: kvbench.methods.snapkv.SnapKV\n"


@pytest.fixture
def own(tmp_path):
    """A folder of the user's own, and how a method is written into it."""
    (tmp_path / "method").mkdir()
    return tmp_path, lambda name, text: (tmp_path / "method" / f"{name}.yaml").write_text(text)


def test_a_method_that_builds_on_another_keeps_its_settings(own):
    """Only a file without a defaults list gets those of its class: they would stand in front of the other method's."""
    folder, write = own
    write("first", f"{SNAPKV}window: 7\n")
    write("second", f"defaults:\n  - first\n  - _self_\n{SNAPKV}budget: 0.1\n")
    with with_config_dirs([folder]):
        method = compose(["method=second"]).method
    assert (method.window, method.budget, method.pool_kernel) == (7, 0.1, 7)


def test_a_list_is_no_configuration(own):
    """The error names the file."""
    folder, write = own
    write("listed", "- a\n- b\n")
    with with_config_dirs([folder]), refused("file-content", None, "listed.yaml"):
        compose(["method=listed"])
