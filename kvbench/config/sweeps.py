"""The jobs of a sweep, known before the first one is begun."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.config import files
from kvbench.config.compose import own_words


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a sweep will do."""

    launcher: str
    """Name of the launcher: `basic`, `joblib`, ..."""
    jobs: list[list[str]]
    """The words of each job; empty where the sweeper finds them on the way."""

    def labels(self) -> list[str]:
        """What is special about each job, such as `snapkv budget=0.25`; its method in any case."""
        common = Counter(word for job in self.jobs for word in set(job))
        return [
            " ".join(
                word.removeprefix("method=").removeprefix("method.")
                for word in job
                if word.startswith("method=") or common[word] < len(self.jobs)
            )
            or f"job {number}"
            for number, job in enumerate(self.jobs, 1)
        ]


def planned(arguments: Sequence[str]) -> Planned | None:
    """What Hydra will make of a sweep; None where Hydra has something to say against it, which it then says itself."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(files.conf_folder()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            words = [*arguments, *own_words()]
            hydra = loader.load_configuration("config", words, RunMode.MULTIRUN).hydra
            launcher = str(OmegaConf.select(hydra, "runtime.choices")["hydra/launcher"])
            if not str(hydra.sweeper._target_).endswith(".BasicSweeper"):
                return Planned(launcher=launcher, jobs=[])
            params = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
            overrides = OverridesParser.create(config_loader=loader).parse_overrides([*params, *arguments])
            batches = BasicSweeper.split_arguments(
                [item for item in overrides if not item.get_key_element().lstrip("+~").startswith("hydra")], None
            )
            return Planned(launcher=launcher, jobs=batches[0])
    except (HydraException, OmegaConfBaseException, AssertionError):
        return None
    finally:
        GlobalHydra.instance().clear()
