"""What a teacher keeps of one student: the way into its ring, and the orders that wait."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from transport.errors import RefusedError
from transport.layout import SlotHeader, token_digest
from transport.messages import (
    INT32_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Cancelled,
    Failed,
    Hello,
    Order,
    as_text,
)
from transport.ring import RingWriter

log = logging.getLogger(__name__)

Tell = Callable[[Cancelled | Failed], None]
Compute = Callable[[Order, list[bytes]], memoryview]
"""Computes an order: its three buffers in, the bytes of the wanted rows out."""


def check_hello(hello: Hello, run: str, facts: Mapping[str, Any]) -> None:
    """Refuse a student that a teacher cannot serve.

    Args:
        hello: what the student says of itself and expects.
        run: name of the teacher's run.
        facts: what the teacher is.

    Raises:
        RefusedError: something differs; the message names both values.
    """
    if hello.protocol != PROTOCOL_VERSION:
        raise RefusedError(
            f"protocol version {hello.protocol}, this teacher speaks {PROTOCOL_VERSION}"
        )
    if hello.run != run:
        raise RefusedError(f"run {hello.run}, this teacher belongs to {run}")
    for name in sorted(facts.keys() | hello.facts.keys()):
        ours, theirs = facts.get(name), hello.facts.get(name)
        if ours != theirs:
            raise RefusedError(f"{name} is {ours!r} here, the student expects {theirs!r}")


class Student:
    """One connected student.

    An answer is confirmed as cancelled only when nothing of it can be under way any more.
    """

    def __init__(self, name: str, writer: RingWriter, tell: Tell) -> None:
        """Begin without orders.

        Args:
            name: name of the student, for the log.
            writer: its ring.
            tell: sends it a message.
        """
        self.name = name
        self.writer = writer
        self.silent_since: float | None = None
        """When it fell silent, or None while it is heard."""
        self._tell = tell
        self._orders: deque[tuple[Order, list[bytes]]] = deque()
        self._computing: Order | None = None
        self._payload: memoryview | None = None  # UCX reads it until a flush has ended
        self._cancels: list[Cancel] = []

    @property
    def num_orders(self) -> int:
        """How many orders wait."""
        return len(self._orders)

    @property
    def is_writing(self) -> bool:
        """Whether a write has passed its deadline and is still under way."""
        return self._payload is not None

    @property
    def has_work(self) -> bool:
        """Whether there is something to do for it now."""
        return self.silent_since is None and (bool(self._orders) or self.is_writing)

    def put(self, order: Order, buffers: list[bytes]) -> None:
        """Let an order wait for its turn."""
        self._orders.append((order, buffers))

    def next(self) -> tuple[Order, list[bytes]]:
        """Return the next order, which is computed from now on."""
        self._computing, buffers = self._orders.popleft()
        return self._computing, buffers

    def compute(self, compute: Compute, order: Order, buffers: list[bytes]) -> memoryview | None:
        """Return the answer to an order, or tell the student why there is none."""
        try:
            payload = compute(order, buffers)
            num_rows = len(buffers[2]) // INT32_BYTES
            self.writer.geometry.check(order.slot, num_rows, payload.nbytes)
        except Exception as error:
            log.exception("order %d of %s failed", order.sequence, self.name)
            failed = Failed(
                sequence=order.sequence,
                attempt=order.attempt,
                error=type(error).__name__,
                message=as_text(error),
            )
            self._tell(failed)
            return None
        return payload

    def put_back(self, order: Order, buffers: list[bytes]) -> None:
        """Let a computed order wait again: it could not be written."""
        self._orders.appendleft((order, buffers))

    def cancel(self, cancel: Cancel) -> None:
        """Confirm that an answer will not be written, as soon as that is so."""
        self._orders = deque(item for item in self._orders if not _same(item[0], cancel))
        if self.is_writing or (self._computing and _same(self._computing, cancel)):
            self._cancels.append(cancel)
        else:
            self._tell(Cancelled(sequence=cancel.sequence, attempt=cancel.attempt))

    def computed(self) -> bool:
        """End the order that was computed; return whether its answer is still wanted."""
        order, self._computing = self._computing, None
        wanted = not any(order and _same(order, cancel) for cancel in self._cancels)
        self._confirm()
        return wanted

    def write(
        self, order: Order, header: SlotHeader, payload: memoryview, timeout_s: float
    ) -> None:
        """Write an answer.

        Raises:
            DeadlineError: it is still under way; `finish` comes next.
            UcxError: the student cannot be reached.
        """
        self._payload = payload
        self.writer.write(order.slot, payload, header, timeout_s)
        self._written()

    def finish(self, timeout_s: float) -> None:
        """End a write whose deadline had passed; raises as `write` does."""
        self.writer.flush(timeout_s)
        self._written()

    def header(
        self, order: Order, token_ids: bytes, payload: memoryview, *, teacher: int, compute_s: float
    ) -> SlotHeader:
        """Return the header of an answer."""
        geometry = self.writer.geometry
        return SlotHeader(
            sequence=order.sequence,
            attempt=order.attempt,
            teacher=teacher,
            num_rows=payload.nbytes // geometry.row_bytes,
            hidden_size=geometry.hidden_size,
            item_bytes=geometry.item_bytes,
            digest=token_digest(token_ids),
            compute_s=compute_s,
        )

    def is_silent_for(self, seconds: float) -> bool:
        """Say whether nothing has been heard of it for this long since it fell silent."""
        return self.silent_since is not None and time.monotonic() - self.silent_since > seconds

    def _written(self) -> None:
        self._payload = None
        self._confirm()

    def _confirm(self) -> None:
        for cancel in self._cancels:
            self._tell(Cancelled(sequence=cancel.sequence, attempt=cancel.attempt))
        self._cancels.clear()


def _same(order: Order, cancel: Cancel) -> bool:
    return (order.sequence, order.attempt) == (cancel.sequence, cancel.attempt)
