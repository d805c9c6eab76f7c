"""The control channel: who is heard, in which order, and how silence is noticed."""

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import zmq
from transport_processes import HELLO, LIVENESS, SPAWN, WAIT_S, Child, chat, listen
from zmq.utils.monitor import recv_monitor_message

from transport.control import ControlChannel, Event
from transport.liveness import Gone, Heard, Liveness, Silent
from transport.messages import Bye, Heartbeat, Order, Welcome, encode
from transport.rendezvous import RunKeys

pytestmark = pytest.mark.usefixtures("nothing_left")


class Peer:
    """A channel that keeps what it is told."""

    def __init__(self, keys: RunKeys, liveness: Liveness) -> None:
        self.heard: queue.Queue[tuple[str, Event, list[bytes]]] = queue.Queue()
        self.lost: queue.Queue[tuple[str, Event]] = queue.Queue()
        self.channel = ControlChannel(keys, liveness, self._sort)

    def _sort(self, peer: str, event: Event, buffers: list[bytes]) -> None:
        if isinstance(event, Silent | Heard | Gone):
            self.lost.put((peer, event))
        else:
            self.heard.put((peer, event, buffers))

    def next(self) -> tuple[str, Event, list[bytes]]:
        """Return the next message."""
        return self.heard.get(timeout=WAIT_S)


@contextmanager
def listening(keys: RunKeys, liveness: Liveness = LIVENESS) -> Iterator[tuple[Peer, str]]:
    """Run the teacher's side; yield it and its endpoint."""
    peer = Peer(keys, liveness)
    endpoint = peer.channel.listen("lo")
    peer.channel.start()
    try:
        yield peer, endpoint
    finally:
        peer.channel.close()


@contextmanager
def connected(
    keys: RunKeys, endpoint: str, liveness: Liveness = LIVENESS, name: str = "student"
) -> Iterator[Peer]:
    """Run the student's side, hello said."""
    peer = Peer(keys, liveness)
    peer.channel.start()
    peer.channel.connect("teacher", endpoint, name, HELLO, b"address", b"key")
    try:
        yield peer
    finally:
        peer.channel.close()


@pytest.fixture
def keys(run_folder: Path) -> RunKeys:
    return RunKeys.load(run_folder)


def test_peers_talk_both_ways(keys: RunKeys) -> None:
    welcome, order = (
        Welcome(teacher=0, transports="tcp"),
        Order(sequence=0, slot=0, batch=1, length=1 << 20),
    )
    half = os.urandom(4 << 20)
    with listening(keys) as (teacher, endpoint), connected(keys, endpoint) as student:
        assert teacher.next() == ("student", HELLO, [b"address", b"key"])
        teacher.channel.send("student", welcome)
        assert student.next() == ("teacher", welcome, [])
        student.channel.send("teacher", order, half, half[::-1], b"rows")
        assert teacher.next() == ("student", order, [half, half[::-1], b"rows"])


def test_port_is_chosen_and_only_on_the_interface(keys: RunKeys) -> None:
    with listening(keys) as (_, one), listening(keys) as (_, other):
        assert one != other
        assert all(name.startswith("tcp://127.0.0.1:") for name in (one, other))


def test_messages_keep_their_order(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint), connected(keys, endpoint) as student:
        teacher.next()
        num_messages = 500
        for sequence in range(num_messages):
            order = Order(sequence=sequence, slot=0, batch=1, length=1)
            student.channel.send("teacher", order, b"ids.", b"pos.", b"")
        heard = [teacher.next()[1] for _ in range(num_messages)]
    assert [m.sequence for m in heard if isinstance(m, Order)] == list(range(num_messages))


def test_close_delivers_the_last_message(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint):
        with connected(keys, endpoint) as student:
            student.channel.send("teacher", Bye())
        assert [teacher.next()[1] for _ in range(2)] == [HELLO, Bye()]


def test_closing_twice_is_harmless(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint), connected(keys, endpoint) as student:
        teacher.next()
        student.channel.close()
        student.channel.close()


def test_channel_that_never_started_closes(keys: RunKeys) -> None:
    Peer(keys, LIVENESS).channel.close()


def test_message_to_nobody_is_skipped(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint):
        teacher.channel.send("nobody", Bye())
        with connected(keys, endpoint):
            assert teacher.next()[0] == "student"


@contextmanager
def raw_client(
    endpoint: str, keys: RunKeys | None, name: bytes = b"stranger"
) -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """Connect a plain socket, with CURVE if there are keys; yield it and how the handshake went."""
    handshakes = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.identity = name
        if keys is not None:
            client.curve_publickey = keys.student_public.encode()
            client.curve_secretkey = keys.student_secret.encode()
            client.curve_serverkey = keys.teacher_public.encode()
        monitor = client.get_monitor_socket(handshakes)
        client.connect(endpoint)
        client.send_multipart(encode(HELLO, b"address", b"key"))
        assert monitor.poll(int(1000 * WAIT_S))
        yield client, recv_monitor_message(monitor)["event"]
        client.disable_monitor()


@pytest.fixture
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> RunKeys:
    return RunKeys.create(tmp_path_factory.mktemp("other"))


def test_client_with_another_key_is_never_heard(keys: RunKeys, other_keys: RunKeys) -> None:
    wrong = replace(
        keys, student_public=other_keys.student_public, student_secret=other_keys.student_secret
    )
    with listening(keys) as (teacher, endpoint), raw_client(endpoint, wrong) as (_, event):
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        with connected(keys, endpoint):
            assert teacher.next()[0] == "student"
        assert teacher.heard.empty()


def test_client_without_a_key_is_never_heard(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint), raw_client(endpoint, None) as (_, event):
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        with connected(keys, endpoint):
            assert teacher.next()[0] == "student"
        assert teacher.heard.empty()


def test_listener_with_another_key_hears_nothing(keys: RunKeys, other_keys: RunKeys) -> None:
    imposter = replace(
        keys, teacher_public=other_keys.teacher_public, teacher_secret=other_keys.teacher_secret
    )
    liveness = Liveness(heartbeat_s=0.1, dead_after_s=0.5)
    with listening(imposter) as (teacher, endpoint), connected(keys, endpoint, liveness) as student:
        assert student.lost.get(timeout=WAIT_S) == ("teacher", Silent("silent for 0.5 s"))
        assert teacher.heard.empty()


def test_junk_on_the_port_has_no_effect(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint):
        host, port = endpoint.removeprefix("tcp://").split(":")
        for junk in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03"):
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as stranger:
                stranger.sendall(junk)
        with connected(keys, endpoint) as student:
            assert teacher.next()[0] == "student"
            teacher.channel.send("student", Bye())
            assert student.next()[1] == Bye()
        assert teacher.heard.empty()


def test_junk_of_an_authentic_client_has_no_effect(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint), raw_client(endpoint, keys) as (client, event):
        assert event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert teacher.next()[0] == "stranger"
        for frames in ([b""], [b"{}"], [os.urandom(100)] * 3, [*encode(Bye()), b"too much"]):
            client.send_multipart(frames)
        client.send_multipart(encode(Bye()))
        assert teacher.next() == ("stranger", Bye(), [])


@pytest.mark.parametrize("name", [b"\xff", b"new\nline", b"x" * 65, "\u00e9".encode(), b"a/b"])
def test_peer_with_an_improper_name_is_never_heard(keys: RunKeys, name: bytes) -> None:
    with listening(keys) as (teacher, endpoint), raw_client(endpoint, keys, name) as (_, event):
        assert event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        with connected(keys, endpoint):
            assert teacher.next()[0] == "student"
        assert teacher.heard.empty()


def test_connection_that_never_shakes_hands_is_closed(keys: RunKeys) -> None:
    with listening(keys) as (_, endpoint):
        host, _, port = endpoint.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as silent:
            start_s = time.monotonic()
            while silent.recv(100):
                pass
            assert time.monotonic() - start_s > LIVENESS.dead_after_s - 0.2


def test_who_has_not_said_hello_is_told_so(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint):
        student = Peer(keys, LIVENESS)
        student.channel.start()
        student.channel.connect("teacher", endpoint, "student", Heartbeat())
        assert student.next() == ("teacher", Bye(clean=False), [])
        student.channel.send("teacher", HELLO, b"address", b"key")
        assert teacher.next()[1] == HELLO
        student.channel.close()


def test_who_connects_again_is_heard_though_the_old_connection_stands(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint), raw_client(endpoint, keys):
        assert teacher.next()[0] == "stranger"
        with raw_client(endpoint, keys) as (client, _):
            assert teacher.next()[1] == HELLO
            teacher.channel.send("stranger", Bye())
            assert client.poll(int(1000 * WAIT_S))


class Returning(Peer):
    """A student's side that meets whoever says bye anew, once it is told to go on."""

    def __init__(self, keys: RunKeys, endpoint: str) -> None:
        super().__init__(keys, LIVENESS)
        self.go_on = threading.Event()
        self.greet = partial(
            self.channel.connect, "teacher", endpoint, "student", HELLO, b"address", b"key"
        )

    def _sort(self, peer: str, event: Event, buffers: list[bytes]) -> None:
        super()._sort(peer, event, buffers)
        if isinstance(event, Bye):
            self.go_on.wait(WAIT_S)
            self.channel.forget(peer)
            self.greet()


def test_a_callback_that_parts_from_a_peer_hears_no_more_of_it(keys: RunKeys) -> None:
    """Three goodbyes have been sent when it parts after the first: it greets anew, and once."""
    welcome = Welcome(teacher=0, transports="")
    with listening(keys) as (teacher, endpoint):
        student = Returning(keys, endpoint)
        with closing(student.channel):
            student.channel.start()
            student.greet()
            teacher.next()
            for _ in range(3):
                teacher.channel.send("student", Bye(clean=False))
            student.go_on.set()
            assert teacher.next()[1] == HELLO
            teacher.channel.send("student", welcome)
            assert [student.next()[1] for _ in range(2)] == [Bye(clean=False), welcome]
        assert teacher.heard.empty() and student.heard.empty()


def test_the_latest_connection_to_a_peer_is_the_one(keys: RunKeys) -> None:
    with listening(keys) as (teacher, endpoint), connected(keys, endpoint) as student:
        teacher.next()
        student.channel.connect("teacher", endpoint, "renamed", HELLO, b"address", b"key")
        assert teacher.next()[0] == "renamed"
        teacher.channel.send("student", Bye())
        teacher.channel.send("renamed", Welcome(teacher=0, transports=""))
        assert student.next()[1] == Welcome(teacher=0, transports="")


def test_killed_listener_is_gone_at_once(keys: RunKeys, start: Callable[..., Child]) -> None:
    told, theirs = SPAWN.Pipe(duplex=False)
    child = start(listen, keys, theirs)
    assert told.poll(WAIT_S)
    with connected(keys, told.recv()) as student:
        assert student.next()[1] == Welcome(teacher=0, transports="")
        start_s = time.monotonic()
        child.kill()
        assert student.lost.get(timeout=WAIT_S) == ("teacher", Gone("its process has ended"))
        assert time.monotonic() - start_s < 1.0


def test_stopped_peer_is_lost_in_time(keys: RunKeys, start: Callable[..., Child]) -> None:
    with listening(keys) as (teacher, endpoint):
        child = start(chat, keys, endpoint)
        assert teacher.next()[1] == HELLO
        start_s = time.monotonic()
        child.signal(signal.SIGSTOP)
        assert teacher.lost.get(timeout=WAIT_S) == ("student", Silent("silent for 1.2 s"))
        took_s = time.monotonic() - start_s
        margin_s = 0.5  # for a busy machine
        limit_s = LIVENESS.dead_after_s + LIVENESS.heartbeat_s
        assert LIVENESS.dead_after_s - LIVENESS.heartbeat_s - margin_s < took_s < limit_s + margin_s
        child.signal(signal.SIGCONT)
        assert teacher.lost.get(timeout=WAIT_S) == ("student", Heard())
        child.kill()
        assert teacher.lost.empty()


def test_peer_that_lives_is_not_lost_and_a_forgotten_one_is_not_missed(keys: RunKeys) -> None:
    liveness = Liveness(heartbeat_s=0.1, dead_after_s=0.5)
    with listening(keys, liveness) as (teacher, endpoint):
        with connected(keys, endpoint, liveness):
            teacher.next()
            with pytest.raises(queue.Empty):
                teacher.lost.get(timeout=2 * liveness.dead_after_s)
        teacher.channel.forget("student")
        with pytest.raises(queue.Empty):
            teacher.lost.get(timeout=2 * liveness.dead_after_s)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_error_in_a_callback_is_not_silent(keys: RunKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError("no room")

    with listening(keys) as (teacher, endpoint), connected(keys, endpoint) as student:
        teacher.next()
        monkeypatch.setattr(student.heard, "put", fail)
        teacher.channel.send("student", Bye())
        reason = "the control channel failed: OSError('no room')"
        assert student.lost.get(timeout=WAIT_S) == ("teacher", Silent(reason))
