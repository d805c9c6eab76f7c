"""The control channel: small messages over ZeroMQ, encrypted, with heartbeats.

A thread of its own owns the sockets, so that heartbeats go out while the main thread computes.
"""

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from transport.errors import ProtocolError
from transport.liveness import Gone, Heard, Liveness, Probe, Silent
from transport.messages import MAX_BUFFER_BYTES, Bye, Heartbeat, Message, decode, encode
from transport.rendezvous import RunKeys

log = logging.getLogger(__name__)

Event = Message | Silent | Heard | Gone
OnEvent = Callable[[str, Event, list[bytes]], None]
_LINGER_MS = 1000
_NAME = re.compile(rb"[\w.-]{1,64}")
"""Names go into logs and files."""


@dataclass
class _Peer:
    socket: zmq.Socket[bytes]
    address: list[bytes]
    endpoint: tuple[str, int] | None = None  # where it listens, if it does
    monitor: zmq.Socket[bytes] | None = None  # tells when its connection closes
    last_seen: float = field(default_factory=time.monotonic)
    silent: bool = False
    disconnected: bool = False
    probe: Probe | None = None


class _OnlyKey:
    """ZAP policy: one public key is let in."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class ControlChannel:
    """Exchanges messages with named peers; callbacks run in the channel's thread."""

    def __init__(self, keys: RunKeys, liveness: Liveness, on_event: OnEvent) -> None:
        """Prepare a channel.

        Args:
            keys: keys of the run.
            liveness: heartbeat interval and limit.
            on_event: called with the peer, a message or what became of the peer, and buffers.
        """
        self._keys = keys
        self._liveness = liveness
        self._on_event = on_event
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._peers: dict[str, _Peer] = {}
        self._owners: dict[zmq.Socket[bytes], str] = {}  # of sockets of one peer only
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def listen(self, interface: str) -> str:
        """Accept peers on a port that the system chooses; return the endpoint. Before `start`."""
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            credentials_provider=_OnlyKey(self._keys.student_public)
        )
        router = self._socket(zmq.ROUTER, self._keys.teacher_public, self._keys.teacher_secret)
        router.curve_server = True
        router.router_handover = True  # who connects again is heard, the old connection or not
        router.bind(f"tcp://{interface}:*")
        self._poller.register(router, zmq.POLLIN)
        self._router = router
        return str(router.get_string(zmq.LAST_ENDPOINT))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def connect(
        self, peer: str, endpoint: str, identity: str, hello: Message, *buffers: bytes
    ) -> None:
        """Connect to a peer that listens, in place of an earlier connection, and say hello.

        Args:
            peer: its name on this side.
            endpoint: where it listens.
            identity: the name by which it shall know this side.
            hello: the first message; what comes before it would not be heard.
            buffers: its buffers.
        """
        frames = encode(hello, *buffers)

        def call() -> None:
            self._drop(peer)
            dealer = self._socket(zmq.DEALER, self._keys.student_public, self._keys.student_secret)
            dealer.identity = identity.encode()
            dealer.curve_serverkey = self._keys.teacher_public.encode()
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.connect(endpoint)
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            self._peers[peer] = _Peer(dealer, [], (host, int(port)), monitor)
            for source in (dealer, monitor):
                self._owners[source] = peer
                self._poller.register(source, zmq.POLLIN)
            self._send_now(peer, frames)

        self._in_thread(call)

    def send(self, peer: str, message: Message, *buffers: bytes) -> None:
        """Send a message; from any thread, without waiting. A peer that is gone is skipped."""
        frames = encode(message, *buffers)
        self._in_thread(lambda: self._send_now(peer, frames))

    def forget(self, peer: str) -> None:
        """Part from a peer: in a callback at once, so that nothing more is heard of it."""
        if threading.current_thread() is self._thread:
            self._drop(peer)
        else:
            self._in_thread(lambda: self._drop(peer))

    def close(self) -> None:
        """Send what is queued, stop the thread, close the sockets."""
        if self._context.closed:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        for peer in list(self._peers):
            self._drop(peer)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(_LINGER_MS)
        os.close(self._wake)

    def _socket(self, kind: int, public: str, secret: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = _LINGER_MS
        socket.maxmsgsize = MAX_BUFFER_BYTES
        socket.handshake_ivl = int(1000 * self._liveness.dead_after_s)
        socket.curve_publickey = public.encode()
        socket.curve_secretkey = secret.encode()
        return socket

    def _in_thread(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            last_beat = time.monotonic() - self._liveness.heartbeat_s
            while not self._stopping:
                pause_s = last_beat + self._liveness.heartbeat_s - time.monotonic()
                ready = self._poller.poll(int(1000 * max(0.0, pause_s)) + 1)
                for source, _ in ready:
                    self._receive(source)
                self._run_calls()
                late_s = time.monotonic() - last_beat - self._liveness.heartbeat_s
                if late_s >= 0:  # after what waited has been received
                    self._beat(late_s)
                    last_beat = time.monotonic()
            self._run_calls()
        except BaseException as error:
            for peer in list(self._peers):
                self._on_event(peer, Silent(f"the control channel failed: {error!r}"), [])
            raise

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _receive(self, source: zmq.Socket[bytes] | int) -> None:
        if isinstance(source, int):
            os.eventfd_read(source)
            return
        peer = self._owners.get(source)
        if peer is not None and source is self._peers[peer].monitor:
            recv_monitor_message(source)
            self._peers[peer].disconnected = True
            self._look_for(peer)
            return
        with suppress(zmq.Again):
            while source is self._router or source in self._owners:  # not parted from meanwhile
                self._accept(source, source.recv_multipart(zmq.NOBLOCK))

    def _accept(self, source: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if source is self._router:
            identity = frames.pop(0)
            if not _NAME.fullmatch(identity):
                log.warning("ignored a message from a peer named %r", identity)
                return
            peer = identity.decode()
        else:
            peer = self._owners[source]
        try:
            message, buffers = decode(frames)
        except ProtocolError as error:
            log.warning("ignored a message from %s: %s", peer, error)
            return
        if source is self._router and message.kind == "hello":
            self._peers.setdefault(peer, _Peer(source, [identity]))
        elif peer not in self._peers:  # it was given up, and lives: it may say hello again
            if message.kind != "bye":
                source.send_multipart([identity, *encode(Bye(clean=False))], zmq.NOBLOCK)
            return
        self._hear(peer)
        if message.kind != "heartbeat":
            self._on_event(peer, message, buffers)

    def _hear(self, peer: str) -> None:
        known = self._peers[peer]
        known.last_seen, known.disconnected = time.monotonic(), False
        if known.silent:
            known.silent = False
            self._on_event(peer, Heard(), [])

    def _send_now(self, peer: str, frames: list[bytes]) -> None:
        known = self._peers.get(peer)
        if known is None:
            return
        try:
            known.socket.send_multipart([*known.address, *frames], zmq.NOBLOCK)
        except zmq.Again:  # a full queue: the peer reads nothing, and its silence will tell
            log.warning("no room to send to %s", peer)

    def _drop(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        if known.probe is not None:
            known.probe.close()
        if known.monitor is not None:
            for source in (known.socket, known.monitor):
                del self._owners[source]
                self._poller.unregister(source)
            known.socket.disable_monitor()
            known.monitor.close(0)
            known.socket.close(_LINGER_MS)

    def _beat(self, late_s: float) -> None:
        """Say that this side lives, and find who is silent; who was stopped itself cannot tell."""
        now = time.monotonic()
        limit = now - self._liveness.dead_after_s
        frames = encode(Heartbeat())
        for peer, known in list(self._peers.items()):
            self._send_now(peer, frames)
            known.last_seen = min(now, known.last_seen + late_s)
            if known.last_seen < limit and not known.silent:
                known.silent = True
                reason = f"silent for {self._liveness.dead_after_s:g} s"
                self._on_event(peer, Silent(reason), [])
            if known.silent or known.disconnected:
                self._look_for(peer)

    def _look_for(self, peer: str) -> None:
        """Find out whether the process of a silent peer that listens has ended."""
        known = self._peers.get(peer)
        if known is None or known.endpoint is None:
            return
        known.probe = known.probe or Probe(known.endpoint)
        refused = known.probe.refused()
        if refused is None:
            return
        known.probe.close()
        known.probe = None
        if refused:
            self._drop(peer)
            self._on_event(peer, Gone("its process has ended"), [])
