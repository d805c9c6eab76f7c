"""What the transport does with memory that needs no UCX: waiting for a word to change.

Every call releases the GIL.
"""

import ctypes
from functools import cache
from pathlib import Path

from transport.errors import DeadlineError, TransportError

LIBRARY = Path(__file__).with_name("libdisaggkd_memory.so")
_SPIN_NS = 20_000
_MAX_NAP_NS = 500_000


def wait_word(address: int, value: int, timeout_s: float) -> None:
    """Wait until the 8-byte word at `address` has the value.

    Raises:
        DeadlineError: it had not within `timeout_s`.
    """
    if _library().dkm_wait_word(address, value, _SPIN_NS, _MAX_NAP_NS, int(timeout_s * 1e9)):
        raise DeadlineError(f"the word at {address:#x} was not {value:#x} within {timeout_s:g} s")


@cache
def _library() -> ctypes.CDLL:
    if not LIBRARY.is_file():
        raise TransportError(f"{LIBRARY.name} is not built: install the package (pip install -e .)")
    library = ctypes.CDLL(str(LIBRARY))
    nanoseconds = ctypes.c_int64
    library.dkm_wait_word.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint64,
        nanoseconds,
        nanoseconds,
        nanoseconds,
    ]
    return library
