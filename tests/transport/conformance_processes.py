"""The processes of the conformance suite: readers, writers, and one that leaves its peers."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from transport_processes import WAIT_S, contents, header_of

from transport.binding import Choice, Worker, open_worker
from transport.errors import ProtocolError, TransportError
from transport.layout import RingGeometry
from transport.ring import Ring, RingWriter


def describe_ring(worker: Worker, ring: Ring) -> dict[str, Any]:
    """Return what a `RingWriter` needs to reach a ring."""
    return {"peer": worker.address, "address": ring.address, "key": ring.key}


def stay(binding: Choice, geometry: RingGeometry, told: Connection) -> None:
    """Own a ring, tell how to reach it, and stay."""
    with open_worker(binding) as worker, Ring(worker, geometry) as ring:
        told.send((os.getpid(), describe_ring(worker, ring)))
        signal.pause()


def read_messages(
    binding: Choice, series: list[tuple[RingGeometry, int]], told: Connection, *, eager: bool
) -> int:
    """Take series of numbered messages; return how many were torn or announced too early.

    An eager reader does not sleep until the writer wakes it, which is after the flush.
    """
    num_bad = 0
    with open_worker(binding) as worker:
        for geometry, num_messages in series:
            with Ring(worker, geometry) as ring:
                told.send(describe_ring(worker, ring))
                for sequence in range(num_messages):
                    num_bad += not _arrives_whole(ring, sequence, eager)
                    told.send(None)  # the slot is free
                assert told.poll(WAIT_S), "the writer does not end"
                told.recv()
    return num_bad


def _arrives_whole(ring: Ring, sequence: int, eager: bool) -> bool:
    payload = contents(ring.geometry, sequence)
    header = header_of(ring.geometry, sequence, payload)
    slot = sequence % ring.geometry.slots
    end = time.monotonic() + WAIT_S
    while eager and not ring.is_ready(slot, sequence, header.attempt):
        assert time.monotonic() < end
    assert ring.wait(slot, sequence, header.attempt, WAIT_S)
    try:
        return ring.payload(slot, header.num_rows) == payload and ring.header(slot) == header
    except ProtocolError:
        return False


def write_messages(
    binding: Choice,
    series: list[tuple[RingGeometry, int]],
    told: Connection,
) -> str:
    """Write series of numbered messages; return what UCX says of the connection."""
    with open_worker(binding) as worker:
        for geometry, num_messages in series:
            assert told.poll(WAIT_S)
            writer = RingWriter(worker, geometry, **told.recv())
            for sequence in range(num_messages):
                payload = contents(geometry, sequence)
                header = header_of(geometry, sequence, payload)
                if sequence >= geometry.slots:
                    assert told.poll(WAIT_S), "no slot becomes free"
                    told.recv()
                writer.write(sequence % geometry.slots, memoryview(payload), header, WAIT_S)
            for _ in range(min(geometry.slots, num_messages)):
                assert told.poll(WAIT_S)
                told.recv()
            description = writer.describe()
            writer.close()
            told.send(None)
    return description


def leave(
    binding: Choice,
    geometry: RingGeometry,
    rings: dict[int, dict[str, Any]],
    told: Connection,
) -> list[float]:
    """Write to peers, wait for word of their fates, start to write again, and close everything.

    Returns:
        Seconds that each thing took to close: the connections, the own ring, the worker.
    """
    worker = open_worker(binding)
    own = Ring(worker, geometry)
    writers = {pid: RingWriter(worker, geometry, **ring) for pid, ring in rings.items()}
    payload = memoryview(bytes(geometry.slot_tokens * geometry.row_bytes))
    for writer in writers.values():
        writer.write(0, payload, header_of(geometry, 0, payload), WAIT_S)
    told.send(None)
    assert told.poll(WAIT_S)
    is_alive = told.recv()
    for writer in writers.values():
        with suppress(TransportError):  # puts under way, and no time to end them
            writer.write(0, payload, header_of(geometry, 1, payload), 0)
    closing = [partial(w.close, force=not is_alive[pid]) for pid, w in writers.items()]
    return [_seconds(close) for close in (*closing, own.close, worker.close)]


def _seconds(call: Callable[[], None]) -> float:
    start_s = time.monotonic()
    call()
    return time.monotonic() - start_s
