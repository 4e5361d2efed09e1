"""Methods across tasks: the table, its places and costs, and whether two tasks rank alike."""

import numpy as np
import pytest
import scipy.stats
from refusals import refused
from stored import store

from kvbench.cli.commands import compose_command
from kvbench.cli.main import main
from kvbench.evidence import frontier_figure
from kvbench.evidence.across import between, summaries
from kvbench.evidence.compare import compare_group, correct
from kvbench.evidence.load import load_groups

LEVELS = {"h2o": 0.2, "knorm": 0.35, "random": 0.1, "snapkv": 0.6, "tova": 0.5}


def scores(rng, level, count):
    """Yes-or-no scores of two subsets."""
    return {name: (rng.random(count) < level).astype(float).tolist() for name in "ab"}


def task(root, name, levels, count=60, seed=0):
    """The full cache and five methods on one task, whose questions are its own."""
    rng = np.random.default_rng(seed)
    more = {"task": name, "fingerprint": name[0] * 64}
    store(root, "full", scores(rng, 0.9, count), ratio=1.0, **more)
    for place, (method, level) in enumerate(levels.items()):
        store(root, method, scores(rng, level, count), ratio=0.2 + 0.1 * place, seconds=0.01 * (1 + place), **more)


def found(root, *words):
    """Groups, their compared rows and the settings."""
    cfg = compose_command("report", [f"results_dir={root}", "resamples=300", *words])
    groups = load_groups(cfg)
    rows = [compare_group(group, cfg)[0] for group in groups]
    correct([row for own in rows for row in own])
    return groups, rows, cfg


def test_a_table_of_methods_by_tasks(tmp_path):
    """Rows by mean place, differences with their verdicts, and what only one task has; a single task has none."""
    task(tmp_path, "gsm8k", LEVELS)
    assert not summaries(*found(tmp_path))
    task(tmp_path, "math", LEVELS | {"knorm": 0.65, "streaming_llm": 0.3}, seed=1)
    (table,) = summaries(*found(tmp_path))
    assert table["title"] == "All tasks with tiny"
    assert table["headings"][:4] == ["method", "gsm8k", "math", "mean place"]
    rows = {row["label"]: [cell["text"] for cell in row["cells"]] for row in table["rows"]}
    styles = {row["label"]: [cell["style"] for cell in row["cells"]][:2] for row in table["rows"]}
    assert list(rows) == ["snapkv", "knorm", "tova", "h2o", "random", "streaming_llm"]
    assert [rows[name][2] for name in rows] == ["1.5", "2.0", "2.5", "4.0", "5.0", "-"]
    assert rows["streaming_llm"][0] == "-" and rows["h2o"][0].startswith("-63.3") and "[-" in rows["h2o"][0]
    assert styles["random"] == ["worse", "worse"]
    # By place in LEVELS: bytes 20, 30, ... % of the full cache's, of a task or as the mean over both.
    assert float(rows["h2o"][3]) == pytest.approx(20, abs=0.1) and float(rows["tova"][3]) == pytest.approx(60, abs=0.1)
    assert "among the 5 runs that every task has" in table["note"]
    assert len(table["agreements"]) == 1 and "over 5 runs" in table["agreements"][0]


def test_the_page_begins_with_it(tmp_path, monkeypatch):
    """`kvbench report` shows the table before the tasks one by one, and links to it."""
    monkeypatch.setattr(frontier_figure, "render", lambda *given: b"")  # no picture is looked at
    for seed, name in enumerate(("gsm8k", "math")):
        task(tmp_path, name, LEVELS, seed=seed)
    assert (
        main(["report", f"results_dir={tmp_path}", "resamples=200", "axes=resident", f"out={tmp_path}/page.html"]) == 0
    )
    page = (tmp_path / "page.html").read_text()
    assert page.index('href="#s1"') < page.index('id="s1"') < page.index("Do the tasks rank") < page.index('id="g1"')


def test_two_tasks_that_rank_alike_or_not(tmp_path, capsys):
    """The correlation is that of the means on each task's own questions; its interval tells +1 from -1."""
    task(tmp_path, "gsm8k", LEVELS)
    task(tmp_path, "math", LEVELS, count=80, seed=1)
    task(tmp_path, "other", {name: 0.7 - level for name, level in LEVELS.items()}, seed=2)
    groups, rows, cfg = found(tmp_path)
    alike, opposite, _ = between(groups, "score", cfg)
    assert alike.titles == ("gsm8k with tiny", "math with tiny") and alike.num_runs == 5
    means = [{row.run.method: row.value for row in own} for own in rows]
    want = scipy.stats.spearmanr([means[0][name] for name in LEVELS], [means[1][name] for name in LEVELS]).statistic
    assert alike.agreement.value == pytest.approx(want)
    assert alike.agreement.interval[0] > 0.5 and opposite.agreement.interval[1] < -0.5
    assert (
        main(["ranks", "metrics=score", f"results_dir={tmp_path}", f"out={tmp_path}/ranks.csv", "resamples=300"]) == 0
    )
    shown = capsys.readouterr().out
    assert alike.words in shown and "resampled by themselves" in shown
    assert (tmp_path / "ranks.csv").read_text().count("\n") == 4
    with refused("settings-conflict", "at_bytes", "at_bytes=25"):
        compose_and_check(["metrics=score", "at_bytes=25"])


def compose_and_check(words):
    """The check of `kvbench report view=ranks`."""
    check = pytest.importorskip("kvbench.extensions.views.ranks").check

    check(compose_command("ranks", words))


def test_nothing_is_ranked_without_three_shared_runs(tmp_path):
    """Two methods have no order."""
    two = {"h2o": 0.2, "snapkv": 0.6}
    task(tmp_path, "gsm8k", two)
    task(tmp_path, "math", two, seed=1)
    assert main(["ranks", "metrics=score", f"results_dir={tmp_path}"]) == 2
