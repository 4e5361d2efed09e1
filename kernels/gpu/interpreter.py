"""Faster patching for Triton's interpreter, which runs the kernels without a GPU.

The interpreter replaces triton.language's functions by numpy versions at every call of a device function, `tl.sum` and
`tl.zeros` included, and walks all of triton.language each time. Within a launch the patches are already applied, so
here they are applied once.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl

Change = tuple[object, str, object]  # the object, the attribute, and its value in the interpreter


def patch_once() -> None:
    """Makes Triton's interpreter patch its functions once per launch, from a list that is made once.

    A version whose interpreter is built otherwise (before 3.9) stays unchanged.
    """
    from triton.runtime import interpreter  # not needed on a machine with a GPU

    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if scope_type is None or getattr(interpreter._patch_lang, "once", False):
        return
    patch = interpreter._patch_lang
    lists: dict[tuple, list[Change]] = {}  # (patched modules, a function's modules) -> further patches
    of_function: dict[Callable, tuple[object, ...]] = {}
    patched: list[tuple[object, ...]] = []
    launch: list[Any] = []

    class Scope(scope_type):  # type: ignore[valid-type,misc]
        """Patches of a launch, and of the device functions that it calls."""

        def restore(self) -> None:
            super().restore()
            patched.clear()
            launch.clear()

    def patch_new(fn: Callable) -> Any:
        if fn not in of_function:
            seen = {id(value) for value in fn.__globals__.values()}
            of_function[fn] = tuple(module for module in (tl, tl.core) if id(module) in seen)
        modules = of_function[fn]
        if modules in patched:
            return scope_type()
        if not launch:
            launch.append(Scope())
        changes = lists.get(key := (*patched, modules))
        if changes is None:
            new_changes = patch(fn)._changes
            launch[0]._changes += new_changes
            lists[key] = [(changed, name, vars(changed)[name]) for changed, name, _ in new_changes]
        else:
            for change in changes:
                launch[0].set_attr(*change)
        patched.append(modules)
        return launch[0]

    patch_new.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_new
