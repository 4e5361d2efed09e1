"""Errors that a user can act on, and whose code raised an error.

Every one that a user can act on is a KvbenchError with a code, and is shown without a traceback. A method, a metric and
a task may be anybody's, so the harness names the code that it called.
"""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import unwrap
from pathlib import Path
from types import FrameType
from typing import ClassVar

_PACKAGE = Path(__file__).resolve().parent
_METHODS = (_PACKAGE / "methods").resolve()  # a link in a checkout
_HARNESS = {_PACKAGE, (_PACKAGE / "kernels").resolve()}
_PYTHON = Path(traceback.__file__).resolve().parent  # the standard library
_RULES = "kvbench.policy"  # where the classes are that every method derives from


CODES: dict[str, "type[KvbenchError]"] = {}  # of every class that is imported


class KvbenchError(ValueError):
    """An error that a user can act on.

    Args:
        message: The value, the rule and the remedy.
        setting: The setting in its form on the command line, for example `method.budget`; None for an error about no
            single one.
    """

    code: ClassVar[str]
    """Kind of error. It stays when the message's words change."""

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting

    def __init_subclass__(cls, code: str | None = None, **options: object) -> None:
        """Register a class by its code; one without a code has that of its base."""
        super().__init_subclass__(**options)
        if code is not None:
            if code in CODES:
                raise TypeError(f"the code {code} is that of {CODES[code].__name__}")
            cls.code = code
            CODES[code] = cls


class SettingValue(KvbenchError, code="setting-value"):
    """A setting's value is not one that it can have."""


class SettingUnknown(KvbenchError, code="setting-unknown"):
    """A setting of that name does not exist."""


class SettingMissing(KvbenchError, code="setting-missing"):
    """A setting that is needed here was not set."""


class SettingsConflict(KvbenchError, code="settings-conflict"):
    """Settings contradict each other, or one has no effect with another."""


class NameUnknown(KvbenchError, code="name-unknown"):
    """A setting names a thing, such as a method or a model, that does not exist."""


class FileMissing(KvbenchError, code="file-missing"):
    """A file or folder is not there, or cannot be read or written."""


class FileContent(KvbenchError, code="file-content"):
    """A file does not hold what it should: another format, a missing or wrong field, a row that cannot be used."""


class PackageMissing(KvbenchError, code="package-missing"):
    """A library or program that is needed here is not installed, or is too old."""


class Unsupported(KvbenchError, code="unsupported"):
    """Parts that exist do not work together, such as a backend and a format."""


class MissingWeightsError(KvbenchError, code="weights-missing"):
    """Model files are neither on this machine nor to be had from it; the message holds the command that gets them."""


class UnsupportedModel(KvbenchError, code="model-unsupported"):
    """The model's attention is not one that the store can hold."""


class NotForModel(KvbenchError, code="method-misfit"):
    """A method does not fit the model, for example because it needs a table that was measured for another one."""


class BrokenRule(KvbenchError, code="method-broken"):
    """A method gave an answer, or declares something, that its contract does not allow."""


class ArgumentValue(KvbenchError, code="argument-value"):
    """An argument of a call from Python, such as `attention_mask`, is not one that it can have."""


class PromptLength(KvbenchError, code="prompt-length"):
    """A prompt, with what follows it, does not fit into the model's context or the cache."""


class CommandLine(KvbenchError, code="command-line"):
    """A word of the command line cannot be read: an unknown command or flag, or a flag without its value."""


def check_whole(key: str, value: object, minimum: int, otherwise: str = "") -> int:
    """Read a setting that is a whole number of at least `minimum`; True and 1.0 are none.

    Args:
        otherwise: Other allowed forms, as the end of the message; the caller removes them first.

    Raises:
        SettingValue: It is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise SettingValue(f"{key}={value!r} must be a whole number of at least {minimum}{otherwise}", setting=key)
    return value


def check_keys(keys: Iterable[object], known: Iterable[str], *, what: str | None = None, prefix: str = "") -> None:
    """Refuse settings that do not exist.

    Args:
        keys: The keys that were set.
        what: The kind of key, as the message says it; a setting of the command line by default.
        prefix: Prefix of each key on the command line, for example `store.`.

    Raises:
        SettingUnknown: Names the first unknown key, those that exist, and the nearest; NameUnknown with `what`.
    """
    names = list(known)
    for key in keys:
        if key not in names:
            all_names = [f"{prefix}{name}" for name in names]
            full_name = f"{prefix}{key}"
            raise (
                unknown_name(what, full_name, all_names, setting=full_name)
                if what
                else unknown_setting(full_name, all_names)
            )


def unknown_name(what: str, value: object, known: Iterable[str], *, setting: str | None = None) -> KvbenchError:
    """Build the error for a name that does not exist: the known names, and the nearest one.

    Args:
        what: The setting that held the name, for example `model.preset`.
        setting: The setting, where `what` is a sentence's part.
    """
    return NameUnknown(f"{what}={value} does not exist.{_near(value, known)}", setting=setting or what)


def check_name(what: str, value: object, known: Iterable[str]) -> str:
    """The name, if it is one of those that exist; a file may hold anything in its place, a list for example.

    Raises:
        NameUnknown: It is none of them (`unknown_name`).
    """
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise unknown_name(what, value, names)
    return value


def unknown_setting(name: str, known: Iterable[str], inner: Iterable[str] = ()) -> KvbenchError:
    """Build the error for a setting that does not exist: those that do, and the nearest.

    Args:
        inner: Settings inside groups, such as `method.budget`, of which one may be meant; they are not listed.
    """
    names = list(known)
    meant = {setting.rpartition(".")[2]: setting for setting in inner} | {setting: setting for setting in names}
    near = get_close_matches(name, list(meant), n=1, cutoff=0.4)
    hint = f" Did you mean {meant[near[0]]}?" if near else ""
    return SettingUnknown(f"there is no setting {name}.{hint} Known: {', '.join(sorted(names))}.", setting=name)


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """Hint at the nearest of the known names, for the end of a message; empty where none is near."""
    near = get_close_matches(str(value), list(known), n=1, cutoff=0.4)
    return f" Did you mean {near[0]}?" if near else ""


def _near(value: object, known: Iterable[str]) -> str:
    names = sorted(known)
    return f"{did_you_mean(value, names)} Known: {', '.join(names)}."


class ExitRequested(RuntimeError):
    """Code that kvbench called raised SystemExit, as `sys.exit()` does; the message names it."""


@contextmanager
def no_sys_exit() -> Iterator[None]:
    """Turn a SystemExit raised inside the block into an error, so that it ends a job and not the command.

    Ctrl-C goes through.

    Raises:
        ExitRequested: A method, metric, task or library raised SystemExit, or something else that is no Exception.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ExitRequested(what_happened(error)) from error


def what_happened(error: BaseException) -> str:
    """The exception in one sentence, with its class and the call that raised it where that is outside the harness."""
    if isinstance(error, ExitRequested):
        return str(error)
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    if origin := raised_by(error):
        return f"{origin[0]} raised {what} ({origin[1]})"
    last = traceback.extract_tb(error.__traceback__)[-1:]
    if isinstance(error, Exception) or not last:
        return what
    return f"{last[0].name} raised {what} ({Path(last[0].filename).name}:{last[0].lineno})"


def raised_by(error: BaseException) -> tuple[str, str] | None:
    """Find the code that the harness called and that raised: of a method, also one of kvbench's own, or of the user.

    Returns:
        Its class and call, such as `Toy.plan_prefill`, and `file:line`, the last line of that file that was reached;
        None where only the harness and libraries were at work.
    """
    if isinstance(error, SyntaxError) and error.filename and not _is_harness(Path(error.filename).resolve()):
        return Path(error.filename).stem, f"{Path(error.filename).name}:{error.lineno}"  # no line of it ever ran
    in_harness, origin = False, None  # (call, file, line)
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename).resolve()
        if origin is None:
            in_harness |= _is_harness(path)
            if in_harness and _is_guest(frame, path):
                origin = _call(frame), path, line
        elif path == origin[1]:
            origin = *origin[:2], line
    return None if origin is None else (origin[0], f"{origin[1].name}:{origin[2]}")


def call_of(owner: object, name: str) -> str:
    """A method of an object as a message names it, with the place of its code: `Toy.plan_prefill (toy.py:23)`."""
    code = getattr(unwrap(getattr(type(owner), name)), "__code__", None)
    where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    return f"{type(owner).__name__}.{name}{where}"


def _call(frame: FrameType) -> str:
    """The class and the call of a frame; of code outside a function its module."""
    if (name := frame.f_code.co_name) == "<module>":
        return str(frame.f_globals.get("__name__"))
    owner = frame.f_locals.get("self")
    local = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return local if owner is None else f"{type(owner).__name__}.{name}"


def _is_guest(frame: FrameType, path: Path) -> bool:
    """True for the code of a method, and for what is neither of the harness nor of a library."""
    if frame.f_code.co_filename.startswith("<") or _is_harness(path):  # Python made it, as a dataclass's __init__
        return False
    is_library = _PYTHON in path.parents or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    bases = type(frame.f_locals.get("self")).__mro__
    return not is_library or _METHODS in path.parents or any(base.__module__.startswith(_RULES) for base in bases)


def _is_harness(path: Path) -> bool:
    """True for kvbench's own code, the methods apart."""
    return not _HARNESS.isdisjoint(path.parents) and _METHODS not in path.parents
