"""The order book on the wire: teachers come and go, and what a lost one owed, another computes."""

import logging
import threading
import time
import uuid
from pathlib import Path

from transport.control import ControlChannel, Event
from transport.errors import DeadlineError, OrderFailedError, RefusedError, TransportError
from transport.greeting import Greeter
from transport.handles import Handle
from transport.liveness import Gone, Heard, Liveness, Silent
from transport.messages import Bye, Cancel, Cancelled, Failed, Hello, Refuse, Welcome
from transport.orders import OrderBook, Work
from transport.rendezvous import RunKeys
from transport.ring import Ring

log = logging.getLogger(__name__)

_TICK_S = 0.25


class Dispatcher(Handle):
    """Meets the teachers of a run, gives them orders, and acts on what becomes of them.

    It has two threads of its own: that of the control channel, and one for what time brings about.
    """

    def __init__(
        self,
        folder: Path,
        keys: RunKeys,
        hello: Hello,
        ring: Ring,
        *,
        address: bytes,
        liveness: Liveness,
        order_timeout_s: float,
    ) -> None:
        """Begin to greet the teachers.

        Args:
            folder: run folder.
            keys: keys of the run.
            hello: what this student says of itself.
            ring: where the answers go.
            address: UCX address of this student's worker.
            liveness: heartbeat interval and limits.
            order_timeout_s: after which time an order is given to another teacher, if there is one.
        """
        self._ring = ring
        self._liveness = liveness
        self._order_timeout_s = order_timeout_s
        self._book = OrderBook(ring.geometry.slots, hello.rank, self._is_ready)
        self._changed = threading.Condition()
        self._welcomed: set[str] = set()
        self._failure: TransportError | None = None
        self._next_order = 0
        self._closing = threading.Event()
        self._channel = ControlChannel(keys, liveness, self._on_event)
        identity = f"student-{hello.rank}.{uuid.uuid4().hex[:8]}"
        self._greeter = Greeter(
            folder, self._channel, identity, hello, address=address, key=ring.key
        )
        self._channel.start()
        self._ticker = threading.Thread(target=self._tick, name="teachers", daemon=True)
        self._ticker.start()

    def connect(self, num_teachers: int, timeout_s: float) -> list[str]:
        """Wait for teachers; see `TeacherPool.connect`."""
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
    def num_orders(self) -> int:
        """How many orders have been added and not released."""
        return len(self._book.works)

    def num_ready(self, first: int) -> int:
        """How many orders, from a sequence number on, have their answers in the ring."""
        with self._changed:
            works = [work for work in self._book.works.values() if work.sequence >= first]
        return sum(map(self._is_ready, works))

    def add(self, batch: int, length: int, buffers: tuple[bytes, bytes, bytes]) -> int:
        """Accept an order and return its sequence number; see `TeacherPool.order`."""
        with self._changed:
            self._raise_failure()
            work = Work(self._next_order, batch, length, buffers)
            self._next_order += 1
            self._book.add(work)
            self._assign()
        return work.sequence

    def work(self, sequence: int) -> Work:
        """Return an order that has not been released."""
        return self._book.works[sequence]

    def wait(self, work: Work, timeout_s: float) -> bool:
        """Wait for an order's answer; it may be given to another teacher meanwhile."""
        with self._changed:
            slot, attempt = work.slot, work.attempt
            if slot is None:
                self._changed.wait(timeout_s)
                return False
        return self._ring.wait(slot, work.sequence, attempt, timeout_s) and work.slot == slot

    def obstacle(self, work: Work) -> str | None:
        """Return why an order cannot be given to anyone now, or None.

        Raises:
            TransportError: there can be no answer any more.
        """
        with self._changed:
            self._raise_failure()
            return None if work.slot is not None else self._book.obstacle()

    def release(self, sequence: int) -> None:
        """Forget an order; its slot is free for the next one."""
        with self._changed:
            self._book.release(sequence)
            self._assign()

    def close(self) -> None:
        """Say bye and wait until no teacher writes any more."""
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
