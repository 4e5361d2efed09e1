"""Hydra's command line by itself: `python -m kvbench.cli.hydra_main FLAGS`, for what only `hydra.main` can show."""

import sys

import hydra
from omegaconf import DictConfig

from kvbench.cli import words
from kvbench.config import files, sources


@hydra.main(version_base="1.3", config_path=str(files.conf_folder()), config_name="config")
def main(cfg: DictConfig) -> None:
    """Refuse to run."""
    raise SystemExit("kvbench runs experiments; this shows --info and --hydra-help")


if __name__ == "__main__":
    with words.config_dir_choices(words.take_config_dir(sys.argv[1:])[0]), sources.searched(files.conf_folder()):
        main()
