"""Teachers on one host, the student on another, and a network between them that has faults."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import LINKS, Host, two_hosts, why_not
from transport_processes import WAIT_S, Child, Progress, study_until, teach

from transport.liveness import Liveness
from transport.rendezvous import discover

pytestmark = pytest.mark.usefixtures("nothing_left")
Start = Callable[..., Child]
IMPATIENT = Liveness(heartbeat_s=0.2, dead_after_s=1.0, grace_s=WAIT_S)


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    """Skip where there can be no hosts."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def hosts(tmp_path: Path, set_ucx: Callable[..., None]) -> Iterator[tuple[Host, Host]]:
    """Two hosts; UCX is told to use the fabric."""
    set_ucx("tcp", UCX_NET_DEVICES="fabric")
    with two_hosts(tmp_path) as both:
        yield both


@pytest.fixture
def start_on(start: Start) -> Callable[..., Child]:
    """Return a function that starts a child on a host."""

    def start_there(host: Host, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Child:
        with host.spawning():
            return start(function, *args, **kwargs)

    return start_there


def end(progress: Progress, student: Child, *teachers: Child) -> None:
    """Let a run come to its end: every order has been answered once."""
    progress.stop.set()
    assert student.result() == progress.answered()
    for teacher in teachers:
        teacher.result()


def test_everything_arrives_over_the_chosen_interface(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start
) -> None:
    there, here = hosts
    before = {name: here.received(name) for name in LINKS}
    progress = Progress()
    teachers = [start_on(there, teach, run_folder, i, interface="fabric") for i in range(2)]
    student = start_on(here, study_until, run_folder, progress, num_teachers=2)
    for index in range(2):
        progress.goes_on(200, teacher=index)
    for endpoint in discover(run_folder).values():
        assert endpoint.startswith(f"tcp://{there.address('fabric')}:")
    end(progress, student, *teachers)
    received = {name: here.received(name) - before[name] for name in LINKS}
    assert received["fabric"] > 100 * progress.answered()
    assert received["office"] < 5000  # the kernel's own packets


def test_a_short_cut_is_waited_for(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start
) -> None:
    """Neither UCX nor TCP tells of a cut; one shorter than `dead_after_s` is no event at all."""
    there, here = hosts
    patient = Liveness(heartbeat_s=0.2, dead_after_s=15)
    progress = Progress()
    teacher = start_on(there, teach, run_folder, liveness=patient, interface="fabric")
    student = start_on(here, study_until, run_folder, progress, liveness=patient)
    progress.goes_on()
    with here.cut("fabric"):
        stands_still(progress)
    progress.goes_on()
    progress.stop.set()
    assert student.result() == len(teacher.result()) == progress.answered()


def stands_still(progress: Progress) -> None:
    """Check that the cut is one."""
    time.sleep(0.2)  # what had arrived is taken
    before = progress.answered()
    time.sleep(1.3)
    assert progress.answered() == before


@pytest.fixture
def at_once() -> dict[str, Any]:
    """Settings of a student that gives up a silent teacher soon, and then waits long for one."""
    return {"liveness": IMPATIENT, "num_spare_slots": 4}


def test_a_long_cut_is_waited_for_when_nobody_is_left(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start, at_once: dict[str, Any]
) -> None:
    there, here = hosts
    progress = Progress()
    teachers = [
        start_on(there, teach, run_folder, index, liveness=IMPATIENT, interface="fabric")
        for index in range(2)
    ]
    student = start_on(here, study_until, run_folder, progress, num_teachers=2, **at_once)
    progress.goes_on()
    with there.cut("fabric"):
        stands_still(progress)
        time.sleep(IMPATIENT.dead_after_s)
    for index in range(2):
        progress.goes_on(teacher=index)
    end(progress, student, *teachers)


def test_others_go_on_during_a_long_cut_and_the_lost_one_comes_back(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start, at_once: dict[str, Any]
) -> None:
    there, here = hosts
    progress = Progress()
    teachers = [
        start_on(host, teach, run_folder, index, liveness=IMPATIENT, interface="fabric")
        for index, host in enumerate((there, here))
    ]
    student = start_on(here, study_until, run_folder, progress, num_teachers=2, **at_once)
    progress.goes_on(teacher=0)
    with there.cut("fabric"):
        time.sleep(IMPATIENT.dead_after_s + 0.5)
        lost = progress.answered(teacher=0)
        progress.goes_on(100, teacher=1)
        assert progress.answered(teacher=0) == lost
    progress.goes_on(teacher=0)
    end(progress, student, *teachers)


@pytest.fixture
def spoil(hosts: tuple[Host, Host]) -> Callable[[Callable[[Host], None]], None]:
    """Return a function that makes the fabric bad in both directions, where the kernel can."""

    def spoil_both(change: Callable[[Host], None]) -> None:
        for host in hosts:
            try:
                change(host)
            except OSError as error:
                pytest.skip(f"this kernel cannot: {error}")

    return spoil_both


def exchange(run_folder: Path, hosts: tuple[Host, Host], start_on: Start) -> float:
    """Let a run go on for 100 answers; return the seconds they took."""
    there, here = hosts
    progress = Progress()
    teacher = start_on(there, teach, run_folder, interface="fabric")
    student = start_on(here, study_until, run_folder, progress, num_spare_slots=4)
    progress.goes_on(1)
    start_s = time.monotonic()
    progress.goes_on(100)
    took_s = time.monotonic() - start_s
    end(progress, student, teacher)
    return took_s


def test_lost_packets_lose_no_order(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start, spoil: Callable[..., None]
) -> None:
    spoil(lambda host: host.lose(0.05))
    exchange(run_folder, hosts, start_on)
    assert min(host.dropped() for host in hosts) > 0


def test_a_slow_network_is_only_slow(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start, spoil: Callable[..., None]
) -> None:
    delay_ms, at_once = 20, 4
    spoil(lambda host: host.delay(delay_ms))
    took_s = exchange(run_folder, hosts, start_on)
    assert took_s > 100 / at_once * 2 * delay_ms / 1000 * 0.9
