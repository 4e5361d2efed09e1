"""What a run writes can be read: random valid settings through a run and everything that reads it."""

import pytest
import roundtrip
from selection import FULL, few

from kvbench.results.record import RunRecord

CASES = 300  # of which the default run takes ten


@pytest.mark.every(5)
@pytest.mark.long  # a run, and commands that read it
@pytest.mark.parametrize("seed", few(range(CASES), *range(0, CASES, CASES // 10)))
def test_what_is_written_is_read(seed, tmp_path, monkeypatch):
    """A run is made or refused before a prompt is read; what it wrote is taken by itself and by every reader. The
    default run has every third reader of a case in turn, and no picture of the run."""
    if FULL:
        assert not roundtrip.trip(seed, tmp_path).faults
    else:
        monkeypatch.setattr("kvbench.show.figure.draw", lambda records, path: path)
        assert not roundtrip.trip(seed, tmp_path, first=seed // (CASES // 10) % 3, step=3).faults


@pytest.mark.parametrize("given", ["fidelity.max_tokens=0", "fidelity.on=own"])
def test_a_text_that_is_not_forced_is_refused_first(given, tmp_path):
    """It was refused sample by sample, once the full cache had run."""
    words = ("model=random", "model.preset=tiny", "task=stream", "task.tokens=3", "task.items=1")
    code, said = roundtrip.give(*words, f"results_dir={tmp_path}", given)
    assert code == 2 and f"task=stream asks for no answer, and {given} leaves nothing to force either" in said
    assert not list(tmp_path.rglob("samples.jsonl"))


def test_answers_of_one_token_have_no_curve(tmp_path):
    """The prompt predicts it, so that nothing was measured along the answer: `drift` ended in words of Python's."""
    words = "model=random model.preset=tiny task=drift task.prompt_tokens=16 task.tokens=6 task.items=1 fidelity.on=own"
    words = (*words.split(), "fidelity.per_token=true", "protocol.max_new_tokens=1", f"results_dir={tmp_path}")
    assert roundtrip.give(*words)[0] in (0, 1)
    code, said = roundtrip.give("drift", f"results_dir={tmp_path}")
    assert code == 2 and any(text in said for text in roundtrip.NOTHING), said


def test_a_record_that_nobody_reads_is_not_written(tmp_path):
    """`limit=first:2` was once written as text where readers took numbers alone; such a record stops its run."""
    record = RunRecord(task="t", model="m", method="full", identity={"task": {"limit": "first:2"}})
    record.save(tmp_path)
    assert RunRecord.load(tmp_path) == record
    record.identity["task"]["limit"] = 2.5
    with pytest.raises(RuntimeError, match="run.json could not be read again: identity.task.limit is no"):
        record.save(tmp_path)
    assert RunRecord.load(tmp_path).identity["task"]["limit"] == "first:2"
