"""The student's side of the orders: a ring, the teachers that write into it, what came back."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transport.answers import Answer, check_answer
from transport.binding import Choice, open_worker
from transport.dispatcher import Dispatcher
from transport.errors import DeadlineError, PeerLostError, ProtocolError
from transport.handles import Handle
from transport.layout import RingGeometry
from transport.liveness import Liveness
from transport.memory import Pin, lock
from transport.messages import INT32_BYTES, PROTOCOL_VERSION, Hello
from transport.rendezvous import RunKeys
from transport.ring import Ring

_POLL_S = 0.05


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
        self._max_orders = geometry.slots - num_spare_slots
        self._liveness = liveness
        self._next_take = 0
        self._worker = open_worker(binding)
        self._ring = Ring(self._worker, geometry, pin)
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            run=keys.run,
            rank=rank,
            **vars(geometry),
            address=self._ring.address,
            facts=dict(facts),
        )
        self._dispatcher = Dispatcher(
            folder,
            keys,
            hello,
            self._ring,
            address=self._worker.address,
            liveness=liveness,
            order_timeout_s=order_timeout_s,
        )

    def connect(self, num_teachers: int, timeout_s: float) -> list[str]:
        """Wait until this many teachers of the run have published themselves and said welcome.

        Returns:
            Their names.

        Raises:
            RefusedError: one does not fit; the message is its reason.
            DeadlineError: they were not there in time.
        """
        return self._dispatcher.connect(num_teachers, timeout_s)

    @property
    def num_teachers(self) -> int:
        """How many teachers can be given orders now."""
        return self._dispatcher.num_teachers

    @property
    def room(self) -> int:
        """How many more orders can be given now."""
        return self._max_orders - self._dispatcher.num_orders

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring's memory."""
        return self._ring.num_bytes

    @property
    def num_ready(self) -> int:
        """How many answers are in the ring, not taken yet."""
        return self._dispatcher.num_ready(self._next_take)

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
        return self._dispatcher.add(batch, length, (token_ids, positions, rows))

    def take(self, timeout_s: float) -> Answer:
        """Wait for the next answer in sequence.

        Raises:
            OrderFailedError: teachers met an error with it.
            PeerLostError: no teacher could be given the order for `liveness.grace_s`.
            ProtocolError: what came is not the answer to what was asked.
            DeadlineError: nothing came within `timeout_s`.
        """
        work, start = self._dispatcher.work(self._next_take), time.monotonic()
        blocked_since: float | None = None  # since when it has been seen: time asleep is no wait
        while not self._dispatcher.wait(work, _POLL_S):
            now = time.monotonic()
            obstacle = self._dispatcher.obstacle(work)
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
        self._dispatcher.release(answer.sequence)

    def close(self) -> None:
        """Say bye, wait until no teacher writes any more, free the ring."""
        self._dispatcher.close()
        self._ring.close()
        self._worker.close()
