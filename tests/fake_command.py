"""Run as a program: `fake_command.py CONF SAMPLES PAUSE_S WORDS`, a kvbench command on fakes, with its own exit code.

With HANG=1 the process stays for a minute where Python leaves, and says so on stderr first.
"""

import atexit
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from fake_parts import make_parts
from places import ROOT

FILES = {
    "method/full.yaml": "# Keeps everything.\n_target_: kvbench.methods.full.Full\nratio: 1.0\n",
    "method/snapkv.yaml": "# Keeps half. And more words.\n_target_: fake.Half\nratio: 0.5\nbudget: 5\n",
    "method/kivi.yaml": "# source: a\n# Keeps a quarter\n# of it.\n# source: b\n_target_: fake.Q\nratio: 0.25\n",
    "method/diffkv.yaml": "_target_: fake.D\nratio: 0.75\nlevels: {high: 8, low: 4}\n",
    "task/longctx.yaml": "# Generated.\nkind: fake\n",
    "task/longbench.yaml": "# From files.\nkind: fake\ndata_dir: null\n",
    "model/smollm2-135m.yaml": "# Small.\nname: tiny\n",
    "protocol/default.yaml": "# Official.\ntemperature: 0.0\n",
    "experiment/paper.yaml": "# @package _global_\n# A paper's.\ndefaults:\n  - override /method: kivi\nseed: 7\n",
}

SMALL = """# Two tasks, four runs each.
every: seed=3 limit=9
tasks:
  - task=longctx
  - task=longbench
    limit=6 protocol.temperature=0.5
methods:
  - method=full
  - method=snapkv method.ratio=0.5,0.25
  - method=kivi
"""


def write_conf(conf: Path) -> None:
    """The shipped config.yaml with small methods, tasks and models beside it."""
    for name, text in FILES.items():
        (conf / name).parent.mkdir(parents=True, exist_ok=True)
        (conf / name).write_text(text)
    shutil.copy(ROOT / "conf" / "config.yaml", conf / "config.yaml")
    for name in ("backend", "launcher", "command"):
        shutil.copytree(ROOT / "conf" / name, conf / name)


def hang() -> None:
    """Stay for a minute."""
    print("hangs", file=sys.stderr, flush=True)
    time.sleep(60)


def main(conf: Path, count: int, pause_s: float, words: list[str]) -> int:
    """A command on fakes that answer slowly."""
    import kvbench.cli.main
    import kvbench.config.files
    import kvbench.runs.parts

    kvbench.config.files.conf_folder = lambda: conf
    kvbench.runs.parts.Loaders = lambda: make_parts(count=count, pause_s=pause_s)
    if os.environ.get("HANG"):
        atexit.register(hang)
    return kvbench.cli.main.main(words)


if __name__ == "__main__":
    # A shell's children in the background ignore SIGINT unless they ask for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
