"""`task=aime24` and `task=aime25`: competition problems with answers from 0 to 999, asked for a boxed answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.tasks.aime.metrics import vote
from kvbench.tasks.draw import Limit
from kvbench.tasks.problem_set import load_problems
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.settings import DataDir, Draws, TaskSettings, listed
from kvbench.tasks.taskset import MetricInfo, TaskSet

if TYPE_CHECKING:
    from kvbench.models.load import LoadedModel

METRICS = {
    "correct": MetricInfo(True, "the whole number in the last box (or behind 'the answer is') is right"),
    "parsed": MetricInfo(True, "the answer ends in a number to grade; a wrong one is not a parse failure"),
}
_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """What is set of the task.

    Args:
        data_dir: Folder with test.jsonl; None for the local caches, then the hub.
        k: Of how many answers pass@k and maj@k are reported; None for 1, 2, 4, ... and `protocol.num_samples`.
    """

    data_dir: DataDir = None
    k: Draws = None


SETTINGS = {"aime24": Settings, "aime25": Settings}


def load(cfg: Settings, model: "LoadedModel", *, limit: Limit | None, seed: int, protocol: Protocol) -> TaskSet:
    """Load the problems of one year.

    Args:
        cfg: The settings; `name` is `aime24` or `aime25`.
        model: Tokenizes the prompts; its context must hold the answer, 32,768 tokens unless `protocol.max_new_tokens`
            says otherwise.
        limit: Which problems; None for all.
        seed: Not used: the engine derives what it needs for sampled answers.
        protocol: How the problems are asked; `num_samples` answers to each.

    Raises:
        ValueError: A model that is too short, or data that is missing or broken.
    """
    return load_problems(
        name=cfg.name,
        folder=_FOLDER,
        yaml_names=[f"kvbench_{cfg.name}"],
        metadata={"data_dir": cfg.data_dir},
        model=model,
        limit=limit,
        protocol=protocol,
        metrics=METRICS,
        primary="correct",
        vote=vote,
        sizes=None if cfg.k is None else listed(cfg.k),
        describe={"form": "boxed"},
        meta_keys=("answer",),
    )
