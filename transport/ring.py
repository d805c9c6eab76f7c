"""The ring of slots: the student owns it, teachers write into it one-sided.

A write is payload and header, a fence, then the doorbell: a reader that sees the doorbell sees the
whole slot. Without the fence a third of the messages were torn or early in experiments.
"""

import logging
from contextlib import ExitStack
from dataclasses import replace

from transport.binding import Places, Worker
from transport.errors import DeadlineError, ProtocolError, UcxError
from transport.handles import Handle
from transport.layout import (
    CACHE_LINE_BYTES,
    HEADER_BYTES,
    RingGeometry,
    SlotHeader,
    doorbell_value,
)
from transport.memory import Pin, address_of, crc32c, lock, wait_word

log = logging.getLogger(__name__)


class Ring(Handle):
    """The student's side: the memory, and the doorbells that announce what arrived in it."""

    def __init__(self, worker: Worker, geometry: RingGeometry, pin: Pin = lock) -> None:
        """Allocate the ring and let writers in.

        Args:
            worker: UCX worker of this process; one ring each.
            geometry: geometry of the ring.
            pin: pins the memory until `close`.
        """
        self.geometry = geometry
        self._worker = worker
        self._region = worker.allocate(geometry.total_bytes)
        self._bell = self._region.address + geometry.bell_offset
        self._doorbells = self._region.view[: geometry.slots * CACHE_LINE_BYTES].cast("Q")
        self._pinned = ExitStack()
        try:
            how = self._pinned.enter_context(pin(self.address, geometry.total_bytes))
        except BaseException:
            self._region.close()
            raise
        log.info("ring of %d bytes: %s", geometry.total_bytes, how)
        worker.start_progress(self._bell)

    @property
    def address(self) -> int:
        """Address of the region, for the writers."""
        return self._region.address

    @property
    def key(self) -> bytes:
        """Packed remote key of the region, for the writers."""
        return self._region.key

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory."""
        return self._region.view.nbytes

    def is_ready(self, slot: int, sequence: int, attempt: int) -> bool:
        """Say whether the answer to this order is complete in the slot."""
        word: int = self._doorbells[self.geometry.doorbell_offset(slot) // 8]
        return word == doorbell_value(sequence, attempt)

    def wait(self, slot: int, sequence: int, attempt: int, timeout_s: float) -> bool:
        """Wait for the answer to this order; return whether it came within `timeout_s`."""
        address = self.address + self.geometry.doorbell_offset(slot)
        try:
            wait_word(address, doorbell_value(sequence, attempt), self._bell, timeout_s)
        except DeadlineError:
            return False
        return True

    def header(self, slot: int) -> SlotHeader:
        """Read the header of a slot whose doorbell has rung.

        Raises:
            ProtocolError: there is no header, or it has a checksum that is not the payload's.
        """
        start = self.geometry.header_offset(slot)
        header = SlotHeader.unpack(self._region.view[start : start + HEADER_BYTES])
        if header.checksum is not None:
            found = crc32c(self.payload(slot, header.num_rows))
            if found != header.checksum:
                raise ProtocolError(
                    f"slot {slot}: the payload's CRC-32C is {found:#010x}, "
                    f"its writer announced {header.checksum:#010x}"
                )
        return header

    def payload(self, slot: int, num_rows: int) -> memoryview:
        """Return the slot's memory, `num_rows` rows of it: no copy is made."""
        start = self.geometry.payload_offset(slot)
        return self._region.view[start : start + num_rows * self.geometry.row_bytes]

    def close(self) -> None:
        """Give the memory back; views of it are invalid from here on."""
        self._worker.stop_progress()
        self._pinned.close()
        self._region.close()


class RingWriter:
    """A teacher's side: writes answers into the ring of one student."""

    def __init__(
        self,
        worker: Worker,
        geometry: RingGeometry,
        *,
        peer: bytes,
        address: int,
        key: bytes,
        checksum: bool = False,
    ) -> None:
        """Connect to a ring.

        Args:
            worker: UCX worker of this process.
            geometry: geometry of the ring.
            peer: UCX address of the student's worker.
            address: address of the ring in the student's memory.
            key: packed remote key of the ring.
            checksum: send a CRC-32C with every payload, which the reader checks.

        Raises:
            UcxError: address or key are none that this UCX can use.
        """
        self.geometry = geometry
        self._endpoint = worker.connect(peer)
        try:
            self._key = self._endpoint.open_key(key)
        except UcxError:
            self._endpoint.close(force=True)
            raise
        self._checksum = checksum
        self._places = [
            Places(
                payload=address + geometry.payload_offset(slot),
                header=address + geometry.header_offset(slot),
                word=address + geometry.doorbell_offset(slot),
                bell=address + geometry.bell_offset,
            )
            for slot in range(geometry.slots)
        ]

    def write(self, slot: int, payload: memoryview, header: SlotHeader, timeout_s: float) -> None:
        """Write an answer and announce it; return when it is in the student's memory.

        Args:
            slot: slot of the ring.
            payload: C-contiguous bytes, `header.num_rows` rows of hidden states.
            header: what the payload is.
            timeout_s: deadline of the whole write.

        Raises:
            ProtocolError: the slot does not exist or the payload does not fit it.
            DeadlineError: the write is still under way; only `flush` or `close` may follow.
            UcxError: the student cannot be reached.
        """
        self.geometry.check(slot, header.num_rows, payload.nbytes)
        if self._checksum:
            header = replace(header, checksum=crc32c(payload))
        self._endpoint.write(
            self._key,
            address_of(payload),
            payload.nbytes,
            header.pack(),
            doorbell_value(header.sequence, header.attempt),
            self._places[slot],
            timeout_s,
        )

    def flush(self, timeout_s: float) -> None:
        """Wait for the end of a write whose deadline has passed; its payload is still in use.

        Raises:
            DeadlineError: it has not ended; `flush` may be called again.
            UcxError: the student cannot be reached.
        """
        self._endpoint.flush(timeout_s)

    def describe(self) -> str:
        """Return what UCX says of the connection; `transport.protocols` reads it."""
        return self._endpoint.describe()

    def close(self, *, force: bool = False) -> None:
        """Close the connection; `force` when the student may be dead."""
        self._endpoint.close(force=force)
