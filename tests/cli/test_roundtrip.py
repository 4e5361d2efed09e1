"""What a run writes can be read: random valid settings through a run and everything that reads it."""

import pytest
import roundtrip
from selection import few

from kvbench.results.record import RunRecord

CASES = 300  # of which the default run takes ten


@pytest.mark.long  # a run, and fifteen commands that read it
@pytest.mark.parametrize("seed", few(range(CASES), *range(0, CASES, CASES // 10)))
def test_what_is_written_is_read(seed, tmp_path):
    """A run is made or refused before a prompt is read; what it wrote is taken by itself and by every reader."""
    assert not roundtrip.trip(seed, tmp_path).faults


def test_a_record_that_nobody_reads_is_not_written(tmp_path):
    """`limit=first:2` was once written as text where readers took numbers alone; such a record stops its run."""
    record = RunRecord(task="t", model="m", method="full", identity={"task": {"limit": "first:2"}})
    record.save(tmp_path)
    assert RunRecord.load(tmp_path) == record
    record.identity["task"]["limit"] = 2.5
    with pytest.raises(RuntimeError, match="run.json could not be read again: identity.task.limit is no"):
        record.save(tmp_path)
    assert RunRecord.load(tmp_path).identity["task"]["limit"] == "first:2"
