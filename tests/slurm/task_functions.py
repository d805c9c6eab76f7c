"""What the tasks of the executor's tests run; `PYTHONPATH` makes it importable there."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from submitit import JobEnvironment
from submitit.core.utils import DelayedSubmission

PATIENCE_S = 90.0


def restart() -> int:
    """Return how often this job has been requeued."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def describe(word: str) -> dict[str, Any]:
    """Return and print what a task knows about itself."""
    here: Any = JobEnvironment()
    print(f"{word} from {here.role} {here.role_rank}")
    return {
        "word": word,
        "role": (here.role, here.role_rank, here.role_size),
        "ranks": (here.global_rank, here.num_tasks, here.local_rank, here.local_size),
        "node": os.environ["SLURMD_NODENAME"],
        "nodes": (here.hostnames, here.role_hostnames("student"), here.role_hostnames("teacher")),
        "devices": here.devices,
        "variables": {name: os.environ.get(name) for name in ("WORD", "SET_UP", "OUTER")},
        "binding": os.environ.get("SLURM_CPU_BIND", ""),
    }


def sleep(folder: str) -> None:
    """Show that the task runs, and go on longer than any test waits."""
    environment: Any = JobEnvironment()
    Path(folder, f"{environment.role}-{environment.role_rank}.runs").touch()
    time.sleep(PATIENCE_S)


def run_number(folder: str) -> int:
    """Return at once which run of the job this is."""
    return restart()


def die_in_second_run(folder: str) -> None:
    """Succeed in the first run of the job, and be killed in the next."""
    if restart():
        os.kill(os.getpid(), signal.SIGKILL)


def raise_in_rank_1(folder: str) -> None:
    """Fail in rank 1 of the role, else as `sleep`."""
    environment: Any = JobEnvironment()
    if environment.role_rank == 1:
        raise LookupError("the needle")
    sleep(folder)


def die_in_rank_1(folder: str) -> None:
    """Be killed in rank 1 of the role, else as `raise_after_a_death`."""
    environment: Any = JobEnvironment()
    if environment.role_rank == 1:
        Path(folder, "told").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    raise_after_a_death(folder)


def raise_after_a_death(folder: str) -> None:
    """Fail a second after `die_in_rank_1` has."""
    _await_word(folder)
    time.sleep(1.0)
    raise ConnectionError("lost a peer")


def raise_when_told(folder: str) -> None:
    """Fail as one that has lost a peer, when the test says so."""
    Path(folder, "student-0.runs").touch()
    _await_word(folder)
    raise ConnectionError("lost a peer")


def _await_word(folder: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not Path(folder, "told").exists() and time.monotonic() < deadline:
        time.sleep(0.1)


class Train:
    """Sleeps in its first run, which a checkpoint ends; returns its number of steps in the next."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def __call__(self, folder: str) -> tuple[int, int]:
        if restart() == 0:
            sleep(folder)
        return restart(), self.steps

    def checkpoint(self, folder: str) -> DelayedSubmission:
        """Go on with the next step."""
        return DelayedSubmission(Train(self.steps + 1), folder)
