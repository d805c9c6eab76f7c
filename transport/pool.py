"""The student's side of the orders: a ring, the teachers that write into it, what came back."""

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transport.answers import Answer, check_answer
from transport.binding import Choice, open_worker
from transport.control import ControlChannel, Event
from transport.errors import (
    DeadlineError,
    OrderFailedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    TransportError,
)
from transport.greeting import Greeter
from transport.handles import Handle
from transport.layout import RingGeometry
from transport.liveness import Gone, Heard, Liveness, Silent
from transport.memory import Pin, lock
from transport.messages import (
    INT32_BYTES,
    PROTOCOL_VERSION,
    Bye,
    Cancel,
    Cancelled,
    Failed,
    Hello,
    Refuse,
    Welcome,
)
from transport.orders import OrderBook, Work
from transport.rendezvous import RunKeys
from transport.ring import Ring

log = logging.getLogger(__name__)

_POLL_S = 0.05
_TICK_S = 0.25


class TeacherPool(Handle):
    """Gives orders to teachers and takes their answers in the order of sequence.

    One order per slot is all the back-pressure there is. Teachers come and go at any time; what a
    lost one owed, another computes. `order`, `take` and `release` are called from one thread.
    """

    def __init__(
        self,
        folder: Path,
        geometry: RingGeometry,
        *,
        rank: int,
        facts: Mapping[str, Any],
        liveness: Liveness,
        num_spare_slots: int = 0,
        order_timeout_s: float = 60.0,
        pin: Pin = lock,
        binding: Choice = "auto",
    ) -> None:
        """Make the ring.

        Args:
            folder: run folder.
            geometry: geometry of the ring.
            rank: rank of this student.
            facts: what the teachers must be; one that differs is refused.
            liveness: heartbeat interval and limits.
            num_spare_slots: how many of the ring's slots are kept for orders of lost teachers.
            order_timeout_s: after which time an order is given to another teacher, if there is one.
            pin: pins the ring's memory.
            binding: binding to UCX.
        """
        keys = RunKeys.load(folder)
        self._num_orders = geometry.slots - num_spare_slots
        self._order_timeout_s = order_timeout_s
        self._worker = open_worker(binding)
        self._ring = Ring(self._worker, geometry, pin)
        self._liveness = liveness
        self._book = OrderBook(geometry.slots, rank, self._is_ready)
        self._changed = threading.Condition()
        self._welcomed: set[str] = set()
        self._failure: TransportError | None = None
        self._next_order = 0
        self._next_take = 0
        self._closing = threading.Event()
        self._channel = ControlChannel(keys, liveness, self._on_event)
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            run=keys.run,
            rank=rank,
            **vars(geometry),
            address=self._ring.address,
            facts=dict(facts),
        )
        self._greeter = Greeter(
            folder,
            self._channel,
            f"student-{rank}.{uuid.uuid4().hex[:8]}",
            hello,
            address=self._worker.address,
            key=self._ring.key,
        )
        self._channel.start()
        self._ticker = threading.Thread(target=self._tick, name="teachers", daemon=True)
        self._ticker.start()

    def connect(self, num_teachers: int, timeout_s: float) -> list[str]:
        """Wait until this many teachers of the run have published themselves and said welcome.

        Returns:
            Their names.

        Raises:
            RefusedError: one does not fit; the message is its reason.
            DeadlineError: they were not there in time.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or len(self._welcomed) >= num_teachers, timeout_s
            )
            self._raise_failure()
            if len(self._welcomed) < num_teachers:
                raise DeadlineError(
                    f"{len(self._welcomed)} of {num_teachers} teachers came within "
                    f"{timeout_s:g} s; see the teachers' logs"
                )
            return sorted(name.partition(".")[0] for name in self._welcomed)

    @property
    def num_teachers(self) -> int:
        """How many teachers can be given orders now."""
        return len(self._book.teachers)

    @property
    def room(self) -> int:
        """How many more orders can be given now."""
        return self._num_orders - len(self._book.works)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring's memory."""
        return self._ring.num_bytes

    @property
    def num_ready(self) -> int:
        """How many answers are in the ring, not taken yet."""
        with self._changed:
            waiting = [w for w in self._book.works.values() if w.sequence >= self._next_take]
        return sum(map(self._is_ready, waiting))

    def order(
        self, token_ids: bytes, positions: bytes, rows: bytes, *, batch: int, length: int
    ) -> int:
        """Ask for the hidden states of a micro-batch; needs `room`.

        Args:
            token_ids: int32 `[batch, length]`.
            positions: int32 `[batch, length]`.
            rows: int32, the wanted rows of the flattened tokens.
            batch: rows of tokens.
            length: tokens of each.

        Returns:
            The order's sequence number.

        Raises:
            ProtocolError: more rows are wanted than a slot holds.
            TransportError: the pool has failed.
        """
        num_rows, limit = len(rows) // INT32_BYTES, self._ring.geometry.slot_tokens
        if num_rows > limit:
            raise ProtocolError(
                f"{num_rows} rows are wanted but a slot holds {limit}: raise ring.slot_tokens"
            )
        assert self.room > 0
        with self._changed:
            self._raise_failure()
            work = Work(self._next_order, batch, length, (token_ids, positions, rows))
            self._next_order += 1
            self._book.add(work)
            self._assign()
        return work.sequence

    def take(self, timeout_s: float) -> Answer:
        """Wait for the next answer in sequence.

        Raises:
            OrderFailedError: teachers met an error with it.
            PeerLostError: no teacher could be given the order for `liveness.grace_s`.
            ProtocolError: what came is not the answer to what was asked.
            DeadlineError: nothing came within `timeout_s`.
        """
        work, start = self._book.works[self._next_take], time.monotonic()
        blocked_since: float | None = None  # since when it has been seen: time asleep is no wait
        while not self._wait(work):
            now = time.monotonic()
            with self._changed:
                self._raise_failure()
                obstacle = None if work.slot is not None else self._book.obstacle()
            blocked_since = (blocked_since or now) if obstacle else None
            if blocked_since and now - blocked_since > self._liveness.grace_s:
                raise PeerLostError(
                    f"order {work.sequence} waited {self._liveness.grace_s:g} s: {obstacle}"
                )
            if now - start > timeout_s:
                raise DeadlineError(
                    f"{work.teacher} did not answer order {work.sequence} within {timeout_s:g} s"
                )
        slot = work.slot
        assert slot is not None
        header = self._ring.header(slot)
        check_answer(work, header)
        self._next_take += 1
        return Answer(
            sequence=work.sequence,
            slot=slot,
            payload=self._ring.payload(slot, header.num_rows),
            header=header,
            waited_s=time.monotonic() - start,
        )

    def release(self, answer: Answer) -> None:
        """Give the slot of a taken answer back; its payload may be overwritten from here on."""
        with self._changed:
            self._book.release(answer.sequence)
            self._assign()

    def close(self) -> None:
        """Say bye, wait until no teacher writes any more, free the ring."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._ticker.join()
        with self._changed:
            for teacher in self._welcomed:
                self._channel.send(teacher, Bye())
            self._changed.wait_for(
                lambda: not self._book.teachers, timeout=self._liveness.dead_after_s
            )
        self._channel.close()
        self._ring.close()
        self._worker.close()

    def _wait(self, work: Work) -> bool:
        """Wait a moment for an order's answer; it may be given to another teacher meanwhile."""
        with self._changed:
            slot, attempt = work.slot, work.attempt
            if slot is None:
                self._changed.wait(_POLL_S)
                return False
        return self._ring.wait(slot, work.sequence, attempt, _POLL_S) and work.slot == slot

    def _is_ready(self, work: Work) -> bool:
        return work.slot is not None and self._ring.is_ready(work.slot, work.sequence, work.attempt)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _assign(self) -> None:
        for work in self._book.assign(time.monotonic()):
            assert work.teacher is not None
            self._channel.send(work.teacher, work.order(), *work.buffers)

    def _tick(self) -> None:
        """Greet teachers that came, and do what time brings about; a thread of its own."""
        try:
            while not self._closing.wait(_TICK_S):
                self._greeter.greet_new()
                with self._changed:
                    for held in self._book.tick(time.monotonic(), self._order_timeout_s):
                        cancel = Cancel(sequence=held.sequence, attempt=held.attempt)
                        self._channel.send(held.teacher, cancel)
                    self._assign()
        except BaseException as error:
            with self._changed:
                self._fail(TransportError(f"the pool of teachers failed: {error!r}"))
            raise

    def _on_event(self, peer: str, event: Event, buffers: list[bytes]) -> None:
        """Act on what a teacher said or what became of it; in the control channel's thread."""
        with self._changed:
            match event:
                case Welcome(transports=transports):
                    log.info("%s is there, over %s", peer, transports)
                    self._welcomed.add(peer)
                    self._book.teachers.add(peer)
                case Refuse(reason=reason):
                    self._refused(peer, reason)
                case Failed(sequence=sequence, attempt=attempt, error=error, message=text):
                    log.warning("%s failed order %d: %s: %s", peer, sequence, error, text)
                    if not self._book.failed(peer, sequence, attempt):
                        self._fail(OrderFailedError(f"{peer}, order {sequence}: {error}: {text}"))
                case Cancelled(sequence=sequence, attempt=attempt):
                    self._book.cancelled(peer, sequence, attempt)
                case Heard():
                    if peer in self._welcomed:
                        log.info("%s is back", peer)
                        self._book.teachers.add(peer)
                case Silent() | Gone() | Bye():
                    self._lost(peer, event)
                case _:
                    log.warning("ignored %s from %s", event.kind, peer)
            if not self._closing.is_set():
                self._assign()
            self._changed.notify_all()

    def _refused(self, peer: str, reason: str) -> None:
        """End the run if it has not begun; else go on without this teacher."""
        self._channel.forget(peer)
        log.error("%s refused this student: %s", peer, reason)
        if not self._next_order:
            self._fail(RefusedError(f"{peer} refused this student: {reason}"))

    def _lost(self, peer: str, event: Silent | Gone | Bye) -> None:
        """Give the orders of a teacher to others."""
        match event:
            case Silent(reason=reason):
                orders = self._book.suspend(peer)
            case Bye(clean=True):
                reason, orders = "it ended", self._book.leave(peer)
            case _:
                reason = event.reason if isinstance(event, Gone) else "the connection broke"
                until = time.monotonic() + self._liveness.dead_after_s
                orders = self._book.suspend(peer, until)
        if isinstance(event, Bye):
            self._channel.forget(peer)
            if not event.clean:
                self._greeter.greet_again(peer)  # it lives
        if not isinstance(event, Silent):
            self._welcomed.discard(peer)
        if not self._closing.is_set():
            log.warning("%s is lost: %s; %d orders go to others", peer, reason, orders)

    def _fail(self, error: TransportError) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()
