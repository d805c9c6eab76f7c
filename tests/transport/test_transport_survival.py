"""Teachers and students that die, hang, wake up again, come late, or fail: nothing is lost."""

import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transport_processes import (
    FACTS,
    LIVENESS,
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

from transport.control import ControlChannel, Event
from transport.errors import OrderFailedError, PeerLostError
from transport.messages import Bye, Hello, Order, Welcome
from transport.pool import TeacherPool
from transport.rendezvous import RunKeys, publish
from transport.service import TeacherService

pytestmark = pytest.mark.usefixtures("nothing_left")
Start = Callable[..., Child]
SetUcx = Callable[[str | None], None]
SPARE = 2
both_ends = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
transports = pytest.mark.parametrize("tls", ["posix", "posix,cma", "tcp"])


def slowly(order: Order, buffers: list[bytes]) -> memoryview:
    time.sleep(0.01)
    return answer(order, buffers)


class Lesson:
    """Gives and takes orders for as long as a condition asks for, and counts who answered."""

    def __init__(self, pool: TeacherPool) -> None:
        self.pool = pool
        self.given = self.taken = 0
        self.answered: list[int] = []

    def until(self, condition: Callable[[], object]) -> None:
        """Take at least one answer, then go on until the condition holds."""
        deadline, first = time.monotonic() + WAIT_S, self.taken
        while self.taken == first or not condition():
            assert time.monotonic() < deadline
            while self.pool.room:
                ask(self.pool, 0, self.given)
                self.given += 1
            self.answered.append(check(self.pool, 0, self.taken))
            self.taken += 1

    def end(self) -> None:
        """Take what has been ordered; then no slot is missing."""
        for sequence in range(self.taken, self.given):
            self.answered.append(check(self.pool, 0, sequence))
        book, deadline = self.pool._dispatcher._book, time.monotonic() + WAIT_S
        while len(book._free) < self.pool._ring.geometry.slots:  # nothing public tells
            assert time.monotonic() < deadline, book.quarantine
            time.sleep(0.01)
        assert not book.works and not book.quarantine


@pytest.mark.alone
@transports
@both_ends
def test_others_take_over_from_a_lost_teacher(
    run_folder: Path, start: Start, set_ucx: SetUcx, number: int, tls: str
) -> None:
    """A killed one is noticed at once, a stopped one by its silence, and comes back."""
    set_ucx(tls)
    teachers = [start(teach, run_folder, index, slowly) for index in range(2)]
    with open_pool(run_folder, num_spare_slots=SPARE) as pool:
        pool.connect(2, WAIT_S)
        lesson = Lesson(pool)
        lesson.until(lambda: len(set(lesson.answered)) == 2)
        start_s = time.monotonic()
        teachers[0].signal(number)
        lesson.until(lambda: pool.num_teachers == 1)
        limit_s = 1.0 if number == signal.SIGKILL else LIVENESS.dead_after_s + 1
        assert time.monotonic() - start_s < limit_s
        lesson.until(lambda: set(lesson.answered[-10:]) == {1})
        if number == signal.SIGSTOP:
            teachers[0].signal(signal.SIGCONT)
            lesson.until(lambda: 0 in lesson.answered[-10:])
        lesson.end()
    teachers[1].result()
    if number == signal.SIGSTOP:
        teachers[0].result()
    teachers[0].kill()


def test_a_late_teacher_takes_over_from_a_dead_one(run_folder: Path, start: Start) -> None:
    first = start(teach, run_folder, 0)
    patient = replace(LIVENESS, grace_s=WAIT_S)
    with open_pool(run_folder, num_spare_slots=SPARE, liveness=patient) as pool:
        pool.connect(1, WAIT_S)
        lesson = Lesson(pool)
        lesson.until(lambda: lesson.taken > 20)
        first.kill()
        second = start(teach, run_folder, 1)
        lesson.until(lambda: 1 in lesson.answered)
        lesson.end()
    second.result()


def test_a_joining_teacher_has_work_within_a_second(run_folder: Path, start: Start) -> None:
    """Also when all orders have been given to another, which is busy with the first."""
    first = start(teach, run_folder, 0, partial(slow_at, 0, 6.0))
    with open_pool(run_folder, num_spare_slots=SPARE) as pool:
        pool.connect(1, WAIT_S)
        for sequence in range(4):
            ask(pool, 0, sequence)
        second = start(teach, run_folder, 1)
        pool.connect(2, WAIT_S)
        joined_s = time.monotonic()
        while not any(
            "teacher-1" in str(work.teacher) for work in pool._dispatcher._book.works.values()
        ):
            assert time.monotonic() - joined_s < 1.0
            time.sleep(0.01)
        assert [check(pool, 0, sequence) for sequence in range(4)].count(1) >= 1
    first.result()
    second.result()


@both_ends
def test_without_a_teacher_the_student_waits_and_ends(
    run_folder: Path, start: Start, number: int
) -> None:
    teacher = start(teach, run_folder)
    with open_pool(run_folder, num_spare_slots=SPARE) as pool:
        pool.connect(1, WAIT_S)
        lesson = Lesson(pool)
        lesson.until(lambda: lesson.taken > 8)
        teacher.signal(number)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError, match=r"order \d+ waited 1\.5 s: no teacher is left"):
            lesson.until(lambda: False)
        waited_s = time.monotonic() - start_s
        assert LIVENESS.grace_s < waited_s < LIVENESS.dead_after_s + LIVENESS.grace_s + 1
        closing_s = time.monotonic()
    assert time.monotonic() - closing_s < 2 * LIVENESS.dead_after_s
    teacher.kill()


def fail_at(sequence: int, index: int, order: Order, buffers: list[bytes]) -> memoryview:
    if order.sequence == sequence and order.attempt == index:
        raise MemoryError("out of memory: " + "x" * 100_000)
    return answer(order, buffers)


def test_an_order_that_failed_goes_to_another(run_folder: Path, start: Start) -> None:
    teachers = [start(teach, run_folder, i, partial(fail_at, 2, 0)) for i in range(2)]
    with open_pool(run_folder) as pool:
        pool.connect(2, WAIT_S)
        learn(pool, 20)
    assert sum(len(teacher.result()) for teacher in teachers) == 20


def test_an_order_that_failed_twice_ends_the_run(run_folder: Path, start: Start) -> None:
    teachers = [start(teach, run_folder, i, fail_always) for i in range(2)]
    with open_pool(run_folder) as pool:
        pool.connect(2, WAIT_S)
        with pytest.raises(
            OrderFailedError, match=r"teacher-\d\.\w+, order \d: ValueError: token id 1000"
        ):
            learn(pool, 4)
    for teacher in teachers:
        assert teacher.result() == []


def fail_always(order: Order, buffers: list[bytes]) -> memoryview:
    raise ValueError("token id 1000 is out of range: " + "x" * 100_000)


def slow_at(sequence: int, seconds: float, order: Order, buffers: list[bytes]) -> memoryview:
    if (order.sequence, order.attempt) == (sequence, 0):
        time.sleep(seconds)
    return answer(order, buffers)


def test_an_order_that_takes_too_long_goes_to_another(run_folder: Path, start: Start) -> None:
    teachers = [start(teach, run_folder, i, partial(slow_at, 9, 2.0)) for i in range(2)]
    with open_pool(run_folder, num_spare_slots=SPARE, order_timeout_s=0.3) as pool:
        pool.connect(2, WAIT_S)
        lesson = Lesson(pool)
        lesson.until(lambda: lesson.taken == 9)
        start_s = time.monotonic()
        lesson.until(lambda: lesson.taken == 10)
        assert time.monotonic() - start_s < 1.5
        lesson.end()
    for teacher in teachers:
        teacher.result()


def test_a_stopping_teacher_serves_on_and_leaves_cleanly(run_folder: Path, start: Start) -> None:
    """Students that end too still need it; without them it goes after a while."""
    leaving, staying = (start(teach, run_folder, index) for index in range(2))
    with open_pool(run_folder) as pool:
        pool.connect(2, WAIT_S)
        lesson = Lesson(pool)
        lesson.until(lambda: len(set(lesson.answered)) == 2)
        leaving.signal(signal.SIGTERM)
        asked_s, before = time.monotonic(), lesson.taken
        lesson.until(lambda: pool.num_teachers == 1)
        assert LIVENESS.grace_s - 0.1 < time.monotonic() - asked_s < LIVENESS.grace_s + 2
        assert 0 in lesson.answered[before:]
        leaving.result()
        lesson.end()
    staying.result()


def test_all_slots_in_quarantine_is_said(run_folder: Path, start: Start) -> None:
    """Nobody may have the slots of a teacher that hangs; without spare ones nothing goes on."""
    teachers = [start(teach, run_folder, 0, partial(slow_at, 0, 2.0))]
    patient = replace(LIVENESS, grace_s=5.0)  # the other teacher takes a while to start
    with open_pool(run_folder, liveness=patient) as pool:
        pool.connect(1, WAIT_S)
        for sequence in range(4):
            ask(pool, 0, sequence)
        teachers[0].signal(signal.SIGSTOP)
        teachers.append(start(teach, run_folder, 1))
        with pytest.raises(PeerLostError, match=r"may still write to 4 of them: raise ring\.spare"):
            pool.take(WAIT_S)
    teachers[0].kill()
    teachers[1].result()


@pytest.mark.alone
@pytest.mark.parametrize("tls", ["posix", "tcp"])
@pytest.mark.parametrize("lost_s", [LIVENESS.dead_after_s + 0.5, LIVENESS.dead_after_s + 2.0])
@both_ends
def test_a_lost_student_leaves_the_others_served(
    run_folder: Path, start: Start, set_ucx: SetUcx, number: int, lost_s: float, tls: str
) -> None:
    """One that wakes up goes on, given up or not; one that was killed begins anew."""
    set_ucx(tls)
    teacher = start(teach, run_folder, 0, slowly, num_students=2)
    victim = start(study, run_folder, num_orders=100, rank=1)
    with open_pool(run_folder) as pool:
        pool.connect(1, WAIT_S)
        lesson = Lesson(pool)
        lesson.until(lambda: lesson.taken > 20)
        victim.signal(number)
        silent_s = time.monotonic()
        lesson.until(lambda: time.monotonic() - silent_s > lost_s)
        if number == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
        else:
            victim.kill()
            victim = start(study, run_folder, num_orders=20, rank=1)
        victim.result()
        lesson.end()
    teacher.result()


def test_a_student_that_is_given_up_again_and_again_greets_again(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every time at once, and each goodbye thrice: no greeting is lost or overtaken by the last."""
    monkeypatch.setattr("transport.dispatcher._TICK_S", 1e-4)
    num_hellos = 0

    def on_event(peer: str, event: Event, buffers: list[bytes]) -> None:
        nonlocal num_hellos
        if isinstance(event, Hello):
            num_hellos += 1
            if num_hellos < 500:
                for _ in range(3):
                    teacher.send(peer, Bye(clean=False))
            else:
                teacher.send(peer, Welcome(teacher=0, transports=""))
        elif isinstance(event, Bye):
            teacher.send(peer, event)

    with closing(ControlChannel(RunKeys.load(run_folder), LIVENESS, on_event)) as teacher:
        publish(run_folder, "teacher-0.f00", teacher.listen("lo"))
        teacher.start()
        with open_pool(run_folder) as pool:
            assert pool.connect(1, 2 * WAIT_S) == ["teacher-0"]
    assert num_hellos == 500


@both_ends
def test_without_a_student_the_teacher_ends(run_folder: Path, start: Start, number: int) -> None:
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
        pytest.raises(PeerLostError, match=r"no student is left since 1\.5 s"),
    ):
        service.serve(compute, num_students=1, connect_timeout_s=WAIT_S)
    waited_s = time.monotonic() - signalled_s[0]
    assert waited_s < LIVENESS.dead_after_s + LIVENESS.grace_s + 1.5
    student.kill()
