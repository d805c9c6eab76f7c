"""Where hidden states come from: a teacher in this process, or teachers behind a ring.

The trainer sees the same in both layouts, and in the same arithmetic.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.data.batches import Batch
from toolkit.teacher.forward import hidden_states
from toolkit.training.memory import bytes_of
from transport.messages import Order
from transport.pool import TeacherPool


class TeacherSource(AbstractContextManager["TeacherSource"], Protocol):
    """A stream of micro-batches with the teacher's hidden states."""

    wait_s: float
    """Seconds that the stream has waited for hidden states, in all."""
    num_bytes: int
    """Bytes of hidden states received, in all."""

    @property
    def held(self) -> dict[str, int]:
        """Bytes that are there all the time, by component."""

    @property
    def num_ready(self) -> int:
        """Micro-batches that lie ready in this moment."""

    @property
    def num_teachers(self) -> int:
        """Teachers of other processes that can be asked in this moment."""

    def stream(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """Yield every batch with the hidden states of its labelled rows, `[R, H]`.

        The tensor is valid until the next one is asked for.
        """


class TeacherBody:
    """A frozen body on a device: what both layouts compute, in one place."""

    def __init__(self, body: nn.Module, device: torch.device) -> None:
        self._body = body.to(device)
        self._device = device

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return bytes_of(self._body.parameters())

    @torch.no_grad()
    def states(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Return the hidden states `[R, H]` of the wanted rows of `ids`, `[B, L]`."""
        device = self._device
        return hidden_states(self._body, ids.to(device), positions.to(device))[rows.to(device)]

    def answer(self, order: Order, buffers: list[bytes]) -> memoryview:
        """Compute an order (see `transport.messages`) and return the bytes of its rows.

        Raises:
            ValueError: a wanted row is not one of the order's tokens.
        """
        ids, positions, rows = (
            torch.from_numpy(np.frombuffer(buffer, np.int32).astype(np.int64)) for buffer in buffers
        )
        if rows.numel() and not 0 <= rows.min() <= rows.max() < order.num_tokens:
            raise ValueError(
                f"rows {rows.min()} to {rows.max()} are wanted of {order.num_tokens} tokens"
            )
        shape = (order.batch, order.length)
        states = self.states(ids.view(shape), positions.view(shape), rows).cpu()
        return states.flatten().view(torch.uint8).numpy().data


class ColocatedTeacher(TeacherSource):
    """A teacher in this process, computed between the student's steps."""

    num_ready = num_teachers = 0

    def __init__(self, body: TeacherBody) -> None:
        self._body = body
        self.wait_s = 0.0
        self.num_bytes = 0

    @property
    def held(self) -> dict[str, int]:
        """The body's weights."""
        return {"teacher weights": self._body.num_bytes}

    def stream(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """Compute each batch when it is asked for."""
        for batch in batches:
            yield batch, self._body.states(batch.ids, batch.positions, batch.rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        pass


class RemoteTeachers(TeacherSource):
    """Teachers of other processes, computing ahead by as many micro-batches as the ring holds."""

    def __init__(
        self,
        pool: TeacherPool,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Wrap a connected pool, which is closed with this source.

        Args:
            pool: where orders go.
            hidden_size: elements of a row.
            dtype: dtype of the hidden states on the wire.
            device: where the student wants them.
            timeout_s: how long to wait for one micro-batch.
        """
        self._pool = pool
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._timeout_s = timeout_s
        self.wait_s = 0.0
        self.num_bytes = 0

    @property
    def held(self) -> dict[str, int]:
        """The ring."""
        return {"hidden states": self._pool.ring_bytes}

    @property
    def num_ready(self) -> int:
        """Micro-batches in the ring that have not been taken."""
        return self._pool.num_ready

    @property
    def num_teachers(self) -> int:
        """Teachers that can be given orders."""
        return self._pool.num_teachers

    def stream(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """Order as far ahead as there are free slots, and yield the answers in order."""
        source = iter(batches)
        ordered: deque[Batch] = deque()
        self._order(source, ordered)
        while ordered:
            batch = ordered.popleft()
            answer = self._pool.take(self._timeout_s)
            self.wait_s += answer.waited_s
            self.num_bytes += answer.payload.nbytes
            yield batch, self._states(answer.payload).to(self._device)
            self._pool.release(answer)
            self._order(source, ordered)

    def _states(self, payload: memoryview) -> Tensor:
        """Return the payload as `[R, H]`: the ring's own memory, no copy."""
        if not payload.nbytes:  # torch.frombuffer refuses the empty buffer
            return torch.empty(0, self._hidden_size, dtype=self._dtype)
        return torch.frombuffer(payload, dtype=self._dtype).view(-1, self._hidden_size)

    def _order(self, batches: Iterator[Batch], ordered: deque[Batch]) -> None:
        while self._pool.room and (batch := next(batches, None)) is not None:
            size, length = batch.ids.shape
            self._pool.order(
                _int32(batch.ids),
                _int32(batch.positions),
                _int32(batch.rows),
                batch=size,
                length=length,
            )
            ordered.append(batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._pool.close()


def _int32(tensor: Tensor) -> bytes:
    return tensor.to(torch.int32).numpy().tobytes()
