"""The `bench` command: settings in, measurements out, as JSON, table and picture."""

import dataclasses
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from omegaconf import DictConfig

from kvbench.config.files import path_of
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import SettingValue, unknown_name
from kvbench.extensions.bench import show
from kvbench.kernels.bench.bench import Common, is_complete, read_document, run, write
from kvbench.results import provenance

# what -> module with Settings. Those in kernels/ need torch alone.
MODULES = {name: f"kvbench.kernels.bench.{name}" for name in ("attention", "prefill", "manager", "products")}
WHOLE_MODEL = ("decode", "parts", "throughput", "serve", "capacity")
MODULES |= {name: f"kvbench.extensions.bench.{name}" for name in WHOLE_MODEL}


def main(cfg: DictConfig) -> int:
    """Measures, or shows what was measured: 0 done, 1 when something was wrong and therefore not timed."""
    if cfg.load is not None:
        show.publish(read_document(Path(str(cfg.load))), Path(str(cfg.load)))
        return 0
    names = list(MODULES) if cfg.what == "all" else [cfg.what]
    jobs = [settings_of(cfg, name) for name in names]  # a bad setting of the last must not wait for the first
    complete = [_measured(settings, Path(str(cfg.out)), bool(cfg.quick)) for settings in jobs]
    return int(not all(complete))


def _measured(settings: Common, out: Path, quick: bool) -> bool:
    """Runs one bench, writes its results after every cell, and shows them, also when a signal stops it.

    Returns True where no variant was refused.
    """
    origin = dataclasses.asdict(provenance.git_state()) | {"harness": provenance.harness_hash("cpu")}
    more = {"provenance": origin, "quick": quick}
    folder, held = begun(out, settings, more)
    try:
        with show.rounds_shown(settings.what) as update:
            document = run(settings, update, lambda so_far: write(so_far | more, folder / "bench.json"), held) | more
    except KeyboardInterrupt:
        if (folder / "bench.json").exists():
            show.publish(read_document(folder / "bench.json"), folder / "bench.json")
        raise
    show.publish(document, folder / "bench.json")
    return is_complete(document)


def settings_of(cfg: DictConfig, name: str) -> Common:
    """The settings of the bench `name`, checked."""
    if name not in MODULES:
        raise unknown_name("what", name, [*MODULES, "all"])
    if not isinstance(cfg.quick, bool):
        raise SettingValue(f"quick={cfg.quick} is neither true nor false", setting="quick")
    kind: type[Common] = import_module(MODULES[name]).Settings
    values = _merged(cfg, name)
    if cfg.quick:
        default = _merged(read_config(path_of("command", "bench")), name)
        values |= {key: small for key, small in kind.quick.items() if values[key] == default[key]}
    settings = kind(**{item.name: values[item.name] for item in dataclasses.fields(kind)})
    settings.check()
    return settings


def _merged(cfg: DictConfig, name: str) -> dict:
    """The settings that all benches share, and one bench's own."""
    values = as_dict(cfg)
    return {key: value for key, value in values.items() if key not in MODULES} | values[name]


def begun(out: Path, settings: Common, more: dict) -> tuple[Path, dict | None]:
    """Folder of the last measurement, if it was stopped and had these settings, on this code, with its document.

    Else a new folder, and None.
    """
    for path in sorted((out / settings.what).glob("*/bench.json"), reverse=True)[:1]:
        wanted = more | {"settings": dataclasses.asdict(settings)}
        with suppress(ValueError):
            held = read_document(path)
            if held.get("left") and all(held.get(name) == value for name, value in wanted.items()):
                return path.parent, held
    return result_folder(out, settings.what), None


def result_folder(out: Path, name: str) -> Path:
    """A new folder named after the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder, number = out / name / stamp, 1
    while folder.exists():
        number += 1
        folder = out / name / f"{stamp}-{number}"
    folder.mkdir(parents=True)
    return folder
