"""`python -m kvbench`, and the program `kvbench`."""

import gc
import sys
from typing import NoReturn

from kvbench.cli.main import main


def run() -> NoReturn:
    """Run a command, and end the process as Python ends, so that libraries stop the workers that they started.

    Live objects are frozen: searching them for cycles once more takes a second, and the system frees them at once.
    """
    code = main()
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    run()
