"""The control messages and their frames: a JSON header, then raw buffers; never pickle.

Whatever does not match its declaration here is refused before anything acts on it.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from transport.errors import ProtocolError
from transport.layout import MAX_ATTEMPTS, MAX_SEQUENCES, RingGeometry

PROTOCOL_VERSION = 2
MAX_HEADER_BYTES = 1 << 16
MAX_BUFFER_BYTES = 1 << 28
MAX_BLOB_BYTES = 1 << 16
MAX_TEXT_CHARS = 8000
"""So many characters fit a header also when each is escaped."""
INT32_BYTES = 4
_ADDRESS_SPACE = 1 << 64

OrderNumber = Annotated[int, Field(ge=0, lt=MAX_SEQUENCES)]
Attempt = Annotated[int, Field(ge=0, lt=MAX_ATTEMPTS)]
Index = Annotated[int, Field(ge=0, lt=1 << 31)]
Size = Annotated[int, Field(ge=1, lt=1 << 31)]
Name = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Fact = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | float | bool | Name | None


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def fits(self, buffers: Sequence[bytes]) -> bool:
        """Say whether these can be the buffers of this message."""
        return not buffers


class Hello(_Message):
    """Student to teacher: who I am, where my ring is, which teacher I expect.

    Buffers: address of the UCX worker, packed key of the ring.
    """

    kind: Literal["hello"] = "hello"
    protocol: Index
    run: Name
    rank: Index
    slots: Size
    slot_tokens: Size
    hidden_size: Size
    item_bytes: Annotated[int, Field(ge=1, lt=1 << 16)]
    address: Annotated[int, Field(ge=0, lt=_ADDRESS_SPACE)]
    facts: dict[Name, Fact]

    @property
    def geometry(self) -> RingGeometry:
        """Geometry of the student's ring."""
        return RingGeometry(self.slots, self.slot_tokens, self.hidden_size, self.item_bytes)

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.address + self.geometry.total_bytes > _ADDRESS_SPACE:
            raise ValueError("the ring ends behind the last address")
        return self

    def fits(self, buffers: Sequence[bytes]) -> bool:
        """Say whether these can be an address and a key."""
        return len(buffers) == 2 and all(0 < len(buffer) <= MAX_BLOB_BYTES for buffer in buffers)


class Welcome(_Message):
    """Teacher to student: send orders."""

    kind: Literal["welcome"] = "welcome"
    teacher: Index
    transports: Text


class Refuse(_Message):
    """Teacher to student: no, and why."""

    kind: Literal["refuse"] = "refuse"
    reason: Text


class Order(_Message):
    """Student to teacher: compute these tokens, and write the wanted rows into this slot.

    Buffers: token ids, positions (both int32 `[batch, length]`), wanted rows (int32 `[num_rows]`,
    indices into the flattened tokens).
    """

    kind: Literal["order"] = "order"
    sequence: OrderNumber
    attempt: Attempt = 0
    slot: Index
    batch: Size
    length: Size

    @property
    def num_tokens(self) -> int:
        """Tokens that the teacher computes."""
        return self.batch * self.length

    def fits(self, buffers: Sequence[bytes]) -> bool:
        """Say whether these can be token ids, positions and rows of this shape."""
        if len(buffers) != 3:
            return False
        ids, positions, rows = map(len, buffers)
        limit = self.num_tokens * INT32_BYTES
        return ids == positions == limit and rows <= limit and rows % INT32_BYTES == 0


class Failed(_Message):
    """Teacher to student: this order cannot be served."""

    kind: Literal["failed"] = "failed"
    sequence: OrderNumber
    attempt: Attempt
    error: Name
    message: Text


class Cancel(_Message):
    """Student to teacher: do not write this order's answer, another teacher has it now."""

    kind: Literal["cancel"] = "cancel"
    sequence: OrderNumber
    attempt: Attempt


class Cancelled(_Message):
    """Teacher to student: I have written this answer, or never will; the slot is yours."""

    kind: Literal["cancelled"] = "cancelled"
    sequence: OrderNumber
    attempt: Attempt


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


def as_text(value: object) -> str:
    """Return `str(value)` as a message may carry it: cut, and valid Unicode."""
    return str(value)[:MAX_TEXT_CHARS].encode(errors="replace").decode()


def encode(message: Message, *buffers: bytes) -> list[bytes]:
    """Return the frames of a message."""
    assert message.fits(buffers)
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
    if not message.fits(buffers):
        raise ProtocolError(f"{message.kind} with buffers of {[len(b) for b in buffers]} bytes")
    return message, buffers
