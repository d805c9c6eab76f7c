"""How long a student waits for uneven teachers, measured and as the planner says.

    python benchmarks/ring.py [--quick] [--json FILE]

Real teachers behind a real ring sleep for times of a gamma distribution, and so does the student.
Its share of waiting is compared with the formula of the planner for several depths of the ring.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from paths.processes import SPAWN, running
from paths.settings import quiet_settings
from rich.console import Console
from rich.table import Table

from toolkit.planner.traffic import share_of_waiting
from transport.layout import RingGeometry
from transport.library import apply_settings
from transport.liveness import Liveness
from transport.messages import Order
from transport.pool import TeacherPool
from transport.rendezvous import RunKeys
from transport.service import TeacherService

WAIT_S = 60.0
PERIOD_S = 0.02
STUDENT_VARIATION, TEACHER_VARIATION = 0.1, 0.5
ROWS = 16


class Case(NamedTuple):
    """Teachers, all of them `kappa` times as fast as the student, and slots of the ring."""

    teachers: int
    kappa: float
    slots: int


CASES = [
    Case(teachers, kappa, slots)
    for teachers, kappa in ((1, 1.0), (1, 1.1), (1, 1.3), (4, 1.1), (2, 0.9))
    for slots in (teachers + 2, teachers + 5, teachers + 9)
]
QUICK = [Case(1, 1.1, 4)]


def took(mean_s: float, variation: float, draw: random.Random) -> float:
    """Draw a time."""
    return draw.gammavariate(1 / variation**2, mean_s * variation**2)


def geometry(case: Case) -> RingGeometry:
    """Return a small ring."""
    return RingGeometry(case.slots, ROWS, 16, 2)


def teach(folder: Path, index: int, case: Case) -> None:
    """Answer every order after a while."""
    apply_settings(quiet_settings())
    draw, ring = random.Random(index), geometry(case)
    answer = memoryview(bytes(ROWS * ring.row_bytes))
    mean_s = PERIOD_S * case.teachers / case.kappa

    def compute(order: Order, buffers: list[bytes]) -> memoryview:
        time.sleep(took(mean_s, TEACHER_VARIATION, draw))
        return answer

    liveness = Liveness()
    with TeacherService(
        folder, index=index, facts={}, interface="lo", liveness=liveness
    ) as service:
        service.serve(compute, num_students=1, connect_timeout_s=WAIT_S)


def measure(case: Case, steps: int) -> tuple[float, float]:
    """Return the measured and the planned share of waiting."""
    draw = random.Random(0)
    rows = np.arange(ROWS, dtype=np.int32).tobytes()
    busy, answered = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        RunKeys.create(folder)
        teachers = [
            SPAWN.Process(target=teach, args=(folder, index, case))
            for index in range(case.teachers)
        ]
        with (
            running(*teachers),
            TeacherPool(folder, geometry(case), rank=0, facts={}, liveness=Liveness()) as pool,
        ):
            pool.connect(case.teachers, WAIT_S)
            waited_s, num_orders = 0.0, 0
            for step in range(steps):
                while pool.room and num_orders < steps:
                    pool.order(rows, rows, rows, batch=1, length=ROWS)
                    num_orders += 1
                answer = pool.take(WAIT_S)
                start = time.monotonic()
                time.sleep(took(PERIOD_S, STUDENT_VARIATION, draw))
                answered.append(answer.header.compute_s)
                pool.release(answer)
                busy.append(time.monotonic() - start)
                waited_s += answer.waited_s if step >= case.slots else 0.0  # once it was full
    planned = share_of_waiting(
        case.teachers,
        statistics.fmean(answered),
        statistics.fmean(busy),
        case.slots,
        (variation(busy), variation(answered)),
    )
    return waited_s / (waited_s + sum(busy)), planned


def variation(values: list[float]) -> float:
    """Return standard deviation over mean."""
    return statistics.pstdev(values) / statistics.fmean(values)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one case, few steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    apply_settings(quiet_settings())
    table = Table()
    for column in ("teachers", "kappa", "slots", "waiting", "planned"):
        table.add_column(column, justify="right")
    figures = {}
    for case in QUICK if arguments.quick else CASES:
        measured, planned = measure(case, 100 if arguments.quick else 600)
        numbers = (str(case.teachers), f"{case.kappa:g}", str(case.slots))
        table.add_row(*numbers, f"{measured:.1%}", f"{planned:.1%}")
        key = "teachers_{}_kappa_{}_slots_{}".format(*numbers)
        figures |= {f"{key}_measured": measured, f"{key}_planned": planned}
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
