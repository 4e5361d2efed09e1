"""`kvbench compare`: is a method worse than the full cache, or than another method, on the same samples?"""

from omegaconf import DictConfig, ListConfig

from kvbench.errors import check_whole
from kvbench.evidence import compare_table
from kvbench.evidence.comparison import compare_group, correct
from kvbench.evidence.load import load_groups


def check(cfg: DictConfig) -> None:
    """Check the settings of the comparison.

    Raises:
        ValueError: Names the setting, its value and the rule.
    """
    check_margin(cfg.margin)
    check_at_bytes(cfg.get("at_bytes"))
    for name, least in (("resamples", 100), ("seed", 0), ("regressions", 0)):
        check_whole(name, cfg.get(name, least), least)


def check_at_bytes(wanted: object) -> None:
    """Refuse what is neither null, a percentage, nor two of them in order."""
    if wanted is None:
        return
    ends: list = list(wanted) if isinstance(wanted, ListConfig | list | tuple) else [wanted]
    numbers = [end for end in ends if isinstance(end, int | float) and not isinstance(end, bool) and end > 0]
    if len(numbers) < len(ends) or len(ends) not in (1, 2) or sorted(set(ends)) != ends:
        raise ValueError(
            f"at_bytes={wanted} is neither a percentage of an FP16 full cache nor two of them, the smaller first; "
            "write at_bytes=25 or 'at_bytes=[12.5,50]'"
        )


def check_margin(margin: object) -> None:
    """Refuse a margin that is neither null nor a number above 0."""
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float) or margin <= 0):
        raise ValueError(
            f"margin={margin} is not a number above 0; 0.01 means one point of score, null is the metric's own margin"
        )


def main(cfg: DictConfig) -> int:
    """Carry out `kvbench compare`.

    Args:
        cfg: The settings in conf/command/compare.yaml.

    Returns:
        0.

    Raises:
        ValueError: Nothing fits, or no two runs share a sample.
    """
    check(cfg)
    groups = load_groups(cfg, also=(str(cfg.against),))
    tables = [(group, *compare_group(group, cfg)) for group in groups]
    rows = [row for _, found, _ in tables for row in found]
    if not rows:
        reasons = [note for group, _, notes in tables for note in (*notes, *group.notes)]
        raise ValueError(f"nothing to compare. {reasons[0] if reasons else 'There is only one run.'}")
    correct(rows)
    compare_table.show(tables, cfg, num_family=len(rows))
    if cfg.out is not None:
        compare_table.write_csv(tables, str(cfg.out))
    return 0
