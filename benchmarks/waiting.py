"""How soon a student awakes, what it uses of a core while it waits, and what a checksum costs.

    python benchmarks/waiting.py [--quick]

A pipe between the same two processes is the measure of the machine. Delays are medians, from just
before the write to the end of the wait; a share of a core is CPU time by elapsed time.
"""

import argparse
import os
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from paths.settings import quiet_settings

from transport.layout import RingGeometry, SlotHeader
from transport.memory import crc32c
from transport.native import Worker, load
from transport.ring import Ring, RingWriter

SPAWN = get_context("spawn")
TIMEOUT_S = 20.0
SMALL = RingGeometry(slots=1, slot_tokens=1, hidden_size=16, item_bytes=4)
LARGE = RingGeometry(slots=1, slot_tokens=4096, hidden_size=1024, item_bytes=4)  # 16 MiB


def teach(
    geometry: RingGeometry, ring: dict[str, Any], pipe: Connection, rounds: int, gap_s: float
) -> None:
    """Send the time through the pipe, then through the ring, again and again."""
    rows, columns = geometry.slot_tokens, geometry.hidden_size
    payload = bytearray(os.urandom(rows * geometry.row_bytes))
    with Worker() as worker, closing(RingWriter(worker, geometry, **ring)) as writer:
        for sequence in range(rounds):
            pipe.recv()
            time.sleep(gap_s)
            pipe.send(time.monotonic())
            time.sleep(gap_s)
            header = SlotHeader(sequence, 0, 0, rows, columns, 4, bytes(16), 0.0)
            struct.pack_into("d", payload, 0, time.monotonic())
            writer.write(0, memoryview(payload), header, TIMEOUT_S)


@contextmanager
def opened(geometry: RingGeometry, tls: str) -> Iterator[tuple[Ring, dict[str, Any]]]:
    os.environ.update(quiet_settings(tls))
    with Worker() as worker, Ring(worker, geometry) as ring:
        yield ring, {"peer": worker.address, "address": ring.address, "key": ring.key}


def delays_s(
    tls: str, geometry: RingGeometry, rounds: int, gap_s: float, checksum: bool = False
) -> tuple[float, float]:
    """Return how long pipe and ring took to tell."""
    of_pipe, of_ring = [], []
    pipe, theirs = SPAWN.Pipe()
    with opened(geometry, tls) as (ring, where):
        where["checksum"] = checksum
        teacher = SPAWN.Process(target=teach, args=(geometry, where, theirs, rounds, gap_s))
        teacher.start()
        for sequence in range(rounds):
            pipe.send(None)
            sent_s = pipe.recv()
            of_pipe.append(time.monotonic() - sent_s)
            assert ring.wait(0, sequence, 0, TIMEOUT_S)
            ring.header(0)
            (sent_s,) = struct.unpack_from("d", ring.payload(0, 1))
            of_ring.append(time.monotonic() - sent_s)
        teacher.join()
    return statistics.median(of_pipe), statistics.median(of_ring)


def idle_shares(tls: str, seconds: float) -> tuple[float, float]:
    """Return what the waiting thread and the progress thread use of a core."""
    with opened(SMALL, tls) as (ring, _):
        wall, own, whole = time.monotonic(), time.thread_time(), time.process_time()
        ring.wait(0, 0, 0, seconds)
        wall, own = time.monotonic() - wall, time.thread_time() - own
        return own / wall, (time.process_time() - whole - own) / wall


def checksum_rate(num_bytes: int, rounds: int) -> float:
    """Return the bytes that one core checks in a second."""
    data, times_s = os.urandom(num_bytes), []
    for _ in range(rounds):
        start = time.monotonic()
        crc32c(data)
        times_s.append(time.monotonic() - start)
    return num_bytes / statistics.median(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    rounds = 5 if parser.parse_args().quick else 60
    os.environ.update(quiet_settings())  # before UCX is loaded
    print("UCX", load())
    for tls in ("posix", "sysv", "posix,cma", "tcp"):
        for gap_s in (0.001, 0.1):
            of_pipe, of_ring = delays_s(tls, SMALL, rounds, gap_s)
            print(f"{tls}, {gap_s} s: pipe {of_pipe * 1e6:.0f} us, ring {of_ring * 1e6:.0f} us")
        waiting, progress = idle_shares(tls, 3.0)
        print(f"{tls}, idle: waiting {waiting:.2%}, progress {progress:.2%}")
    rate = checksum_rate(1 << 24, rounds)
    print(f"crc32c: {rate / 2**20:.0f} MiB/s")
    for checksum in (False, True):
        _, of_ring = delays_s("posix", LARGE, rounds, 0.01, checksum)
        print(f"posix, 16 MiB written and taken, checksum {checksum}: {of_ring * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
