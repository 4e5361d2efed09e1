"""Settings of the evidence commands, checked before anything is read."""

from collections.abc import Collection, Mapping

from omegaconf import DictConfig, ListConfig

from kvbench.errors import SettingValue, check_whole, unknown_name
from kvbench.evidence.load import patterns
from kvbench.rules import Number

LEAST = {"resamples": 100, "seed": 0, "regressions": 0, "answers": 1, "answer_length": 1, "digits": 0}
FLAGS = ("incomplete", "published", "intervals")
POSITIVE = Number(0, above=True)
KINDS = ("png", "svg")  # of pictures of several curves or maps
Bytes = float | tuple[float, float]


def check(
    cfg: DictConfig,
    lists: Mapping[str, Collection[str]] | None = None,
    choices: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Check the settings that commands share, as far as a command has them, and those that are known words.

    Args:
        cfg: The settings of a command.
        lists: Setting -> known words; a word, several, or null for all.
        choices: Setting -> known words, one of which it must be.

    Raises:
        ValueError: Names the setting, its value and the rule.
    """
    for name, known in (lists or {}).items():
        for value in patterns(cfg.get(name)) or ():
            if value not in known:
                raise unknown_name(name, value, known)
    for name, known in (choices or {}).items():
        if cfg[name] not in known:
            raise unknown_name(name, cfg[name], known)
    check_margin(cfg.get("margin"))
    bytes_wanted(cfg.get("at_bytes"))
    for name in FLAGS:
        if name in cfg and not isinstance(cfg[name], bool):
            raise SettingValue(f"{name}={cfg[name]} is neither true nor false", setting=name)
    for name, least in LEAST.items():
        if name in cfg:
            check_whole(name, cfg[name], least)


def check_margin(margin: object) -> None:
    """Refuse a margin that is neither null nor a number above 0."""
    if margin is not None and not POSITIVE.fits(margin):
        raise SettingValue(
            f"margin={margin} is not a number above 0; 0.01 means one point of score, null is the metric's own margin",
            setting="margin",
        )


def bytes_wanted(wanted: object) -> Bytes | None:
    """Read the setting `at_bytes`: null, a percentage of an FP16 full cache, or two of them in order; refuse others."""
    if wanted is None:
        return None
    ends: list = list(wanted) if isinstance(wanted, ListConfig | list | tuple) else [wanted]
    numbers = [float(end) for end in ends if POSITIVE.fits(end)]
    if len(numbers) < len(ends) or len(ends) not in (1, 2) or sorted(set(ends)) != ends:
        raise SettingValue(
            f"at_bytes={wanted} is neither a percentage of an FP16 full cache nor two of them, the smaller first; "
            "write at_bytes=25 or 'at_bytes=[12.5,50]'",
            setting="at_bytes",
        )
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
