"""Writes into a ring: what they touch, what is refused, and how they end."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
from transport_processes import (
    GEOMETRY,
    SPAWN,
    WAIT_S,
    Child,
    header_of,
    hold_ring,
)

from transport.errors import DeadlineError, ProtocolError, TransportError, UcxError
from transport.layout import RingGeometry
from transport.memory import crc32c
from transport.native import Worker
from transport.ring import Ring, RingWriter

pytestmark = pytest.mark.usefixtures("nothing_left")


class Pair(NamedTuple):
    """A ring and a writer into it, both of this process."""

    ring: Ring
    writer: RingWriter


@contextmanager
def connected(*, checksum: bool = False) -> Iterator[Pair]:
    with Worker() as reader, Worker() as worker, Ring(reader, GEOMETRY) as ring:
        where = {"peer": reader.address, "address": ring.address, "key": ring.key}
        writer = RingWriter(worker, GEOMETRY, **where, checksum=checksum)
        yield Pair(ring, writer)
        writer.close()


@pytest.fixture
def pair(nothing_left: None) -> Iterator[Pair]:
    with connected() as pair:
        yield pair


def full_slot(value: int) -> bytes:
    return bytes([value]) * (GEOMETRY.slot_tokens * GEOMETRY.row_bytes)


def test_payload_is_the_memory_that_is_written(pair: Pair) -> None:
    view = pair.ring.payload(2, GEOMETRY.slot_tokens)
    sources = [memoryview(full_slot(1)), memoryview(bytearray(full_slot(2)))]  # one read-only
    for sequence, source in enumerate(sources):
        pair.writer.write(2, source, header_of(GEOMETRY, sequence, source), WAIT_S)
        assert view == source


def test_write_touches_its_slot_alone(pair: Pair) -> None:
    payload = full_slot(255)
    pair.writer.write(1, memoryview(payload), header_of(GEOMETRY, 0, payload), WAIT_S)
    for slot in (0, 2, 3):
        assert not any(pair.ring.payload(slot, GEOMETRY.slot_tokens))
        assert not pair.ring.is_ready(slot, 0, 0)
        with pytest.raises(ProtocolError, match="slot header says"):
            pair.ring.header(slot)


def test_doorbell_of_another_attempt_or_sequence_does_not_count(pair: Pair) -> None:
    late = header_of(GEOMETRY, 8, b"")
    pair.writer.write(0, memoryview(b""), late, WAIT_S)
    assert pair.ring.is_ready(0, 8, late.attempt)
    assert pair.ring.wait(0, 8, late.attempt, 0)
    assert not pair.ring.is_ready(0, 8, late.attempt + 1)
    assert not pair.ring.is_ready(0, 9, late.attempt)
    start = time.monotonic()
    assert not pair.ring.wait(0, 8, late.attempt + 1, 0.05)
    assert 0.05 <= time.monotonic() - start < 1


@pytest.fixture
def checked(nothing_left: None) -> Iterator[Pair]:
    with connected(checksum=True) as pair:
        yield pair


@pytest.mark.parametrize("num_rows", [0, 1, GEOMETRY.slot_tokens])
def test_checksum_is_sent_when_asked_for(checked: Pair, num_rows: int) -> None:
    payload = full_slot(1)[: num_rows * GEOMETRY.row_bytes]
    sent = header_of(GEOMETRY, 0, payload)
    checked.writer.write(3, memoryview(payload), sent, WAIT_S)
    assert checked.ring.header(3) == replace(sent, checksum=crc32c(payload))


@pytest.mark.parametrize("flipped_bit", [0, GEOMETRY.slot_tokens * GEOMETRY.row_bytes * 8 - 1])
def test_payload_that_changed_on_the_way_is_refused(checked: Pair, flipped_bit: int) -> None:
    payload = full_slot(1)
    checked.writer.write(3, memoryview(payload), header_of(GEOMETRY, 0, payload), WAIT_S)
    received = checked.ring.payload(3, GEOMETRY.slot_tokens)
    received[flipped_bit // 8] ^= 1 << flipped_bit % 8
    values = f"{crc32c(received):#010x}, its writer announced {crc32c(payload):#010x}"
    with pytest.raises(ProtocolError, match=f"slot 3: the payload's CRC-32C is {values}"):
        checked.ring.header(3)


@pytest.mark.parametrize(
    ("slot", "num_rows", "num_bytes", "message"),
    [
        (4, 1, 16, "slot 4 is not one of the ring's 4"),
        (-1, 1, 16, "slot -1 is not one of the ring's 4"),
        (0, 65, 65 * 16, "65 rows do not fit a slot of 64 rows"),
        (0, 2, 16, "payload has 16 bytes, 2 rows of 16 bytes were announced"),
        (0, 1, 17, "payload has 17 bytes, 1 rows of 16 bytes were announced"),
    ],
)
def test_write_that_does_not_fit_is_refused(
    pair: Pair, slot: int, num_rows: int, num_bytes: int, message: str
) -> None:
    payload = bytes([255]) * num_bytes
    header = replace(header_of(GEOMETRY, 0, payload), num_rows=num_rows)
    with pytest.raises(ProtocolError, match=message):
        pair.writer.write(slot, memoryview(payload), header, WAIT_S)
    for number in range(GEOMETRY.slots):
        assert not any(pair.ring.payload(number, GEOMETRY.slot_tokens))
        assert not pair.ring.is_ready(number, 0, 0)


def test_closing_twice_is_harmless() -> None:
    with Worker() as worker, Ring(worker, GEOMETRY) as ring:
        writer = RingWriter(
            worker, GEOMETRY, peer=worker.address, address=ring.address, key=ring.key
        )
        writer.close()
        writer.close()
        ring.close()
        worker.close()


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGSTOP, DeadlineError), (signal.SIGKILL, UcxError)]
)
def test_write_to_a_dead_reader_ends(
    start: Callable[..., Child],
    set_ucx: Callable[[str | None], None],
    number: int,
    error: type[TransportError],
) -> None:
    set_ucx("tcp")
    geometry = RingGeometry(slots=1, slot_tokens=1 << 20, hidden_size=4, item_bytes=4)
    payload = memoryview(bytes(geometry.slot_tokens * geometry.row_bytes))
    ours, theirs = SPAWN.Pipe()
    reader = start(hold_ring, geometry, theirs)
    assert ours.poll(WAIT_S)
    with Worker() as worker:
        writer = RingWriter(worker, geometry, **ours.recv())
        writer.write(0, payload, header_of(geometry, 0, payload), WAIT_S)
        reader.signal(number)
        start_s = time.monotonic()
        with pytest.raises(error):
            writer.write(0, payload, header_of(geometry, 1, payload), 0.5)
        writer.close(force=True)
        assert time.monotonic() - start_s < 1.5
    reader.kill()


def test_ring_pins_all_its_memory_until_it_is_closed() -> None:
    pinned: list[tuple[int, int]] = []

    @contextmanager
    def pin(address: int, num_bytes: int) -> Iterator[str]:
        pinned.append((address, num_bytes))
        yield "pinned"
        pinned.remove((address, num_bytes))

    with Worker() as worker:
        with Ring(worker, GEOMETRY, pin) as ring:
            assert pinned == [(ring.address, GEOMETRY.total_bytes)]
        assert pinned == []


def test_ring_that_cannot_be_pinned_leaves_nothing() -> None:
    def pin(address: int, num_bytes: int) -> AbstractContextManager[str]:
        raise ValueError(f"{num_bytes} bytes are too many")

    with Worker() as worker, pytest.raises(ValueError, match=f"{GEOMETRY.total_bytes} bytes"):
        Ring(worker, GEOMETRY, pin)
