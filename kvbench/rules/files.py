"""Files named by a setting, or by a folder of unknown origin."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def open_regular(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading; a pipe or a device under its name, on which a reader would wait for ever, is refused.

    Raises:
        OSError: It is not there, no regular file, or cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield file


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """The content of a regular file of at most `limit_bytes`.

    Raises:
        OSError: As `open_regular`, or it is longer.
    """
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
        if content is None:  # some of the kernel's files look regular and give nothing yet
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if len(content) > limit_bytes:
            raise OSError(errno.EFBIG, f"it has more than {limit_bytes} bytes", str(path))
        return content
