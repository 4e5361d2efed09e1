"""Files that a setting, or a folder that may be anybody's, names."""

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """The content of a file of at most `limit_bytes`; a pipe or a device, on which a reader would wait for ever or
    never reach the end, is refused.

    Raises:
        OSError: It is not there, no regular file, longer, or cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        content = file.read(limit_bytes + 1)
        if content is None:  # files of the kernel look regular and may give nothing yet
            raise OSError(errno.EAGAIN, "it is no regular file", str(path))
        if len(content) > limit_bytes:
            raise OSError(errno.EFBIG, f"it has more than {limit_bytes} bytes", str(path))
        return content
