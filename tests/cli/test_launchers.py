"""Sweeps under the launchers that exist: the same samples as in sequence, the same end, and nothing lost by a kill.

Every launcher starts processes that load torch, so these take minutes: `make test-launchers` installs the launchers
and runs them.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from places import ROOT

from kvbench.cli.sweeping import PLUGINS, is_installed
from kvbench.config import files
from kvbench.results.journal import is_held
from kvbench.results.sweep import sweeps

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]
# 12 runs, and the full cache's of two seeds, which they share.
SWEEP = ["method=snapkv,kivi,h2o", "seed=0,1", "protocol.max_new_tokens=4,6"]
BAD = ["method=snapkv", "method.window=4,-4", "protocol.max_new_tokens=4"]
SMALL = ["model=random", "model.preset=tiny", "task.kinds=[kv]", "task.items=2", "task.length=400", "batch_size=2"]
AT_ONCE = {
    "basic": [],
    "joblib": ["hydra.launcher.n_jobs=2"],
    "submitit_local": ["hydra.sweeper.max_batch_size=3"],
    "ray": ["hydra.launcher.ray.init.num_cpus=2"],
}


def command(folder, launcher, sweep=SWEEP, small=SMALL):
    """A sweep as a program."""
    given = ["hydra/launcher=" + launcher, *AT_ONCE[launcher]] if launcher != "basic" else []
    # One thread: sums in another order would change the last bit.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment |= {"RAY_DEDUP_LOGS": "0", "RAY_AUTH_MODE": "disabled"}
    return subprocess.Popen(
        [sys.executable, "-m", "kvbench", "-m", *sweep, *small, *given],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def answers(folder):
    """Run -> digest of its samples without their times and seals."""
    found = {}
    for path in sorted(folder.glob("results/*/*/*/*/samples.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{key: value for key, value in row.items() if key not in ("timing", "seal")} for row in rows]
        found[path.parent.relative_to(folder).as_posix()] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return found


@pytest.fixture(scope="module")
def in_sequence(tmp_path_factory):
    """The sweep with the basic launcher: its folder and its answers."""
    folder = tmp_path_factory.mktemp("sequence")
    child = command(folder, "basic")
    out, said = child.communicate()
    assert child.returncode == 0, said
    assert "12 jobs: 12 done" in said and out.count("Quality: ") == 1
    found = answers(folder)
    assert len(found) == 16, "12 runs, and 4 of the full cache"
    return found


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_same_samples_and_the_same_end(launcher, tmp_path, in_sequence):
    """Under every launcher the answers are those of the sequence, with one table, one picture and exit code 0; a sweep
    with a bad job ends with its code."""
    if not is_installed(launcher):
        pytest.skip(f"needs {PLUGINS[launcher]}")
    child = command(tmp_path, launcher)
    out, said = child.communicate()
    assert child.returncode == 0, said
    assert "12 jobs: 12 done" in said and out.count("Quality: ") == 1, said
    assert (tmp_path / "results" / "longctx" / "random-tiny" / "sweep.png").exists()
    assert answers(tmp_path) == in_sequence
    (sweep,) = sweeps(tmp_path / "results")
    assert len({job.process for job in sweep.jobs().values()} - {child.pid}) > 1, "all in one process"
    child = command(tmp_path, launcher, BAD)
    out, said = child.communicate()
    assert child.returncode == 2 and "2 jobs: 1 done, 1 failed" in said and "Quality: " in out, said


def test_shards_at_once_are_one_run(tmp_path):
    """One run and its reference in three shards that work at the same time: the answers of one process, and one row."""
    if not is_installed("joblib"):
        pytest.skip(f"needs {PLUGINS['joblib']}")
    small = [*SMALL, "task.items=9"]  # five batches, the last not full
    found = {}
    for name, launcher, words in (("whole", "basic", []), ("split", "joblib", ["shard=1/3,2/3,3/3"])):
        (tmp_path / name).mkdir()
        child = command(tmp_path / name, launcher, ["method=kivi", *words], small)
        out, said = child.communicate()
        assert child.returncode == 0, said
        rows = [line.split()[0] for line in out.splitlines() if line.startswith(("full ", "kivi "))]
        assert rows == ["full", "kivi"] * 3, "quality, cost and answers have one row of each"
        found[name] = answers(tmp_path / name)
    assert len(found["whole"]) == 2 and found["split"] == found["whole"]


def test_two_processes_share_and_a_kill_loses_nothing(tmp_path, in_sequence):
    """The same sweep twice at once; a worker that computes is killed; afterwards the command brings everything to its
    end, and the answers are those of the sequence."""
    launcher = "joblib"
    if not is_installed(launcher):
        pytest.skip(f"needs {PLUGINS[launcher]}")
    pair = [command(tmp_path, launcher) for _ in range(2)]
    end = time.monotonic() + 900
    while not list(tmp_path.glob("results/*/*/kivi/*/samples.jsonl")) and time.monotonic() < end:
        time.sleep(0.2)
    locks = [path for path in sorted(tmp_path.glob("results/.multirun/*/*/.lock")) if is_held(path.parent)]
    victim = int(locks[0].read_text())
    assert victim not in [child.pid for child in pair]
    os.kill(victim, signal.SIGKILL)
    ended = [child.communicate() for child in pair]
    codes = sorted(child.returncode for child in pair)
    assert codes == [0, 1], [said for _, said in ended]
    assert any("ended without a word, as after a kill" in said for _, said in ended)
    again = command(tmp_path, launcher)
    _, said = again.communicate()
    assert again.returncode == 0 and "12 jobs: 12 done" in said
    assert answers(tmp_path) == in_sequence


@pytest.mark.parametrize("launcher", sorted(PLUGINS))
def test_presets_fit_the_plugins(launcher):
    """Every setting of a preset is one of the plugin's or of Hydra's."""
    if not is_installed(launcher):
        pytest.skip(f"needs {PLUGINS[launcher]}")
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    from kvbench.config.settings import as_dict, read_config

    Plugins.instance()
    node = ConfigStore.instance().load(f"hydra/launcher/{launcher}.yaml").node
    preset = as_dict(read_config(files.path_of("launcher", launcher)))["hydra"]
    assert set(preset) <= {"launcher", "sweeper"} and set(preset["launcher"]) <= set(node)
