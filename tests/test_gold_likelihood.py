"""The gold answers' likelihood of the study of five benchmarks: its table is that of the packed samples."""

import json
import lzma
import re
from collections import defaultdict

import numpy as np
import pytest
from places import ROOT

EXAMPLE = ROOT / "results" / "example"
MARGIN_NATS = 0.05  # a smaller loss counts as none


def losses(folder, full):
    """Arrays of losses in nats, one for each subset, of a run and the full cache's."""
    parts = defaultdict(list)
    for key, (subset, nll) in samples(folder).items():
        if nll is not None:
            parts[subset].append(nll - full[key][1])
    return [np.array(part) for _, part in sorted(parts.items())]


def samples(folder):
    """Subset and NLL of each answered sample."""
    with lzma.open(folder / "samples.jsonl.xz", "rt") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    return {line["sample_id"]: (line["subset"], line["fidelity"]["nll"]) for line in lines if line["status"] == "ok"}


def p_of_signs(parts, rng, draws=4000):
    """One-sided p of a mean over subsets above the margin, by random signs."""
    shifted = [part - MARGIN_NATS for part in parts]
    seen = np.mean([part.mean() for part in shifted])
    signed = [(part * rng.choice([-1, 1], (draws, len(part)))).mean(axis=1) for part in shifted]
    return (1 + np.sum(np.mean(signed, axis=0) >= seen)) / (1 + draws)


# Of LongBench: column of the table, answers of more than a token, settings in the family, those told in the table.
@pytest.mark.parametrize(
    ("column", "is_aware", "n", "settings", "told"),
    [
        pytest.param(5, True, 74, 16, 2, id="question in the window"),
        pytest.param(6, False, 80, 12, 1, id="question behind the context"),
    ],
)
def test_losses_of_long_prompts_are_those_of_the_samples(column, is_aware, n, settings, told):
    """Means of a column to 0.001 nats; what is bold in it is what a test of random signs tells, too."""
    text = (ROOT / "docs" / "reference" / "results.md").read_text()
    table = text.split("<!-- table: mission: gold -->\n")[1].split("<!-- end -->")[0].splitlines()
    cells = [cell for line in table[2:] if (cell := line.split("|")[column].strip())]
    shown = [(cell.startswith("**"), float(re.match(r"\**([+-][\d.]+) ", cell)[1])) for cell in cells]
    stored = {
        path.parent: record
        for path in (EXAMPLE / "mission" / "longbench").glob("*/*/*/run.json")
        if (record := json.loads(path.read_text()))["protocol"]["query_aware"] == is_aware
    }
    (whole,) = (folder for folder, record in stored.items() if record["method"] == "full")
    full, rng = samples(whole), np.random.default_rng(0)
    assert sum(nll is not None for _, nll in full.values()) == n
    others = [folder for folder in stored if folder != whole]
    parts = [losses(folder, full) for folder in others]
    ps = np.array([p_of_signs(each, rng) for each in parts])
    order = np.argsort(ps)
    holm = np.empty_like(ps)
    holm[order] = np.minimum(1, np.maximum.accumulate(ps[order] * np.arange(len(ps), 0, -1)))
    assert len(others) == settings
    has_row = [stored[folder]["identity"]["method"].get("budget") != "25%seen" for folder in others]
    found = sorted(
        (p <= 0.05, np.mean([part.mean() for part in each]))
        for p, each, is_shown in zip(holm, parts, has_row, strict=True)
        if is_shown
    )
    assert [is_told for is_told, _ in found] == sorted(is_told for is_told, _ in shown)
    assert sum(is_told for is_told, _ in found) == told
    np.testing.assert_allclose([mean for _, mean in found], [mean for _, mean in sorted(shown)], atol=0.00051)
