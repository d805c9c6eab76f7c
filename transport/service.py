"""The teacher's side: takes orders, calls a function, writes the answers into the rings."""

import logging
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transport.binding import Choice, open_worker
from transport.control import ControlChannel, Event
from transport.errors import (
    DeadlineError,
    PeerLostError,
    RefusedError,
    TransportError,
    UcxError,
)
from transport.handles import Handle
from transport.layout import SlotHeader, token_digest
from transport.liveness import Heard, Liveness, Silent
from transport.messages import (
    INT32_BYTES,
    PROTOCOL_VERSION,
    Bye,
    Cancel,
    Cancelled,
    Failed,
    Hello,
    Order,
    Refuse,
    Welcome,
    as_text,
)
from transport.protocols import check_connection
from transport.rendezvous import RunKeys, publish, withdraw
from transport.ring import RingWriter

log = logging.getLogger(__name__)


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
    silent_since: float | None = None
    unwritten: memoryview | None = None  # of a write whose deadline passed: UCX still reads it
    cancels: list[Cancel] = field(default_factory=list)  # to be confirmed when that has ended

    @property
    def has_work(self) -> bool:
        """Whether there is something to do for it now."""
        busy = bool(self.orders) or self.unwritten is not None
        return busy and self.silent_since is None


Compute = Callable[[Order, list[bytes]], memoryview]
"""Computes an order: its three buffers in, the bytes of the wanted rows out."""


class TeacherService(Handle):
    """Serves the students of a run until all have said bye; they may come and go at any time.

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
        checksum: bool = False,
        binding: Choice = "auto",
        require_rdma: bool = False,
        on_served: Callable[[Served], None] | None = None,
    ) -> None:
        """Open the control channel and publish this teacher in the run folder.

        Args:
            folder: run folder.
            index: which teacher this is.
            facts: what this teacher is; a student that expects something else is refused.
            interface: network interface to listen on.
            liveness: heartbeat interval and limits.
            checksum: send a CRC-32C with every payload.
            binding: binding to UCX.
            require_rdma: refuse students whose memory cannot be written by RDMA.
            on_served: called after every answer.
        """
        self._folder = folder
        self._keys = RunKeys.load(folder)
        self._index = index
        self._name = f"teacher-{index}.{uuid.uuid4().hex[:8]}"
        self._facts = dict(facts)
        self._liveness = liveness
        self._checksum = checksum
        self._on_served = on_served
        self._students: dict[str, _Student] = {}
        self._events: queue.SimpleQueue[tuple[str, Event | Stop, list[bytes]]] = queue.SimpleQueue()
        self._num_ended = 0
        self._stop_at: float | None = None
        self._computing: tuple[str, int, int] | None = None
        self._require_rdma = require_rdma
        self._worker = open_worker(binding)
        self._channel = ControlChannel(self._keys, liveness, lambda *event: self._events.put(event))
        endpoint = self._channel.listen(interface)
        self._channel.start()
        publish(folder, self._name, endpoint)

    def serve(self, compute: Compute, *, num_students: int, connect_timeout_s: float) -> None:
        """Serve until this many students have said bye.

        After `stop`, until those that are there have said bye, but no longer than
        `liveness.grace_s`.

        Raises:
            DeadlineError: no student came within `connect_timeout_s`.
            PeerLostError: the students were lost and none came back within `liveness.grace_s`.
        """
        alone_since = idle_since = time.monotonic()
        limit_s, came = connect_timeout_s, False
        while self._num_ended < num_students and not self._has_stopped():
            self._handle_events()
            name = next((name for name, s in self._students.items() if s.has_work), None)
            if name is not None:
                self._serve(name, compute, time.monotonic() - idle_since)
                idle_since = time.monotonic()
            self._give_up_silent()
            if any(student.silent_since is None for student in self._students.values()):
                alone_since, limit_s, came = time.monotonic(), self._liveness.grace_s, True
            elif time.monotonic() - alone_since > limit_s:
                if came:
                    raise PeerLostError(f"no student is left since {limit_s:g} s; see their logs")
                raise DeadlineError(f"no student came within {limit_s:g} s")

    def stop(self) -> None:
        """Let `serve` come to its end; safe in a signal handler."""
        self._events.put(("", Stop(), []))

    def close(self) -> None:
        """Withdraw, tell the students, close the connections."""
        withdraw(self._folder, self._name)
        for name, student in list(self._students.items()):
            clean = student.unwritten is None
            self._forget(name, force=True)
            self._channel.send(name, Bye(clean=clean))
        self._channel.close()
        self._worker.close()

    def _has_stopped(self) -> bool:
        if self._stop_at is None:
            return False
        return not self._students or time.monotonic() > self._stop_at

    def _handle_events(self, *, wait: bool = True) -> None:
        """Handle what has come in; wait for something if there is nothing to do."""
        wait = wait and not any(student.has_work for student in self._students.values())
        try:
            self._handle(*self._events.get(block=wait, timeout=self._liveness.heartbeat_s))
            while True:
                self._handle(*self._events.get_nowait())
        except queue.Empty:
            pass

    def _handle(self, peer: str, event: Event | Stop, buffers: list[bytes]) -> None:
        student = self._students.get(peer)
        match event:
            case Hello():
                self._welcome(peer, event, buffers)
            case Stop():
                self._stop_at = self._stop_at or time.monotonic() + self._liveness.grace_s
            case Bye():
                self._num_ended += student is not None  # else it had been refused
                self._forget(peer, force=False)
                self._channel.send(peer, Bye())
                self._channel.forget(peer)
            case Silent(reason=reason) if student is not None:
                log.warning("%s is %s; its orders wait", peer, reason)
                student.silent_since = time.monotonic()
            case Heard() if student is not None:
                log.info("%s is back", peer)
                student.silent_since = None
            case Order() if student is not None:
                student.orders.append((event, buffers))
            case Cancel() if student is not None:
                self._cancel(peer, student, event)
            case _:
                log.warning("ignored %s from %s", type(event).__name__, peer)

    def _welcome(self, peer: str, hello: Hello, buffers: list[bytes]) -> None:
        try:
            self._check(hello)
            self._forget(peer, force=True)  # it begins anew
            writer, transports = self._connect(peer, hello, *buffers)
        except (RefusedError, UcxError) as error:
            log.warning("refused %s: %s", peer, error)
            self._channel.send(peer, Refuse(reason=as_text(error)))
            self._channel.forget(peer)
            return
        self._students[peer] = _Student(writer)
        self._channel.send(peer, Welcome(teacher=self._index, transports=transports))

    def _connect(
        self, peer: str, hello: Hello, address: bytes, key: bytes
    ) -> tuple[RingWriter, str]:
        """Connect to a student's ring; return the transports in use too."""
        writer = RingWriter(
            self._worker,
            hello.geometry,
            peer=address,
            address=hello.address,
            key=key,
            checksum=self._checksum,
        )
        try:
            return writer, check_connection(
                peer, writer.describe(), hello.geometry.slot_bytes, rdma=self._require_rdma
            )
        except RefusedError:
            writer.close(force=True)
            raise

    def _check(self, hello: Hello) -> None:
        """Raise RefusedError with the reason if this student cannot be served."""
        if hello.protocol != PROTOCOL_VERSION:
            raise RefusedError(
                f"protocol version {hello.protocol}, this teacher speaks {PROTOCOL_VERSION}"
            )
        if hello.run != self._keys.run:
            raise RefusedError(f"run {hello.run}, this teacher belongs to {self._keys.run}")
        for name in sorted(self._facts.keys() | hello.facts.keys()):
            ours, theirs = self._facts.get(name), hello.facts.get(name)
            if ours != theirs:
                raise RefusedError(f"{name} is {ours!r} here, the student expects {theirs!r}")

    def _cancel(self, peer: str, student: _Student, cancel: Cancel) -> None:
        """Confirm that an order will not be written, as soon as that is so."""
        wanted = (cancel.sequence, cancel.attempt)
        student.orders = deque(
            item for item in student.orders if (item[0].sequence, item[0].attempt) != wanted
        )
        if student.unwritten is not None or self._computing == (peer, *wanted):
            student.cancels.append(cancel)
        else:
            self._channel.send(peer, Cancelled(sequence=cancel.sequence, attempt=cancel.attempt))

    def _confirm(self, peer: str, student: _Student) -> list[tuple[int, int]]:
        """Confirm what was cancelled meanwhile; return it."""
        done = [(cancel.sequence, cancel.attempt) for cancel in student.cancels]
        student.cancels.clear()
        for sequence, attempt in done:
            self._channel.send(peer, Cancelled(sequence=sequence, attempt=attempt))
        return done

    def _serve(self, name: str, compute: Compute, waited_s: float) -> None:
        """Do the next thing for a student: end a write that was late, or answer an order."""
        student = self._students.pop(name)
        self._students[name] = student  # to the end: round robin
        if student.unwritten is not None:
            self._write(name, student, lambda: student.writer.flush(self._liveness.heartbeat_s))
            return
        order, buffers = student.orders.popleft()
        self._computing = (name, order.sequence, order.attempt)
        start = time.monotonic()
        payload = self._compute(name, compute, order, buffers)
        computed = time.monotonic()
        self._handle_events(wait=False)
        self._computing = None
        if self._students.get(name) is not student or payload is None:
            return
        if (order.sequence, order.attempt) in self._confirm(name, student):
            return
        if student.silent_since is not None:  # it may come back
            student.orders.appendleft((order, buffers))
            return
        header = self._header(student, order, buffers[0], payload, computed - start)
        student.unwritten = payload
        limit_s = self._liveness.dead_after_s
        write = partial(student.writer.write, order.slot, payload, header, limit_s)
        if self._write(name, student, write) and self._on_served is not None:
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

    def _compute(
        self, name: str, compute: Compute, order: Order, buffers: list[bytes]
    ) -> memoryview | None:
        """Return the answer to an order, or tell the student why there is none."""
        geometry = self._students[name].writer.geometry
        try:
            payload = compute(order, buffers)
            geometry.check(order.slot, len(buffers[2]) // INT32_BYTES, payload.nbytes)
        except Exception as error:
            log.exception("order %d of %s failed", order.sequence, name)
            failed = Failed(
                sequence=order.sequence,
                attempt=order.attempt,
                error=type(error).__name__,
                message=as_text(error),
            )
            self._channel.send(name, failed)
            return None
        return payload

    def _header(
        self,
        student: _Student,
        order: Order,
        token_ids: bytes,
        payload: memoryview,
        compute_s: float,
    ) -> SlotHeader:
        geometry = student.writer.geometry
        return SlotHeader(
            sequence=order.sequence,
            attempt=order.attempt,
            teacher=self._index,
            num_rows=payload.nbytes // geometry.row_bytes,
            hidden_size=geometry.hidden_size,
            item_bytes=geometry.item_bytes,
            digest=token_digest(token_ids),
            compute_s=compute_s,
        )

    def _write(self, name: str, student: _Student, write: Callable[[], None]) -> bool:
        """Write or end a write; return whether all of it is in the student's memory."""
        try:
            write()
        except DeadlineError as error:
            log.warning("%s cannot be written to now: %s", name, error)
            return False
        except UcxError as error:
            log.warning("the connection to %s broke: %s", name, error)
            self._give_up(name)
            return False
        student.unwritten = None
        self._confirm(name, student)
        return True

    def _give_up_silent(self) -> None:
        """Drop the orders of students that have been silent for too long."""
        limit = time.monotonic() - self._liveness.grace_s
        for name, student in list(self._students.items()):
            if student.silent_since is not None and student.silent_since < limit:
                self._give_up(name)

    def _give_up(self, name: str) -> None:
        """Drop a student; if it lives, it may say hello again."""
        self._forget(name, force=True)
        self._channel.send(name, Bye(clean=False))
        self._channel.forget(name)

    def _forget(self, name: str, *, force: bool) -> None:
        student = self._students.pop(name, None)
        if student is None:
            return
        try:
            student.writer.close(force=force)
        except TransportError as error:
            log.warning("closing the connection to %s: %s", name, error)
