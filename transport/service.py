"""The teacher's side: takes orders, calls a function, writes the answers into the rings."""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transport.control import ControlChannel, Liveness
from transport.errors import DeadlineError, PeerLostError, TransportError, UcxError
from transport.handles import Handle
from transport.layout import RingGeometry, SlotHeader, token_digest
from transport.messages import PROTOCOL_VERSION, Bye, Failed, Hello, Message, Order, Refuse, Welcome
from transport.rendezvous import RunKeys, publish, withdraw
from transport.ring import RingWriter
from transport.ucx import Worker

log = logging.getLogger(__name__)

_MAX_ERROR_CHARS = 8000  # a longer header than a control message may have would not be heard


@dataclass(frozen=True)
class Lost:
    """Event: a student fell silent."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """Event: this process was asked to end."""


@dataclass(frozen=True)
class Served:
    """What answering one order took; times in seconds."""

    student: str
    num_tokens: int
    num_bytes: int
    waited_s: float
    compute_s: float
    write_s: float
    queued: int


@dataclass
class _Student:
    writer: RingWriter
    orders: deque[tuple[Order, list[bytes]]] = field(default_factory=deque)


Event = Message | Lost | Stop
Compute = Callable[[Order, list[bytes]], memoryview]
"""Computes an order: its three buffers in, the bytes of the wanted rows out."""


class TeacherService(Handle):
    """Serves the students of a run until all have said bye.

    Students are served round robin, the orders of each first in first out. Everything but the
    control channel happens in the thread that calls `serve`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        index: int,
        facts: Mapping[str, Any],
        interface: str,
        liveness: Liveness,
        on_served: Callable[[Served], None] | None = None,
    ) -> None:
        """Open the control channel and publish this teacher in the run folder.

        Args:
            folder: run folder.
            index: which teacher this is.
            facts: what this teacher is; a student that expects something else is refused.
            interface: network interface to listen on.
            liveness: heartbeat interval and limit.
            on_served: called after every answer.
        """
        self._folder = folder
        self._keys = RunKeys.load(folder)
        self._index = index
        self._name = f"teacher-{index}"
        self._facts = dict(facts)
        self._liveness = liveness
        self._on_served = on_served
        self._students: dict[str, _Student] = {}
        self._events: queue.SimpleQueue[tuple[str, Event, list[bytes]]] = queue.SimpleQueue()
        self._num_ended = 0
        self._stopped = False
        self._worker = Worker()
        self._channel = ControlChannel(
            self._keys,
            liveness,
            on_message=lambda peer, message, buffers: self._events.put((peer, message, buffers)),
            on_lost=lambda peer, reason: self._events.put((peer, Lost(reason), [])),
        )
        endpoint = self._channel.listen(interface)
        self._channel.start()
        publish(folder, self._name, {"endpoint": endpoint})

    def serve(self, compute: Compute, *, num_students: int, connect_timeout_s: float) -> None:
        """Serve until this many students have said bye, or `stop` was called.

        Raises:
            DeadlineError: no student came within `connect_timeout_s`.
            PeerLostError: a student is gone without a bye.
        """
        deadline = time.monotonic() + connect_timeout_s
        idle_since = time.monotonic()
        while self._num_ended < num_students and not self._stopped:
            self._handle_events()
            student = next((name for name, s in self._students.items() if s.orders), None)
            if student is not None:
                self._answer(student, compute, time.monotonic() - idle_since)
                idle_since = time.monotonic()
            elif not self._students and self._num_ended == 0 and time.monotonic() > deadline:
                raise DeadlineError(f"no student came within {connect_timeout_s:g} s")

    def stop(self) -> None:
        """Let `serve` return after the order under way; safe in a signal handler."""
        self._events.put(("", Stop(), []))

    def close(self) -> None:
        """Withdraw, tell the students, close the connections."""
        withdraw(self._folder, self._name)
        for name in list(self._students):
            self._channel.send(name, Bye())
            self._forget(name, force=True)
        self._channel.close()
        self._worker.close()

    def _handle_events(self) -> None:
        """Handle what has come in; wait for something if there is nothing to compute."""
        wait = not any(student.orders for student in self._students.values())
        try:
            self._handle(*self._events.get(block=wait, timeout=self._liveness.heartbeat_s))
            while True:
                self._handle(*self._events.get_nowait())
        except queue.Empty:
            pass

    def _handle(self, peer: str, event: Event, buffers: list[bytes]) -> None:
        match event:
            case Hello():
                self._welcome(peer, event, buffers)
            case Order():
                if peer in self._students:
                    self._students[peer].orders.append((event, buffers))
            case Bye():
                self._forget(peer, force=False)
                self._channel.send(peer, Bye())
                self._channel.forget(peer)
                self._num_ended += 1
            case Lost(reason=reason):
                self._forget(peer, force=True)
                raise PeerLostError(f"{peer} is lost: {reason}; see its log")
            case Stop():
                self._stopped = True
            case _:
                log.warning("ignored %s from %s", event.kind, peer)

    def _welcome(self, peer: str, hello: Hello, buffers: list[bytes]) -> None:
        reason = self._objection(hello)
        if reason is not None:
            self._channel.send(peer, Refuse(reason=reason))
            self._channel.forget(peer)
            return
        geometry = RingGeometry(hello.slots, hello.slot_tokens, hello.hidden_size, hello.item_bytes)
        address, key = buffers
        writer = RingWriter(self._worker, geometry, peer=address, address=hello.address, key=key)
        self._students[peer] = _Student(writer)
        transports = writer.transports()
        log.info("%s is there, over %s", peer, transports)
        self._channel.send(peer, Welcome(teacher=self._index, transports=transports))

    def _objection(self, hello: Hello) -> str | None:
        """Return why this student cannot be served, or None."""
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol version {hello.protocol}, this teacher speaks {PROTOCOL_VERSION}"
        if hello.run != self._keys.run:
            return f"run {hello.run}, this teacher belongs to {self._keys.run}"
        for name in sorted(self._facts.keys() | hello.facts.keys()):
            ours, theirs = self._facts.get(name), hello.facts.get(name)
            if ours != theirs:
                return f"{name} is {ours!r} here, the student expects {theirs!r}"
        return None

    def _answer(self, name: str, compute: Compute, waited_s: float) -> None:
        student = self._students.pop(name)
        self._students[name] = student  # to the end: round robin
        order, buffers = student.orders.popleft()
        start = time.monotonic()
        try:
            payload = compute(order, buffers)
        except Exception as error:
            log.exception("order %d of %s failed", order.sequence, name)
            failed = Failed(
                sequence=order.sequence,
                attempt=order.attempt,
                error=type(error).__name__,
                message=str(error)[:_MAX_ERROR_CHARS],
            )
            self._channel.send(name, failed)
            return
        computed = time.monotonic()
        self._write(name, order, buffers[0], payload, computed - start)
        if self._on_served is not None:
            self._on_served(
                Served(
                    student=name,
                    num_tokens=order.num_tokens,
                    num_bytes=payload.nbytes,
                    waited_s=waited_s,
                    compute_s=computed - start,
                    write_s=time.monotonic() - computed,
                    queued=sum(len(s.orders) for s in self._students.values()),
                )
            )

    def _write(
        self,
        name: str,
        order: Order,
        token_ids: bytes,
        payload: memoryview,
        compute_s: float,
    ) -> None:
        student = self._students[name]
        geometry = student.writer.geometry
        header = SlotHeader(
            sequence=order.sequence,
            attempt=order.attempt,
            teacher=self._index,
            num_rows=payload.nbytes // geometry.row_bytes,
            hidden_size=geometry.hidden_size,
            item_bytes=geometry.item_bytes,
            digest=token_digest(token_ids),
            compute_s=compute_s,
        )
        try:
            student.writer.write(order.slot, payload, header, self._liveness.dead_after_s)
        except (DeadlineError, UcxError) as error:
            raise PeerLostError(f"{name} cannot be written to: {error}; see its log") from error

    def _forget(self, name: str, *, force: bool) -> None:
        student = self._students.pop(name, None)
        if student is None:
            return
        try:
            student.writer.close(force=force)
        except TransportError as error:
            log.warning("closing the connection to %s: %s", name, error)
