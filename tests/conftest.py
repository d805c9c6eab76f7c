"""Fixtures that all tests share."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CommandLine, listening_ports, shared_memory, wait_for


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
