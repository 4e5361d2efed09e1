"""The `bench` command: settings in, measurements out, as JSON, table and picture."""

import dataclasses
import json
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

from omegaconf import DictConfig

from kvbench.config.files import conf_folder
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import unknown_name
from kvbench.kernels.bench.settings import Common
from kvbench.results import provenance

# what -> module with Settings, QUICK and run(settings, progress). Those in kernels/ need torch alone.
MODULES = {
    "attention": "kvbench.kernels.bench.attention",
    "prefill": "kvbench.kernels.bench.prefill",
    "manager": "kvbench.kernels.bench.manager",
    "decode": "kvbench.bench.decode",
    "throughput": "kvbench.bench.throughput",
}


def main(cfg: DictConfig) -> int:
    """Measures, or shows what was measured.

    Args:
        cfg: The settings of conf/command/bench.yaml.

    Returns:
        0 done, 1 when something was wrong and therefore not timed.

    Raises:
        ValueError: A setting is out of range, or `load` is no result.
    """
    from kvbench.bench import show

    if cfg.load is not None:
        show.publish(read_document(Path(str(cfg.load))), Path(str(cfg.load)))
        return 0
    names = list(MODULES) if cfg.what == "all" else [cfg.what]
    jobs = [(name, *settings_of(cfg, name)) for name in names]  # a bad setting of the last must not wait for the first
    status = 0
    for name, module, settings in jobs:
        with show.Bar(name) as bar:
            document = module.run(settings, bar.update)
        document["provenance"] = dataclasses.asdict(provenance.git_state()) | {
            "harness": provenance.harness_hash("cpu")
        }
        document["quick"] = bool(cfg.quick)
        show.publish(document, result_folder(Path(str(cfg.out)), name) / "bench.json")
        status = max(status, int(any(cell["refused"] for cell in document["cells"])))
    return status


def settings_of(cfg: DictConfig, name: str) -> tuple[ModuleType, Common]:
    """The module that measures `name`, and its settings.

    Raises:
        ValueError: There is no such bench, or a value is out of range.
    """
    if name not in MODULES:
        raise unknown_name("what", name, [*MODULES, "all"])
    if not isinstance(cfg.quick, bool):
        raise ValueError(f"quick={cfg.quick} is neither true nor false")
    module = import_module(MODULES[name])
    values = _merged(cfg, name)
    if cfg.quick:
        default = _merged(read_config(conf_folder() / "command" / "bench.yaml"), name)
        values |= {key: small for key, small in module.QUICK.items() if values[key] == default[key]}
    known = {item.name for item in dataclasses.fields(module.Settings)}
    settings: Common = module.Settings(**{key: value for key, value in values.items() if key in known})
    settings.check()
    return module, settings


def _merged(cfg: DictConfig, name: str) -> dict:
    """The settings that all benches share, and one bench's own."""
    values = as_dict(cfg)
    return {key: value for key, value in values.items() if key not in MODULES} | values[name]


def result_folder(out: Path, name: str) -> Path:
    """A new folder named after the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder, number = out / name / stamp, 1
    while folder.exists():
        number += 1
        folder = out / name / f"{stamp}-{number}"
    folder.mkdir(parents=True)
    return folder


def read_document(path: Path) -> dict:
    """A result from its file.

    Raises:
        ValueError: It is not there, no JSON, or not of this schema.
    """
    from kvbench.kernels.bench.report import check_document

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"load={path} cannot be read ({error}); give the bench.json of a result") from error
    if not isinstance(document, dict):
        raise ValueError(f"load={path} is not a document of kvbench bench")
    check_document(document)
    return document
