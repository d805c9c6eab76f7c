"""The processes of the transport tests: functions that run in a child, and the child itself."""

import faulthandler
import os
import random
import resource
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from transport.control import ControlChannel, Event
from transport.layout import RingGeometry, SlotHeader, token_digest
from transport.liveness import Liveness
from transport.memory import lock
from transport.messages import PROTOCOL_VERSION, Hello, Order, Welcome
from transport.native import Worker
from transport.pool import TeacherPool
from transport.rendezvous import RunKeys
from transport.ring import Ring, RingWriter
from transport.service import Served, TeacherService
from transport.student import Compute

SPAWN = get_context("spawn")
LIVENESS = Liveness(heartbeat_s=0.2, dead_after_s=1.2, grace_s=1.5)
GEOMETRY = RingGeometry(slots=4, slot_tokens=64, hidden_size=4, item_bytes=4)
FACTS = {"hidden_size": 4, "vocabulary": 1000}
HELLO = Hello(
    protocol=PROTOCOL_VERSION,
    run="run",
    rank=0,
    slots=1,
    slot_tokens=1,
    hidden_size=1,
    item_bytes=1,
    address=1,
    facts={},
)
WAIT_S = 20.0
"""Bound of waits that a healthy test ends long before, on a busy machine too."""
_BYTES = random.Random(0).randbytes(1 << 20)


def _run(outcome: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    faulthandler.register(signal.SIGQUIT)
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        result = error
    outcome.send(result)


class Child:
    """A function that runs in a process of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._outcome, theirs = SPAWN.Pipe(duplex=False)
        self.process = SPAWN.Process(target=_run, args=(theirs, function, args, kwargs))
        self.process.start()
        theirs.close()

    def result(self, timeout_s: float = WAIT_S) -> Any:
        """Return what the function returned, or raise what it raised; the process has ended."""
        if not self._outcome.poll(timeout_s):
            self.signal(signal.SIGQUIT)  # it shows where it is
            time.sleep(0.5)
            raise AssertionError("the child does not end")
        result = self._outcome.recv()
        self.process.join(WAIT_S)
        assert self.process.exitcode == 0
        if isinstance(result, Exception):
            raise result
        return result

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the process, a stopped one too."""
        self.process.kill()
        self.process.join(WAIT_S)


def question(rank: int, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token ids and positions `[batch, length]` and the wanted rows of a student's order."""
    rng = np.random.default_rng((rank, sequence))
    shape = rng.integers(1, 9, 2)
    ids, positions = rng.integers(0, 1000, (2, *shape), dtype=np.int32)
    rows = rng.permutation(ids.size)[: rng.integers(1, ids.size + 1)]
    return ids, positions, rows.astype(np.int32)


def answer(order: Order, buffers: list[bytes]) -> memoryview:
    """Compute an order: what was asked, as hidden states `[num_rows, 4]`."""
    ids, positions, rows = (np.frombuffer(buffer, np.int32) for buffer in buffers)
    assert len(ids) == len(positions) == order.num_tokens
    sequence = np.full_like(rows, order.sequence)
    hidden = np.stack([ids[rows], positions[rows], rows, sequence], axis=1)
    return memoryview(hidden.astype(np.float32).tobytes())


def ask(pool: TeacherPool, rank: int, sequence: int) -> None:
    """Give the order with this number."""
    ids, positions, rows = question(rank, sequence)
    batch, length = ids.shape
    given = pool.order(
        ids.tobytes(), positions.tobytes(), rows.tobytes(), batch=batch, length=length
    )
    assert given == sequence


def check(pool: TeacherPool, rank: int, sequence: int) -> int:
    """Take the next answer, compare it with the question, return the teacher's index."""
    taken = pool.take(WAIT_S)
    ids, positions, rows = question(rank, sequence)
    found = np.frombuffer(taken.payload, np.float32).reshape(-1, 4)
    wanted = np.stack([ids.flat[rows], positions.flat[rows], rows, np.full_like(rows, sequence)], 1)
    assert (found == wanted).all()
    assert (taken.sequence, taken.header.digest) == (sequence, token_digest(ids.tobytes()))
    pool.release(taken)
    return taken.header.teacher


def learn(pool: TeacherPool, num_orders: int, rank: int = 0) -> list[int]:
    """Give and take this many orders, as many at once as fit; return who answered each."""
    teachers: list[int] = []
    given = 0
    while len(teachers) < num_orders:
        while pool.room and given < num_orders:
            ask(pool, rank, given)
            given += 1
        teachers.append(check(pool, rank, len(teachers)))
    return teachers


def open_pool(folder: Path, rank: int = 0, num_spare_slots: int = 0, **changes: Any) -> TeacherPool:
    """Return a pool of the tests' usual kind: four orders at once."""
    settings: dict[str, Any] = {"facts": FACTS, "liveness": LIVENESS} | changes
    geometry = replace(GEOMETRY, slots=GEOMETRY.slots + num_spare_slots)
    return TeacherPool(folder, geometry, rank=rank, num_spare_slots=num_spare_slots, **settings)


def study(folder: Path, num_orders: int, rank: int = 0, **changes: Any) -> None:
    """Be a student."""
    with open_pool(folder, rank, **changes) as pool:
        pool.connect(1, WAIT_S)
        learn(pool, num_orders, rank)


class Progress:
    """How far a student has come that works until it is stopped, seen from outside."""

    def __init__(self) -> None:
        self.stop = SPAWN.Event()
        self.by_teacher = SPAWN.Array("q", 2)

    def answered(self, teacher: int | None = None) -> int:
        """Return how many answers the student has taken, of all teachers or of one."""
        return sum(self.by_teacher) if teacher is None else int(self.by_teacher[teacher])

    def goes_on(self, num_answers: int = 20, teacher: int | None = None) -> None:
        """Wait for some more answers, of any teacher or of one."""
        goal, deadline = self.answered(teacher) + num_answers, time.monotonic() + WAIT_S
        while self.answered(teacher) < goal:
            assert time.monotonic() < deadline, "the orders have come to a halt"
            time.sleep(0.01)


def study_until(folder: Path, progress: Progress, num_teachers: int = 1, **settings: Any) -> int:
    """Be a student until it is stopped; return how many orders it has given."""
    with open_pool(folder, **settings) as pool:
        pool.connect(num_teachers, WAIT_S)
        given = taken = 0
        while not progress.stop.is_set() or taken < given:
            while pool.room and not progress.stop.is_set():
                ask(pool, 0, given)
                given += 1
            if taken < given:
                progress.by_teacher[check(pool, 0, taken)] += 1
                taken += 1
    return given


def teach(
    folder: Path,
    index: int = 0,
    compute: Compute = answer,
    num_students: int = 1,
    liveness: Liveness = LIVENESS,
    interface: str = "lo",
    **changes: Any,
) -> list[Served]:
    """Be a teacher that ends in good order at SIGTERM; return what it served."""
    served: list[Served] = []
    with TeacherService(
        folder,
        index=index,
        facts=FACTS,
        interface=interface,
        liveness=liveness,
        on_served=served.append,
        **changes,
    ) as service:
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
        service.serve(compute, num_students=num_students, connect_timeout_s=WAIT_S)
    return served


def teach_two(folder: Path, reached: Connection, num_waiting: int) -> list[Served]:
    """Be a teacher of two students that answers the first order when so many others wait."""
    served: list[Served] = []
    with TeacherService(
        folder, index=0, facts=FACTS, interface="lo", liveness=LIVENESS, on_served=served.append
    ) as service:

        def compute(order: Order, buffers: list[bytes]) -> memoryview:
            if not served:
                reached.send(None)
                deadline = time.monotonic() + WAIT_S
                while service._events.qsize() < num_waiting:  # nothing public tells
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
            return answer(order, buffers)

        service.serve(compute, num_students=2, connect_timeout_s=WAIT_S)
    return served


def chat(keys: RunKeys, endpoint: str) -> None:
    """Say hello on the control channel and stay."""
    channel = ControlChannel(keys, LIVENESS, lambda *_: None)
    channel.start()
    channel.connect("teacher", endpoint, "student", HELLO, b"address", b"key")
    signal.pause()


def listen(keys: RunKeys, told: Connection) -> None:
    """Welcome whoever says hello on the control channel, and stay."""

    def welcome(peer: str, event: Event, buffers: list[bytes]) -> None:
        if isinstance(event, Hello):
            channel.send(peer, Welcome(teacher=0, transports=""))

    channel = ControlChannel(keys, LIVENESS, welcome)
    told.send(channel.listen("lo"))
    channel.start()
    signal.pause()


def contents(geometry: RingGeometry, sequence: int) -> bytes:
    """Return the payload of a numbered message: random rows, none to a full slot."""
    rng = random.Random(sequence)
    num_bytes = rng.randint(0, geometry.slot_tokens) * geometry.row_bytes
    start = rng.randint(0, len(_BYTES) - num_bytes)
    return _BYTES[start : start + num_bytes]


def header_of(geometry: RingGeometry, sequence: int, payload: bytes | memoryview) -> SlotHeader:
    """Return the header of a numbered message; every other one is a second attempt."""
    return SlotHeader(
        sequence=sequence,
        attempt=sequence % 2,
        teacher=1,
        num_rows=len(payload) // geometry.row_bytes,
        hidden_size=geometry.hidden_size,
        item_bytes=geometry.item_bytes,
        digest=token_digest(payload),
        compute_s=0.5,
    )


def announce_in_turn(
    ring: dict[str, Any], pipe: Connection, num_rounds: int, *, pause_s: float, policy: int
) -> None:
    """Send the time over a pipe, then in the first slot of a ring, again and again."""
    geometry = GEOMETRY
    os.sched_setscheduler(0, policy, os.sched_param(os.sched_get_priority_min(policy)))
    with Worker() as worker:
        writer = RingWriter(worker, geometry, **ring)
        for sequence in range(num_rounds):
            time.sleep(pause_s)
            pipe.send(time.monotonic())
            time.sleep(pause_s)
            payload = bytearray(geometry.row_bytes)
            header = replace(header_of(geometry, sequence, payload), attempt=0)
            struct.pack_into("d", payload, 0, time.monotonic())
            writer.write(0, memoryview(payload), header, WAIT_S)
        writer.close()


def hold_ring(geometry: RingGeometry, told: Connection) -> None:
    """Own a ring, tell how to reach it, and stay."""
    with Worker() as worker, Ring(worker, geometry) as ring:
        told.send({"peer": worker.address, "address": ring.address, "key": ring.key})
        signal.pause()


def lock_too_much() -> str:
    """Lock 1 MiB where 64 KiB are allowed; return what was said."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
    if os.getuid() == 0:  # whom the limit does not bind
        os.setuid(65534)
    memory = np.zeros(1 << 20, np.uint8)
    with lock(memory.ctypes.data, memory.nbytes) as how:
        return how
