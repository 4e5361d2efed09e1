"""`python -m kvbench`, and the program `kvbench`."""

import atexit
import os
import sys
from typing import NoReturn

from kvbench.cli.main import main


def run() -> NoReturn:
    """Run a command, and end the process as it is: to take apart all that a model and its libraries leave, which the
    system does at once, keeps Python busy for two seconds."""
    code = main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
