"""The commands beside `run`: each is one YAML in conf/command/ that names its function and lists its settings.

A command's YAML is its whole documentation: `python -m kvbench <command> --help` prints it.
"""

from omegaconf import DictConfig, OmegaConf, open_dict

from kvbench.config import files as listing
from kvbench.errors import unknown_name


def run(name: str, arguments: list[str]) -> int:
    """Carry out a command.

    Args:
        name: One of `listing.command_files()`.
        arguments: Hydra's `key=value` words.

    Returns:
        The exit code.

    Raises:
        ValueError: A setting is unknown or out of range.
    """
    from hydra.utils import get_method

    cfg = compose_command(name, arguments)
    settings = OmegaConf.create({key: value for key, value in cfg.items() if key != "_target_"})
    OmegaConf.set_struct(settings, True)
    return get_method(cfg["_target_"])(settings)


def compose_command(name: str, arguments: list[str]) -> DictConfig:
    """The settings of a command, with what the command line changes.

    Args:
        name: File in conf/command/.
        arguments: Hydra's `key=value` words.

    Raises:
        ValueError: A word is no setting of the command; lists those there are.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from kvbench.config.compose import explain

    for word in arguments:
        if "=" not in word:
            raise ValueError(
                f"{word} is no setting of {name}; settings are key=value. `python -m kvbench {name} --help` lists them"
            )
        if word.lstrip("+~").startswith("_"):
            raise ValueError(f"{word}: names that begin with an underscore are not settings of {name}")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(listing.conf_folder()), version_base="1.3"):
            return _with_choices(compose(f"command/{name}", arguments, return_hydra_config=True))
    except (HydraException, OmegaConfBaseException) as error:
        _check_keys(name, arguments)
        raise explain(error, arguments) from error
    finally:
        GlobalHydra.instance().clear()


def _with_choices(composed: DictConfig) -> DictConfig:
    """The settings without Hydra's own; `_choices_` holds the name taken of every group, such as `method: diffkv`."""
    with open_dict(composed):
        chosen = composed.pop("hydra").runtime.choices
        if named := {group: chosen[group] for group in listing.GROUPS if group in chosen}:
            composed._choices_ = named
    return composed


def _check_keys(name: str, arguments: list[str]) -> None:
    """Name the first word whose key the command does not have; silent when all keys exist."""
    own = OmegaConf.load(listing.conf_folder() / "command" / f"{name}.yaml")
    for word in arguments:
        node, prefix = own, ""
        top = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if "defaults" in own and top not in own:  # it takes an experiment's settings too, and `explain` knows those
            continue
        for part in word.partition("=")[0].lstrip("+~").split("."):
            known = [prefix + str(item) for item in node if not str(item).startswith("_")] if node else []
            if prefix + part not in known:
                raise unknown_name("key", prefix + part, known)
            node, prefix = (node[part] if OmegaConf.is_dict(node[part]) else None), f"{prefix}{part}."


def help_text(name: str) -> str:
    """The answer to `kvbench <command> --help`: its purpose and every setting with its meaning."""
    lines = (listing.conf_folder() / "command" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    shown, skip = [], False
    for line in lines:
        if line.startswith(("# @package", "_target_:")):
            continue
        if line and not line.startswith((" ", "#", "-")):
            skip = line.startswith(("defaults:", "hydra:"))
        if not skip:
            shown.append(line.removeprefix("# ") if line.startswith("# ") else f"  {line}".rstrip())
    body = "\n".join(shown).strip("\n")
    return f"usage: python -m kvbench {name} [key=value ...]\n\n{body}"
