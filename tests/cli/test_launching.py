"""Sweeps and runs through Hydra's plugin interfaces: nothing of Hydra or of `sys` is replaced."""

import sys
from pathlib import Path
from types import ModuleType

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf
from places import ROOT

from kvbench.cli import launching
from kvbench.cli.jobs import Jobs
from kvbench.cli.main import main
from kvbench.config.compose import compose
from kvbench.results.sweep import sweeps

EVENTS: list[str] = []


class Recorder(Callback):
    """A callback of the user's."""

    def on_run_start(self, config, **named):
        EVENTS.append(f"run starts {named['config_name']}")

    def on_multirun_start(self, config, **named):
        EVENTS.append("sweep starts")

    def on_job_start(self, config, *, task_function, **named):
        EVENTS.append(f"{config.method._target_} starts")

    def on_job_end(self, config, job_return, **named):
        EVENTS.append(f"{job_return.status.name}")
        raise RuntimeError("a fault of the callback")

    def on_multirun_end(self, config, **named):
        EVENTS.append("sweep ends")


class GuardedModule(ModuleType):
    """A module whose `argv` stays as it is."""

    def __setattr__(self, name, value):
        if name == "argv":
            raise AttributeError("sys.argv is read-only here")
        super().__setattr__(name, value)


def splitter():
    """The function by which Hydra's own sweeper splits words."""
    (basic,) = [kind for kind in Plugins.instance().discover() if kind.__name__ == "BasicSweeper"]
    return basic.split_arguments


def test_a_sweep_replaces_nothing(fakes, monkeypatch):
    """Words of a sweep, an extension's listed jobs and a run leave `sys.argv` and Hydra's sweeper alone, also while
    their jobs run."""
    words, split, seen = ("program", "--of", "the=caller"), splitter(), []
    monkeypatch.setattr(sys, "argv", words)
    real = Jobs.run

    def run(self, cfg):
        seen.append(sys.argv is words and splitter() is split)
        real(self, cfg)

    monkeypatch.setattr(Jobs, "run", run)
    monkeypatch.setattr(sys, "__class__", GuardedModule)
    assert main(["-m", "method=snapkv,kivi", "method.budget=3", "limit=2"]) == 0
    assert main(["method=kivi", "limit=2"]) == 0
    assert main(["--cfg", "job"]) == 0
    assert seen == [True] * 3 and sys.argv is words and splitter() is split
    assert "BasicSweeper.split_arguments" in split.__qualname__ and Path(split.__code__.co_filename).is_relative_to(
        Path(hydra.__file__).parent
    )
    (sweep,) = sweeps(Path("results"))
    assert set(sweep.states().values()) == {"done"} and (sweep.folder.parent / "multirun.yaml").is_file()


def test_no_source_names_a_private_module_of_hydra():
    """kvbench imports no module of Hydra that begins with an underscore."""
    for folder in ("kvbench", "methods", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "hydra._" not in path.read_text(), path


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        (["a=1,2", "b=x", "+c=3,4"], ["a=1 b=x +c=3", "a=1 b=x +c=4", "a=2 b=x +c=3", "a=2 b=x +c=4"]),
        (["a=range(1,4)"], ["a=1", "a=2", "a=3"]),
        (["a=1,2", "a=3"], ["a=3"]),
        (["a=[1,2],[3]"], ["a=[1,2]", "a=[3]"]),
        ([], [""]),
    ],
)
def test_combinations(words, jobs):
    """Every combination of values, the last word's values changing fastest; a repeated key counts once."""
    parsed = OverridesParser.create().parse_overrides(words)
    assert [" ".join(job) for job in launching.combinations(parsed)] == jobs


def test_a_word_without_countable_values_is_refused():
    """An interval has no list of values."""
    with pytest.raises(HydraException, match=r"a=interval\(1,2\)"):
        launching.combinations(OverridesParser.create().parse_overrides(["a=interval(1,2)"]))


def test_batches_and_jobs_in_order(fakes, monkeypatch):
    """`hydra.sweeper.max_batch_size` bounds what a launcher gets at once; numbers of jobs go on from batch to batch."""
    got = []
    launch = launching.ListSweeper.setup

    def setup(self, **named):
        launch(self, **named)
        real = self.launcher.launch
        monkeypatch.setattr(
            self.launcher,
            "launch",
            lambda jobs, initial_job_idx: got.append((initial_job_idx, len(jobs))) or real(jobs, initial_job_idx),
        )

    monkeypatch.setattr(launching.ListSweeper, "setup", setup)
    assert main(["-m", "seed=0,1,2", "method=full", "limit=2", "hydra.sweeper.max_batch_size=2"]) == 0
    assert got == [(0, 2), (2, 1)]


def test_callbacks_of_the_user_are_called(fakes, monkeypatch):
    """Those that `hydra.callbacks` names hear of runs, sweeps and jobs; what one raises stops nothing."""
    monkeypatch.setitem(sys.modules, "recorder", sys.modules[__name__])
    named = "+hydra.callbacks.recorder._target_=recorder.Recorder"
    EVENTS.clear()
    with pytest.warns(UserWarning, match=r"Recorder.on_job_end raised RuntimeError"):
        assert main(["method=kivi", "limit=2", named]) == 0
    assert EVENTS[0] == "run starts config" and EVENTS[-1] == "COMPLETED"
    EVENTS.clear()
    with pytest.warns(UserWarning, match=r"Recorder.on_job_end raised RuntimeError"):
        assert main(["-m", "method=kivi", "seed=0,1", "limit=2", named]) == 0
    assert (EVENTS[0], EVENTS[-1]) == ("sweep starts", "sweep ends") and EVENTS.count("COMPLETED") == 2


def test_another_programs_hydra_is_left_alone(tmp_path):
    """A program that composes with Hydra may compose kvbench's settings meanwhile: its own search path has no folder of
    kvbench, and its Hydra is started afterwards."""
    (tmp_path / "mine.yaml").write_text("x: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        before = GlobalHydra.instance().hydra
        assert compose(["method=snapkv"]).method.budget == 0.25
        assert GlobalHydra.instance().hydra is before
        assert hydra.compose("mine") == OmegaConf.create({"x": 1})
        assert {source.scheme() for source in GlobalHydra.instance().config_loader().get_sources()} == {
            "pkg",
            "file",
            "structured",
        }


def test_own_methods_have_the_defaults_of_their_classes(tmp_path, capsys):
    """A method in the user's own folder, which lists one setting, has its class's others, and `--cfg -p` shows one."""
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text("_target_: kvbench.methods.snapkv.SnapKV\nbudget: 0.1\n")
    assert main(["--config-dir", str(tmp_path), "--cfg", "job", "-p", "method", "method=mine"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert shown.budget == 0.1 and shown.window == 32
