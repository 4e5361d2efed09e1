"""Attempts to be graded right without the answer."""

# Hostile programs give up in the plainest way.
# ruff: noqa: SIM105


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


def _attack_equal_object(folder, port, abstract, pid):
    return AlwaysEqual()


def _attack_equal_text(folder, port, abstract, pid):
    return LyingText("wrong")


def _attack_equal_number(folder, port, abstract, pid):
    return LyingNumber(7)


def _attack_equal_nested(folder, port, abstract, pid):
    return [AlwaysEqual(), LyingText("wrong")]


def _attack_lying_class(folder, port, abstract, pid):
    class Text(metaclass=LyingType):
        __class__ = str

        def __eq__(self, other):
            return True

    return Text()


def _attack_exit_zero(folder, port, abstract, pid):
    import os

    os._exit(0)


def _attack_system_exit(folder, port, abstract, pid):
    import sys

    sys.exit(0)


def _attack_print_passed(folder, port, abstract, pid):
    import os

    print("passed")
    os.write(1, b"0 v 0 1\nT")
    os.write(2, b"pass")


def _attack_forged_reports(folder, port, abstract, pid):
    import os

    for number in range(3, 40):
        for report in (b"0 v 0 1\nT", b"1 v 0 1\nT", b"2 v 0 1\nT"):
            try:
                os.write(number, report)
            except OSError:
                break
    os._exit(0)


def _attack_forged_garbage(folder, port, abstract, pid):
    import os

    for number in range(3, 40):
        try:
            os.write(number, b"pass pass pass pass\n" * 100)
        except OSError:
            pass


def _attack_forged_pickle(folder, port, abstract, pid):
    import os
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {folder}/escaped",)

    data = pickle.dumps(Bomb())
    for number in range(3, 40):
        try:
            os.write(number, b"0 v 0 %d\n" % len(data) + data)
        except OSError:
            pass


def _attack_forged_huge_length(folder, port, abstract, pid):
    import os

    for number in range(3, 40):
        try:
            os.write(number, b"0 v 0 13\nl99999999999:0 v 0 999999999999\n")
        except OSError:
            pass


def _attack_close_everything(folder, port, abstract, pid):
    import os

    os.closerange(0, 64)


def _attack_climb_frames(folder, port, abstract, pid):
    import sys

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
    import gc

    texts = [entry for entry in gc.get_objects() if isinstance(entry, dict) and "canonical_solution" in entry]
    jobs = [entry for entry in gc.get_objects() if isinstance(entry, dict) and "entry_point" in entry]
    return (texts + [job.get("expected") for job in jobs])[:1]


def _attack_replace_encoder(folder, port, abstract, pid):
    import sys

    main = sys.modules["__main__"]
    main.encode = lambda value, max_bytes: b"T"
    main.decode = lambda data: [folder, port, abstract, pid]
    return "wrong"


def _attack_replace_builtins(folder, port, abstract, pid):
    import builtins

    builtins.isinstance = lambda *arguments: True
    builtins.len = lambda value: 0
    builtins.type = lambda value: str
    return "wrong"


def _attack_replace_os_write(folder, port, abstract, pid):
    import os

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


def _attack_not_a_number(folder, port, abstract, pid):
    return float("nan")


def _attack_import_grader(folder, port, abstract, pid):
    import kvbench.tasks.code.grade as grader

    grader.is_right = lambda *arguments: True


def _load_exit_zero():
    import os

    os._exit(0)


def _load_forged_reports():
    import os

    for number in range(3, 40):
        try:
            os.write(number, b"-1 v 0 1\nN0 v 0 1\nT1 v 0 1\nT")
        except OSError:
            pass
    os._exit(0)


def _load_deep_source():
    exec(compile("(" * 5000 + ")" * 5000, "deep", "exec"))
