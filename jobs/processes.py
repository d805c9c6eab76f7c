"""A child's tie to the process that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies, however it dies; exit if it has already.

    Args:
        parent: process id that the parent had when it started this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")
