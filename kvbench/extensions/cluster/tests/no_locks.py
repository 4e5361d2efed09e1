"""Run as a program: `no_locks.py FOLDER WORDS`, a kvbench command below whose folder no file can be locked."""

import errno
import fcntl
import os
import sys
from pathlib import Path

REAL = fcntl.flock


def refusing(folder: Path):
    """A lock that fails below a folder, as on a file system without locks."""

    def flock(file, operation):
        number = file if isinstance(file, int) else file.fileno()
        if folder.resolve() in Path(os.readlink(f"/proc/self/fd/{number}")).parents:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return REAL(file, operation)

    return flock


if __name__ == "__main__":
    from kvbench.cli.main import main

    fcntl.flock = refusing(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
