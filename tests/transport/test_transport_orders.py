"""Orders and answers between students and teachers that are processes of their own."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from transport_processes import (
    FACTS,
    LIVENESS,
    SPAWN,
    WAIT_S,
    Child,
    answer,
    ask,
    check,
    learn,
    open_pool,
    question,
    teach,
    teach_two,
)

from transport import pool as pool_module
from transport.errors import (
    DeadlineError,
    OrderFailedError,
    ProtocolError,
    RefusedError,
)
from transport.liveness import Liveness
from transport.memory import crc32c
from transport.messages import Order
from transport.rendezvous import RunKeys, discover
from transport.service import TeacherService

pytestmark = pytest.mark.usefixtures("nothing_left")
Start = Callable[..., Child]


@pytest.mark.parametrize(
    ("num_teachers", "tls"), [(1, None), (2, "tcp"), (3, "posix")], ids=["one", "two", "three"]
)
def test_answers_come_in_sequence(
    run_folder: Path,
    start: Start,
    set_ucx: Callable[[str | None], None],
    num_teachers: int,
    tls: str | None,
) -> None:
    set_ucx(tls)
    teachers = [start(teach, run_folder, index) for index in range(num_teachers)]
    with open_pool(run_folder) as pool:
        names = pool.connect(num_teachers, WAIT_S)
        assert names == [f"teacher-{index}" for index in range(num_teachers)]
        answered = learn(pool, 100)
        assert pool.room == 4
    served = [len(teacher.result()) for teacher in teachers]
    assert served == [answered.count(index) for index in range(num_teachers)]
    assert min(served) > 0
    assert discover(run_folder) == {}


@pytest.mark.parametrize("checksum", [False, True])
def test_answers_have_a_checksum_when_asked_for(
    run_folder: Path, start: Start, checksum: bool
) -> None:
    teacher = start(teach, run_folder, checksum=checksum)
    with open_pool(run_folder) as pool:
        pool.connect(1, WAIT_S)
        ask(pool, 0, 0)
        taken = pool.take(WAIT_S)
        assert taken.header.checksum == (crc32c(taken.payload) if checksum else None)
        pool.release(taken)
    teacher.result()


def test_one_teacher_serves_two_students_in_turn(run_folder: Path, start: Start) -> None:
    reached, theirs = SPAWN.Pipe(duplex=False)
    teacher = start(teach_two, run_folder, theirs, num_waiting=7)
    with open_pool(run_folder, rank=0) as one, open_pool(run_folder, rank=1) as other:
        one.connect(1, WAIT_S)
        other.connect(1, WAIT_S)
        ask(one, 0, 0)
        assert reached.poll(WAIT_S)
        for rank, pool in enumerate((one, other)):
            for sequence in range(1 - rank, 4):
                ask(pool, rank, sequence)
        for rank, pool in enumerate((one, other)):
            for sequence in range(4):
                check(pool, rank, sequence)
    served = teacher.result()
    assert [one.student.partition(".")[0] for one in served] == ["student-0", "student-1"] * 4
    questions = [question(rank, sequence) for sequence in range(4) for rank in range(2)]
    assert [one.num_tokens for one in served] == [ids.size for ids, _, _ in questions]
    assert [one.num_bytes for one in served] == [16 * len(rows) for _, _, rows in questions]
    assert [one.queued for one in served] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert all(min(one.waited_s, one.compute_s, one.write_s) > 0 for one in served)


def test_order_larger_than_a_slot_is_refused(run_folder: Path, start: Start) -> None:
    teacher = start(teach, run_folder)
    with open_pool(run_folder) as pool:
        pool.connect(1, WAIT_S)
        with pytest.raises(
            ProtocolError, match=r"65 rows are wanted but a slot holds 64: raise ring\.slot_tokens"
        ):
            pool.order(b"", b"", bytes(4 * 65), batch=1, length=65)
        learn(pool, 8)
    assert len(teacher.result()) == 8


def lose_a_row(order: Order, buffers: list[bytes]) -> memoryview:
    return answer(order, buffers)[:-16]


def test_answer_with_too_few_rows_is_not_written(run_folder: Path, start: Start) -> None:
    teacher = start(teach, run_folder, compute=lose_a_row)
    with open_pool(run_folder) as pool:
        pool.connect(1, WAIT_S)
        with pytest.raises(
            OrderFailedError, match=r"order 0: ProtocolError: payload has \d+ bytes, \d+ rows of"
        ):
            learn(pool, 1)
    assert teacher.result() == []


def test_nobody_to_talk_to(run_folder: Path) -> None:
    with (
        open_pool(run_folder) as pool,
        pytest.raises(DeadlineError, match=r"0 of 2 teachers came within 0\.2 s"),
    ):
        pool.connect(2, 0.2)
    with (
        TeacherService(
            run_folder, index=0, facts=FACTS, interface="lo", liveness=LIVENESS
        ) as service,
        pytest.raises(DeadlineError, match=r"no student came within 0\.2 s"),
    ):
        service.serve(answer, num_students=1, connect_timeout_s=0.2)


@pytest.fixture
def other_run(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with another name whose peers and keys are those of this one."""
    folder = tmp_path_factory.mktemp("other")
    keys = asdict(replace(RunKeys.load(run_folder), run="other"))
    (folder / "secret").touch(mode=0o600)
    (folder / "secret").write_text(json.dumps(keys))
    (folder / "peers").symlink_to(run_folder / "peers")
    return folder


def test_student_that_does_not_fit_is_refused_and_others_are_served(
    run_folder: Path, other_run: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    liveness = Liveness(heartbeat_s=0.1, dead_after_s=1.0)
    teacher = start(teach, run_folder, liveness=liveness)
    run = RunKeys.load(run_folder).run

    def reason(folder: Path, **changes: Any) -> str:
        with open_pool(folder, **changes) as pool, pytest.raises(RefusedError) as refusal:
            pool.connect(1, WAIT_S)
        return str(refusal.value).partition(" refused this student: ")[2]

    assert reason(run_folder, facts=FACTS | {"vocabulary": 999}) == (
        "vocabulary is 1000 here, the student expects 999"
    )
    assert reason(run_folder, facts={"hidden_size": 4}) == (
        "vocabulary is 1000 here, the student expects None"
    )
    assert reason(run_folder, facts=FACTS | {"norm": "rms"}) == (
        "norm is None here, the student expects 'rms'"
    )
    assert reason(other_run) == f"run other, this teacher belongs to {run}"
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "PROTOCOL_VERSION", 1)
        assert reason(run_folder) == "protocol version 1, this teacher speaks 2"
    refused_s = time.monotonic()
    with open_pool(run_folder, liveness=liveness) as pool:
        pool.connect(1, WAIT_S)
        sequence = 0  # longer than the silence of those that were refused could be noticed
        while time.monotonic() - refused_s < liveness.dead_after_s + 3 * liveness.heartbeat_s:
            ask(pool, 0, sequence)
            check(pool, 0, sequence)
            sequence += 1
    assert len(teacher.result()) == sequence
