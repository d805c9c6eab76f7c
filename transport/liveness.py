"""How a peer's silence and its death are told apart."""

import errno
import select
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Liveness:
    """How often a side says that it lives, and what follows from silence; all in seconds.

    Attributes:
        heartbeat_s: interval of heartbeats.
        dead_after_s: after which silence a peer gets nothing more.
        grace_s: how long a side goes on without any peer.
    """

    heartbeat_s: float = 1.0
    dead_after_s: float = 10.0
    grace_s: float = 60.0


@dataclass(frozen=True)
class Silent:
    """Event: a peer has not been heard for too long; it may come back."""

    reason: str


@dataclass(frozen=True)
class Heard:
    """Event: a peer that was silent lives."""


@dataclass(frozen=True)
class Gone:
    """Event: a peer's process has ended; the channel has forgotten it."""

    reason: str


class Probe:
    """An attempt to connect to where a peer listens; if refused, its process has ended.

    A stopped process is not refused: its kernel accepts for it.
    """

    def __init__(self, endpoint: tuple[str, int]) -> None:
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._error = self._socket.connect_ex(endpoint)

    def refused(self) -> bool | None:
        """Say whether the connection was refused, or None while nothing is known."""
        if self._error == errno.EINPROGRESS and select.select([], [self._socket], [], 0)[1]:
            self._error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return None if self._error == errno.EINPROGRESS else self._error == errno.ECONNREFUSED

    def close(self) -> None:
        """End the attempt."""
        self._socket.close()
