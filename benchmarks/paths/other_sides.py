"""What the ring is compared with: torch's gloo, ZeroMQ, and memcpy alone."""

import mmap
import os
import time
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any, Self

import numpy as np
from paths.loop import Loops
from paths.side import SLOTS, WAIT_S, WORD_BYTES, Side, Words, count


class _SlotSide(Side):
    """An end whose slots are ordinary memory."""

    def __init__(self, credits: Semaphore) -> None:
        super().__init__(credits)
        self._slots: dict[int, list[Words]] = {}

    def _slot(self, num_bytes: int, sequence: int) -> Words:
        if num_bytes not in self._slots:
            self._slots[num_bytes] = [
                np.ones(num_bytes // WORD_BYTES, np.uint64) for _ in range(SLOTS)
            ]
        return self._slots[num_bytes][sequence % SLOTS]


class GlooSide(_SlotSide):
    """`torch.distributed.send` and `recv`, as they are with the gloo backend."""

    def __init__(self, credits: Semaphore, rendezvous: Path, rank: int) -> None:
        import torch.distributed  # here alone: the others start without it

        super().__init__(credits)
        self._torch, self._peer = torch, 1 - rank
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2
        )

    def put(self, source: Words, sequence: int) -> None:
        self._torch.distributed.send(self._tensor(source), self._peer)

    def take(self, num_bytes: int, sequence: int) -> Words:
        slot = self._slot(num_bytes, sequence)
        self._torch.distributed.recv(self._tensor(slot), self._peer)
        return slot

    def _tensor(self, words: Words) -> Any:
        return self._torch.from_numpy(words.view(np.int64))

    def close(self) -> None:
        self._torch.distributed.destroy_process_group()


class ZeromqSide(_SlotSide):
    """A pair of sockets over tcp: sent without a copy, received into the slot."""

    def __init__(self, credits: Semaphore) -> None:
        import zmq

        super().__init__(credits)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.rcvtimeo = int(WAIT_S * 1000)

    def bind(self) -> str:
        """Listen, and return where."""
        self._socket.bind("tcp://127.0.0.1:*")
        return str(self._socket.last_endpoint.decode())

    def connect(self, endpoint: str) -> None:
        """Connect to the other end."""
        self._socket.connect(endpoint)

    def put(self, source: Words, sequence: int) -> None:
        self._socket.send(source, copy=False, track=True).wait(WAIT_S)

    def take(self, num_bytes: int, sequence: int) -> Words:
        slot = self._slot(num_bytes, sequence)
        self._socket.recv_into(slot)
        return slot

    def close(self) -> None:
        self._context.destroy()


class Memory:
    """A process that copies within its own memory, or counts."""

    def __init__(self, library: Path) -> None:
        self._loops = Loops(library)
        self._buffers: dict[tuple[int, bool], list[Words]] = {}

    def copy(self, num_bytes: int, num_buffers: int, shared: bool, num_copies: int) -> float:
        """Copy one buffer into several in turn; return the seconds it took.

        Shared memory has small pages, as a ring has that UCX allocates; other memory huge ones.
        """
        source, *targets = (words.ctypes.data for words in self._memory(num_bytes, shared))
        start_s = time.perf_counter()
        self._loops.copy(targets[:num_buffers], source, num_bytes, num_copies)
        return time.perf_counter() - start_s

    def _memory(self, num_bytes: int, shared: bool) -> list[Words]:
        key = num_bytes, shared
        if key not in self._buffers:
            self._buffers[key] = [np.ones(num_bytes // WORD_BYTES, np.uint64)]
            for _ in range(SLOTS):
                target = mmap.mmap(-1, num_bytes) if shared else np.ones(num_bytes, np.uint8)
                self._buffers[key].append(np.frombuffer(target, np.uint64))
        return self._buffers[key]

    def count(self, duration_s: float) -> float:
        """Keep the main thread busy with Python; return how often it went round in a second."""
        return count(duration_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._buffers.clear()
