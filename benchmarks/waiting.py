"""How soon a student awakes, what it uses of a core while it waits, and what a checksum costs.

    python benchmarks/waiting.py [--quick] [--json FILE]

A pipe between the same two processes is the measure of the machine. Delays are medians, from just
before the write to the end of the wait; a share of a core is CPU time by elapsed time, and the
measure of the machine is there a thread that sleeps in naps as long as those of the wait.
"""

import argparse
import json
import os
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paths.processes import SPAWN, running
from paths.settings import quiet_settings
from rich.console import Console
from rich.table import Table

from transport.layout import RingGeometry, SlotHeader
from transport.memory import crc32c
from transport.native import Worker, load
from transport.ring import Ring, RingWriter

TIMEOUT_S, IDLE_S, NAP_S = 20.0, 3.0, 0.004
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
        with running(teacher):
            for sequence in range(rounds):
                pipe.send(None)
                if not pipe.poll(TIMEOUT_S):
                    raise TimeoutError(f"nothing came through the pipe in {TIMEOUT_S:g} s")
                sent_s = pipe.recv()
                of_pipe.append(time.monotonic() - sent_s)
                assert ring.wait(0, sequence, 0, TIMEOUT_S)
                ring.header(0)
                (sent_s,) = struct.unpack_from("d", ring.payload(0, 1))
                of_ring.append(time.monotonic() - sent_s)
    return statistics.median(of_pipe), statistics.median(of_ring)


def idle_shares(tls: str, seconds: float) -> tuple[float, float, float]:
    """Return what the waiting thread and the progress thread use of a core, and a sleeping one."""
    with opened(SMALL, tls) as (ring, _):
        wall, own, whole = time.monotonic(), time.thread_time(), time.process_time()
        ring.wait(0, 0, 0, seconds)
        wall, own = time.monotonic() - wall, time.thread_time() - own
        progress = time.process_time() - whole - own
    start, asleep = time.monotonic(), time.thread_time()
    while time.monotonic() - start < seconds:
        time.sleep(NAP_S)
    asleep = time.thread_time() - asleep
    return own / wall, progress / wall, asleep / (time.monotonic() - start)


def checksum_rate(num_bytes: int, rounds: int) -> float:
    """Return the bytes that one core checks in a second."""
    data, times_s = os.urandom(num_bytes), []
    for _ in range(rounds):
        start = time.monotonic()
        crc32c(data)
        times_s.append(time.monotonic() - start)
    return num_bytes / statistics.median(times_s)


def measure(rounds: int) -> dict[str, float]:
    """Return all figures: seconds, shares of a core, bytes a second."""
    figures = {}
    for tls in ("posix", "sysv", "posix,cma", "tcp"):
        for gap_s in (0.001, 0.1):
            of_pipe, of_ring = delays_s(tls, SMALL, rounds, gap_s)
            gap = f"{tls}.gap_{gap_s * 1e3:.0f}ms"
            figures |= {f"{gap}.pipe_s": of_pipe, f"{gap}.ring_s": of_ring}
        names = ("waiting", "progress", "sleeping")
        shares = zip(names, idle_shares(tls, IDLE_S), strict=True)
        figures |= {f"{tls}.{name}_share": share for name, share in shares}
    figures["crc32c_bytes_per_s"] = checksum_rate(1 << 24, rounds)
    for name in ("plain", "checksum"):
        _, of_ring = delays_s("posix", LARGE, rounds, 0.01, checksum=name == "checksum")
        figures[f"posix.16mib.{name}_s"] = of_ring
    return figures


def as_text(name: str, value: float) -> str:
    """Return a figure for the table."""
    if name.endswith("_share"):
        return f"{value:.2%}"
    if name.endswith("_per_s"):
        return f"{value / 2**20:,.0f} MiB/s"
    return f"{value * 1e6:,.0f} us"


def main() -> None:
    """Measure, print a table, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    os.environ.update(quiet_settings())  # before UCX is loaded
    figures = measure(rounds=5 if options.quick else 60)
    table = Table("figure", "median", title=f"UCX {load()}")
    for name, value in figures.items():
        table.add_row(name, as_text(name, value))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
