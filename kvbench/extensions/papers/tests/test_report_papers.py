"""The chapter beside the papers: which cells stand beside which runs, and that nothing passes for a match."""

import pytest
from stored import store, yes_no

from kvbench.cli.commands import compose_command
from kvbench.evidence.load import load_groups
from kvbench.extensions.papers import published
from kvbench.extensions.papers import report_section as report_papers
from kvbench.extensions.papers.report_section import (
    AS_STATED,
    NOT_COMPARED,
    OTHER_MODEL,
    OTHER_PROTOCOL,
    differences,
    fits,
    printed_table,
)

SCORES = yes_no(0.7, {"gsm8k": 30}, seed=3)


def chapter(root):
    """The rows of the one group, as dicts by heading."""
    (group,) = load_groups(compose_command("report", [f"results_dir={root}"]))
    return [
        dict(zip(report_papers.HEADINGS, [row["label"], *row["cells"]], strict=True))
        for row in printed_table(group)["rows"]
    ]


def test_a_cell_is_shown_with_the_run_of_its_setting(tmp_path):
    """Method, task and setting choose the cells; the full caches of both stand beside; another model is called so."""
    common = {"task": "gsm8k", "model": "llama3-8b"}
    store(tmp_path, "full", SCORES, **common, ratio=1.0)
    store(tmp_path, "kivi", SCORES, **common, ratio=0.25, settings={"bits": 2, "group": 32})
    store(tmp_path, "kivi", SCORES, **common, ratio=0.4, settings={"bits": 4, "group": 32})
    store(tmp_path, "diffkv", SCORES, **common, ratio=0.2, settings={"high": "k8v4", "low": "k4v2", "alpha_h": 1.0})
    rows = chapter(tmp_path)
    mean = f"{100 * sum(SCORES['gsm8k']) / 30:.1f}"
    kivi = [row for row in rows if row["run"].startswith("kivi")]
    wanted = published.select(papers=["diffkv", "leankv"], methods=["kivi"], tasks=["gsm8k"], places=["table 1"])
    assert len(kivi) == len(wanted) and {row["setting there"] for row in kivi} == {"2bit"}
    memory = report_papers.HEADINGS[-2]
    assert {(row["match"], row[memory]) for row in kivi} == {(OTHER_MODEL, "12.5 (nominal), 25.0")}
    (near,) = [row for row in rows if row["match"] != OTHER_MODEL]
    assert near is rows[0] and near["of"] == "Llama3-8B" and near["theirs"] == "75.7 (full 76.3)"
    assert near["ours [95 %]"].startswith(f"{mean} [") and near["ours [95 %]"].endswith(f"(full {mean})")
    assert near["match"] == NOT_COMPARED and "stated there alone: window=64" in near["conditions that differ"]
    assert near[memory] == "19.3 (unstated), 20.0" and near["printed in"] == "DiffKV, Table 1"


def test_longbench_e_is_not_longbench(tmp_path):
    """MiniKV's cells are of LongBench-E: they stand beside subsets of that alone, and an average beside all of it."""
    for task, num in (("trec", 0), ("trec_e", 3)):
        root = tmp_path / task
        store(root, "kivi", {task: [0, 1] * 6}, task="longbench", settings={"bits": 2, "group": 16})
        rows = chapter(root)
        assert len(rows) == num and {row["task"] for row in rows} <= {"TREC"}


@pytest.mark.parametrize(
    ("variant", "known", "answer"),
    [
        ("50%", {"budget": 0.5}, True),
        ("50%", {"budget": 0.25}, False),
        ("50%", {"budget": 50}, False),
        ("50%", {"budget": "50%seen"}, False),
        ("50%", {"read_budget": 0.5}, True),
        ("50%", {}, None),
        ("2bit", {"bits": 2}, True),
        ("2bit", {"bits": 4}, False),
        ("C=128 w8-L2", {"budget": 128}, True),
        ("C=128", {"budget": 0.5}, False),
        ("K8V4-K4V2", {"high": "k8v4", "low": "k4v2"}, True),
        ("K8V4-K4V2", {"high": "fp16", "low": "k4v2"}, False),
        ("uniform 25%+25%", {"allocation": "pyramid"}, False),
        ("", {"bits": 2}, None),
    ],
)
def test_settings_are_read_from_their_printed_names(variant, known, answer):
    """Settings parsed from the name of a variant, as far as possible; the rest is unknown."""
    assert fits(variant, known) is answer


def test_a_match_has_every_stated_condition():
    """One that differs, one that is stated there alone, and a setting that is not compared are each no match."""
    stated = {"bits": "2", "group": "32", "memory_source": "cell"}
    assert differences(stated, {"bits": 2, "group": 32}, True) == ([], AS_STATED)
    assert differences(stated, {"bits": 2, "group": 64}, True) == (["group: 32 there, 64 here"], OTHER_PROTOCOL)
    assert differences(stated | {"runs": "5"}, {"bits": 2, "group": 32}, True)[1] == NOT_COMPARED
    assert differences(stated, {"bits": 2, "group": 32}, None)[1] == NOT_COMPARED
    notes, match = differences({"group": "unstated"}, {"group": 32}, True)
    assert notes == ["group: not stated there"] and match == AS_STATED
    for odd in ("\x1b[2J" + "x" * 999, 10**400):  # of a folder that may be anybody's
        (notes,), match = differences({"group": "32"}, {"group": odd}, True)
        assert notes.isprintable() and len(notes) < 200 and match == OTHER_PROTOCOL
