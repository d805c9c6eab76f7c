"""What the transport does with memory that needs no UCX: waiting for a word, checksums, locking.

Every call releases the GIL.
"""

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from transport.errors import DeadlineError, TransportError

LIBRARY = Path(__file__).with_name("libdisaggkd_memory.so")
REMEDY = "install a C compiler, then the package again"
Pin = Callable[[int, int], AbstractContextManager[str]]
"""Pins so many bytes from an address on, until its end; gives what it did, for the log."""

_ADDRESS = ctypes.c_void_p
_CRC = ctypes.c_uint32
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dkm_wait_word": (ctypes.c_int, [_ADDRESS, ctypes.c_uint64, _ADDRESS, ctypes.c_int64]),
    "dkm_ring_bell": (None, [_ADDRESS]),
    "dkm_crc32c": (_CRC, [_CRC, _ADDRESS, ctypes.c_size_t]),
    "dkm_crc32c_portable": (_CRC, [_CRC, _ADDRESS, ctypes.c_size_t]),
}


def wait_word(address: int, value: int, bell: int, timeout_s: float) -> None:
    """Wait until the 8-byte word at `address` has the value.

    Args:
        address: where the word stands.
        value: what to wait for.
        bell: address of the 4-byte bell that writers ring, if they can, when they have written.
        timeout_s: how long to wait.

    Raises:
        DeadlineError: the word had not the value within `timeout_s`.
    """
    if _library().dkm_wait_word(address, value, bell, int(timeout_s * 1e9)):
        raise DeadlineError(f"the word at {address:#x} was not {value:#x} within {timeout_s:g} s")


def ring_bell(bell: int) -> None:
    """Wake whoever waits beside this bell, in this process or in another one of this machine."""
    _library().dkm_ring_bell(bell)


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous buffer, also of a read-only one."""
    if view.nbytes and view.readonly:  # ctypes takes none, numpy takes 10 us when caches are cold
        return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def crc32c(view: bytes | memoryview, seed: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) of contiguous bytes.

    Args:
        view: the bytes.
        seed: CRC of what came before them: `crc32c(b, crc32c(a)) == crc32c(a + b)`.
    """
    data = memoryview(view)
    return int(_library().dkm_crc32c(seed, address_of(data), data.nbytes))


@contextmanager
def lock(address: int, num_bytes: int) -> Iterator[str]:
    """Keep memory from being swapped out, if the limit of locked memory allows it: a `Pin`."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = _ADDRESS(address), ctypes.c_size_t(num_bytes)
    if libc.mlock(*memory):
        reason = os.strerror(ctypes.get_errno())
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        yield (
            f"not locked ({reason}): {num_bytes} bytes are needed, RLIMIT_MEMLOCK is {limit}; "
            "raise it with `ulimit -l unlimited`, under Slurm with "
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        )
        return
    try:
        yield "locked in memory"
    finally:
        libc.munlock(*memory)


@cache
def _library() -> ctypes.CDLL:
    if not LIBRARY.is_file():
        raise TransportError(f"{LIBRARY.name} is not built: {REMEDY}")
    library = ctypes.CDLL(str(LIBRARY))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
