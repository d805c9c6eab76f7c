"""Ring geometry, slot headers, doorbells."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import ProtocolError
from transport.layout import (
    CACHE_LINE_BYTES,
    HEADER_BYTES,
    HEADER_VERSION,
    MAGIC,
    PAGE_BYTES,
    RingGeometry,
    SlotHeader,
    doorbell_value,
    token_digest,
)

GEOMETRIES = st.builds(
    RingGeometry,
    slots=st.integers(1, 300),
    slot_tokens=st.integers(1, 1 << 20),
    hidden_size=st.integers(1, 1 << 14),
    item_bytes=st.sampled_from([1, 2, 4, 8]),
)
UINT32 = st.integers(0, (1 << 32) - 1)
HEADERS = st.builds(
    SlotHeader,
    sequence=st.integers(0, (1 << 64) - 1),
    attempt=UINT32,
    teacher=UINT32,
    num_rows=UINT32,
    hidden_size=UINT32,
    item_bytes=st.integers(0, (1 << 16) - 1),
    digest=st.binary(min_size=16, max_size=16),
    compute_s=st.floats(0, width=32, allow_infinity=False),
    checksum=st.none() | UINT32,
)
ORDERS = st.tuples(st.integers(0, (1 << 48) - 2), st.integers(0, (1 << 16) - 1))


@given(GEOMETRIES)
def test_parts_of_a_ring_are_apart_and_inside_it(geometry: RingGeometry) -> None:
    payload_bytes = geometry.slot_tokens * geometry.hidden_size * geometry.item_bytes
    parts = []
    for slot in range(geometry.slots):
        parts += [
            (geometry.doorbell_offset(slot), CACHE_LINE_BYTES),
            (geometry.payload_offset(slot), payload_bytes),
            (geometry.header_offset(slot), HEADER_BYTES),
        ]
    end = 0
    for start, num_bytes in sorted(parts):
        assert start >= end
        end = start + num_bytes
    assert end == geometry.total_bytes


@given(GEOMETRIES)
def test_parts_are_aligned_and_little_is_wasted(geometry: RingGeometry) -> None:
    for slot in range(geometry.slots):
        assert geometry.doorbell_offset(slot) % CACHE_LINE_BYTES == 0
        assert geometry.payload_offset(slot) % PAGE_BYTES == 0
        assert geometry.header_offset(slot) % CACHE_LINE_BYTES == 0
    used = geometry.slots * (
        geometry.slot_tokens * geometry.row_bytes + HEADER_BYTES + CACHE_LINE_BYTES
    )
    assert geometry.total_bytes % PAGE_BYTES == 0
    assert used <= geometry.total_bytes < used + (geometry.slots + 1) * PAGE_BYTES


@pytest.mark.parametrize("name", ["slots", "slot_tokens", "hidden_size", "item_bytes"])
def test_geometry_without_a_positive_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0 must be at least 1"):
        replace(RingGeometry(1, 1, 1, 1), **{name: 0})


@given(HEADERS)
def test_header_survives_packing(header: SlotHeader) -> None:
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert SlotHeader.unpack(memoryview(data)) == header


@given(st.binary(min_size=HEADER_BYTES - 6, max_size=HEADER_BYTES - 6))
def test_any_bytes_are_the_header_that_packs_to_them_or_are_refused(data: bytes) -> None:
    data = MAGIC + bytes([HEADER_VERSION, 0]) + data
    padded = data[:-4] + bytes(4)
    unchecked = data[:-12] + bytes(12)
    for candidate in (data, padded, unchecked):
        try:
            header = SlotHeader.unpack(candidate)
        except ProtocolError:
            continue
        assert header.pack() == candidate
        assert SlotHeader.unpack(header.pack()) == header


@pytest.mark.parametrize("bits", ["7fc00000", "7f800001", "7f800000", "bf800000"])
def test_time_that_is_nan_infinite_or_negative_is_refused(bits: str) -> None:
    compute_s = bytes.fromhex(bits)[::-1]
    data = SlotHeader(1, 0, 0, 1, 1, 4, bytes(16), 0.0).pack()
    with pytest.raises(ProtocolError, match="bytes that no writer writes"):
        SlotHeader.unpack(data[:48] + compute_s + data[52:])


@pytest.mark.parametrize("position", [53, 56, 59, 60, 63])
def test_flags_checksum_and_filling_that_nobody_writes_are_refused(position: int) -> None:
    data = bytearray(SlotHeader(1, 0, 0, 1, 1, 4, bytes(16), 0.0).pack())
    data[position] = 1
    with pytest.raises(ProtocolError, match="bytes that no writer writes"):
        SlotHeader.unpack(bytes(data))


@given(HEADERS, st.integers(0, 5), st.integers(1, 255))
def test_header_of_another_magic_or_version_is_refused(
    header: SlotHeader, position: int, flip: int
) -> None:
    data = bytearray(header.pack())
    data[position] ^= flip
    with pytest.raises(ProtocolError, match="expected b'DKHS' version 1"):
        SlotHeader.unpack(bytes(data))


@given(ORDERS, ORDERS)
def test_doorbell_is_never_zero_and_differs(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert 0 < doorbell_value(*one) < 1 << 64
    assert (doorbell_value(*one) == doorbell_value(*other)) == (one == other)


@pytest.mark.parametrize("order", [(-1, 0), ((1 << 48) - 1, 0), (0, -1), (0, 1 << 16)])
def test_doorbell_has_limits(order: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        doorbell_value(*order)


def test_digest_tells_token_ids_apart() -> None:
    assert token_digest(b"tokens") == token_digest(memoryview(b"tokens")) != token_digest(b"Tokens")
    assert len(token_digest(b"")) == 16
