"""A suite's work in items: for any workers, also some that die, the runs are those of one process."""

import fcntl
import json
import multiprocessing.connection
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_parts import FakeEngine, make_parts
from no_locks import refusing
from places import ROOT
from refusals import refused

from kvbench.cli import commands
from kvbench.cli.endings import Stopped
from kvbench.cli.main import main
from kvbench.config import files
from kvbench.config.compose import compose
from kvbench.extensions.cluster import ray_workers as suite_ray
from kvbench.extensions.cluster.ray_workers import Hand, Report, check_same, share_out
from kvbench.extensions.suite.worker import Item
from kvbench.results.record import RunRecord
from kvbench.results.sweep import Sweep, sweeps

KEPT = ("hash", "status", "message", "metrics", "fidelity", "ledger", "kept", "comparison", "counts", "remark")


def left(results: Path) -> dict[str, object]:
    """Files of each run without times, by its folder."""
    content: dict[str, object] = {}
    for path in sorted(results.glob("*/*/*/*/run.json")):
        rows = [json.loads(line) for line in (path.parent / "samples.jsonl").read_text().splitlines()]
        rows = [{key: value for key, value in row.items() if key not in ("timing", "seal")} for row in rows]
        record = json.loads(path.read_text())
        config = (path.parent / "config.yaml").read_text().replace(str(results.name), "")
        content[path.parent.relative_to(results).as_posix()] = rows, config, {key: record[key] for key in KEPT}
    return content


@pytest.fixture
def quick(small, monkeypatch):
    """The small suite, without a page."""
    run = commands.run
    monkeypatch.setattr(commands, "run", lambda name, *rest: 0 if name == "report" else run(name, *rest))
    return small


@pytest.mark.parametrize("forced", [[], pytest.param(["fidelity.on=own"], marks=pytest.mark.exhaustive)])
def test_workers_without_locks_leave_what_one_process_leaves(quick, capsys, monkeypatch, forced):
    """Items in any order, by three workers, one of them stopped on the way and never given again: the worker of the
    same selection takes what is left. No worker locks a file or writes one of another's. The command then joins them,
    computes nothing, and leaves the files of one process. Answers of fakes depend on their batch."""
    words = ["suite=small", "batch_size=2", "tasks=longctx", "methods=[full,kivi]", *forced]
    assert main([*words, "results_dir=whole"]) == 0
    assert main([*words, "results_dir=shared", "manifest=items", "item_prompts=3"]) == 0
    items = Path("items").read_text().split()
    assert [item.rpartition("/")[2] for item in items] == ["0-3", "4-7", "8-8"]
    assert not Path("shared").exists() and {item[:7] for item in items} == {"1/fake/"}
    random.Random(7).shuffle(items)
    for number in range(2):
        Path(f"part.{number}").write_text("\n".join(items[number::2]))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refusing(Path("shared")))
        answered, real = [], suite_ray.Progress.advance

        def advance(self):
            answered.append(self)
            if len(answered) == 5:
                raise Stopped(signal.SIGTERM)
            real(self)

        patch.setattr(suite_ray.Progress, "advance", advance)
        assert main([*words, "results_dir=shared", "selection=part.0"]) == 143
        for number in range(2):
            assert main([*words, "results_dir=shared", f"selection=part.{number}"]) == 0
    assert len(answered) == 18, "nothing that is there is written again"
    writers = {path.parent.name for path in Path("shared").rglob("samples.jsonl")}
    assert sorted(re.sub("[0-9a-f]{8}$", "", name) for name in writers) == ["part.0.", "part.0.", "part.1."]
    assert {path.name for path in Path("shared").rglob("*") if path.is_file()} == {"samples.jsonl", "run.json"}
    capsys.readouterr()
    assert main(["status", "results_dir=shared"]) == 0
    assert "18 answers of workers; the command without selection= and ray= joins them" in capsys.readouterr().out
    assert main([*words, "results_dir=shared"]) == 0
    said = capsys.readouterr().err
    assert "18 answers, 18 of them there; at most 0 s" in said and len(answered) == 18
    assert left(Path("shared")) == left(Path("whole")) and len(left(Path("whole"))) == 2
    assert not list(Path("shared").rglob(".shards/*"))
    for path in Path("shared").glob("*/*/*/*/run.json"):
        record = RunRecord.load(path.parent)
        assert {session.worker for session in record.sessions} <= writers and record.machine and record.ended
        assert sum(session.num_done for session in record.sessions) == 9


@pytest.mark.smoke
def test_what_workers_did_not_do_is_done_at_the_end(quick, capsys):
    """Some items only, while a live worker writes on: its torn line does not count and stays, the rest is computed."""
    words = ["suite=small", "batch_size=2", "tasks=longctx", "methods=kivi", "reference=none"]
    assert main([*words, "results_dir=whole"]) == 0
    assert main([*words, "results_dir=shared", "manifest=items", "item_prompts=2"]) == 0
    Path("part").write_text("\n".join(Path("items").read_text().split()[1:3]))
    assert main([*words, "results_dir=shared", "selection=part"]) == 0
    (journal,) = Path("shared").glob("*/*/kivi/*/.shards/*/samples.jsonl")
    with journal.open("ab") as file:
        file.write(b'{"sample_id": "a/8", "subs')
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.results.shards.clear", lambda run, journal=None: None)
        assert main([*words, "results_dir=shared"]) == 0
    assert journal.read_bytes().endswith(b"subs"), "its writer may live"
    assert left(Path("shared")) == left(Path("whole"))
    assert "9 answers, 4 of them there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("selection=part", "item 1/fake/00000000/0-8: line 1 has the runs [0-9a-f]{8} here and 9 prompts; settings"),
        ("selection=odd", "'9/what' is no item of a manifest, such as 2/gsm8k/3fa9c0d1/0-15"),
        ("selection=none", "selection=none cannot be read: No such file or directory; name a file with lines"),
        ("selection=part resume=false", "resume=false and shard= are not for workers"),
        ("selection=part ray=2", "selection= is one way to share the work, and ray another"),
        ("manifest=a hydra/launcher=joblib", "manifest= is one way to share the work, and a launcher another"),
        ("ray=0.5", "ray=0.5 must be a whole number of at least 1"),
        ("ray=2", r"needs the package ray, which is not installed; pip install -e '\.\[ray\]'"),
    ],
)
def test_what_workers_refuse(quick, capsys, monkeypatch, line, message):
    """One sentence, and nothing is computed."""
    monkeypatch.setattr(suite_ray, "find_spec", lambda name: None)
    Path("part").write_text("1/fake/00000000/0-8\n")
    Path("odd").write_text("9/what\n")
    assert main(["suite=small", "methods=kivi", "tasks=longctx", *line.split()]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(quick.rglob("samples.jsonl"))


class Workers:
    """A crew in this process. `dies` names items, and how many workers die of each; one more dies before it has any."""

    def __init__(self, dies: dict[int, int], early: int = 0) -> None:
        self.dies, self.early, self.reports, self.hired = Counter(dies), early, [], 0
        self.log: list[tuple[int, int]] = []

    def hire(self):
        """A worker, which dies at once as long as `early` says."""
        self.hired += 1
        self.early -= 1
        self.reports.append((self.hired, None if self.early >= 0 else Report(host="here", process=self.hired)))

    def give(self, member, item, log):
        """Does an item, or dies."""
        self.log.append((member, item.first))
        self.dies[item.first] -= 1
        lives = Report(host="here", process=member, answers=3, work_s=0.5)
        self.reports.append((member, None if self.dies[item.first] >= 0 else lives))

    def next(self, timeout_s):
        """The oldest report; nothing now and then."""
        return self.reports.pop(0) if self.reports and random.random() < 0.8 else None


def share(tmp_path, crew, size=2, count=6):
    """Items shared out among a crew; whether all were done, and the sweep."""
    items = [Item(1, "t", "00000000", first, first) for first in range(count)]
    sweep = Sweep.start(tmp_path, "kvbench suite=x", "ray", [f"{item}" for item in items])
    for _ in range(size):
        crew.hire()
    return share_out(crew, items, sweep, size), sweep


def test_items_of_workers_that_die_go_to_others(tmp_path, capsys):
    """Each item is done, the lost ones by another worker; a dead worker is replaced; the sweep has the states."""
    crew = Workers({1: 1, 4: 2}, early=1)
    is_done, sweep = share(tmp_path, crew)
    assert is_done and set(sweep.states().values()) == {"done"} and crew.hired == 2 + 4
    assert Counter(first for _, first in crew.log) == {0: 1, 1: 2, 2: 1, 3: 1, 4: 3, 5: 1}
    assert len({member for member, first in crew.log if first == 4}) == 3
    assert sum(job.num_done for job in sweep.jobs().values()) == 18
    assert "died at 1/t/00000000/1-1, it goes to another" in capsys.readouterr().err


def test_an_item_that_kills_every_worker_is_dropped(tmp_path, capsys):
    """The others are done; a crew that never gets ready is told."""
    is_done, sweep = share(tmp_path, Workers({2: 9}))
    assert not is_done and list(sweep.states().values()) == ["done"] * 2 + ["failed"] + ["done"] * 3
    assert "1/t/00000000/2-2 killed 3 workers; give the command without ray=" in capsys.readouterr().err
    with refused("not-measured", "ray", "7 workers"):
        share(tmp_path / "two", Workers({}, early=99))


class Forked:
    """A crew of processes, each with a `Hand`, as an actor has one. The first, and the one in its place, are killed at
    their third answer."""

    def __init__(self, size, jobs):
        self.jobs, self.size, self.members, self.hired = jobs, size, {}, 0

    def hire(self):
        """A worker that is asked whether it is ready."""
        self.hired += 1
        mine, theirs = multiprocessing.Pipe()
        killed = self.hired in (1, self.size + 1)
        child = multiprocessing.get_context("fork").Process(target=self.serve, args=(theirs, mine, killed), daemon=True)
        child.start()
        theirs.close()
        self.members[child.pid] = mine, child
        mine.send(("ready",))
        return child.pid

    def serve(self, calls, other, killed):
        """Does what it is told."""
        other.close()
        real, left = FakeEngine.answer, [3 if killed else -1]

        def answer(*args):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        FakeEngine.answer = answer
        hand = Hand(self.jobs, Path.cwd(), files.config_dirs())
        while True:
            name, *args = calls.recv()
            calls.send(getattr(hand, name)(*args))

    def items(self, member, prompts):
        """All items, behind the report that it is ready."""
        calls = self.members[member][0]
        calls.send(("items", prompts))
        self.reports = [(member, calls.recv())]
        return calls.recv()

    def give(self, member, item, log):
        """Tells a worker."""
        self.members[member][0].send(("work", item, log))

    def next(self, timeout_s):
        """The first that has something to say, or is dead."""
        if self.reports:
            return self.reports.pop()
        for member, (calls, _) in list(self.members.items()):
            if calls in multiprocessing.connection.wait([one for one, _ in self.members.values()], timeout_s):
                try:
                    return member, calls.recv()
                except (EOFError, ConnectionResetError):
                    del self.members[member]
                    return member, None
        return None


@pytest.mark.long
def test_workers_that_are_killed_leave_what_one_process_leaves(quick, capsys, monkeypatch):
    """`ray=1` with a process in the place of an actor: it is killed in the middle of an item, and so is the one in its
    place. The third does all items, and the files are those of one process."""
    words = ["suite=small", "batch_size=2", "tasks=longctx", "methods=[full,kivi]"]
    assert main([*words, "results_dir=whole"]) == 0
    crews = []

    @contextmanager
    def forked(size, jobs):
        crews.append(Forked(size, jobs))
        yield crews[0]
        for _, child in crews[0].members.values():
            child.kill()
            child.join()

    monkeypatch.setattr(suite_ray, "find_spec", lambda name: name)
    monkeypatch.setattr(suite_ray, "on_ray", forked)
    capsys.readouterr()
    assert main([*words, "results_dir=shared", "ray=1", "item_prompts=1"]) == 0
    said = capsys.readouterr().err
    assert said.count("it goes to another") == 2 and "5/5 items" in said and crews[0].hired == 3
    assert "18 answers, " not in said, "nothing is timed before the join"
    assert left(Path("shared")) == left(Path("whole"))
    items, whole = sweeps(Path("shared"))
    assert set(items.states().values()) == set(whole.states().values()) == {"done"}
    assert sum(job.num_done for job in items.jobs().values()) == 16, (
        "the first had written two; the second gave them anew"
    )
    job = SimpleNamespace(cfg=compose(["task=longctx", "method=kivi"]), method="kivi")
    with refused("run-differs", None, "runs of fake", "cpu"):
        check_same([Item(1, "fake", "00000000", 0, 8)], SimpleNamespace(pending=[job], loaders=make_parts()))


PAIR = """# Two tasks of a random model.
every: model=random model.preset=tiny seed=1 batch_size=2 protocol.max_new_tokens=8
tasks:
  - task=longctx task.kinds=[kv] task.items=6 task.length=500
  - task=longctx task.kinds=[passkey] task.items=6 task.length=500 fidelity.on=own
methods:
  - method=full
  - method=snapkv method.budget=0.5,0.25
  - method=kivi
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with a suite of a tiny model and what one process leaves of it, and how to run it there as a program."""
    tmp_path = tmp_path_factory.mktemp("pair")
    (tmp_path / "own" / "suite").mkdir(parents=True)
    (tmp_path / "own" / "suite" / "pair.yaml").write_text(PAIR)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def start(*words, program=("-m", "kvbench"), **more):
        command = [sys.executable, *program, "--config-dir", "own", "suite=pair", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env=environment | more, **pipes)

    def run(*words, **more):
        child = start(*words, **more)
        _, said = child.communicate()
        assert child.returncode == 0, said
        return said

    run("results_dir=whole")
    assert len(left(tmp_path / "whole")) == 8
    return tmp_path, start, run, environment


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_xargs_over_a_manifest_without_locks(pair):
    """Two processes at once, three selections, no file of the folder can be locked: the journals of one process. Each
    process loads the model once."""
    folder, _, run, environment = pair
    run("results_dir=shared", "manifest=items", "item_prompts=1")
    subprocess.run(["split", "-n", "r/3", "items", "part."], cwd=folder, check=True)
    parts = sorted(path.name for path in folder.glob("part.*"))
    assert len(parts) == 3 and len((folder / "items").read_text().split()) == 12
    worker = [sys.executable, str(Path(__file__).parent / "no_locks.py"), "shared", "--config-dir", "own"]
    worker += ["suite=pair", "results_dir=shared", "selection={}"]
    ended = subprocess.run(
        ["xargs", "-P2", "-I{}", *worker], input="\n".join(parts), cwd=folder, env=environment, text=True, stderr=-1
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("loading model") == 3 and ended.stderr.count("4 items, ") == 3
    assert not list((folder / "shared").rglob(".lock"))
    said = run("results_dir=shared")
    assert said.count("24 answers, 24 of them there; 0 s") == 2
    assert left(folder / "shared") == left(folder / "whole")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_three_workers_on_ray_of_which_two_are_killed(pair):
    """A local Ray: two workers that have items are killed. The journals are those of one process, the sweep tells how
    the items stand, and each worker has loaded the model once."""
    if find_spec("ray") is None:
        pytest.skip("needs ray")
    folder, start, _, _ = pair
    ray_folder = Path(tempfile.mkdtemp(prefix="kvr", dir="/tmp"))  # names of sockets must be short
    child = start("results_dir=ray", "ray=3", "item_prompts=1", RAY_TMPDIR=str(ray_folder), RAY_AUTH_MODE="disabled")
    killed, processes, end = list[int](), set[int](), time.monotonic() + 900
    while len(killed) < 2 and child.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
        for sweep in sweeps(folder / "ray")[:1]:
            states = sweep.states()
            at = [job for number, job in sweep.jobs().items() if states[number] == "running"]
            fresh = [job for job in at if job.process not in processes]
            if fresh:
                processes = {job.process for job in at}
                os.kill(fresh[0].process, signal.SIGKILL)
                killed.append(fresh[0].process)
    _, said = child.communicate()
    assert child.returncode == 0 and len(set(killed)) == 2, said
    assert said.count("it goes to another") == 2 and "12/12 items" in said
    items, _ = sweeps(folder / "ray")
    assert set(items.states().values()) == {"done"} and items.record().launcher == "ray"
    assert left(folder / "ray") == left(folder / "whole")
    loads = Counter(
        path.name.split("-")[-1]
        for path in ray_folder.rglob("worker-*.err")
        for line in path.open()
        if "loading model" in line
    )
    assert 3 <= len(loads) <= 5 and set(loads.values()) == {1}  # who was killed may have loaded none
    shutil.rmtree(ray_folder, ignore_errors=True)
