"""The monitor while a run goes on: a live view, or plain lines where there is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from jobs.monitor.state import StateReader
from jobs.monitor.view import dashboard, plain_line
from jobs.run_folder import RunFolder

_REFRESH_S = 0.5
_PLAIN_REFRESH_S = 10.0


@contextmanager
def watching(folder: RunFolder, console: Console) -> Iterator[Callable[[], None]]:
    """Show a run on the console; yields a function to call often, which refreshes when due."""
    reader = StateReader(folder)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            show: Callable[[], None] = lambda: live.update(dashboard(reader.read()), refresh=True)  # noqa: E731
            yield _every(_REFRESH_S, show)
            show()
    else:
        yield _every(_PLAIN_REFRESH_S, lambda: console.print(plain_line(reader.read())))


def _every(interval_s: float, show: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `show` unless it has done so within the interval."""
    due = 0.0

    def refresh() -> None:
        nonlocal due
        if time.monotonic() >= due:
            show()
            due = time.monotonic() + interval_s

    return refresh
