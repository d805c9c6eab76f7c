"""How a student meets the teachers of its run, whenever they come."""

import logging
from pathlib import Path

from transport.control import ControlChannel
from transport.messages import Hello
from transport.rendezvous import discover

log = logging.getLogger(__name__)

_TEACHER_PREFIX = "teacher-"


class Greeter:
    """Says hello once to every teacher that publishes itself in the run folder."""

    def __init__(
        self,
        folder: Path,
        channel: ControlChannel,
        identity: str,
        hello: Hello,
        *,
        address: bytes,
        key: bytes,
    ) -> None:
        """Greet nobody yet.

        Args:
            folder: run folder.
            channel: where hello is said.
            identity: name of this student.
            hello: what is said.
            address: UCX address of this student's worker.
            key: packed key of its ring.
        """
        self._folder = folder
        self._channel = channel
        self._identity = identity
        self._hello = hello
        self._buffers = (address, key)
        self._greeted: set[str] = set()

    def greet_new(self) -> None:
        """Greet those that have come since; a folder that cannot be read now is read later."""
        try:
            found = discover(self._folder, self._greeted)
        except OSError as error:  # of a shared file system such errors pass
            log.warning("cannot look for teachers: %s", error)
            return
        for peer, endpoint in found.items():
            if peer.startswith(_TEACHER_PREFIX):
                self._greeted.add(peer)
                self._channel.connect(peer, endpoint, self._identity, self._hello, *self._buffers)

    def greet_again(self, peer: str) -> None:
        """Greet a teacher once more that has given this student up."""
        self._greeted.discard(peer)
