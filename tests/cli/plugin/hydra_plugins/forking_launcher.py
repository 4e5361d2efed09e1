"""A launcher of Hydra for the tests: each job in a process of its own, and nothing of it comes back but its end."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict


class ForkingLauncher(Launcher):
    """Forks for each job, one after the other; the job of the number KILL kills itself in its midst."""

    def setup(self, *, hydra_context, task_function, config) -> None:
        """As Hydra asks for it."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; raise when one was killed, as launchers do."""
        setup_globals()
        lost = []
        for index, overrides in enumerate(job_overrides, initial_job_idx):
            child = os.fork()
            if not child:
                os._exit(self._in_child(index, list(overrides)))
            if os.waitpid(child, 0)[1]:
                lost.append(index)
        if lost:
            raise RuntimeError(f"jobs {lost} were killed")
        ended = JobReturn()
        ended.status = JobStatus.COMPLETED
        return [ended] * len(job_overrides)

    def _in_child(self, index: int, overrides: list[str]) -> int:
        os.chdir("/")  # a worker may start anywhere
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = f"job {index}", index
            config.hydra.sweep.dir = str(Path("/tmp") / f"kvbench-forking-{os.getppid()}")
        HydraConfig.instance().set_config(config)
        if os.environ.get("KILL") == str(index):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGKILL))
        run_job(
            hydra_context=self.hydra_context,
            config=config,
            task_function=self.task_function,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        return 0


ConfigStore.instance().store(
    group="hydra/launcher",
    name="forking",
    node={"_target_": "hydra_plugins.forking_launcher.ForkingLauncher"},
    provider="forking_launcher",
)
