"""The control channel: small messages over ZeroMQ, encrypted, with heartbeats.

A thread of its own owns the sockets, so that heartbeats go out while the main thread computes.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator

from transport.errors import ProtocolError
from transport.messages import MAX_BUFFER_BYTES, Heartbeat, Message, decode, encode
from transport.rendezvous import RunKeys

log = logging.getLogger(__name__)

OnMessage = Callable[[str, Message, list[bytes]], None]
OnLost = Callable[[str, str], None]
_LINGER_MS = 1000


@dataclass(frozen=True)
class Liveness:
    """How often a side says that it lives, and after which silence it counts as dead."""

    heartbeat_s: float = 1.0
    dead_after_s: float = 10.0


@dataclass
class _Peer:
    socket: zmq.Socket[bytes]
    address: list[bytes]
    last_seen: float = field(default_factory=time.monotonic)


class _OnlyKey:
    """ZAP policy: one public key is let in."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class ControlChannel:
    """Exchanges messages with named peers; callbacks run in the channel's thread."""

    def __init__(
        self, keys: RunKeys, liveness: Liveness, *, on_message: OnMessage, on_lost: OnLost
    ) -> None:
        """Prepare a channel.

        Args:
            keys: keys of the run.
            liveness: heartbeat interval and limit.
            on_message: called with peer, message and buffers.
            on_lost: called once with a peer that fell silent, and the reason.
        """
        self._keys = keys
        self._liveness = liveness
        self._on_message = on_message
        self._on_lost = on_lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._peers: dict[str, _Peer] = {}
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
        router.bind(f"tcp://{interface}:*")
        self._poller.register(router, zmq.POLLIN)
        self._router = router
        return str(router.get_string(zmq.LAST_ENDPOINT))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def connect(self, peer: str, endpoint: str, identity: str) -> None:
        """Connect to a peer that listens; `identity` is the name by which it knows this side."""

        def call() -> None:
            socket = self._socket(zmq.DEALER, self._keys.student_public, self._keys.student_secret)
            socket.identity = identity.encode()
            socket.curve_serverkey = self._keys.teacher_public.encode()
            socket.connect(endpoint)
            self._poller.register(socket, zmq.POLLIN)
            self._peers[peer] = _Peer(socket, [])

        self._in_thread(call)

    def send(self, peer: str, message: Message, *buffers: bytes) -> None:
        """Send a message; from any thread, without waiting. A peer that is gone is skipped."""
        frames = encode(message, *buffers)
        self._in_thread(lambda: self._send_now(peer, frames))

    def forget(self, peer: str) -> None:
        """Stop heartbeats to a peer and watching for its own."""
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
        if self._router is not None:
            self._router.close(_LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wake)

    def _socket(self, kind: int, public: str, secret: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = _LINGER_MS
        socket.maxmsgsize = MAX_BUFFER_BYTES
        socket.curve_publickey = public.encode()
        socket.curve_secretkey = secret.encode()
        return socket

    def _in_thread(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            next_heartbeat = time.monotonic()
            while not self._stopping:
                pause_s = max(0.0, next_heartbeat - time.monotonic())
                ready = self._poller.poll(int(1000 * pause_s) + 1)
                for source, _ in ready:
                    self._receive(source)
                self._run_calls()
                if time.monotonic() >= next_heartbeat:  # after what waited has been received
                    self._beat()
                    next_heartbeat = time.monotonic() + self._liveness.heartbeat_s
            self._run_calls()
        except BaseException as error:
            for peer in list(self._peers):
                self._on_lost(peer, f"the control channel failed: {error!r}")
            raise

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _receive(self, source: zmq.Socket[bytes] | int) -> None:
        if isinstance(source, int):
            os.eventfd_read(source)
            return
        try:
            while True:
                self._accept(source, source.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            pass

    def _accept(self, source: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if source is self._router:
            identity = frames.pop(0)
            peer = identity.decode(errors="replace")
        else:
            peer = next(name for name, known in self._peers.items() if known.socket is source)
        try:
            message, buffers = decode(frames)
        except ProtocolError as error:
            log.warning("ignored a message from %s: %s", peer, error)
            return
        if source is self._router and message.kind == "hello":
            self._peers.setdefault(peer, _Peer(source, [identity]))
        if peer not in self._peers:
            return
        self._peers[peer].last_seen = time.monotonic()
        if message.kind != "heartbeat":
            self._on_message(peer, message, buffers)

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
        if known is not None and known.socket is not self._router:
            self._poller.unregister(known.socket)
            known.socket.close(_LINGER_MS)

    def _beat(self) -> None:
        limit = time.monotonic() - self._liveness.dead_after_s
        frames = encode(Heartbeat())
        for peer, known in list(self._peers.items()):
            if known.last_seen < limit:
                self._drop(peer)
                self._on_lost(peer, f"silent for {self._liveness.dead_after_s:g} s")
            else:
                self._send_now(peer, frames)
