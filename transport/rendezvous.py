"""How the processes of a run find and trust each other: files in the run folder."""

import fcntl
import ipaddress
import json
import logging
import os
import socket
import stat
import struct
import time
import uuid
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Self

import zmq

from transport.errors import DeadlineError, TransportError

log = logging.getLogger(__name__)

SECRET_FILE = "secret"
PEERS_FOLDER = "peers"
_POLL_S = 0.05
_MAX_FILE_BYTES = 4096
_SIOCGIFADDR = 0x8915


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    with _written(path, text, mode) as temporary:
        temporary.replace(path)


@contextmanager
def _written(path: Path, text: str, mode: int) -> Iterator[Path]:
    """Write a whole file beside `path`, under a name that is gone at the end of the block."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise TransportError(
            f"{path} belongs to user {status.st_uid}, this process to user {os.geteuid()}: "
            "choose another run.folder"
        )


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which others could put a file in the place of one of ours."""
    status = folder.stat()
    _check_owner(folder, status)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TransportError(
            f"{folder} can be written by others: chmod go-w it, or choose another run.folder"
        )


def _read_private(path: Path) -> str:
    """Read a small file that is ours alone; the checks are of the very file that is read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TransportError(f"{path} is not a regular file")
        _check_owner(path, status)
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TransportError(f"{path} can be read by others: chmod 600 it, or start a new run")
        return os.read(descriptor, _MAX_FILE_BYTES).decode()
    finally:
        os.close(descriptor)


@dataclass(frozen=True, repr=False)  # secrets stay out of logs and tracebacks
class RunKeys:
    """The run's name and its CURVE keys: one pair for teachers, one for students."""

    run: str
    teacher_public: str
    teacher_secret: str
    student_public: str
    student_secret: str

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Write new keys into a run folder, readable by the owner alone; keep keys that exist.

        Of several processes that do so at once the first wins, and all return its keys.

        Raises:
            TransportError: others can write in the folder, or reach the keys that exist.
        """
        _check_folder(folder)
        pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
        text = json.dumps(asdict(cls(uuid.uuid4().hex, *pairs)))
        path = folder / SECRET_FILE
        with _written(path, text, mode=0o600) as temporary, suppress(FileExistsError):
            os.link(temporary, path)
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the keys of a run folder.

        Raises:
            TransportError: there are none, others can reach them, or put others in their place.
        """
        path = folder / SECRET_FILE
        if not path.exists():
            raise TransportError(f"{path} does not exist: this is no folder of a started run")
        _check_folder(folder)
        try:
            return cls(**json.loads(_read_private(path)))
        except (OSError, ValueError, TypeError) as error:
            raise TransportError(f"{path} is damaged ({error}): start a new run") from error


def publish(folder: Path, name: str, endpoint: str) -> None:
    """Tell the other processes of the run where this one listens: `tcp://address:port`."""
    peers = folder / PEERS_FOLDER
    peers.mkdir(exist_ok=True, mode=0o700)
    record = json.dumps({"endpoint": endpoint})
    write_atomically(peers / f"{name}.json", record, mode=0o600)


def withdraw(folder: Path, name: str) -> None:
    """Take back what `publish` told; harmless when there is nothing."""
    (folder / PEERS_FOLDER / f"{name}.json").unlink(missing_ok=True)


def discover(folder: Path, known: Container[str] = ()) -> dict[str, str]:
    """Return the endpoints that have been published, by name; warn of files that are no record.

    Names in `known` are not read again.
    """
    found = {}
    for path in sorted((folder / PEERS_FOLDER).glob("[!.]*.json")):
        if path.stem in known:
            continue
        try:
            found[path.stem] = _endpoint(_read_private(path))
        except FileNotFoundError:  # withdrawn between the listing and the reading
            continue
        except (OSError, TransportError) as error:
            _warn_once("skipped a record: %s", str(error))
        except (ValueError, RecursionError) as error:
            _warn_once("skipped a record: %s: %s", path, str(error))
    return found


_warn_once = cache(log.warning)
"""Folders are looked through many times a second."""


def _endpoint(record: str) -> str:
    """Return the endpoint of a record, or raise ValueError."""
    values = json.loads(record)
    endpoint = values.get("endpoint") if isinstance(values, dict) else None
    scheme, _, rest = str(endpoint).partition("://")
    address, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{record[:200]!r} has no endpoint tcp://address:port")
    ipaddress.IPv4Address(address)
    return str(endpoint)


def wait_for(folder: Path, name: str, timeout_s: float) -> str:
    """Return the endpoint that `name` has published, as soon as it has.

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
