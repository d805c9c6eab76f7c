"""Fixtures that all tests share."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CommandLine, listening_ports, shared_memory, wait_for


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests on Slurm first, all in one worker: they wait much and share a cluster."""
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)
    for item in items:
        if item.get_closest_marker("slurm") is not None:
            item.add_marker(pytest.mark.xdist_group("slurm"))


@pytest.fixture
def disaggkd(tmp_path: Path) -> Iterator[CommandLine]:
    """The command line; fails a test that leaves a process, a port or shared memory behind."""
    before = shared_memory()
    command = CommandLine(tmp_path)
    yield command
    left = command.children()
    ports = listening_ports(left)
    for process in left:
        process.send_signal(signal.SIGKILL)
    assert not left, f"left behind: {left}, listening on {ports}"
    wait_for(lambda: shared_memory() <= before, 10, "the end of all shared memory")
