"""Names of runs in tables and pictures."""

from kvbench.results.record import RunRecord
from kvbench.show.labels import label_runs


def run(method, hash_, seed=0, **settings):
    """A record with the parts that a label looks at."""
    return RunRecord(method=method, hash=hash_, identity={"method": settings, "seed": seed})


def test_labels_say_what_differs():
    """One run of a method is the method; several are told apart by the settings that differ, and only by those."""
    runs = [run("full", "f"), run("snapkv", "a", budget=0.5, window=32), run("snapkv", "b", budget=0.25, window=32)]
    assert label_runs(runs) == ["full", "snapkv budget=0.5", "snapkv budget=0.25"]
    assert label_runs(runs[:2]) == ["full", "snapkv"]
    assert label_runs(runs, "\n")[1] == "snapkv\nbudget=0.5"


def test_prompts_in_chunks_always_show():
    """Later tokens saw a compressed past, so the label says so beside any run and alone."""
    whole, chunked = run("snapkv", "a", budget=0.5), run("snapkv", "b", budget=0.5)
    chunked.protocol = {"prefill_chunk": 512}
    assert label_runs([whole, chunked]) == ["snapkv", "snapkv prefill.chunk=512"]
    assert label_runs([chunked]) == ["snapkv prefill.chunk=512"]


def test_labels_fall_back():
    """Seeds tell runs apart when the method does not, and the hash when nothing does; the same run twice is one run."""
    assert label_runs([run("h2o", "a", 0, budget=1), run("h2o", "b", 1, budget=1)]) == ["h2o seed=0", "h2o seed=1"]
    assert label_runs([run("h2o", "abcdefgh"), run("h2o", "12345678")]) == ["h2o abcdef", "h2o 123456"]
    assert label_runs([run("h2o", "a"), run("h2o", "a")]) == ["h2o", "h2o"]


def test_long_settings_are_cut():
    """A table of numbers does not fill the line, and two that begin alike are told apart by the hash."""
    first, second = [[0.25] * 9, [0.5]], [[0.25] * 9, [0.75]]
    labels = label_runs([run("duo", "aaaaaaaa", table=first), run("duo", "bbbbbbbb", table=second)])
    assert labels == ["duo table=[[0.25, 0.25, 0.25, 0... aaaaaa", "duo table=[[0.25, 0.25, 0.25, 0... bbbbbb"]
