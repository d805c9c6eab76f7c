"""Whether anything grows while orders and answers go back and forth at full speed.

    python benchmarks/soak.py [--quick] [--minutes N] [--json FILE]

One student and one teacher, answers of 256 KiB over shared memory. Memory, file descriptors and
threads of both are read during the second half and compared with those at half time.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from paths.processes import SPAWN, running
from paths.settings import quiet_settings
from rich.console import Console
from rich.table import Table

from transport.layout import RingGeometry
from transport.library import apply_settings
from transport.liveness import Liveness
from transport.messages import Order
from transport.pool import TeacherPool
from transport.rendezvous import RunKeys
from transport.service import TeacherService

GEOMETRY = RingGeometry(slots=6, slot_tokens=256, hidden_size=512, item_bytes=2)
WAIT_S = 60.0


def teach(folder: Path) -> None:
    """Answer every order with the same bytes."""
    apply_settings(quiet_settings())
    answer = memoryview(bytes(GEOMETRY.slot_tokens * GEOMETRY.row_bytes))

    def compute(order: Order, buffers: list[bytes]) -> memoryview:
        return answer

    with TeacherService(folder, index=0, facts={}, interface="lo", liveness=Liveness()) as service:
        service.serve(compute, num_students=1, connect_timeout_s=WAIT_S)


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    rss_mib: float
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        """Look at a process."""
        process = psutil.Process(pid)
        rss_mib = process.memory_info().rss / (1 << 20)
        return cls(rss_mib, process.num_fds(), process.num_threads())


def learn(folder: Path, teacher: int, minutes: float) -> dict[str, float]:
    """Give and take orders for this time; return how much more is held at the end."""
    rows = np.arange(GEOMETRY.slot_tokens, dtype=np.int32).tobytes()
    pids = {"student": psutil.Process().pid, "teacher": teacher}
    figures: dict[str, float] = {"minutes": minutes, "num_orders": 0}
    half: dict[str, Usage] | None = None
    with TeacherPool(folder, GEOMETRY, rank=0, facts={}, liveness=Liveness()) as pool:
        pool.connect(1, WAIT_S)
        start = time.monotonic()
        while (passed := time.monotonic() - start) < 60 * minutes:
            while pool.room:
                pool.order(rows, rows, rows, batch=1, length=GEOMETRY.slot_tokens)
            pool.release(pool.take(WAIT_S))
            figures["num_orders"] += 1
            if half is None and passed > 30 * minutes:
                half = {side: Usage.of(pid) for side, pid in pids.items()}
        assert half is not None
        for side, pid in pids.items():
            now = Usage.of(pid)
            figures[f"{side}_growth_mib"] = now.rss_mib - half[side].rss_mib
            figures[f"{side}_new_fds"] = now.num_fds - half[side].num_fds
            figures[f"{side}_new_threads"] = now.num_threads - half[side].num_threads
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten seconds")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    apply_settings(quiet_settings())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        RunKeys.create(folder)
        teacher = SPAWN.Process(target=teach, args=(folder,))
        with running(teacher):
            assert teacher.pid is not None
            minutes = 1 / 6 if arguments.quick else arguments.minutes
            figures = learn(folder, teacher.pid, minutes)
    table = Table("", "", title="what grows in the second half")
    for key, value in figures.items():
        table.add_row(key, f"{value:,.2f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
