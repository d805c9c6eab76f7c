"""The monitor while a run goes on: a live view, or plain lines where there is no terminal."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.live import Live

from jobs.monitor.state import RunState, StateReader
from jobs.monitor.view import dashboard, plain_line, summary
from jobs.run_folder import RunFolder
from transport.rendezvous import write_atomically

_REFRESH_S = 0.5
_PLAIN_REFRESH_S = 10.0
_SVG_WIDTH = 100


@contextmanager
def watching(folder: RunFolder, console: Console) -> Iterator[Callable[[], RunState]]:
    """Show a run on the console; yields a function to call often, which refreshes when due."""
    reader = StateReader(folder)
    if not console.is_terminal:
        yield _every(_PLAIN_REFRESH_S, reader, lambda s: console.print(plain_line(s)))
        return
    with Live(console=console, auto_refresh=False) as live:
        refresh = _every(_REFRESH_S, reader, lambda s: live.update(dashboard(s), refresh=True))
        yield refresh
        live.update(dashboard(reader.read()), refresh=True)


def follow(folder: RunFolder, console: Console) -> RunState:
    """Show a run until it is done, has failed for good, or its Slurm job has left the queue."""
    with watching(folder, console) as refresh:
        while not (state := refresh()).ended:
            time.sleep(_REFRESH_S)
    return state


def as_json(state: RunState) -> str:
    """Return a state as one line of JSON."""
    last = state.last
    values = {
        "path": state.path,
        "phase": state.phase,
        "done": state.done,
        "failure": None if state.failure is None else asdict(state.failure),
        "job": state.job,
        "job_state": None if state.job_state is None else asdict(state.job_state),
        "restarts": state.restarts,
        "last_step": last,
        "student_waiting": None if last is None else state.waiting,
        "teachers": [asdict(teacher) for teacher in state.teachers],
        "results": state.results,
    }
    return json.dumps(values)


def write_svg(state: RunState, path: Path) -> None:
    """Write the summary of a run as a picture."""
    console = Console(record=True, width=_SVG_WIDTH, file=StringIO(), force_terminal=True)
    console.print(summary(state))
    write_atomically(path, console.export_svg(title="disaggkd"))


def _every(
    interval_s: float, reader: StateReader, show: Callable[[RunState], None]
) -> Callable[[], RunState]:
    """Return a function that reads the state, and shows it unless it has within the interval."""
    due = 0.0

    def refresh() -> RunState:
        nonlocal due
        state = reader.read()
        if time.monotonic() >= due:
            show(state)
            due = time.monotonic() + interval_s
        return state

    return refresh
