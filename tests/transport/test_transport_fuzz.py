"""Strangers on the control channel while orders are under way: nothing may come of it.

`DISAGGKD_FUZZ_SEED` chooses other bytes; the seed stands in the name of each test.
"""

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import zmq
from hostile import (
    address_of,
    broken_handshake,
    client_of,
    mutated_frames,
    recorded_handshake,
    send_raw,
)
from transport_processes import HELLO, WAIT_S, Child, Progress, study_until, teach

from transport.errors import ProtocolError
from transport.liveness import Liveness
from transport.messages import Heartbeat, Refuse, decode, encode
from transport.rendezvous import RunKeys, discover, publish

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.parametrize("seed", [int(os.environ.get("DISAGGKD_FUZZ_SEED", "0"))]),
]
NUM_FRAMES = 10_000
NUM_CONNECTIONS = 1000
GROWTH_BYTES = 8 << 20
PROPER_NAMES = [b"stranger", b"student-0", b"teacher-0"]
IMPROPER_NAMES = [b"\xff\xfe", b"new\nline", b"x" * 255]
PATIENT = Liveness(heartbeat_s=0.2, dead_after_s=2 * WAIT_S)
"""Nobody is taken for dead on a busy machine: each order is then served exactly once."""


@dataclass
class Run:
    """A teacher and a student that work while the test disturbs them."""

    folder: Path
    keys: RunKeys
    teacher: psutil.Process
    student: psutil.Process
    progress: Progress

    @property
    def endpoint(self) -> str:
        """Where the teacher listens."""
        return next(iter(discover(self.folder).values()))


@pytest.fixture
def run(run_folder: Path, start: Callable[..., Child]) -> Iterator[Run]:
    """A run under way; at its end every order must have been answered, and rightly."""
    progress = Progress()
    teacher = start(teach, run_folder, liveness=PATIENT)
    student = start(study_until, run_folder, progress, liveness=PATIENT)
    processes = [psutil.Process(child.process.pid) for child in (teacher, student)]
    run = Run(run_folder, RunKeys.load(run_folder), *processes, progress)
    progress.goes_on()
    yield run
    progress.goes_on()
    progress.stop.set()
    assert student.result() == len(teacher.result()) == progress.answered()
    assert not any(name.startswith("teacher-0") for name in discover(run_folder))


@contextmanager
def no_growth(process: psutil.Process) -> Iterator[Callable[[], None]]:
    """Yield what to call when the process is warm; memory and files must not grow from then on."""
    before: list[int] = []
    yield lambda: before.append(process.memory_info().rss)
    growth = process.memory_info().rss - before[0]
    assert growth < GROWTH_BYTES


def test_teacher_ignores_wrong_frames_of_the_right_key(run: Run, seed: int) -> None:
    rng = random.Random(seed)
    with zmq.Context() as context, no_growth(run.teacher) as warm:
        for name in PROPER_NAMES + IMPROPER_NAMES:
            with client_of(context, run.keys, name) as client:
                client.linger = int(1000 * WAIT_S)
                client.connect(run.endpoint)
                for _ in range(NUM_FRAMES // 6):
                    client.send_multipart(mutated_frames(rng))
                if name in PROPER_NAMES:
                    wait_until_heard(client)
            if name == PROPER_NAMES[0]:
                warm()
        run.progress.goes_on()


def wait_until_heard(client: zmq.Socket[bytes]) -> None:
    """Say hello until it is refused: then all before it has been heard."""
    last = HELLO.model_copy(update={"run": "last"})
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        client.send_multipart(encode(last, b"address", b"key"))
        while client.poll(100):
            match decode(client.recv_multipart())[0]:
                case Refuse(reason=reason) if reason.startswith("run last, "):
                    return
    raise AssertionError("the teacher hears nothing")


def refused_frames(rng: random.Random) -> list[bytes]:
    """Return frames that are no message."""
    while True:
        frames = mutated_frames(rng)
        try:
            decode(frames)
        except ProtocolError:
            return frames


def test_student_ignores_wrong_frames_of_a_teacher(run: Run, seed: int) -> None:
    rng = random.Random(seed)
    with no_growth(run.student) as warm:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.router_mandatory = True
            router.linger = router.sndtimeo = router.rcvtimeo = int(1000 * WAIT_S)
            router.curve_secretkey = run.keys.teacher_secret.encode()
            router.curve_publickey = run.keys.teacher_public.encode()
            router.curve_server = True
            router.bind("tcp://127.0.0.1:*")
            publish(run.folder, "teacher-9", router.get_string(zmq.LAST_ENDPOINT))
            student = router.recv_multipart()[0]
            for number in range(NUM_FRAMES):
                router.send_multipart([student, *refused_frames(rng)])
                if number % 100 == 0:
                    router.send_multipart([student, *encode(Heartbeat())])
                if number == NUM_FRAMES // 6:
                    warm()
        run.progress.goes_on()


def test_teacher_survives_broken_handshakes(
    run: Run, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    handshake = recorded_handshake(run.endpoint, run.keys)
    address, num_files = address_of(run.endpoint), run.teacher.num_fds()
    silent = [socket.create_connection(address) for _ in range(50)]
    other = RunKeys.create(tmp_path_factory.mktemp("other"))
    wrong = [
        replace(other, teacher_public=run.keys.teacher_public),
        replace(run.keys, teacher_public=other.teacher_public),
    ]
    with zmq.Context() as context, no_growth(run.teacher) as warm:
        clients = [client_of(context, rng.choice(wrong), b"stranger") for _ in range(20)]
        for client in clients:
            client.connect(run.endpoint)
            client.send_multipart(encode(HELLO, b"address", b"key"))
        for number in range(NUM_CONNECTIONS):
            data = broken_handshake(rng, handshake)
            send_raw(address, data, reset=rng.random() < 0.5)
            if number == NUM_CONNECTIONS // 4:
                warm()
        run.progress.goes_on()
        for client in clients:
            assert not client.poll(0)
            client.close()
    for connection in silent:
        connection.close()
    deadline = time.monotonic() + WAIT_S
    while run.teacher.num_fds() > num_files:
        assert time.monotonic() < deadline, "connections stay open"
        time.sleep(0.05)


def test_student_survives_a_listener_that_speaks_another_protocol(run: Run, seed: int) -> None:
    rng = random.Random(seed)
    handshake = recorded_handshake(run.endpoint, run.keys)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        for number in range(100):
            endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            publish(run.folder, f"teacher-9.{number}", endpoint)
        for _ in range(100):
            with listener.accept()[0] as connection, suppress(OSError):
                connection.sendall(broken_handshake(rng, handshake))
        run.progress.goes_on()
