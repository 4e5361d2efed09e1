"""The setting `store.key_offset` of a run: what its identity holds, and what is refused before a model is loaded."""

import pytest
from refusals import refused

from kvbench.methods.uniform import Uniform
from kvbench.rules.counting import counted
from kvbench.runs.choices import make_cache
from kvbench.runs.config import RunConfig, store_options
from kvbench.runs.experiment import _method_settings


def test_a_table_counts_by_its_numbers(tmp_path):
    """Not by its path; and a run without offsets is the run that it was before there were any."""
    path = tmp_path / "table.tsv"
    path.write_text("0.5\t-1\n2\t3e-2\n")
    found = store_options({"key_offset": str(path)})
    assert found == store_options({"key_offset": [[0.5, -1], [2, 0.03]]})
    assert counted(found)["key_offset"] == ((0.5, -1.0), (2.0, 0.03))
    assert "key_offset" not in counted(store_options({}))
    assert counted(store_options({"key_offset": "prompt"}))["key_offset"] == "prompt"
    assert make_cache(f"int4 store.key_offset={path}")[1] == found
    assert RunConfig(store=found).of_full().store == store_options({})


@pytest.mark.parametrize("text", ["1 2\n3\n", "nan 1\n", "x\n", ""])
def test_what_is_no_table_is_refused(tmp_path, text):
    """With the setting's name; and so is a file that is not there."""
    path = tmp_path / "table.txt"
    path.write_text(text)
    for given, code in ((path, "setting-value"), (tmp_path / "nothing", "file-missing")):
        with refused(code, "store.key_offset", given):
            store_options({"key_offset": str(given)})


def test_keys_before_the_rotary_embedding_count_where_they_are_asked_for():
    """A method that does not ask is the method that it was before it could."""
    found = [
        _method_settings({"tier": "int4"} | more, Uniform(tier="int4", **more)) for more in ({}, {"pre_rope": True})
    ]
    assert "pre_rope" not in found[0] and found[1] == found[0] | {"pre_rope": True}
    assert _method_settings({"tier": "int4", "pre_rope": False}, Uniform(tier="int4")) == found[0]
