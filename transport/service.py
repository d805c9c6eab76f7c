"""The teacher's side: takes orders, calls a function, writes the answers into the rings."""

import logging
import queue
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from transport.liveness import Heard, Liveness, Silent
from transport.messages import (
    Bye,
    Cancel,
    Hello,
    Order,
    Refuse,
    Welcome,
    as_text,
)
from transport.protocols import check_connection
from transport.rendezvous import RunKeys, publish, withdraw
from transport.ring import RingWriter
from transport.student import Compute, Student, check_hello

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
        self._students: dict[str, Student] = {}
        self._events: queue.SimpleQueue[tuple[str, Event | Stop, list[bytes]]] = queue.SimpleQueue()
        self._num_ended = 0
        self._stop_at: float | None = None
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
            student = next((s for s in self._students.values() if s.has_work), None)
            if student is not None:
                self._serve(student, compute, time.monotonic() - idle_since)
                idle_since = time.monotonic()
            self._give_up_silent()
            if any(s.silent_since is None for s in self._students.values()):
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
            clean = not student.is_writing
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
                student.put(event, buffers)
            case Cancel() if student is not None:
                student.cancel(event)
            case _:
                log.warning("ignored %s from %s", type(event).__name__, peer)

    def _welcome(self, peer: str, hello: Hello, buffers: list[bytes]) -> None:
        self._forget(peer, force=True)  # it begins anew
        try:
            check_hello(hello, self._keys.run, self._facts)
            writer, transports = self._connect(peer, hello, *buffers)
        except (RefusedError, UcxError) as error:
            log.warning("refused %s: %s", peer, error)
            self._channel.send(peer, Refuse(reason=as_text(error)))
            self._channel.forget(peer)
            return
        self._students[peer] = Student(peer, writer, partial(self._channel.send, peer))
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
        largest = hello.geometry.slot_bytes
        try:
            return writer, check_connection(
                peer, writer.describe(), largest, rdma=self._require_rdma
            )
        except RefusedError:
            writer.close(force=True)
            raise

    def _serve(self, student: Student, compute: Compute, waited_s: float) -> None:
        """Do the next thing for a student: end a write that was late, or answer an order."""
        self._students[student.name] = self._students.pop(student.name)  # the last: round robin
        if student.is_writing:
            self._write(student, partial(student.finish, self._liveness.heartbeat_s))
            return
        order, buffers = student.next()
        start = time.monotonic()
        payload = student.compute(compute, order, buffers)
        computed = time.monotonic()
        self._handle_events(wait=False)
        wanted = student.computed()
        if self._students.get(student.name) is not student or payload is None or not wanted:
            return
        if student.silent_since is not None:  # it may come back
            student.put_back(order, buffers)
            return
        header = student.header(
            order, buffers[0], payload, teacher=self._index, compute_s=computed - start
        )
        limit_s = self._liveness.dead_after_s
        write = partial(student.write, order, header, payload, limit_s)
        if self._write(student, write) and self._on_served is not None:
            self._on_served(
                Served(
                    student=student.name,
                    num_tokens=order.num_tokens,
                    num_bytes=payload.nbytes,
                    waited_s=waited_s,
                    compute_s=computed - start,
                    write_s=time.monotonic() - computed,
                    queued=sum(s.num_orders for s in self._students.values()),
                )
            )

    def _write(self, student: Student, write: Callable[[], None]) -> bool:
        """Write or end a write; return whether all of it is in the student's memory."""
        try:
            write()
        except DeadlineError as error:
            log.warning("%s cannot be written to now: %s", student.name, error)
            return False
        except UcxError as error:
            log.warning("the connection to %s broke: %s", student.name, error)
            self._give_up(student.name)
            return False
        return True

    def _give_up_silent(self) -> None:
        """Drop the orders of students that have been silent for too long."""
        for name, student in list(self._students.items()):
            if student.is_silent_for(self._liveness.grace_s):
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
