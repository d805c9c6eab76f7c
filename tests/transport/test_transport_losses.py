"""Students and teachers that die or hang in the middle of a run."""

import itertools
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from transport_processes import (
    FACTS,
    LIVENESS,
    SPAWN,
    WAIT_S,
    Child,
    answer,
    ask,
    check,
    learn,
    open_pool,
    study,
    teach,
)

from transport.errors import DeadlineError, PeerLostError
from transport.messages import Order
from transport.rendezvous import discover
from transport.service import TeacherService

pytestmark = pytest.mark.usefixtures("nothing_left")
Start = Callable[..., Child]
LIMIT_S = LIVENESS.dead_after_s + 1
both_ends = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])


def hang_at_three(reached: Connection, order: Order, buffers: list[bytes]) -> memoryview:
    if order.sequence == 3:
        reached.send(None)
        threading.Event().wait()
    return answer(order, buffers)


@both_ends
def test_student_notices_a_dead_teacher(run_folder: Path, start: Start, number: int) -> None:
    reached, theirs = SPAWN.Pipe(duplex=False)
    teacher = start(teach, run_folder, compute=partial(hang_at_three, theirs))
    with open_pool(run_folder) as pool:
        pool.connect(1, WAIT_S)
        for sequence in range(4):
            ask(pool, 0, sequence)
        for sequence in range(3):
            check(pool, 0, sequence)
        assert reached.poll(WAIT_S)
        with pytest.raises(DeadlineError, match=r"did not answer order 3 within 0\.1 s"):
            pool.take(0.1)
        teacher.signal(number)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError, match=r"teacher-0 is lost: silent for 1\.2 s"):
            pool.take(WAIT_S)
        assert time.monotonic() - start_s < LIMIT_S
    assert time.monotonic() - start_s < LIMIT_S + LIVENESS.dead_after_s
    teacher.kill()


def test_other_teachers_end_when_one_is_lost(run_folder: Path, start: Start) -> None:
    teachers = [start(teach, run_folder, index) for index in range(2)]
    with open_pool(run_folder) as pool:
        pool.connect(2, WAIT_S)
        learn(pool, 8)
        teachers[1].kill()
        with pytest.raises(PeerLostError, match="teacher-1 is lost"):
            for sequence in itertools.count(8):
                ask(pool, 0, sequence)
                check(pool, 0, sequence)
    assert len(teachers[0].result()) >= 4


@both_ends
@pytest.mark.parametrize("tls", ["posix", "tcp"])
def test_teacher_notices_a_dead_student(
    run_folder: Path,
    start: Start,
    set_ucx: Callable[[str | None], None],
    tls: str,
    number: int,
) -> None:
    set_ucx(tls)
    student = start(study, run_folder, num_orders=1000)
    signalled_s = []

    def compute(order: Order, buffers: list[bytes]) -> memoryview:
        if order.sequence == 20:
            signalled_s.append(time.monotonic())
            student.signal(number)
        return answer(order, buffers)

    with (
        TeacherService(
            run_folder, index=0, facts=FACTS, interface="lo", liveness=LIVENESS
        ) as service,
        pytest.raises(PeerLostError, match=r"student-0\.\w+ (is lost|cannot be written to): "),
    ):
        service.serve(compute, num_students=1, connect_timeout_s=WAIT_S)
    assert time.monotonic() - signalled_s[0] < LIMIT_S
    assert discover(run_folder) == {}
    student.kill()
