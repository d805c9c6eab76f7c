"""Control messages: what is sent arrives, and nothing else is let in."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_processes import HELLO

from transport.errors import ProtocolError
from transport.messages import (
    MAX_BUFFER_BYTES,
    MAX_HEADER_BYTES,
    Bye,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Order,
    Refuse,
    Welcome,
    decode,
    encode,
)

NUMBERS = st.integers(0, (1 << 48) - 2)
SIZES = st.integers(1, 1 << 31)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        kind=st.just("hello"),
        protocol=NUMBERS,
        run=st.text(),
        rank=NUMBERS,
        slots=SIZES,
        slot_tokens=SIZES,
        hidden_size=SIZES,
        item_bytes=SIZES,
        address=st.integers(0, (1 << 64) - 1),
        facts=st.dictionaries(st.text(max_size=9), JSON, max_size=3),
    ),
    st.builds(Welcome, kind=st.just("welcome"), teacher=NUMBERS, transports=st.text()),
    st.builds(Refuse, kind=st.just("refuse"), reason=st.text()),
    st.builds(
        Order,
        kind=st.just("order"),
        sequence=NUMBERS,
        attempt=NUMBERS,
        slot=NUMBERS,
        batch=SIZES,
        length=SIZES,
    ),
    st.builds(
        Failed,
        kind=st.just("failed"),
        sequence=NUMBERS,
        attempt=NUMBERS,
        error=st.text(),
        message=st.text(),
    ),
    st.just(Heartbeat()),
    st.just(Bye()),
)
ORDER = {"kind": "order", "sequence": 3, "attempt": 0, "slot": 1, "batch": 2, "length": 8}
ORDER_BUFFERS = [b"ids", b"positions", b"rows"]


@given(MESSAGES, st.data())
def test_message_survives_the_wire(message: Message, data: st.DataObject) -> None:
    buffers = [data.draw(st.binary()) for _ in range(message.num_buffers)]
    assert decode(encode(message, *buffers)) == (message, buffers)


def test_wrong_number_of_buffers_is_not_sent() -> None:
    with pytest.raises(AssertionError):
        encode(HELLO, b"address alone")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "exec"},
        {"kind": None},
        {"extra": 1},
        {"sequence": "3"},
        {"sequence": 3.0},
        {"sequence": True},
        {"sequence": -1},
        {"attempt": -1},
        {"slot": None},
        {"slot": -1},
        {"batch": 0},
        {"length": 0},
    ],
)
def test_header_that_is_not_as_declared_is_refused(change: dict[str, Any]) -> None:
    decode([json.dumps(ORDER).encode(), *ORDER_BUFFERS])
    with pytest.raises(ProtocolError, match="not a control message: "):
        decode([json.dumps(ORDER | change).encode(), *ORDER_BUFFERS])


@pytest.mark.parametrize("name", ["kind", "sequence", "slot", "batch", "length"])
def test_header_that_lacks_a_key_is_refused(name: str) -> None:
    header = {key: value for key, value in ORDER.items() if key != name}
    with pytest.raises(ProtocolError, match="not a control message: "):
        decode([json.dumps(header).encode(), *ORDER_BUFFERS])


@pytest.mark.parametrize("name", ["slots", "slot_tokens", "hidden_size", "item_bytes"])
def test_hello_with_an_impossible_ring_is_refused(name: str) -> None:
    header = HELLO.model_dump() | {name: 0}
    with pytest.raises(ProtocolError, match="greater than 0"):
        decode([json.dumps(header).encode(), b"address", b"key"])


@pytest.mark.parametrize("header", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 60_000])
def test_header_that_is_no_message_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode([header])


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_junk_is_refused_and_nothing_else_is_raised(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode([header])


@pytest.mark.parametrize("num_buffers", [0, 2, 4])
def test_wrong_number_of_buffers_is_refused(num_buffers: int) -> None:
    with pytest.raises(ProtocolError, match=f"order with {num_buffers} buffers"):
        decode([json.dumps(ORDER).encode(), *[b""] * num_buffers])


def test_no_frames_are_refused() -> None:
    with pytest.raises(ProtocolError, match="without a header"):
        decode([])


def test_too_long_header_is_refused() -> None:
    header = encode(Refuse(reason="x" * MAX_HEADER_BYTES))
    with pytest.raises(ProtocolError, match="too long"):
        decode(header)


def test_too_long_message_is_refused() -> None:
    half = bytes(MAX_BUFFER_BYTES // 2)  # twice the same object: no more memory than half
    with pytest.raises(ProtocolError, match="control message of"):
        decode([json.dumps(ORDER).encode(), half, half, b""])
