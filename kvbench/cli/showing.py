"""Flags of Hydra that show something and run nothing."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override

from kvbench.cli.words import config_dir_flags
from kvbench.config import files
from kvbench.config.compose import started
from kvbench.errors import CommandLine, unknown_name


def show(flags: Mapping[str, str], settings: Sequence[str], name: str, root: Path) -> int:
    """Show what a flag names.

    Args:
        flags: Flags by their long names, with their values.
        settings: Settings of a run, as `key=value`.
        name: The configuration to start from.
        root: Folder that has it.

    Returns:
        Exit code.
    """
    if "--info" in flags or "--hydra-help" in flags:
        return _by_hydra_itself(flags, settings)
    with started(root) as loader:
        if "--shell-completion" in flags:
            return _completion(loader, settings, name)
        cfg = loader.load_configuration(name, list(settings), RunMode.RUN)
        print(_shown(cfg, flags), end="")
    return 0


def _shown(cfg: DictConfig, flags: Mapping[str, str]) -> str:
    """Text of the configuration, or of the part that flags name."""
    kind, package = flags["--cfg"], flags.get("--package", "_global_")
    if kind not in ("job", "hydra", "all"):
        raise unknown_name("--cfg", kind, ["job", "hydra", "all"])
    HydraConfig.instance().set_config(cfg)  # for what refers to it
    OmegaConf.set_readonly(cfg.hydra, None)
    with flag_override(cfg, ["struct", "readonly"], [False, False]), flag_override(cfg.hydra, "struct", False):
        if kind == "job":
            del cfg["hydra"]
        elif kind == "hydra":
            for part in ("hydra_help", "help"):
                del cfg.hydra[part]
            for key in [key for key in cfg if key != "hydra"]:
                del cfg[key]
    shown = cfg if package == "_global_" else OmegaConf.select(cfg, package)
    if shown is None:
        raise unknown_name("--package", package, map(str, cfg))
    if not OmegaConf.is_config(shown):
        return f"{shown}\n"
    heading = f"# @package {package}\n" if "--package" in flags and package != "_global_" else ""
    return heading + OmegaConf.to_yaml(shown, resolve="--resolve" in flags)


def _completion(loader: ConfigLoader, words: Sequence[str], name: str) -> int:
    """Carry out `install=SHELL`, `uninstall=SHELL` or `query=SHELL` of the completion by tab."""
    action, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    if action not in ("install", "uninstall", "query"):
        raise CommandLine("--shell-completion takes one of install=SHELL, uninstall=SHELL and query=SHELL")
    if action != "query" and Path(sys.argv[0]).stem != "kvbench":
        raise CommandLine(f'the tab completes words of a program; `eval "$(kvbench -sc {words[0]})"` has it do so')
    kinds = cast(list[type[CompletionPlugin]], Plugins.instance().discover(CompletionPlugin))
    plugins = {kind.provides(): kind for kind in kinds}
    if shell not in plugins:
        raise unknown_name(action, shell, plugins)
    plugin = plugins[shell](loader)
    plugin.query(name) if action == "query" else getattr(plugin, action)()
    return 0


def _by_hydra_itself(flags: Mapping[str, str], settings: Sequence[str]) -> int:
    """Run Hydra's command line in a process whose words they are."""
    words = [word for flag, value in flags.items() for word in (flag, value) if word]
    config_flags, module = config_dir_flags(files.config_dirs()), "kvbench.cli.hydra_main"
    command = [sys.executable, "-m", module, *config_flags, *words, *settings]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    path = files.package_folder().parent.joinpath(*module.split(".")).with_suffix(".py")
    print(done.stdout.replace(f"python {path}", "kvbench"), end="")  # as its help calls the program
    return done.returncode
