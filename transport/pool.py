"""The student's side of the orders: who computes what, into which slot, and what came back."""

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transport.control import ControlChannel, Liveness
from transport.errors import (
    DeadlineError,
    OrderFailedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    TransportError,
)
from transport.handles import Handle
from transport.layout import RingGeometry, SlotHeader, token_digest
from transport.messages import (
    PROTOCOL_VERSION,
    Bye,
    Failed,
    Hello,
    Message,
    Order,
    Refuse,
    Welcome,
)
from transport.rendezvous import RunKeys, discover
from transport.ring import Ring
from transport.ucx import Worker

log = logging.getLogger(__name__)

_POLL_S = 0.05
_GREETING_S = 1.0
_TEACHER_PREFIX = "teacher-"
_ROW_INDEX_BYTES = 4


@dataclass(frozen=True)
class Answer:
    """Hidden states that have arrived; the payload is the ring's memory until `release`.

    Attributes:
        sequence: number of the order.
        slot: slot of the ring.
        payload: bytes of `header.num_rows` rows of hidden states.
        header: what the teacher said of them.
        waited_s: seconds that `take` waited.
    """

    sequence: int
    slot: int
    payload: memoryview
    header: SlotHeader
    waited_s: float


@dataclass(frozen=True)
class _Outstanding:
    order: Order
    teacher: str
    digest: bytes
    num_rows: int


class TeacherPool(Handle):
    """Gives orders to teachers and takes their answers in the order of sequence.

    One order per free slot is all the back-pressure there is. Used from one thread.
    """

    def __init__(
        self,
        folder: Path,
        geometry: RingGeometry,
        *,
        rank: int,
        facts: Mapping[str, Any],
        liveness: Liveness,
    ) -> None:
        """Make the ring.

        Args:
            folder: run folder.
            geometry: geometry of the ring.
            rank: rank of this student.
            facts: what the teachers must be; one that differs is refused.
            liveness: heartbeat interval and limit.
        """
        self._folder = folder
        self._keys = RunKeys.load(folder)
        self._rank = rank
        self._facts = dict(facts)
        self._identity = f"student-{rank}.{uuid.uuid4().hex[:8]}"
        self._worker = Worker()
        self._worker.start_progress()
        self._ring = Ring(self._worker, geometry)
        self._liveness = liveness
        self._channel = ControlChannel(
            self._keys, liveness, on_message=self._on_message, on_lost=self._on_lost
        )
        self._changed = threading.Condition()
        self._welcome: dict[str, str] = {}
        self._ended: set[str] = set()
        self._failure: TransportError | None = None
        self._free_slots = list(range(geometry.slots))
        self._outstanding: dict[int, _Outstanding] = {}
        self._greeted: set[str] = set()
        self._next_greeting = 0.0
        self._next_order = 0
        self._next_take = 0
        self._closing = False
        self._channel.start()

    def connect(self, num_teachers: int, timeout_s: float) -> list[str]:
        """Wait until this many teachers of the run have published themselves and said welcome.

        Returns:
            Their names.

        Raises:
            RefusedError: one does not fit; the message is its reason.
            DeadlineError: they were not there in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._welcome) < num_teachers:
                self._raise_failure()
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"{len(self._welcome)} of {num_teachers} teachers came within "
                        f"{timeout_s:g} s; see the teachers' logs"
                    )
                self._greet_new()
                self._changed.wait(_POLL_S)
            return sorted(self._welcome)

    def _greet_new(self) -> None:
        """Say hello to teachers that have published themselves since; they may come at any time."""
        geometry = self._ring.geometry
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            run=self._keys.run,
            rank=self._rank,
            **vars(geometry),
            address=self._ring.address,
            facts=self._facts,
        )
        new = {
            name: record["endpoint"]
            for name, record in discover(self._folder).items()
            if name.startswith(_TEACHER_PREFIX) and name not in self._greeted
        }
        for name, endpoint in new.items():
            self._channel.connect(name, endpoint, self._identity)
            self._channel.send(name, hello, self._worker.address, self._ring.key)
        self._greeted |= new.keys()

    @property
    def free_slots(self) -> int:
        """How many more orders can be given now."""
        return len(self._free_slots)

    @property
    def num_ready(self) -> int:
        """How many answers are in the ring, not taken yet."""
        return sum(self._is_ready(item) for item in self._outstanding.values())

    def order(
        self, token_ids: bytes, positions: bytes, rows: bytes, *, batch: int, length: int
    ) -> int:
        """Ask for the hidden states of a micro-batch; needs a free slot.

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
        """
        num_rows, limit = len(rows) // _ROW_INDEX_BYTES, self._ring.geometry.slot_tokens
        if num_rows > limit:
            raise ProtocolError(
                f"{num_rows} rows are wanted but a slot holds {limit}: raise ring.slot_tokens"
            )
        if time.monotonic() >= self._next_greeting:
            self._greet_new()
            self._next_greeting = time.monotonic() + _GREETING_S
        slot = self._free_slots.pop(0)
        order = Order(sequence=self._next_order, slot=slot, batch=batch, length=length)
        with self._changed:
            self._raise_failure()
            teacher = self._least_busy()
        self._outstanding[order.sequence] = _Outstanding(
            order, teacher, token_digest(token_ids), num_rows
        )
        self._next_order += 1
        self._channel.send(teacher, order, token_ids, positions, rows)
        return order.sequence

    def take(self, timeout_s: float) -> Answer:
        """Wait for the next answer in sequence.

        Raises:
            OrderFailedError: the teacher met an error.
            PeerLostError: a teacher is gone.
            ProtocolError: what came is not the answer to what was asked.
            DeadlineError: nothing came within `timeout_s`.
        """
        item = self._outstanding[self._next_take]
        order = item.order
        start = time.monotonic()
        while not self._ring.wait(order.slot, order.sequence, order.attempt, _POLL_S):
            with self._changed:
                self._raise_failure()
            if time.monotonic() - start > timeout_s:
                raise DeadlineError(
                    f"{item.teacher} did not answer order {order.sequence} within {timeout_s:g} s"
                )
        header = self._ring.header(order.slot)
        _check_answer(item, header)
        self._next_take += 1
        return Answer(
            sequence=order.sequence,
            slot=order.slot,
            payload=self._ring.payload(order.slot, header.num_rows),
            header=header,
            waited_s=time.monotonic() - start,
        )

    def release(self, answer: Answer) -> None:
        """Give the slot of a taken answer back; its payload may be overwritten from here on."""
        del self._outstanding[answer.sequence]
        self._free_slots.append(answer.slot)

    def close(self) -> None:
        """Say bye, wait until no teacher writes any more, free the ring."""
        if self._closing:
            return
        with self._changed:
            self._closing = True
            for teacher in self._welcome:
                self._channel.send(teacher, Bye())
            self._changed.wait_for(
                lambda: self._ended >= set(self._welcome), timeout=self._liveness.dead_after_s
            )
        self._channel.close()
        self._ring.close()
        self._worker.close()

    def _least_busy(self) -> str:
        """Return the teacher with the fewest tokens to compute; ranks start at different ones."""
        names = sorted(self._welcome)
        busy = dict.fromkeys(names, 0)
        for item in self._outstanding.values():
            if not self._is_ready(item):
                busy[item.teacher] += item.order.num_tokens
        first = self._rank % len(names)
        return min(names[first:] + names[:first], key=busy.__getitem__)

    def _is_ready(self, item: _Outstanding) -> bool:
        order = item.order
        return order.sequence >= self._next_take and self._ring.is_ready(
            order.slot, order.sequence, order.attempt
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _on_message(self, peer: str, message: Message, buffers: list[bytes]) -> None:
        with self._changed:
            match message:
                case Welcome(transports=transports):
                    log.info("%s is there, over %s", peer, transports)
                    self._welcome[peer] = transports
                case Refuse(reason=reason):
                    self._fail(RefusedError(f"{peer} refused this student: {reason}"))
                case Failed(sequence=sequence, error=error, message=text):
                    self._fail(OrderFailedError(f"{peer}, order {sequence}: {error}: {text}"))
                case Bye():
                    self._end(peer, "it ended")
                case _:
                    log.warning("ignored %s from %s", message.kind, peer)
            self._changed.notify_all()

    def _on_lost(self, peer: str, reason: str) -> None:
        with self._changed:
            self._end(peer, reason)
            self._changed.notify_all()

    def _end(self, peer: str, reason: str) -> None:
        self._ended.add(peer)
        if not self._closing:
            self._fail(PeerLostError(f"{peer} is lost: {reason}; see its log"))

    def _fail(self, error: TransportError) -> None:
        self._failure = self._failure or error


def _check_answer(item: _Outstanding, header: SlotHeader) -> None:
    wanted = (item.order.sequence, item.order.attempt, item.num_rows, item.digest)
    found = (header.sequence, header.attempt, header.num_rows, header.digest)
    if wanted != found:
        raise ProtocolError(
            f"slot {item.order.slot}: {item.teacher} answered "
            f"(sequence, attempt, rows, digest) = {found}, asked was {wanted}"
        )
