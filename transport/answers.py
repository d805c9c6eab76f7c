"""What a student takes out of its ring, and whether it is what was asked for."""

from dataclasses import dataclass

from transport.errors import ProtocolError
from transport.layout import SlotHeader, token_digest
from transport.messages import INT32_BYTES
from transport.orders import Work


@dataclass(frozen=True)
class Answer:
    """Hidden states that have arrived; the payload is the ring's memory until `release`.

    Attributes:
        sequence: number of the order.
        slot: slot of the ring.
        payload: bytes of `header.num_rows` rows of hidden states.
        header: what the teacher said of them.
        waited_s: seconds that `take` waited.
    """

    sequence: int
    slot: int
    payload: memoryview
    header: SlotHeader
    waited_s: float


def check_answer(work: Work, header: SlotHeader) -> None:
    """Compare an answer with its order.

    Raises:
        ProtocolError: it is the answer to something else.
    """
    token_ids, _, rows = work.buffers
    digest, num_rows = token_digest(token_ids), len(rows) // INT32_BYTES
    wanted = (work.sequence, work.attempt, num_rows, digest)
    found = (header.sequence, header.attempt, header.num_rows, header.digest)
    if wanted != found:
        raise ProtocolError(
            f"slot {work.slot}: {work.teacher} answered "
            f"(sequence, attempt, rows, digest) = {found}, asked was {wanted}"
        )
