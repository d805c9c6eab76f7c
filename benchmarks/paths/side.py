"""What one end of every path does: messages in a stream with credits, and there and back."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from multiprocessing.synchronize import Semaphore
from typing import Self

import numpy as np
from numpy.typing import NDArray

SLOTS = 4
WAIT_S = 20.0
PING_BYTES = 64
WORD_BYTES = 8

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Cost:
    """What a stream cost one side.

    Attributes:
        elapsed_s: wall-clock time until the last message was released.
        cpu_s: processor time of all threads of the process.
    """

    elapsed_s: float
    cpu_s: float


class Clock:
    """Measures what a stream costs this process, from here on."""

    def __init__(self) -> None:
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()

    def cost(self) -> Cost:
        """Return what it has cost until now."""
        return Cost(time.perf_counter() - self._start_s, time.process_time() - self._start_cpu_s)


class Side(ABC):
    """One end of a path; both ends number their messages alike."""

    def __init__(self, credits: Semaphore) -> None:
        self._credits = credits
        self._sequence = 0
        self._sources: dict[int, Words] = {}

    @abstractmethod
    def put(self, source: Words, sequence: int) -> None:
        """Send a message; the source may change from then on."""

    @abstractmethod
    def take(self, num_bytes: int, sequence: int) -> Words:
        """Wait for a message and return it, in the memory of its slot."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

    def send(self, num_bytes: int, num_messages: int, touched: bool) -> Cost:
        """Send messages as credits come back; write the source before each, if `touched`."""
        source, clock = self._source(num_bytes), Clock()
        for _ in range(num_messages):
            self._acquire()
            if touched:
                source.fill(self._sequence)
            self.put(source, self._next())
        for _ in range(SLOTS):
            self._acquire()
        cost = clock.cost()
        for _ in range(SLOTS):
            self._credits.release()
        return cost

    def receive(self, num_bytes: int, num_messages: int, touched: bool) -> Cost:
        """Take messages and give credits back; read and check every word, if `touched`."""
        clock = Clock()
        for _ in range(num_messages):
            sequence = self._next()
            words = self.take(num_bytes, sequence)
            assert not touched or words.sum() == sequence * len(words), "the message is damaged"
            self._credits.release()
        return clock.cost()

    def ping(self, num_rounds: int) -> list[float]:
        """Send a small message and wait for the answer, again and again; return the seconds."""
        source = self._source(PING_BYTES)
        times_s = []
        for _ in range(num_rounds):
            start_s = time.perf_counter()
            sequence = self._next()
            self.put(source, sequence)
            self.take(PING_BYTES, sequence)
            times_s.append(time.perf_counter() - start_s)
        return times_s

    def pong(self, num_rounds: int) -> None:
        """Answer small messages."""
        source = self._source(PING_BYTES)
        for _ in range(num_rounds):
            sequence = self._next()
            self.take(PING_BYTES, sequence)
            self.put(source, sequence)

    def count(self, duration_s: float) -> float:
        """Keep the main thread busy with Python; return how often it went round in a second."""
        return count(duration_s)

    def trickle(self, num_bytes: int, interval_s: float, duration_s: float) -> None:
        """Send messages at a low rate to a side that does not take them."""
        source = self._source(num_bytes)
        start_s = time.perf_counter()
        for number in range(int(duration_s / interval_s)):
            time.sleep(max(0.0, start_s + number * interval_s - time.perf_counter()))
            self.put(source, self._sequence)

    def _source(self, num_bytes: int) -> Words:
        if num_bytes not in self._sources:
            self._sources[num_bytes] = np.ones(num_bytes // WORD_BYTES, np.uint64)
        return self._sources[num_bytes]

    def _next(self, num_messages: int = 1) -> int:
        self._sequence += num_messages
        return self._sequence - num_messages

    def _acquire(self) -> None:
        if not self._credits.acquire(timeout=WAIT_S):
            raise TimeoutError(f"no credit came back within {WAIT_S:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def count(duration_s: float) -> float:
    """Run a loop of Python; return how often it went round in a second."""
    start_s, rounds = time.perf_counter(), 0
    while time.perf_counter() - start_s < duration_s:
        rounds += 1
    return rounds / duration_s
