"""What UCX says of its protocols, and what follows from it."""

import logging
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from transport_processes import GEOMETRY, WAIT_S, Child, open_pool, teach

from transport.binding import open_worker
from transport.errors import RefusedError
from transport.protocols import PutProtocol, check_connection, put_protocols, transports
from transport.ring import Ring, RingWriter

SLOT_BYTES = 1 << 20
TWO_RAILS = "50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1/path0"
TABLE = """
# +-------------+------------------+
# | ucp_context_0 inter-node cfg#1 |
# | remote memory write by {operation} from host memory to host |
# +-------------+--------------------+----------+
# |    Range    |    Description     |  Config  |
# +-------------+--------------------+----------+
# |     0..2038 | short              | rc_mlx5/mlx5_0:1/path0 |
# | 2039..{last} | {method}           | {config} |
# |     4G..inf | software emulation | tcp/ib0  |
# +-------------+--------------------+----------+
"""


def table(
    method: str, config: str, last: str = "4294967295", operation: str = "ucp_put*(multi)"
) -> str:
    return TABLE.format(method=method, config=config, last=last, operation=operation)


def test_table_is_read_up_to_the_largest_put() -> None:
    text = table("multi-frag zero-copy", TWO_RAILS, last="64K") + table(
        "zero-copy", "tcp/ib0", operation="ucp_get*"
    )
    assert put_protocols(text, SLOT_BYTES) == [
        PutProtocol(0, "2038", "short", "rc_mlx5/mlx5_0:1/path0"),
        PutProtocol(2039, "64K", "multi-frag zero-copy", TWO_RAILS),
    ]
    assert len(put_protocols(text, 8)) == 1
    assert put_protocols(text, 4 << 30)[2].is_emulated


@pytest.mark.parametrize(
    ("method", "config", "is_rdma"),
    [
        ("zero-copy", "rc_mlx5/mlx5_0:1/path0", True),
        ("zero-copy", TWO_RAILS, True),
        ("zero-copy", "dc_mlx5/mlx5_0:1", True),
        ("zero-copy", "tcp/ib0", False),
        ("zero-copy", "50% on rc_verbs/mlx5_0:1 and 50% on tcp/eth0", False),
        ("software emulation", "rc_mlx5/mlx5_0:1", False),
        ("zero-copy", "", False),
    ],
)
def test_rdma_is_told_from_the_rest(method: str, config: str, is_rdma: bool) -> None:
    assert PutProtocol(0, "inf", method, config).is_rdma == is_rdma
    text = table(method, config or "-")
    if is_rdma:
        check_connection("student", text, SLOT_BYTES, rdma=True)
    else:
        with pytest.raises(RefusedError, match=r"require is 'rdma', but UCX's puts are: 0\.\.2038"):
            check_connection("student", text, SLOT_BYTES, rdma=True)


def test_unknown_protocol_is_not_rdma() -> None:
    with pytest.raises(RefusedError, match="not told by this UCX"):
        check_connection("student", "lane[0]:  0:rc_mlx5/mlx5_0:1.0", SLOT_BYTES, rdma=True)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("is_emulated", [False, True])
def test_emulation_is_warned_of(
    set_ucx: Callable[..., None], caplog: pytest.LogCaptureFixture, is_emulated: bool
) -> None:
    set_ucx("tcp", UCX_RNDV_THRESH="8k" if is_emulated else "inf")
    with open_worker("native") as worker, Ring(worker, GEOMETRY) as ring:
        writer = RingWriter(
            worker, GEOMETRY, peer=worker.address, address=ring.address, key=ring.key
        )
        with caplog.at_level(logging.INFO):
            used = check_connection("student", writer.describe(), SLOT_BYTES, rdma=False)
        assert used == transports(writer.describe()) == "tcp/lo"
        writer.close()
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == is_emulated
    method = "software emulation" if is_emulated else "zero-copy"
    assert f"student is there, over tcp/lo; puts: 0..inf {method} tcp/lo" in caplog.messages


def test_teacher_refuses_what_is_not_rdma(
    run_folder: Path, start: Callable[..., Child], set_ucx: Callable[..., None]
) -> None:
    set_ucx("posix")
    teacher = start(teach, run_folder, require_rdma=True)
    message = r"refused this student: transport.require is 'rdma', but .* short posix/memory"
    with open_pool(run_folder) as pool, pytest.raises(RefusedError, match=message):
        pool.connect(1, WAIT_S)
    teacher.signal(signal.SIGTERM)
    teacher.result()
