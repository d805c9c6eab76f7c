"""Hidden states from teachers behind a ring: the tensor is the ring's memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from toolkit.data.batches import Batch
from toolkit.teacher.pinning import pin_for
from toolkit.teacher.sources import ColocatedTeacher, RemoteTeachers, TeacherBody
from transport.control import Liveness
from transport.layout import RingGeometry
from transport.library import ucx_settings
from transport.memory import lock
from transport.messages import Order
from transport.pool import TeacherPool
from transport.rendezvous import RunKeys
from transport.service import TeacherService

GEOMETRY = RingGeometry(slots=3, slot_tokens=8, hidden_size=4, item_bytes=4)
CPU = torch.device("cpu")
WAIT_S = 20.0


class Embedding(nn.Module):
    """The smallest body: a row of numbers for every token id."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, GEOMETRY.hidden_size)

    def forward(self, input_ids: torch.Tensor, **_: object) -> "Embedding":
        self.last_hidden_state = self.embedding(input_ids)
        return self


def batch(index: int) -> Batch:
    ids = torch.arange(8).view(2, 4) + index % 2
    rows = torch.arange(index, 8)
    return Batch(index, ids, torch.arange(4).expand(2, 4), ids.flatten()[rows], rows, 8)


@pytest.fixture
def body() -> TeacherBody:
    return TeacherBody(Embedding(), CPU)


@contextmanager
def serving(folder: Path, body: TeacherBody) -> Iterator[None]:
    """Be a teacher, in a thread of its own."""
    liveness = Liveness()
    with TeacherService(folder, index=0, facts={}, interface="lo", liveness=liveness) as service:
        thread = threading.Thread(
            target=service.serve,
            args=(body.answer,),
            kwargs={"num_students": 1, "connect_timeout_s": WAIT_S},
        )
        thread.start()
        yield
        thread.join()


def test_tensor_is_the_slot_that_the_teacher_writes(
    tmp_path: Path, body: TeacherBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ucx_settings("lo").items():
        monkeypatch.setenv(name, value)
    RunKeys.create(tmp_path)
    starts: list[int] = []

    @contextmanager
    def pin(address: int, num_bytes: int) -> Iterator[str]:
        starts.extend(address + GEOMETRY.payload_offset(slot) for slot in range(GEOMETRY.slots))
        yield "pinned"

    batches = [batch(index) for index in range(7)]
    expected = ColocatedTeacher(body).stream(batches)
    with serving(tmp_path, body):
        pool = TeacherPool(tmp_path, GEOMETRY, rank=0, facts={}, liveness=Liveness(), pin=pin)
        pool.connect(1, WAIT_S)
        with RemoteTeachers(
            pool, hidden_size=4, dtype=torch.float32, device=CPU, timeout_s=WAIT_S
        ) as remote:
            used = []
            for (_, states), (_, wanted) in zip(remote.stream(batches), expected, strict=True):
                assert torch.equal(states, wanted)
                used.append(states.data_ptr())
    assert set(used) == set(starts)


ORDER = Order(sequence=0, slot=0, batch=2, length=4)


def as_bytes(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


@pytest.mark.parametrize("rows", [(), (0,), (7, 0, 7)])
def test_any_wanted_rows_are_answered(body: TeacherBody, rows: tuple[int, ...]) -> None:
    ids, positions = as_bytes(*range(2, 10)), as_bytes(*range(4), *range(4))
    payload = body.answer(ORDER, [ids, positions, as_bytes(*rows)])
    wanted = body._body.embedding(torch.tensor([2 + row for row in rows], dtype=torch.long))
    assert payload.nbytes == 16 * len(rows)
    assert bytes(payload) == wanted.detach().numpy().tobytes()


@pytest.mark.parametrize("rows", [(-1,), (8,), (0, 1 << 30)])
def test_rows_outside_the_batch_are_refused(body: TeacherBody, rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rows -?\d+ to -?\d+ are wanted of 8 tokens"):
        body.answer(ORDER, [bytes(32), bytes(32), as_bytes(*rows)])


def test_ring_is_locked_for_a_cpu() -> None:
    assert pin_for(CPU) is lock


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_ring_is_registered_with_cuda_for_a_gpu() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    with pin_for(torch.device("cuda"))(memory.data_ptr(), memory.nbytes) as how:
        assert how == "registered with CUDA"
        assert memory.is_pinned()
    assert not memory.is_pinned()
