"""What every binding must do over every transport that one machine has.

DISAGGKD_CONFORMANCE=full sends 100,000 small and 2,000 large messages over each.
"""

import importlib.util
import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from conformance_processes import leave, read_messages, stay, write_messages
from transport_processes import SPAWN, WAIT_S, Child, study, teach

from transport.binding import Choice
from transport.layout import RingGeometry
from transport.protocols import put_protocols, transports

FULL = os.environ.get("DISAGGKD_CONFORMANCE") == "full"
SMALL = RingGeometry(slots=3, slot_tokens=60, hidden_size=16, item_bytes=4)
LARGE = RingGeometry(slots=3, slot_tokens=512, hidden_size=512, item_bytes=4)
NUM_SMALL, NUM_LARGE = (100_000, 2_000) if FULL else (600, 60)
FULL_S = 600.0
CLOSE_S = 3.0


class Transport(NamedTuple):
    """Settings that leave UCX few ways to write, and their names in UCX's own tables."""

    tls: str
    used: frozenset[str]
    more: Mapping[str, str] = MappingProxyType({})


TRANSPORTS = {
    "posix": Transport("posix", frozenset({"posix/memory"})),
    "sysv": Transport("sysv", frozenset({"sysv/memory"})),
    # Into memory that is not shared cma alone can write; posix only makes the connection.
    "cma": Transport("posix,cma", frozenset({"cma/memory"}), {"UCX_ALLOC_PRIO": "mmap"}),
    # Small puts, and with them doorbells, go over posix, large ones over cma.
    "posix and cma": Transport("posix,cma", frozenset({"posix/memory", "cma/memory"})),
    "tcp": Transport("tcp", frozenset({"tcp/lo"})),
}

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.timeout(2 * FULL_S if FULL else 120),
]


@pytest.fixture(params=["native", "ucx-py"])
def binding(request: pytest.FixtureRequest) -> Choice:
    choice: Choice = request.param
    if choice == "ucx-py" and importlib.util.find_spec("ucp") is None:
        pytest.skip("ucx-py is not installed, see docs/transport.md")
    return choice


def exchange(
    start: Callable[..., Child],
    binding: Choice,
    series: list[tuple[RingGeometry, int]],
    *,
    eager: bool = False,
) -> tuple[int, str]:
    """Send messages from one child to another.

    Returns:
        How many were torn or early, and what UCX says of the connection.
    """
    ours, theirs = SPAWN.Pipe()
    reader = start(read_messages, binding, series, theirs, eager=eager)
    writer = start(write_messages, binding, series, ours)
    description = writer.result(FULL_S)
    return reader.result(), description


def check_used(used: frozenset[str], description: str) -> None:
    """Hold that UCX wrote over these transports, and by itself."""
    protocols = put_protocols(description, LARGE.slot_bytes)
    if protocols:
        assert {protocol.transports for protocol in protocols} == used
        assert not any(protocol.is_emulated for protocol in protocols)
    elif not used <= set(transports(description).split(", ")):  # UCX before 1.17 tells less
        pytest.skip(f"this UCX uses {transports(description)}")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_no_message_is_torn_or_early(
    start: Callable[..., Child], set_ucx: Callable[..., None], binding: Choice, name: str
) -> None:
    tls, used, more = TRANSPORTS[name]
    set_ucx(tls, **more)
    num_bad, description = exchange(start, binding, [(SMALL, NUM_SMALL), (LARGE, NUM_LARGE)])
    assert num_bad == 0
    check_used(used, description)


@pytest.mark.parametrize(("fence", "is_enough"), [("ep_based", True), ("weak", False)])
def test_only_the_right_fence_keeps_two_transports_in_order(
    start: Callable[..., Child],
    set_ucx: Callable[..., None],
    binding: Choice,
    fence: str,
    is_enough: bool,
) -> None:
    set_ucx(TRANSPORTS["posix and cma"].tls, UCX_FENCE_MODE=fence)
    num_bad, description = exchange(start, binding, [(LARGE, 20 * NUM_LARGE)], eager=True)
    check_used(TRANSPORTS["posix and cma"].used, description)
    assert (num_bad == 0) == is_enough


def test_orders_are_served(start: Callable[..., Child], run_folder: Path, binding: Choice) -> None:
    teacher = start(teach, run_folder, binding=binding)
    start(study, run_folder, 50, binding=binding).result()
    assert len(teacher.result()) == 50


@pytest.mark.parametrize("name", ["posix", "sysv", "cma", "tcp"])
def test_leaving_live_stopped_and_dead_peers(
    start: Callable[..., Child],
    set_ucx: Callable[..., None],
    tmp_path: Path,
    binding: Choice,
    name: str,
) -> None:
    tls, _, more = TRANSPORTS[name]
    set_ucx(tls, UCX_LOG_FILE=str(tmp_path / "ucx-%p.log"), **more)
    ours, theirs = SPAWN.Pipe()
    live, stopped, dead = readers = [start(stay, binding, LARGE, theirs) for _ in range(3)]
    assert ours.poll(WAIT_S)
    rings = dict(ours.recv() for _ in readers)
    writer = start(leave, binding, LARGE, rings, theirs)
    assert ours.poll(WAIT_S)
    ours.recv()
    stopped.signal(signal.SIGSTOP)
    dead.kill()
    ours.send({pid: pid == live.process.pid for pid in rings})
    durations_s = writer.result()
    assert max(durations_s) < CLOSE_S, durations_s
    live.kill()
    stopped.kill()
    log = "".join(path.read_text() for path in tmp_path.glob("ucx-*.log"))
    assert re.findall(r".*(?:WARN|ERROR|FATAL|ssert).*", log) == []
