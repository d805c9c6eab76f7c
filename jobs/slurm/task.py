"""A task of a run's Slurm job: which rank of its role it is, and where its output goes."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jobs.run_folder import RunFolder
from jobs.slurm import client
from toolkit.errors import InputError

log = logging.getLogger(__name__)

WARNINGS = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}
"""Signals by which Slurm says that a job is to end soon."""
_PAUSES_S = (2.0, 5.0, 10.0, 20.0)
"""Between questions to a controller that does not answer."""

_T = TypeVar("_T")


def role_rank(shift: int) -> int:
    """Return the rank of this task in its role: its rank among all tasks of the job, shifted.

    Raises:
        InputError: this is no task of Slurm.
    """
    if "SLURM_PROCID" not in os.environ:
        raise InputError("there is no SLURM_PROCID, so this is no task that srun started")
    return int(os.environ["SLURM_PROCID"]) + shift


def write_to_log(folder: RunFolder, role: str, rank: int) -> None:
    """Let all output of this process go to the log of its role."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.log_file(role, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def run_task(role: str, folder: Path, shift: int) -> int:
    """Run the role of this task to its end; return 0 where it stopped as asked.

    The batch script reads in the run folder how the run stands; to srun, stopping is no failure.

    Args:
        role: `teacher` or `student`.
        folder: run folder.
        shift: see `role_rank`.
    """
    # A warning that comes while Python still imports shall wait for the role's handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    rank = role_rank(shift)
    write_to_log(RunFolder(folder), role, rank)
    from jobs.roles import EXIT_FAILED, EXIT_STOPPED, run_role

    code = run_role(role, rank, folder)
    if role == "teacher" and code == EXIT_FAILED:
        _stand_in_for_script(RunFolder(folder))
    return 0 if code == EXIT_STOPPED else code


def _stand_in_for_script(folder: RunFolder) -> None:
    """Have the job begin again where its script was lost with the student's first node.

    The job outlives dead nodes, as a run does not need any one teacher. Without its script, which
    would do the same, it would hold its other nodes for nothing. One of its teachers acts.
    """
    job, start = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    reason = "the node of the job's script is lost"
    is_lost = _insist(lambda: client.script_is_lost(job))
    if not is_lost or not folder.add_restart(job, start, reason):
        return
    log.warning(reason)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm ends this task while it answers
    try:
        if start < folder.load().cluster.max_restarts:
            return _insist(lambda: client.requeue(job))
    except InputError as error:
        log.warning("%s", error)
    _insist(lambda: client.cancel(job))


def _insist(ask: Callable[[], _T]) -> _T:
    """Ask the controller again and again: it may be busy, and nobody else will ask.

    Raises:
        InputError: the last time it said no, too.
    """
    for pause_s in _PAUSES_S:
        try:
            return ask()
        except InputError as error:
            log.warning("%s", error)
            time.sleep(pause_s)
    return ask()
