"""The benches of the score pass over prompts and of page management."""

from dataclasses import replace

import pytest

from kvbench.kernels.backend import Backend
from kvbench.kernels.bench import bench, manager, prefill

# Prompts.


def test_score_passes_are_timed_beside_attention():
    """The window, all queries and the full matrix agree with a matrix in fp64; their cost is over attention's time."""
    words = "shapes=[6x2x64] lengths=[333] windows=[8] rounds=2 threads=[1] kernels=torch".split()
    document = bench.run(bench.read_words(prefill.Settings, words))
    bench.check_document(document)
    (cell,) = document["cells"]
    assert not cell["refused"]
    rows = {row["name"]: row for row in cell["variants"]}
    assert set(rows) == {
        "attention",
        "sdpa",
        "eager, all queries",
        "attention + scores of the last 8",
        "attention + scores of all queries",
    }
    assert rows["attention + scores of the last 8"]["versus"]["name"] == "attention"
    assert all(row["max_error"] < 1e-4 for row in rows.values())
    assert "costs" in _shown(document)


def test_a_score_pass_that_is_wrong_is_refused(monkeypatch):
    """Counting one query too few is refused; attention alone is still timed."""

    class Short(Backend):
        def prompt_scores(self, q, k, scale, columns, reduction, lse=None):
            fewer = columns.queries - 1 if columns.queries > 0 else 200
            return super().prompt_scores(q, k, scale, replace(columns, queries=fewer), reduction)

    monkeypatch.setattr(bench, "get_backend", lambda name, device: Short())
    words = "shapes=[2x2x64] lengths=[310] windows=[8] rounds=1 threads=[1]".split()
    (cell,) = bench.run(bench.read_words(prefill.Settings, words))["cells"]
    assert len(cell["refused"]) == 2 and all("scores of" in entry["name"] for entry in cell["refused"])
    assert {row["name"] for row in cell["variants"]} == {"attention", "sdpa", "eager, all queries"}


def test_matrices_that_do_not_fit_are_left_out(monkeypatch):
    """The full matrix is not even tried when memory is short, and the document says so."""
    monkeypatch.setattr(prefill.machine, "available_bytes", lambda device: 1000)
    words = "shapes=[2x2x64] lengths=[64] windows=[8] rounds=1 threads=[1] kernels=torch".split()
    document = bench.run(bench.read_words(prefill.Settings, words))
    assert any("left out: its matrices" in note for note in document["notes"])
    assert all(not row["name"].startswith("eager") for row in document["cells"][0]["variants"])


# Pages.


def test_both_managers_hold_the_same_pages():
    """All at once and one by one give every list the same pages through every operation, wrapping around."""
    words = "lists=[5,33] tokens_per_page=8 start_tokens=11 rounds=3 threads=[1]".split()
    document = bench.run(bench.read_words(manager.Settings, words))
    bench.check_document(document)
    assert len(document["cells"]) == 6
    for cell in document["cells"]:
        assert not cell["refused"], cell["refused"]
        assert [row["name"] for row in cell["variants"]] == ["all at once", "one by one"]
    assert "compact, free, take" in _shown(document)


@pytest.mark.parametrize("operation", manager._OPERATIONS)
def test_managers_agree_after_many_operations(operation):
    """The lists are the same again after the counters of the circular list have gone around several times."""
    small = manager.Settings(lists=[7], tokens_per_page=4, start_tokens=9)
    state = manager._State(7, small, "cpu", Backend())
    both = state.variants(operation)
    for _ in range(80):
        for variant in both:
            variant.call(0)
    assert state.pages_agree() == 0.0 and state.pool.start > 3 * state.pool.num_pages
    assert state.table.num_slots[0].tolist() == state.host.slots == state.start.tolist()


def test_a_manager_that_gives_out_other_pages_is_refused(monkeypatch):
    """A batched manager whose pages differ from the sequential one's is not timed."""
    real = manager.PageTable.reserve

    def rolled(self, lists, tier, count):
        first = real(self, lists, tier, count)
        self.entries.copy_(self.entries.roll(1, 0))
        return first

    monkeypatch.setattr(manager.PageTable, "reserve", rolled)
    words = "lists=[5] tokens_per_page=8 start_tokens=11 rounds=1 threads=[1]".split()
    document = bench.run(bench.read_words(manager.Settings, words))
    assert all([entry["name"] for entry in cell["refused"]] == ["all at once"] for cell in document["cells"])


def _shown(document):
    """What the command would print."""
    from rich.console import Console

    from kvbench.bench import show

    console = Console(width=200)
    with console.capture() as captured:
        console.print(show.render(document))
    return captured.get()
