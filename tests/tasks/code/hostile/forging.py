"""Attempts to be graded right without the answer."""

# Programs give up in the plainest way, and expressions need imports too.
# ruff: noqa: D103

import builtins
import gc
import os
import pickle
import sys


def write_all(*reports):
    for number in range(3, 40):
        for report in reports:
            try:
                os.write(number, report)
            except OSError:
                break


# Programs of one expression, and below those that are more.
ATTACKS = {
    "equal_object": "AlwaysEqual()",
    "equal_text": "LyingText('wrong')",
    "equal_number": "LyingNumber(7)",
    "equal_nested": "[AlwaysEqual(), LyingText('wrong')]",
    "exit_zero": "os._exit(0)",
    "system_exit": "sys.exit(0)",
    "print_passed": r"print('passed'), os.write(1, b'0 v 0 1\nT'), os.write(2, b'pass')",
    "forged_reports": r"write_all(b'0 v 0 1\nT', b'1 v 0 1\nT', b'2 v 0 1\nT'), os._exit(0)",
    "forged_garbage": r"write_all(b'pass pass pass pass\n' * 100)",
    "forged_huge_length": r"write_all(b'0 v 0 13\nl99999999999:0 v 0 999999999999\n')",
    "close_everything": "os.closerange(0, 64)",
    "not_a_number": "float('nan')",
}


class AlwaysEqual:
    """Claims to be equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = None


class LyingText(str):
    """A string that claims to be equal to everything and shows as anything."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = str.__hash__

    def encode(self, *arguments):
        return b""


class LyingNumber(int):
    """An int that claims to be equal to everything."""

    def __eq__(self, other):
        return True

    def __add__(self, other):
        return self

    __hash__ = int.__hash__


class LyingType(type):
    """A type that claims to be str."""

    def mro(cls):
        return [cls, object]

    def __instancecheck__(cls, other):
        return True


def _attack_lying_class(folder, port, abstract, pid):
    class Text(metaclass=LyingType):
        __class__ = str

        def __eq__(self, other):
            return True

    return Text()


def _attack_forged_pickle(folder, port, abstract, pid):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {folder}/escaped",)

    data = pickle.dumps(Bomb())
    write_all(b"0 v 0 %d\n" % len(data) + data)


def _attack_climb_frames(folder, port, abstract, pid):
    frame, found = sys._getframe(), []
    while frame is not None:
        for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):
            if "expect" in name or "result" in name or "verdict" in name:
                found.append(value)
        if "pipe" in frame.f_locals and "index" in frame.f_locals:
            frame.f_locals["index"] = 10**6
        frame = frame.f_back
    for value in found:
        if isinstance(value, list):
            value.append("pass")
    return found[0] if found else "pass"


def _attack_search_memory(folder, port, abstract, pid):
    texts = [entry for entry in gc.get_objects() if isinstance(entry, dict) and "canonical_solution" in entry]
    jobs = [entry for entry in gc.get_objects() if isinstance(entry, dict) and "entry_point" in entry]
    return (texts + [job.get("expected") for job in jobs])[:1]


def _attack_replace_encoder(folder, port, abstract, pid):
    main = sys.modules["__main__"]
    main.encode = lambda value, max_bytes: b"T"
    main.decode = lambda data: [folder, port, abstract, pid]
    return "wrong"


def _attack_replace_builtins(folder, port, abstract, pid):
    builtins.isinstance = lambda *arguments: True
    builtins.len = lambda value: 0
    builtins.type = lambda value: str
    return "wrong"


def _attack_replace_os_write(folder, port, abstract, pid):
    real = os.write
    os.write = lambda number, data: real(number, b"0 v 0 4\ns1:x"[: len(data)]) and len(data)
    return "wrong"


def _attack_raise_lying_exception(folder, port, abstract, pid):
    class Passed(BaseException):
        def __str__(self):
            raise SystemExit(0)

    raise Passed


def _attack_generator(folder, port, abstract, pid):
    yield "pass"


def _attack_import_grader(folder, port, abstract, pid):
    import kvbench.tasks.code.grade as grader

    grader.is_right = lambda *arguments: True


def _load_exit_zero():
    os._exit(0)


def _load_forged_reports():
    write_all(b"-1 v 0 1\nN0 v 0 1\nT1 v 0 1\nT")
    os._exit(0)


def _load_deep_source():
    exec(compile("(" * 5000 + ")" * 5000, "deep", "exec"))
