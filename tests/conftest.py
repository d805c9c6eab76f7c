"""What all tests share: the command line, how tests are spread, and that nothing stays behind."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, listening_ports, shared_memory, wait_for

_BEFORE = pytest.StashKey[set[str]]()
_IS_WORKER = "workerinput"  # attribute that pytest-xdist gives its workers' configuration


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests on the machine's one Slurm to one worker, the others to whoever is free."""
    from xdist.scheduler import LoadScopeScheduling

    class OneForSlurm(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "slurm" if nodeid.startswith("tests/slurm/") else nodeid

    return OneForSlurm(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, _IS_WORKER):
        session.config.stash[_BEFORE] = shared_memory()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail when shared memory is left; tests run side by side cannot tell whose it is."""
    if hasattr(session.config, _IS_WORKER):
        return
    before = session.config.stash[_BEFORE]
    with suppress(AssertionError):
        wait_for(lambda: shared_memory() <= before, 10)
    left = shared_memory() - before
    if left:
        session.config.get_terminal_writer().line(f"\nshared memory is left: {left}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def disaggkd(tmp_path: Path) -> Iterator[CommandLine]:
    """The command line; fails a test that leaves a process or a port behind."""
    command = CommandLine(tmp_path)
    yield command
    left = command.children()
    ports = listening_ports(left)
    for process in left:
        process.send_signal(signal.SIGKILL)
    assert not left, f"left behind: {left}, listening on {ports}"
