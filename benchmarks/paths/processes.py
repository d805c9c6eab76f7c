"""Processes of a benchmark: each pinned to a core, doing what it is told until it is closed."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

SPAWN = get_context("spawn")
START_S = 60.0
CALL_S = 60.0
END_S = 60.0


def _obey(
    calls: Connection, core: int, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.sched_setaffinity(0, {core})
    with make(*arguments) as side:
        calls.send(None)
        while (call := calls.recv()) is not None:
            name, values = call
            calls.send(getattr(side, name)(*values))


class PinnedProcess:
    """A process that holds one object and calls its methods."""

    def __init__(self, core: int, make: Callable[..., Any], *arguments: Any) -> None:
        self._calls, theirs = SPAWN.Pipe()
        self._arguments = arguments  # semaphores must live until the process has found them
        self._process = SPAWN.Process(
            target=_obey, args=(theirs, core, make, arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    def result(self, timeout_s: float = CALL_S) -> Any:
        """Return what the method returned whose call was begun."""
        if not self._calls.poll(timeout_s):
            raise TimeoutError(f"process {self._process.pid} has not answered in {timeout_s:g} s")
        return self._calls.recv()

    def begin(self, name: str, *arguments: Any) -> None:
        """Let it call a method."""
        self._calls.send((name, arguments))

    def call(self, name: str, *arguments: Any) -> Any:
        """Let it call a method and return the result."""
        self.begin(name, *arguments)
        return self.result()

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        with suppress(BrokenPipeError):
            self._calls.send(None)
        self._process.join(5)
        self._process.kill()
        self._process.join()


@contextmanager
def started(*processes: PinnedProcess) -> Iterator[None]:
    """Wait until the processes are ready, and close them at the end."""
    try:
        for process in processes:
            process.result(START_S)
        yield
    finally:
        for process in processes:
            process.close()


@contextmanager
def running(*processes: SpawnProcess) -> Iterator[None]:
    """Run processes that end by themselves, and by force if they do not."""
    for process in processes:
        process.start()
    try:
        yield
        for process in processes:
            process.join(END_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
