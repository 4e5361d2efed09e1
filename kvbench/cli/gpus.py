"""One GPU for each worker of a sweep: workers on one machine share out those they see, without a word to each other."""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

_held: list[int] = []  # the lock of this process's GPU; the kernel lets go of it when the process ends


def claim(folder: Path | None = None) -> str | None:
    """Reserve the least used visible GPU for this process, before torch uses one.

    torch then sees this one alone.

    The second call of a process changes nothing.

    Args:
        folder: Folder of this machine's locks; by default one of the user's among the temporary files.

    Returns:
        The GPU as CUDA_VISIBLE_DEVICES names it; None where there is none, or no choice.
    """
    if _held:
        return os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible_gpus()
    if len(names) < 2:
        return names[0] if names else None
    folder = folder or Path(tempfile.gettempdir()) / f"kvbench-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    name, lock = _first_free(names, folder)
    _held.append(lock)
    os.environ["CUDA_VISIBLE_DEVICES"] = name
    return name


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is not None:
        return [name.strip() for name in value.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _first_free(names: Sequence[str], folder: Path) -> tuple[str, int]:
    """A GPU that the fewest workers have, and the lock that says so."""
    workers = 0
    while True:
        for name in names:
            safe = "".join(char if char.isalnum() else "-" for char in name)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(folder / f"{safe}.{workers}.lock", flags, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return name, lock
            except BlockingIOError:
                os.close(lock)
        workers += 1
