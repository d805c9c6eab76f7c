"""How the processes of a run find and trust each other: files in the run folder."""

import fcntl
import json
import os
import socket
import stat
import struct
import time
import uuid
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import zmq

from transport.errors import DeadlineError, TransportError

SECRET_FILE = "secret"
PEERS_FOLDER = "peers"
_POLL_S = 0.05
_SIOCGIFADDR = 0x8915


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise


@dataclass(frozen=True)
class RunKeys:
    """The run's name and its CURVE keys: one pair for teachers, one for students."""

    run: str
    teacher_public: str
    teacher_secret: str
    student_public: str
    student_secret: str

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Write new keys into a run folder, readable by the owner alone; keep keys that exist."""
        path = folder / SECRET_FILE
        if not path.exists():
            pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
            keys = cls(uuid.uuid4().hex, *pairs)
            write_atomically(path, json.dumps(asdict(keys)), mode=0o600)
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the keys of a run folder.

        Raises:
            TransportError: there are none, or others than the owner can read them.
        """
        path = folder / SECRET_FILE
        if not path.is_file():
            raise TransportError(f"{path} does not exist: this is no folder of a started run")
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TransportError(f"{path} can be read by others: chmod 600 it, or start a new run")
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def publish(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Tell the other processes of the run how to reach this one."""
    peers = folder / PEERS_FOLDER
    peers.mkdir(exist_ok=True)
    write_atomically(peers / f"{name}.json", json.dumps(record), mode=0o600)


def withdraw(folder: Path, name: str) -> None:
    """Take back what `publish` told; harmless when there is nothing."""
    (folder / PEERS_FOLDER / f"{name}.json").unlink(missing_ok=True)


def discover(folder: Path, known: Container[str] = ()) -> dict[str, dict[str, Any]]:
    """Return what has been published, by name; `known` names are not read again."""
    found = {}
    for path in sorted((folder / PEERS_FOLDER).glob("[!.]*.json")):
        if path.stem in known:
            continue
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # withdrawn between the listing and the reading
            continue
    return found


def wait_for(folder: Path, name: str, timeout_s: float) -> dict[str, Any]:
    """Return what `name` has published, as soon as it has.

    Raises:
        DeadlineError: it had not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while name not in (found := discover(folder)):
        if time.monotonic() > deadline:
            raise DeadlineError(f"{name} did not come within {timeout_s:g} s; see its log")
        time.sleep(_POLL_S)
    return found[name]


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface of this machine.

    Raises:
        TransportError: there is no such interface, or it has no address.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise TransportError(
                f"network interface {interface!r} has no address on {socket.gethostname()} "
                f"({error.strerror}); it has {names}: set transport.interface"
            ) from error
    return socket.inet_ntoa(answer[20:24])
