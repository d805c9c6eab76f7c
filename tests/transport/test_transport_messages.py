"""Control messages: what is sent arrives, and nothing else is let in."""

import json
import re
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
    as_text,
    decode,
    encode,
)

NUMBERS = st.integers(0, (1 << 48) - 2)
ATTEMPTS = st.integers(0, (1 << 16) - 1)
INDICES = st.integers(0, (1 << 31) - 1)
SIZES = st.integers(1, (1 << 31) - 1)
SMALL = st.integers(1, 1 << 12)
NAMES = st.text(max_size=256)
TEXTS = st.text(max_size=8000)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)
FACTS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES
)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        kind=st.just("hello"),
        protocol=INDICES,
        run=NAMES,
        rank=INDICES,
        slots=SMALL,
        slot_tokens=SMALL,
        hidden_size=SMALL,
        item_bytes=SMALL,
        address=st.integers(0, (1 << 64) - (1 << 50)),
        facts=st.dictionaries(NAMES, FACTS, max_size=3),
    ),
    st.builds(Welcome, kind=st.just("welcome"), teacher=INDICES, transports=TEXTS),
    st.builds(Refuse, kind=st.just("refuse"), reason=TEXTS),
    st.builds(
        Order,
        kind=st.just("order"),
        sequence=NUMBERS,
        attempt=ATTEMPTS,
        slot=INDICES,
        batch=st.integers(1, 9),
        length=st.integers(1, 9),
    ),
    st.builds(
        Failed,
        kind=st.just("failed"),
        sequence=NUMBERS,
        attempt=ATTEMPTS,
        error=NAMES,
        message=TEXTS,
    ),
    st.just(Heartbeat()),
    st.just(Bye()),
)
ORDER = {"kind": "order", "sequence": 3, "attempt": 0, "slot": 1, "batch": 2, "length": 8}
ORDER_BUFFERS = [b"ids." * 16, b"pos." * 16, b"rows"]


def sized(least: int, most: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=least, max_size=most)


def buffers_of(message: Message) -> st.SearchStrategy[list[bytes]]:
    """Return what may travel with a message."""
    match message:
        case Hello():
            return st.lists(sized(1, 99), min_size=2, max_size=2)
        case Order(num_tokens=n):
            rows = st.integers(0, n).flatmap(lambda num_rows: sized(4 * num_rows, 4 * num_rows))
            return st.tuples(sized(4 * n, 4 * n), sized(4 * n, 4 * n), rows).map(list)
        case _:
            return st.just([])


@given(MESSAGES, st.data())
def test_message_survives_the_wire(message: Message, data: st.DataObject) -> None:
    buffers = data.draw(buffers_of(message))
    assert decode(encode(message, *buffers)) == (message, buffers)


@given(MESSAGES, st.lists(sized(0, 99), max_size=4))
def test_buffers_are_accepted_only_as_the_header_says(
    message: Message, buffers: list[bytes]
) -> None:
    frames = [message.model_dump_json().encode(), *buffers]
    if message.fits(buffers):
        assert decode(frames) == (message, buffers)
    else:
        with pytest.raises(ProtocolError, match="with buffers of"):
            decode(frames)


@given(st.text())
def test_any_text_can_be_sent(text: str) -> None:
    for value in (text, text * 9000, "\ud800" + text, "\0" * 9000):
        refuse = Refuse(reason=as_text(value))
        assert decode(encode(refuse)) == (refuse, [])


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
        {"sequence": (1 << 48) - 1},
        {"sequence": 10**4000},
        {"attempt": -1},
        {"attempt": 1 << 16},
        {"slot": None},
        {"slot": -1},
        {"slot": 1 << 31},
        {"batch": 0},
        {"batch": 1 << 31},
        {"length": 0},
        {"length": 1 << 31},
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


@pytest.mark.parametrize("header", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 60_000])
def test_header_that_is_no_message_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode([header])


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_junk_is_refused_and_nothing_else_is_raised(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode([header])


@pytest.mark.parametrize(
    "sizes",
    [(), (64, 64), (64, 64, 4, 0), (63, 64, 4), (64, 68, 4), (64, 64, 3), (64, 64, 68), (0, 0, 0)],
)
def test_buffers_of_an_order_have_its_shape(sizes: tuple[int, ...]) -> None:
    for rows in (0, 4, 64):
        decode([json.dumps(ORDER).encode(), bytes(64), bytes(64), bytes(rows)])
    message = f"order with buffers of {list(sizes)} bytes"
    with pytest.raises(ProtocolError, match=re.escape(message)):
        decode([json.dumps(ORDER).encode(), *map(bytes, sizes)])


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (1 << 17, 1), (1, 1, 1)])
def test_address_and_key_of_a_hello_are_there(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="hello with buffers of"):
        decode([HELLO.model_dump_json().encode(), *map(bytes, sizes)])


@pytest.mark.parametrize(
    "change",
    [
        {"address": 1 << 64},
        {"address": (1 << 64) - 8191},
        {"item_bytes": 1 << 16},
        *({name: 0} for name in ("slots", "slot_tokens", "hidden_size", "item_bytes")),
        {"slots": 1 << 31},
        {"slot_tokens": (1 << 31) - 1, "hidden_size": (1 << 31) - 1, "item_bytes": 8},
        {"run": "x" * 257},
        {"facts": {"x" * 257: 1}},
        {"facts": {"a": "x" * 257}},
        {"facts": {"a": 10**4000}},
        {"facts": {"a": float("nan")}},
        {"facts": {"a": [1]}},
    ],
)
def test_hello_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    decode([json.dumps(HELLO.model_dump() | {"address": (1 << 64) - 8192}).encode(), b"a", b"k"])
    with pytest.raises(ProtocolError, match="not a control message: "):
        decode([json.dumps(HELLO.model_dump() | change).encode(), b"address", b"key"])


def test_no_frames_are_refused() -> None:
    with pytest.raises(ProtocolError, match="without a header"):
        decode([])


def test_too_long_header_is_refused() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        decode([encode(Bye())[0] + b" " * MAX_HEADER_BYTES])


def test_too_long_message_is_refused() -> None:
    half = bytes(MAX_BUFFER_BYTES // 2)  # twice the same object: no more memory than half
    with pytest.raises(ProtocolError, match="control message of"):
        decode([json.dumps(ORDER).encode(), half, half, b""])
