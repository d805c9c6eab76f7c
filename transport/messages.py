"""The control messages and their frames: a JSON header, then raw buffers; never pickle.

Whatever does not match its declaration here is refused before anything acts on it.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from transport.errors import ProtocolError

PROTOCOL_VERSION = 2
MAX_HEADER_BYTES = 1 << 16
MAX_BUFFER_BYTES = 1 << 28
ROW_INDEX_BYTES = 4


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    num_buffers: ClassVar[int] = 0


class Hello(_Message):
    """Student to teacher: who I am, where my ring is, which teacher I expect.

    Buffers: address of the UCX worker, packed key of the ring.
    """

    num_buffers = 2
    kind: Literal["hello"] = "hello"
    protocol: int
    run: str
    rank: NonNegativeInt
    slots: PositiveInt
    slot_tokens: PositiveInt
    hidden_size: PositiveInt
    item_bytes: PositiveInt
    address: NonNegativeInt
    facts: dict[str, Any]


class Welcome(_Message):
    """Teacher to student: send orders."""

    kind: Literal["welcome"] = "welcome"
    teacher: NonNegativeInt
    transports: str


class Refuse(_Message):
    """Teacher to student: no, and why."""

    kind: Literal["refuse"] = "refuse"
    reason: str


class Order(_Message):
    """Student to teacher: compute these tokens, and write the wanted rows into this slot.

    Buffers: token ids, positions (both int32 `[batch, length]`), wanted rows (int32 `[num_rows]`,
    indices into the flattened tokens).
    """

    num_buffers = 3
    kind: Literal["order"] = "order"
    sequence: NonNegativeInt
    attempt: NonNegativeInt = 0
    slot: NonNegativeInt
    batch: PositiveInt
    length: PositiveInt

    @property
    def num_tokens(self) -> int:
        """Tokens that the teacher computes."""
        return self.batch * self.length


class Failed(_Message):
    """Teacher to student: this order cannot be served."""

    kind: Literal["failed"] = "failed"
    sequence: NonNegativeInt
    attempt: NonNegativeInt
    error: str
    message: str


class Cancel(_Message):
    """Student to teacher: do not write this order's answer, another teacher has it now."""

    kind: Literal["cancel"] = "cancel"
    sequence: NonNegativeInt
    attempt: NonNegativeInt


class Cancelled(_Message):
    """Teacher to student: I have written this answer, or never will; the slot is yours."""

    kind: Literal["cancelled"] = "cancelled"
    sequence: NonNegativeInt
    attempt: NonNegativeInt


class Heartbeat(_Message):
    """Both ways, once a second: I live."""

    kind: Literal["heartbeat"] = "heartbeat"


class Bye(_Message):
    """Both ways: the connection is over; a teacher will write no more.

    Of a connection that broke (`clean` is false), bytes may still be on their way.
    """

    kind: Literal["bye"] = "bye"
    clean: bool = True


Message = Hello | Welcome | Refuse | Order | Failed | Cancel | Cancelled | Heartbeat | Bye
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message, *buffers: bytes) -> list[bytes]:
    """Return the frames of a message."""
    assert len(buffers) == message.num_buffers
    return [message.model_dump_json().encode(), *buffers]


def decode(frames: list[bytes]) -> tuple[Message, list[bytes]]:
    """Return the message and its buffers.

    Raises:
        ProtocolError: the frames are not a message of this protocol.
    """
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError("control message without a header, or with one that is too long")
    if sum(map(len, frames)) > MAX_BUFFER_BYTES:
        raise ProtocolError(f"control message of {sum(map(len, frames))} bytes")
    try:
        message = _ADAPTER.validate_json(frames[0])
    except ValidationError as error:
        raise ProtocolError(f"not a control message: {error.errors()[0]['msg']}") from error
    buffers = frames[1:]
    if len(buffers) != message.num_buffers:
        raise ProtocolError(f"{message.kind} with {len(buffers)} buffers")
    return message, buffers
