"""The page: self-contained, small, true to the results, and safe whatever the answers hold."""

import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from stored import flips, store, yes_no

from kvbench.cli.commands import compose_command
from kvbench.cli.main import main
from kvbench.evidence import frontier_figure, report, report_bars
from kvbench.evidence.load import load_groups
from kvbench.policy import Policy

SCORES = yes_no(0.8, {"a": 20, "b": 20}, seed=1)
EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> & \u2028 {{ 7 * 7 }} '


class Page(HTMLParser):
    """Everything a browser would see: elements, their attributes, and the text of the page and of its data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.data, self._open = [], "", "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if attributes.get("id") == "data":
            self.data += data
        elif tag not in ("script", "style"):
            self.text += data

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def make(root, *words):
    """Writes the report and reads it back."""
    out = root / "page.html"
    command = ["report", f"results_dir={root}", f"out={out}", "resamples=200", "axes=resident"]
    assert main([*command, *words]) == 0
    return Page(out.read_text(encoding="utf-8"))


class Planted(Policy):
    """A method that a results folder from somewhere else might name."""

    made = []

    def __init__(self):
        self.made.append(self)


@pytest.fixture
def sweep(tmp_path):
    """The full cache, a method that loses five answers and gains one, and one that keeps everything."""
    store(tmp_path, "full", SCORES, ratio=1.0, tiers=(100,), bits=16)
    store(tmp_path, "lossy", flips(SCORES, 5, 1), ratio=0.3, tiers=(30, 20), text=lambda number: f"{EVIL}{number}")
    store(tmp_path, "exact", SCORES, ratio=0.6, tiers=(100,), bits=8)
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """Pictures of noise instead of drawn ones, for what is not about pictures; 60 kB each."""
    noise = np.random.default_rng(0).integers(0, 256, (250, 250), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "png")
    monkeypatch.setattr(frontier_figure, "render", lambda panel, axis, kind: buffer.getvalue())


def test_cards_show_the_expected_answer(tmp_path, quick):
    """Every right answer that the record has, before what a task happens to keep beside it."""
    store(tmp_path, "full", SCORES, ratio=1.0, gold=lambda number: (f"the {number}", "or so"))
    store(tmp_path, "lossy", flips(SCORES, 5, 0), ratio=0.3, gold=lambda number: (f"the {number}", "or so"))
    (data,) = json.loads(make(tmp_path).data)
    assert len(data["samples"]) == 5
    assert all(right == f"the {name.split('/')[1]}; or so" for name, right in data["samples"])


def test_page_holds_the_results(sweep):
    """Methods, differences, lost and gained answers, tiers, bytes and environment are those of the runs."""
    page = make(sweep)
    (data,) = json.loads(page.data)
    assert data["runs"] == ["lossy"] and data["others"] == ["full"]
    assert len(data["changes"]) == 6 and sum(item[1] for item in data["changes"]) == 5
    first = data["changes"][0]
    assert data["texts"][first[4]].startswith("answer ") and data["texts"][first[5]].startswith("</script>")
    parts = ["toy with tiny", "-10.0 [", "5 / 1", "5 lost and 1 gained", "quant meta", "torch", "2.13.0", "cpu (X)"]
    parts += ["tier 0 30.0 %, tier 1 20.0 %, evicted 50.0 %", "complete", "30.0", "no noise band"]
    missing = [part for part in parts if part not in " ".join(page.text.split())]
    assert not missing


def test_page_is_self_contained_and_safe(sweep, quick):
    """No address outside the page, no handler, one script of ours, and the answers only as data that cannot end it."""
    store(sweep, "evil<b>name</b>", SCORES, settings={"x": "<script>1</script>"})
    page = make(sweep, f"title='{'<i>a</i>'}'")
    raw = (sweep / "page.html").read_text(encoding="utf-8")
    assert "alert(" not in re.sub(r'<script type="application/json".*?</script>', "", raw, flags=re.DOTALL)
    assert [attributes.get("type") for attributes in page.named("script")] == ["application/json", None]
    assert len(page.named("img")) == 1 and page.named("img")[0]["src"].startswith("data:image/png;base64,")
    assert not page.named("i") or all("class" in attributes for attributes in page.named("i"))
    assert not page.named("b") and "<i>a</i>" in page.text
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert not re.match(r"https?:|//", attributes.get("href", "") + attributes.get("src", ""))
    assert not page.named("link") and "innerHTML" not in raw and "<" not in page.data
    assert any(EVIL in text for text in json.loads(page.data)[0]["texts"])


def test_page_can_be_read_without_eyes(sweep, quick):
    """Language, one main heading, labelled controls, pictures with words, tables with heading cells."""
    page = make(sweep)
    assert page.named("html")[0]["lang"] == "en" and len(page.named("h1")) == len(page.named("main")) == 1
    (image,) = page.named("img")
    assert "Best estimates: " in image["alt"] and "exact" in image["alt"]
    assert all(attributes.get("scope") in ("row", "col") for attributes in page.named("th"))
    assert all(a.get("aria-label") for a in page.named("div") if a.get("role") == "region")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"][1:] for attributes in page.named("a")]
    assert set(links) <= set(ids)


def test_odd_runs_are_named_on_the_page(sweep, quick, capsys):
    """Incomplete, failed and other-version runs are in the warnings and on the terminal, and in no number."""
    before = json.loads(make(sweep).data)
    store(sweep, "broken", SCORES, status="failed", message="<b>did nothing</b>")
    store(sweep, "older", SCORES, harness="0" * 64, started="2025-01-01T00:00:00+00:00")
    store(sweep, "part", {"a": SCORES["a"][:4]}, status="running")
    page = make(sweep)
    parts = ["FAILED and is left out: <b>did nothing</b>", "1 runs of another version", "4 of 40"]
    parts += ["part is not drawn: it is incomplete", "incomplete, 4 of 40 answers"]
    missing = [part for part in parts if part not in " ".join(page.text.split())]
    assert not missing
    assert json.loads(page.data) == before
    assert "! part is not drawn" in capsys.readouterr().out


def test_same_results_same_page(sweep, quick):
    """The page has no time of its making and no other chance in it."""
    make(sweep)
    first = (sweep / "page.html").read_bytes()
    make(sweep)
    assert (sweep / "page.html").read_bytes() == first


def test_page_stays_small(sweep, quick, monkeypatch):
    """A page that is too large loses answers first, then pictures, and says so; one that cannot fit is an error."""
    for run in range(3):
        store(sweep, f"long{run}", flips(SCORES, 16, 3), text=lambda number, run=run: f"{run} {number} " + "x" * 5000)
    cfg = compose_command("report", [f"results_dir={sweep}", "resamples=100", "axes=[resident,peak]"])
    found, means = report.gather(load_groups(cfg), cfg)
    whole, cut = report.page(found, means, cfg)
    assert not cut and len(whole) < report.MAX_BYTES
    monkeypatch.setattr(report, "MAX_BYTES", len(whole) - 20_000)
    made, cut = report.page(found, means, cfg)
    assert len(made) <= report.MAX_BYTES and "Answers are cut to" in cut and cut in made.decode()
    monkeypatch.setattr(report, "MAX_BYTES", len(whole) - 100_000)
    made, cut = report.page(found, means, cfg)
    assert len(made) <= report.MAX_BYTES and "Only the first picture of each group fits" in cut
    monkeypatch.setattr(report, "MAX_BYTES", 10_000)
    with refused("unsupported", None, "10.0 kB"):
        report.page(found, means, cfg)


def test_a_bar_of_bytes_is_as_long_as_its_percentage(tmp_path):
    """Answers of two lengths: the longer text has more bytes and a smaller share, so a shorter bar."""
    for name, ratio in (("long", 0.5), ("short", 0.6)):
        store(tmp_path, name, SCORES, ratio=ratio)
    (group,) = load_groups(compose_command("report", [f"results_dir={tmp_path}"]))
    for record in group.runs[0].samples.values():
        record["ledger"] = {key: 2 * count for key, count in record["ledger"].items()}
    rows = report_bars.byte_bars(group)["rows"]
    lengths = [sum(float(part["width"]) for part in row["parts"]) for row in rows]
    assert lengths == pytest.approx([100 * 0.5 / 0.6, 100], abs=0.01)
    assert [row["text"].split(":")[0] for row in rows] == ["50.0\u00a0%, 103 kB", "60.0\u00a0%, 61.7 kB"]


def test_tiers_have_their_methods_names(tmp_path):
    """Tiers are named by the method's own code where it still fits; nothing outside kvbench.methods is loaded."""
    kivi = {"_target_": "kvbench.methods.kivi.Kivi", "tier": None, "bits": 2}
    store(tmp_path, "kivi", SCORES, tiers=(60, 40), settings=kivi)
    (group,) = load_groups(compose_command("report", [f"results_dir={tmp_path}"]))
    (run,) = group.runs
    settings = run.record.identity["method"]
    assert report_bars.tier_names(run, 2) == ["tier 0", "tier 1"]  # `tier` is no setting of Kivi
    del settings["tier"]
    names = report_bars.tier_names(run, 2)
    assert names[1] == "16-bit buffer" and "2" in names[0]
    assert report_bars.shares_by_name(run) == pytest.approx({names[0]: 0.6, names[1]: 0.4})
    assert 19.0 < float(report._at_length(run)) < 19.4  # the audit's own count of Llama-3-8B at 32k is 19.1
    settings.clear()
    settings["_target_"] = f"{Planted.__module__}.Planted"
    assert report_bars.tier_names(run, 2) == ["tier 0", "tier 1"] and not Planted.made
    assert report._at_length(run) == "-"
