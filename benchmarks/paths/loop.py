"""The loops in C: compiled when the benchmark starts, called with the handles of the binding."""

import ctypes
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paths.side import WAIT_S

from transport.binding import Places
from transport.memory import LIBRARY
from transport.native import open_library
from transport.ring import RingWriter

_SOURCE = Path(__file__).with_suffix(".c")
_COMPILE = ("cc", "-O3", "-std=gnu11", "-Wall", "-Wextra", "-shared", "-fPIC", str(_SOURCE), "-o")
_WAIT_NS = int(WAIT_S * 1e9)


class _Stream(ctypes.Structure):
    """`struct stream`."""

    _fields_ = (
        ("places", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("num_slots", "num_bytes", "first", "num_messages")),
        ("touched", ctypes.c_uint64),
        ("released", ctypes.c_void_p),
        ("timeout_ns", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Messages:
    """What both sides of a stream agree on.

    Attributes:
        num_bytes: of a message.
        first: sequence of the first one.
        num_messages: how many.
        touched: write the source before each message and check every word of the slot.
        num_slots: how many of the ring's slots are used, in turn.
    """

    num_bytes: int
    first: int
    num_messages: int
    touched: bool
    num_slots: int


class Loops:
    """The compiled loops, in one process."""

    def __init__(self, library: Path, released: Any = None) -> None:
        """Open the library.

        Args:
            library: what `build` returned.
            released: word of shared memory in which the reader tells the writer what it has read.
        """
        self._library = ctypes.CDLL(str(library))
        self._released = released

    def send(self, writer: RingWriter, source: int, header: bytes, what: Messages) -> None:
        """Write messages into a ring as its slots are given back; return when all were."""
        # Private, since nothing but a write needs them; these loops are another kind of write.
        peer, key, places = writer._endpoint._handle, writer._key, writer._places
        _check(
            self._library.loop_send(
                ctypes.byref(self._stream(places, what)),
                open_library().dkx_write,
                *(peer, key, ctypes.c_void_p(source)),
                *(ctypes.create_string_buffer(header, len(header)), ctypes.c_size_t(len(header))),
            )
        )

    def receive(self, places: Sequence[Places], what: Messages, spin_s: float) -> None:
        """Wait for messages in a ring and give their slots back.

        Args:
            places: of the slots, in this process.
            what: the messages.
            spin_s: how long to look at a doorbell before sleeping beside the bell.
        """
        _check(
            self._library.loop_receive(
                ctypes.byref(self._stream(places, what)),
                ctypes.CDLL(str(LIBRARY)).dkm_wait_word,
                ctypes.c_int64(int(spin_s * 1e9)),
            )
        )

    def copy(self, targets: Iterable[int], source: int, num_bytes: int, num_copies: int) -> None:
        """Copy a buffer into several in turn; all are addresses."""
        addresses = list(targets)
        self._library.loop_copy(
            (ctypes.c_void_p * len(addresses))(*addresses),
            *(ctypes.c_uint64(len(addresses)), ctypes.c_void_p(source)),
            *(ctypes.c_uint64(num_bytes), ctypes.c_uint64(num_copies)),
        )

    def _stream(self, places: Sequence[Places], what: Messages) -> _Stream:
        flat = [address for place in places for address in place]
        table = (ctypes.c_uint64 * len(flat))(*flat)
        stream = _Stream(
            ctypes.addressof(table),
            *(what.num_slots, what.num_bytes, what.first, what.num_messages, what.touched),
            *(ctypes.addressof(self._released), _WAIT_NS),
        )
        stream.table = table  # must live as long
        return stream


def build(folder: Path) -> Path:
    """Compile the loops into a folder and return the library."""
    library = folder / "loop.so"
    subprocess.run([*_COMPILE, str(library)], check=True, timeout=60)
    return library


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"a loop in C ended with status {status}, see loop.c and transport/csrc")
