"""What a hostile or broken peer sends: mutated control frames and broken handshakes."""

import json
import random
import select
import socket
import struct
from contextlib import suppress
from typing import Any

import zmq
from transport_processes import HELLO, WAIT_S

from transport.messages import Bye, Failed, Heartbeat, Order, Refuse, Welcome, encode
from transport.rendezvous import RunKeys

SAMPLES = [
    encode(HELLO, b"address", b"key"),
    encode(Welcome(teacher=1, transports="tcp/lo")),
    encode(Refuse(reason="no")),
    encode(Order(sequence=7, slot=1, batch=4, length=64), bytes(1024), bytes(1024), bytes(256)),
    encode(Failed(sequence=7, attempt=0, error="ValueError", message="no")),
    encode(Heartbeat()),
    encode(Bye()),
]
VALUES: list[Any] = [
    *(-1, 0, 1 << 16, 1 << 31, 1 << 48, 1 << 64, 10**400, 1.5, float("nan"), True, None),
    *("", "x", "x" * 70_000, "\ud800", [], [[]], {}, {"x": 1}, "hello", "order", "bye"),
]
_GREETING_BYTES = 64
_QUIET_S = 0.3


def _change_header(rng: random.Random, header: bytes) -> bytes:
    values = json.loads(header)
    match rng.randrange(3):
        case 0:
            values[rng.choice(list(values))] = rng.choice(VALUES)
        case 1:
            del values[rng.choice(list(values))]
        case _:
            values[rng.choice(["", "sequence", "x" * rng.randrange(99)])] = rng.choice(VALUES)
    return json.dumps(values).encode()


def _change_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    match rng.randrange(4):
        case 0:
            changed = changed[: rng.randrange(len(changed) + 1)]
        case 1:
            changed = bytearray(rng.randbytes(rng.randrange(2000)))
        case 2:
            changed += rng.randbytes(rng.randrange(1, 9))
        case _:
            for _ in range(rng.randrange(1, 9)):
                if changed:
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def mutated_frames(rng: random.Random) -> list[bytes]:
    """Return the frames of a message, one to three times changed."""
    frames = list(rng.choice(SAMPLES))
    for _ in range(rng.randrange(1, 4)):
        index = rng.randrange(len(frames))
        match rng.randrange(5):
            case 0 | 1:
                with suppress(ValueError, IndexError, TypeError, AttributeError):
                    frames[0] = _change_header(rng, frames[0])
            case 2:
                frames[index] = _change_bytes(rng, frames[index])
            case 3:
                frames.insert(index, rng.randbytes(rng.randrange(300)))
            case _ if len(frames) > 1:
                del frames[index]
    return frames


def client_of(context: zmq.Context[Any], keys: RunKeys, name: bytes) -> zmq.Socket[bytes]:
    """Return a socket with the student's keys."""
    client = context.socket(zmq.DEALER)
    client.linger = 0
    client.rcvhwm = 0  # what it is told is not lost while it talks itself
    client.sndtimeo = int(1000 * WAIT_S)
    client.identity = name
    client.curve_publickey = keys.student_public.encode()
    client.curve_secretkey = keys.student_secret.encode()
    client.curve_serverkey = keys.teacher_public.encode()
    return client


def address_of(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def recorded_handshake(endpoint: str, keys: RunKeys) -> bytes:
    """Return the bytes by which a client with the right keys shakes hands and says something."""
    sent = b""
    with (
        zmq.Context() as context,
        client_of(context, keys, b"stranger") as client,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        client.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        client.send_multipart(encode(Heartbeat()))
        near = listener.accept()[0]
        with near, socket.create_connection(address_of(endpoint)) as far:
            other = {near: far, far: near}
            while ready := select.select([near, far], [], [], _QUIET_S)[0]:
                for source in ready:
                    data = source.recv(1 << 16)
                    sent += data if source is near else b""
                    other[source].sendall(data)
    assert len(sent) > _GREETING_BYTES
    return sent


def broken_handshake(rng: random.Random, handshake: bytes) -> bytes:
    """Return bytes that begin as a handshake does, or not even so."""
    kept = handshake[: rng.randrange(len(handshake) + 1)]
    match rng.randrange(4):
        case 0:
            return kept
        case 1:
            return kept + rng.randbytes(rng.randrange(2000))
        case 2:
            return handshake[:_GREETING_BYTES] + rng.randbytes(rng.randrange(2000))
        case _:
            return _change_bytes(rng, handshake)


def send_raw(address: tuple[str, int], data: bytes, *, reset: bool) -> None:
    """Send bytes on a connection of their own and close it, with a reset or in order."""
    with socket.create_connection(address, timeout=WAIT_S) as connection, suppress(OSError):
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(data)
