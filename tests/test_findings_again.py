"""`make findings` in a copy: its commands end well, and leave tables and documents as they are."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from places import ROOT, need_extension

COMMANDS = re.findall(
    r"results/example/\w+\.py", (ROOT / "Makefile").read_text().partition("\nfindings:")[2].partition("\n\n")[0]
)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # 4.5 minutes on an idle machine
@need_extension("papers")
def test_findings_are_made_again(tmp_path):
    """Numbers to the last digits, which other processors round otherwise; of pictures, that they are drawn."""
    for folder in ("results/example", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    pictures = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "results" / "example").glob("*.png")}
    assert len(COMMANDS) == 3
    for script in COMMANDS:
        subprocess.run([sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    for path in (tmp_path / "README.md", *(tmp_path / "docs").rglob("*.md")):
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path.name
    for path in (tmp_path / "results" / "example").glob("*.csv"):
        made, stored = pd.read_csv(path), pd.read_csv(ROOT / path.relative_to(tmp_path))
        pd.testing.assert_frame_equal(made, stored, rtol=1e-6, obj=path.name)
    drawn = [
        name for name, time in pictures.items() if (tmp_path / "results" / "example" / name).stat().st_mtime_ns > time
    ]
    assert len(drawn) > 10


@need_extension("papers")
def test_the_full_cache_alone_is_no_picture(tmp_path, monkeypatch):
    """LongBench with the question behind the context has no formats of 4 bits to draw."""
    monkeypatch.syspath_prepend(ROOT / "results" / "example")
    report = importlib.import_module("mission_report")
    monkeypatch.setattr(report, "HERE", tmp_path)
    run = Path("longbench", "qwen2.5-coder-0.5b", "full", "0836e301d22e")
    (tmp_path / "runs" / run).parent.mkdir(parents=True)
    (tmp_path / "runs" / run).symlink_to(report.PACKED / run)
    report.pictures({f"{report.BEHIND} with {report.MODEL}": tmp_path / "runs"}, tmp_path / "drawn")
    assert not [*tmp_path.glob("*.png")]
