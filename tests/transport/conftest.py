"""A run folder, the UCX settings of local processes, and the check that nothing stays behind."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from transport_processes import Child

from transport.library import ucx_settings
from transport.rendezvous import RunKeys


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return the folder of a run that has its keys."""
    RunKeys.create(tmp_path)
    return tmp_path


@pytest.fixture
def set_ucx(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that chooses UCX_TLS and more, for this process and its children."""

    def choose(tls: str | None, **more: str) -> None:
        monkeypatch.delenv("UCX_TLS", raising=False)
        for name, value in (ucx_settings("lo", tls) | more).items():
            monkeypatch.setenv(name, value)

    choose(None)
    return choose


@pytest.fixture
def start(nothing_left: None) -> Iterator[Callable[..., Child]]:
    """Return a function that starts a child; the test itself must see every child end."""
    children: list[Child] = []

    def start_child(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Child:
        children.append(Child(function, *args, **kwargs))
        return children[-1]

    yield start_child
    alive = [child.process.name for child in children if child.process.is_alive()]
    for child in children:
        child.kill()
    assert not alive


@pytest.fixture
def nothing_left(set_ucx: object) -> Iterator[None]:
    """Fail when processes or threads outlive the test."""
    before = _leftovers()
    yield
    deadline = time.monotonic() + 2
    while new := _leftovers() - before:
        assert time.monotonic() < deadline, new
        time.sleep(0.02)


def _leftovers() -> set[str]:
    children = psutil.Process().children(recursive=True)
    return {
        *(str(child.pid) for child in children if not _is_resource_tracker(child)),
        *(f"thread {thread.name}" for thread in threading.enumerate()),
        *(name for name in _native_threads() if name.startswith(("ucx-progress", "ZMQ"))),
    }


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Say whether this is the one process that multiprocessing itself keeps."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _native_threads() -> set[str]:
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
