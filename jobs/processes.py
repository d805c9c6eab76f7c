"""How the process of a role depends on its parent, and how it ends."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies, however it dies; exit if it has already.

    Args:
        parent: process id that the parent had when it started this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")


def end(code: int) -> NoReturn:
    """End this process with an exit code; whatever needs closing must be closed.

    Python would first take down torch, for more than a second, and wait for threads of libraries.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
