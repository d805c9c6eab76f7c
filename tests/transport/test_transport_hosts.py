"""Teachers on one host, the student on another, and a network between them that has faults."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hosts import LINKS, Host, two_hosts, why_not
from transport_processes import LIVENESS, Child, Progress, study_until, teach

from transport.liveness import Liveness
from transport.rendezvous import discover

pytestmark = pytest.mark.usefixtures("nothing_left")
Start = Callable[..., Child]
SPARE = 4


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


def end(progress: Progress, student: Child, *teachers: Child) -> list[int]:
    """Let a run come to its end; return how many answers each teacher gave."""
    progress.stop.set()
    answered = student.result()
    assert len(answered) == progress.answered
    for teacher in teachers:
        teacher.result()
    return [answered.count(index) for index in range(len(teachers))]


def test_everything_arrives_over_the_chosen_interface(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start
) -> None:
    there, here = hosts
    before = {name: here.received(name) for name in LINKS}
    progress = Progress()
    teachers = [start_on(there, teach, run_folder, i, interface="fabric") for i in range(2)]
    student = start_on(here, study_until, run_folder, progress, num_teachers=2)
    progress.goes_on(500)
    for endpoint in discover(run_folder).values():
        assert endpoint.startswith(f"tcp://{there.address('fabric')}:")
    counts = end(progress, student, *teachers)
    assert min(counts) > 0
    received = {name: here.received(name) - before[name] for name in LINKS}
    assert received["fabric"] > 100 * sum(counts)
    assert received["office"] < 5000  # the kernel's own packets


def test_a_short_cut_is_waited_for(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start
) -> None:
    """UCX and TCP say nothing of a cut; shorter than `dead_after_s` it is no event at all."""
    there, here = hosts
    patient = Liveness(heartbeat_s=0.2, dead_after_s=10)
    progress = Progress()
    teacher = start_on(there, teach, run_folder, liveness=patient, interface="fabric")
    student = start_on(here, study_until, run_folder, progress, liveness=patient)
    progress.goes_on()
    with here.cut("fabric"):
        time.sleep(0.2)  # what has arrived is taken
        before = progress.answered
        time.sleep(1.5)
        assert progress.answered == before
    progress.goes_on()
    (count,) = end(progress, student, teacher)
    assert count == progress.answered


def test_a_long_cut_is_waited_for_when_nobody_else_is_left(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start
) -> None:
    there, here = hosts
    liveness = Liveness(heartbeat_s=0.2, dead_after_s=1.0, grace_s=20)
    progress = Progress()
    teachers = [
        start_on(there, teach, run_folder, index, liveness=liveness, interface="fabric")
        for index in range(2)
    ]
    settings = {"liveness": liveness, "num_spare_slots": SPARE}
    student = start_on(here, study_until, run_folder, progress, num_teachers=2, **settings)
    progress.goes_on()
    with there.cut("fabric"):
        time.sleep(3)
    progress.goes_on()
    assert sum(end(progress, student, *teachers)) == progress.answered


def test_others_go_on_during_a_cut_and_the_lost_one_comes_back(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start
) -> None:
    there, here = hosts
    liveness = Liveness(heartbeat_s=0.2, dead_after_s=1.0, grace_s=20)
    progress = Progress()
    teachers = [
        start_on(host, teach, run_folder, index, liveness=liveness, interface="fabric")
        for index, host in enumerate((there, here))
    ]
    settings = {"liveness": liveness, "num_spare_slots": SPARE}
    student = start_on(here, study_until, run_folder, progress, num_teachers=2, **settings)
    progress.goes_on()
    with there.cut("fabric"):
        time.sleep(liveness.dead_after_s + 1)
        progress.goes_on(100)
        time.sleep(1)
    restored = progress.answered
    time.sleep(2)
    progress.goes_on()
    progress.stop.set()
    answered = student.result()
    for teacher in teachers:
        teacher.result()
    assert 0 in answered[restored:]


DISCIPLINES = {
    "delay and loss": "netem delay 10ms 2ms loss 1%",
    "narrow with a short queue": "tbf rate 4mbit burst 8kb limit 8kb",
}


@pytest.mark.parametrize("name", DISCIPLINES)
def test_a_bad_network_slows_but_loses_nothing(
    run_folder: Path, hosts: tuple[Host, Host], start_on: Start, name: str
) -> None:
    for host in hosts:
        try:
            host.shape(*DISCIPLINES[name].split())
        except OSError as error:
            pytest.skip(f"this kernel has no such discipline: {error}")
    there, here = hosts
    progress = Progress()
    teach_there = partial(start_on, there, teach, run_folder, interface="fabric")
    teacher = teach_there(liveness=LIVENESS)
    student = start_on(here, study_until, run_folder, progress, num_spare_slots=SPARE)
    progress.goes_on(200)
    (count,) = end(progress, student, teacher)
    assert count == progress.answered
