"""`kvbench submit`: a suite with an author's own methods, and the folder that a board takes."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvbench.cli import commands, suite
from kvbench.cli.suite import Suite, Sweeping
from kvbench.cli.words import own_choices
from kvbench.config import files
from kvbench.config.settings import as_dict, read_config
from kvbench.errors import unknown_name
from kvbench.evidence import submission
from kvbench.evidence.load import lets_through, patterns
from kvbench.results.sweep import sweeps
from kvbench.results.writing import write_files
from kvbench.show.progress import note

GROUP = "submit"
FILES = ("data_dir", "file")  # settings of tasks that name files of a benchmark


def main(arguments: Sequence[str], sweep: Sweeping) -> int:
    """Carry out `kvbench submit`; `sweep` runs words of a sweep with these jobs. Returns the exit code."""
    cfg, others = suite.own_words(GROUP, arguments)
    if not cfg.folder:
        raise ValueError("submit needs the folder of your methods, with method/NAME.yaml: kvbench submit FOLDER")
    folder = Path(str(cfg.folder)).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"submit {cfg.folder}: this is no folder; make one, with your method as method/NAME.yaml and the "
            "module that it names (docs/submit.md)"
        )
    with own_choices([*files.own_folders(), folder]):
        name = folder.resolve().name
        own, out = _own(folder), Path(str(cfg.out or f"submissions/{name}"))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"out={out} is there and not empty; give a new folder, or remove it")
        protocol = suite.find(cfg.suite)
        wanted = commands.compose_command("suite", [f"suite={cfg.suite}"])
        wanted.tasks = cfg.tasks
        wanted.results_dir = str(cfg.results_dir or f"results/submit/{name}")
        wanted.methods = [*_beside(protocol, cfg), *_mine(protocol, own, cfg)]
        for job in suite.jobs(protocol, wanted, others):
            _refuse_files(job)
        if code := suite.run(protocol, wanted, others, [GROUP, *arguments], sweep):
            return code
        return _hand_over(folder, Path(wanted.results_dir), out, str(cfg.suite), own)


def _own(folder: Path) -> dict[str, Path]:
    """The author's methods and their files."""
    found = {name: folder / "method" / f"{name}.yaml" for name in files.options("method", folder)}
    if not found:
        raise ValueError(f"{folder / 'method'} has no YAML; a method is method/NAME.yaml and the module that it names")
    return found


def _beside(protocol: Suite, cfg: DictConfig) -> list[str]:
    """The suite's own lines of methods that run, `full` and `random` among them."""
    wanted = patterns(cfg.beside)
    always = (files.FULL, submission.RANDOM)
    names = [suite.choice(shlex.split(line), "method").split(",") for line in protocol.methods]
    known = {name for own in names for name in own}
    if missing := [name for name in always if name not in known]:
        raise ValueError(f"suite={cfg.suite} has no method={missing[0]}, which a board needs beside every other")
    for one in wanted or ():
        if not any(lets_through([one], name) for name in known):
            raise unknown_name("beside", one, known)
    fits = [one for one in known if one in always or lets_through(wanted, one)]
    return [
        shlex.join([f"method={','.join(name for name in own if name in fits)}", *_without_method(line)])
        for own, line in zip(names, protocol.methods, strict=True)
        if set(own) & set(fits)
    ]


def _without_method(line: str) -> list[str]:
    return [word for word in shlex.split(line) if not word.startswith("method=")]


def _mine(protocol: Suite, own: dict[str, Path], cfg: DictConfig) -> list[str]:
    """A line for each of the author's methods, at the budgets of the suite's `random` where it has a budget."""
    from kvbench.config.methods import method_settings

    wanted = patterns(cfg.methods)
    given = [one for one in wanted or () if "=" in one]
    for line in given:
        if (name := suite.choice(shlex.split(line), "method")) not in own:
            raise unknown_name("methods", name, own)
    names = [one for one in wanted or ("*",) if "=" not in one]
    for one in names:
        if not any(lets_through([one], name) for name in own):
            raise unknown_name("methods", one, own)
    chance = [
        line for line in protocol.methods if submission.RANDOM in suite.choice(shlex.split(line), "method").split(",")
    ]
    found = list(given)
    for name in own:
        if lets_through(names, name):
            has_budget = "budget" in method_settings(name)
            budgets = [shlex.join([f"method={name}", *_without_method(line)]) for line in chance]
            found += budgets if has_budget else [f"method={name}"]
    return found


def _refuse_files(job: Sequence[str]) -> None:
    """Refuse a job whose task asks from files: its records would hold parts of them."""
    from kvbench.config.compose import compose
    from kvbench.tasks import data_files

    task: dict[str, Any] = as_dict(
        compose([word for word in job if word.partition(".")[0].partition("=")[0] == "task"]).task
    )
    if task.get("harness") or any(task.get(key) for key in FILES) or data_files(task):
        raise ValueError(
            f"task={task.get('name')} asks from files of a benchmark, whose questions a submission would hold; take a "
            "suite of generated tasks, such as suite=quick"
        )


def _hand_over(folder: Path, results: Path, out: Path, suite_name: str, own: dict[str, Path]) -> int:
    """Copy what a board takes, with the hash of each file, and check it as a board does."""
    contents, modules = dict[str, bytes](), dict[str, dict[str, str]]()
    place = json.dumps(str(folder.resolve()))[1:-1].encode()  # in the commands of run.json, and nobody else's business
    jobs = sweeps(results)[-1].jobs().values()  # other runs may lie there, of an earlier state of the method
    runs = sorted({name for job in jobs for name in (job.run, job.reference) if name})
    for kept in (results / run / name for run in runs for name in submission.KEPT):
        if kept.is_file():
            contents[kept.relative_to(results).as_posix()] = kept.read_bytes().replace(place, submission.CODE.encode())
    ran = [name for name in own if any(Path(run).parent.name == name for run in runs)]
    for name in ran:
        contents[f"{submission.CODE}/method/{name}.yaml"] = own[name].read_bytes()
        modules[name] = {}
        for module, inside, path in _code_of(name):
            modules[name][module] = f"{submission.CODE}/{inside}"
            contents[modules[name][module]] = path.read_bytes()
    sha256 = {name: submission.digest_of_bytes(content) for name, content in contents.items()}
    contents[submission.NAME] = submission.write(suite_name, ran, modules, sha256)
    write_files(out, {out / name: content for name, content in contents.items()})
    found = submission.check(out)
    for fault in found.faults:
        note(f"! {fault}")
    if found.faults:
        note(f"{out} is not what a board takes, see above; mend it, remove the folder and give the command again")
        return 1
    note(f"{out}: {len(contents)} files; its {submission.NAME} has the SHA-256 {found.digest}")
    return 0


def _code_of(name: str) -> Iterator[tuple[str, str, Path]]:
    """Module, place below the folder of code, and file of what a method's part of the identity is a hash of."""
    from kvbench.results.provenance import method_files
    from kvbench.runs.parts import policy_class

    for module, path in method_files(policy_class(read_config(files.path_of("method", name))["_target_"])).items():
        parts = module.split(".")
        yield module, "/".join(parts) + ("/__init__.py" if path.name == "__init__.py" else ".py"), path
