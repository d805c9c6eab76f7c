"""What waiting costs: the delay after a doorbell, and the processor while nothing comes."""

import os
import resource
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from transport_processes import GEOMETRY, SPAWN, WAIT_S, Child, announce_in_turn

from transport.native import Worker
from transport.ring import Ring

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("nothing_left")]


@contextmanager
def opened_ring() -> Iterator[tuple[Ring, dict[str, object]]]:
    """Yield a ring and what a writer must know of it."""
    with Worker() as worker, Ring(worker, GEOMETRY) as ring:
        yield ring, {"peer": worker.address, "address": ring.address, "key": ring.key}


@contextmanager
def cpu_shares() -> Iterator[list[float]]:
    """Measure which share of a core this thread, and all others of this process, take."""
    shares: list[float] = []
    wall, own, whole = time.monotonic(), time.thread_time(), time.process_time()
    yield shares
    wall, own = time.monotonic() - wall, time.thread_time() - own
    shares += [own / wall, (time.process_time() - whole - own) / wall]


@contextmanager
def awakenings() -> Iterator[list[int]]:
    """Count how often this thread has slept and awoken."""
    counts: list[int] = []
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    yield counts
    counts.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)


@pytest.fixture
def undisturbed() -> Iterator[int]:
    """Give this thread priority over a busy machine; return the scheduling policy that does it."""
    policy = os.SCHED_RR
    try:
        os.sched_setscheduler(0, policy, os.sched_param(os.sched_get_priority_min(policy)))
    except PermissionError:
        pytest.skip("needs the right to real-time priority")
    yield policy
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.mark.parametrize("tls", ["posix", "sysv", "posix,cma", "tcp"])
def test_doorbell_ends_a_wait_about_as_soon_as_a_pipe(
    start: Callable[..., Child],
    set_ucx: Callable[[str | None], None],
    undisturbed: int,
    tls: str,
) -> None:
    set_ucx(tls)
    num_rounds, seen = 30, []
    for _ in range(3):
        of_pipe, of_ring = [], []
        ours, theirs = SPAWN.Pipe(duplex=False)
        with opened_ring() as (ring, where):
            writer = start(
                announce_in_turn, where, theirs, num_rounds, pause_s=0.02, policy=undisturbed
            )
            for sequence in range(num_rounds):
                sent_s = ours.recv()
                of_pipe.append(time.monotonic() - sent_s)
                assert ring.wait(0, sequence, 0, WAIT_S)
                (sent_s,) = struct.unpack("d", ring.payload(0, 1)[:8])
                of_ring.append(time.monotonic() - sent_s)
            writer.result()
        limit_s = 2 * statistics.median(of_pipe) + 0.0005  # naps alone would take 0.002
        seen.append((statistics.median(of_ring), limit_s))
        if statistics.median(of_ring) < limit_s:  # others only ever add to it
            return
    pytest.fail(f"delays and their limits in s: {seen}")


@pytest.mark.parametrize("tls", ["posix", "tcp"])
def test_waiting_in_vain_takes_little_of_a_core(
    set_ucx: Callable[[str | None], None], tls: str
) -> None:
    """Each awakening costs what the machine makes of it: a thread that only sleeps tells."""
    set_ucx(tls)
    measured = []
    with opened_ring() as (ring, _):
        for _ in range(6):
            with awakenings() as num_awakenings, cpu_shares() as shares:
                assert not ring.wait(0, 0, 0, 0.5)
            assert num_awakenings[0] < 0.5 / 0.004 + 20
            with cpu_shares() as asleep:
                for _ in range(125):
                    time.sleep(0.004)
            measured.append([*shares, *asleep])
    waiting, progress, sleeping, _ = map(min, zip(*measured, strict=True))  # others only ever add
    assert waiting < max(0.02, 3 * sleeping)
    assert progress < max(0.005, sleeping)


def test_progress_takes_little_from_a_busy_thread(
    start: Callable[..., Child], set_ucx: Callable[[str | None], None]
) -> None:
    set_ucx("tcp")
    num_rounds = 10
    measured = []
    for _ in range(8):
        ours, theirs = SPAWN.Pipe(duplex=False)
        with opened_ring() as (ring, where):
            policy = os.SCHED_OTHER
            writer = start(announce_in_turn, where, theirs, num_rounds, pause_s=0.05, policy=policy)
            ours.recv()
            with cpu_shares() as shares:
                while not ring.is_ready(0, num_rounds - 1, 0):
                    pass
            writer.result()
        measured.append(shares[1])
        if measured[-1] < 0.03:  # others only ever add to it
            return
    pytest.fail(f"took {measured} of a core")
