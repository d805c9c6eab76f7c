"""Geometry of a ring and the header of its slots: pure arithmetic, no memory.

A ring is one region of memory: first the doorbells and the bell, one cache line each, then the
slots. A slot is a payload of `slot_tokens` rows of hidden states, followed by a header of 64 bytes
at a fixed place.
"""

import struct
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Self

from transport.errors import ProtocolError

PAGE_BYTES = 4096
CACHE_LINE_BYTES = 64
HEADER_BYTES = 64
DIGEST_BYTES = 16
MAGIC = b"DKHS"
HEADER_VERSION = 1

_HEADER = struct.Struct("<4sHHQIIII16sfII4x")
_HAS_CHECKSUM = 1
_SEQUENCE_BITS = 48
MAX_SEQUENCES = (1 << _SEQUENCE_BITS) - 1
MAX_ATTEMPTS = 1 << 16


def _align(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to


@dataclass(frozen=True)
class RingGeometry:
    """Sizes of a ring; both sides compute every address from these four numbers.

    Attributes:
        slots: number of slots.
        slot_tokens: rows of hidden states that one slot holds.
        hidden_size: elements of a row.
        item_bytes: bytes of an element.
    """

    slots: int
    slot_tokens: int
    hidden_size: int
    item_bytes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of hidden states."""
        return self.hidden_size * self.item_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, payload and header, aligned to a page."""
        return _align(self.slot_tokens * self.row_bytes + HEADER_BYTES, PAGE_BYTES)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole region."""
        return self._slots_offset + self.slots * self.slot_bytes

    @property
    def _slots_offset(self) -> int:
        return _align(self.bell_offset + CACHE_LINE_BYTES, PAGE_BYTES)

    @property
    def bell_offset(self) -> int:
        """Where the bell stands: a 4-byte word that writers ring, if they can, after a doorbell."""
        return self.slots * CACHE_LINE_BYTES

    def check(self, slot: int, num_rows: int, num_bytes: int) -> None:
        """Refuse a payload that does not fit a slot.

        Raises:
            ProtocolError: there is no such slot, it is too small, or the bytes are not the rows.
        """
        if not 0 <= slot < self.slots:
            raise ProtocolError(f"slot {slot} is not one of the ring's {self.slots}")
        if num_rows > self.slot_tokens:
            raise ProtocolError(f"{num_rows} rows do not fit a slot of {self.slot_tokens} rows")
        if num_bytes != num_rows * self.row_bytes:
            raise ProtocolError(
                f"payload has {num_bytes} bytes, {num_rows} rows of "
                f"{self.row_bytes} bytes were announced"
            )

    def doorbell_offset(self, slot: int) -> int:
        """Return where the doorbell of a slot stands, in bytes from the start of the region."""
        return slot * CACHE_LINE_BYTES

    def payload_offset(self, slot: int) -> int:
        """Return where the payload of a slot starts."""
        return self._slots_offset + slot * self.slot_bytes

    def header_offset(self, slot: int) -> int:
        """Return where the header of a slot starts: the end of the slot."""
        return self.payload_offset(slot) + self.slot_bytes - HEADER_BYTES


@dataclass(frozen=True)
class SlotHeader:
    """What a writer says of the payload it wrote.

    Attributes:
        sequence: number of the order that this answers.
        attempt: how often that order had been given to another teacher before.
        teacher: index of the writer.
        num_rows: rows of hidden states in the payload.
        hidden_size: elements of a row.
        item_bytes: bytes of an element.
        digest: digest of the token ids that the teacher computed from.
        compute_s: seconds that the teacher computed.
        checksum: CRC-32C of the payload, or None if the writer made none.
    """

    sequence: int
    attempt: int
    teacher: int
    num_rows: int
    hidden_size: int
    item_bytes: int
    digest: bytes
    compute_s: float
    checksum: int | None = None

    def pack(self) -> bytes:
        """Return the header's 64 bytes."""
        return _HEADER.pack(
            MAGIC,
            HEADER_VERSION,
            self.item_bytes,
            self.sequence,
            self.attempt,
            self.teacher,
            self.num_rows,
            self.hidden_size,
            self.digest,
            self.compute_s,
            0 if self.checksum is None else _HAS_CHECKSUM,
            self.checksum or 0,
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """Read a header.

        Raises:
            ProtocolError: the bytes are not a header of this version.
        """
        magic, version, item_bytes, *middle, flags, checksum = _HEADER.unpack(data)
        if (magic, version) != (MAGIC, HEADER_VERSION):
            raise ProtocolError(
                f"slot header says {magic!r} version {version}, "
                f"expected {MAGIC!r} version {HEADER_VERSION}"
            )
        sequence, attempt, teacher, num_rows, hidden_size, digest, compute_s = middle
        header = cls(
            sequence=sequence,
            attempt=attempt,
            teacher=teacher,
            num_rows=num_rows,
            hidden_size=hidden_size,
            item_bytes=item_bytes,
            digest=digest,
            compute_s=compute_s,
            checksum=checksum if flags & _HAS_CHECKSUM else None,
        )
        if not 0 <= compute_s < inf or header.pack() != data:
            raise ProtocolError(f"slot header with bytes that no writer writes: {header}")
        return header


def doorbell_value(sequence: int, attempt: int) -> int:
    """Return the word that announces an order's answer; never 0, and different for each attempt."""
    assert 0 <= sequence < MAX_SEQUENCES and 0 <= attempt < MAX_ATTEMPTS
    return attempt << _SEQUENCE_BITS | (sequence + 1)


def token_digest(token_ids: bytes | memoryview) -> bytes:
    """Return the digest by which an answer is matched with the tokens that were asked for."""
    return blake2b(token_ids, digest_size=DIGEST_BYTES).digest()
