"""The ring of this project, over one UCX transport."""

import os
from collections.abc import Iterable, Mapping
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import numpy as np
from paths.loop import Loops, Messages
from paths.side import SLOTS, WAIT_S, Clock, Cost, Side, Words

from transport.binding import Places, open_worker
from transport.layout import DIGEST_BYTES, RingGeometry, SlotHeader
from transport.ring import Ring, RingWriter

_HIDDEN_SIZE = 16
_ITEM_BYTES = 4
_ROW_BYTES = _HIDDEN_SIZE * _ITEM_BYTES
_SPIN_S = 0.0002


def _geometry(num_bytes: int) -> RingGeometry:
    return RingGeometry(SLOTS, num_bytes // _ROW_BYTES, _HIDDEN_SIZE, _ITEM_BYTES)


def _header(num_bytes: int, sequence: int) -> SlotHeader:
    return SlotHeader(
        sequence=sequence,
        attempt=0,
        teacher=0,
        num_rows=num_bytes // _ROW_BYTES,
        hidden_size=_HIDDEN_SIZE,
        item_bytes=_ITEM_BYTES,
        digest=bytes(DIGEST_BYTES),
        compute_s=0.0,
    )


class RingSide(Side):
    """An end with a ring for every size that it takes, and writers into the rings of the other.

    As between student and teacher, a worker that is written to writes nothing itself.
    """

    def __init__(
        self,
        credits: Semaphore,
        settings: Mapping[str, str],
        sizes: Iterable[int],
        library: Path,
        released: Any,
    ) -> None:
        super().__init__(credits)
        os.environ.update(settings)
        self._loops = Loops(library, released)
        # Over tcp the progress thread needs the reader's core.
        self._spin_s = 0.0 if settings["UCX_TLS"] == "tcp" else _SPIN_S
        self._writing = open_worker("native")
        self._reading = {size: open_worker("native") for size in sizes}
        self._rings = {size: Ring(one, _geometry(size)) for size, one in self._reading.items()}
        self._writers: dict[int, RingWriter] = {}

    def where(self) -> dict[int, dict[str, Any]]:
        """Return how to reach the rings, by their size."""
        return {
            size: {"peer": self._reading[size].address, "address": ring.address, "key": ring.key}
            for size, ring in self._rings.items()
        }

    def connect(self, where: Mapping[int, dict[str, Any]]) -> None:
        """Connect to the other end's rings."""
        for size, ring in where.items():
            self._writers[size] = RingWriter(self._writing, _geometry(size), **ring)

    def put(self, source: Words, sequence: int) -> None:
        writer = self._writers[source.nbytes]
        header = _header(source.nbytes, sequence)
        writer.write(sequence % SLOTS, memoryview(source), header, WAIT_S)

    def take(self, num_bytes: int, sequence: int) -> Words:
        ring, slot = self._rings[num_bytes], sequence % SLOTS
        if not ring.wait(slot, sequence, 0, WAIT_S):
            raise TimeoutError(f"message {sequence} did not come within {WAIT_S:g} s")
        return np.frombuffer(ring.payload(slot, ring.header(slot).num_rows), np.uint64)

    def send_in_c(self, num_bytes: int, num_messages: int, touched: bool, num_slots: int) -> Cost:
        """Send messages as `send` does, in a loop in C, over some of the slots."""
        source, header = self._source(num_bytes), _header(num_bytes, 0).pack()
        what = Messages(num_bytes, self._next(num_messages), num_messages, touched, num_slots)
        clock = Clock()
        self._loops.send(self._writers[num_bytes], source.ctypes.data, header, what)
        return clock.cost()

    def receive_in_c(
        self, num_bytes: int, num_messages: int, touched: bool, num_slots: int
    ) -> Cost:
        """Take messages as `receive` does, in a loop in C, over some of the slots."""
        ring = self._rings[num_bytes]
        geometry, start = ring.geometry, ring.address
        places = [
            Places(
                payload=start + geometry.payload_offset(slot),
                header=start + geometry.header_offset(slot),
                word=start + geometry.doorbell_offset(slot),
                bell=start + geometry.bell_offset,
            )
            for slot in range(num_slots)
        ]
        what = Messages(num_bytes, self._next(num_messages), num_messages, touched, num_slots)
        clock = Clock()
        self._loops.receive(places, what, self._spin_s)
        return clock.cost()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close(force=True)
        for ring in self._rings.values():
            ring.close()
        self._writing.close()
        for worker in self._reading.values():
            worker.close()
