"""Ways from the front page: where a reader comes with a question and at most two clicks."""

import re

import pytest
from test_docs import ROOT, anchors_of

# Question -> the section that answers it: one click to the page, one in its table of contents.
ANSWERS = {
    "Which method should I use, at which setting?": "docs/choose.md#which-method-fits",
    "What do my engine's flags save and cost?": "docs/choose.md#flags-of-serving-engines",
    "How many bytes does it take on my model?": "docs/choose.md#bytes-on-another-model",
    "How do I measure on my own questions?": "docs/run.md#your-own-data",
    "What does a column of the table mean?": "docs/read.md#a-runs-table",
    "When is a difference proven?": "docs/read.md#verdicts",
    "How do I get a table and a figure for my paper?": "docs/read.md#figures-and-tables-for-a-paper",
    "How do I use it with transformers' generate?": "docs/python.md#transformers-own-generate",
    "How do I add my own method?": "docs/extend.md#in-the-repository-or-in-a-folder-of-your-own",
    "Does it agree with the papers?": "docs/findings.md#against-the-papers",
    "How fast is it on a GPU?": "docs/gpu.md#what-was-measured",
}


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_is_two_clicks_away(question):
    """The front page links to the page, and the page has the section."""
    page, _, anchor = ANSWERS[question].partition("#")
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert page in {link.partition("#")[0] for link in links}
    assert anchor in anchors_of(ROOT / page)
