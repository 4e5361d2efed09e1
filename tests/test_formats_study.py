"""The study of storage formats (results/example/formats.py): what it runs, and the table it makes of the runs."""

import csv
import importlib.util

import pytest
from places import ROOT

from kvbench.cache.rotation import KINDS
from kvbench.config.compose import compose
from kvbench.config.settings import as_dict
from kvbench.runs.parts import make_policy

PATH = ROOT / "results" / "example" / "formats.py"


@pytest.fixture(scope="module")
def script():
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("formats", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_run_can_be_made_and_none_comes_twice(script):
    """Methods and tiers have the names that kvbench knows them by; the full cache is first, for the comparisons."""
    found = list(script.runs(script.settings_of([])))
    assert found[0] == ("full", {}, {})
    assert len({repr(run) for run in found}) == len(found) >= 25
    settings = {method: as_dict(compose([f"method={method}"]).method) for method in {method for method, *_ in found}}
    for method, own, more in found:
        assert set(own) <= set(settings[method]) and set(more.values()) <= set(KINDS)
        make_policy(settings[method] | own)


def test_the_table_has_a_row_for_every_run(script, tmp_path):
    """On random weights: bytes fall with the bits, and the differences are those to the full cache."""
    words = "model=tiny items=1 rows=4 memory=64MiB".split()
    asked = script.settings_of([*words, "methods=[full]", "formats=[int4]", "rotated=[k2v2]"])
    script.study(tmp_path, asked)
    script.table(tmp_path)
    with (tmp_path / "formats.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    four, two = (next(name for name in rows if tier in name) for tier in ("int4 tier=int4", "tier=k2v2"))
    assert set(rows) == {"full", four, two}
    assert "rotation=hadamard" in two
    resident = {name: float(row["resident"]) for name, row in rows.items()}
    assert resident["full"] > 2 * resident[four] > 2 * resident[two]
    assert float(rows["full"]["quality"]) == 0.0


def test_a_setting_that_is_not_there_is_named(script):
    """With those that are."""
    with pytest.raises(SystemExit, match="there is no setting item; there are items, length"):
        script.settings_of(["item=3"])
