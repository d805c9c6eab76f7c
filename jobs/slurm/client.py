"""Slurm's own clients, each with a deadline, and what they answer."""

import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import InputError

_TIMEOUT_S = 30.0
_KEPT = {"SLURM_CONF"}
_HOPELESS = {"PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig", "BadConstraints"}
_LEAKING = ("SLURM_", "SBATCH_", "SRUN_", "PMIX_", "PMI_")
"""Variables of an outer job that would change a job submitted from inside it."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job.

    Attributes:
        state: for example RUNNING; of several components, the one that matters most.
        reason: why it is in this state, or "".
        elapsed: time since its start, as Slurm writes it.
        left: time until its limit, as Slurm writes it.
    """

    state: str
    reason: str
    elapsed: str
    left: str


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what an outer job put there."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith(_LEAKING)
    }


def call(*command: str, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run a client of Slurm.

    Raises:
        InputError: it is not installed, or did not answer in time.
    """
    if shutil.which(command[0]) is None:
        raise InputError(
            f"{command[0]} is not on PATH: run this where Slurm's clients are, or use "
            "`disaggkd run` on this machine"
        )
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=clean_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"{' '.join(command)} did not answer within {timeout_s:g} s: is the controller up?"
        ) from error


def check_controller() -> None:
    """Refuse to go on when no controller answers.

    Raises:
        InputError: with Slurm's own words.
    """
    done = call("scontrol", "ping")
    if done.returncode or " is UP" not in done.stdout:
        words = (done.stdout + done.stderr).strip()
        raise InputError(f"no Slurm controller answers: {words}")


def check_script(path: str) -> None:
    """Ask Slurm whether it would take a batch file, without queueing it.

    Raises:
        InputError: with Slurm's whole answer.
    """
    done = call("sbatch", "--test-only", path)
    if done.returncode:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        asked = "\n".join(line for line in lines if line.startswith("#SBATCH"))
        raise InputError(
            f"Slurm would not take the job:\n{done.stderr.strip()}\nIt was asked for:\n{asked}"
        )


def submit(path: str) -> int:
    """Queue a batch file and return the job's id.

    Raises:
        InputError: with Slurm's whole answer.
    """
    done = call("sbatch", "--parsable", path)
    if done.returncode:
        raise InputError(f"Slurm refused the job:\n{done.stderr.strip()}")
    return int(done.stdout.split(";")[0])


def job_state(job: int) -> JobState | None:
    """Return the state of a queued or running job, or None if Slurm knows it no more."""
    done = call("squeue", "--noheader", "--jobs", str(job), "--format=%T|%r|%M|%L")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return None
    states = [JobState(*line.split("|")) for line in lines]
    return min(states, key=lambda state: state.state == "RUNNING")


def refuse_hopeless(job: int) -> None:
    """Take back a job that asks for more than its partition ever gives.

    Many clusters queue such a job instead of refusing it, and it waits forever.

    Raises:
        InputError: it did; it is cancelled.
    """
    state = job_state(job)
    if state is not None and state.reason in _HOPELESS:
        cancel(job)
        raise InputError(
            f"job {job} would wait forever ({state.reason}), so it is cancelled: look at "
            "cluster.time_min, nodes and partitions, and at `scontrol show partition`"
        )


def script_is_lost(job: int) -> bool:
    """Return whether the node that runs a job's script does not answer any more.

    Raises:
        InputError: the controller does not answer, or does not know the job.
    """
    host = _shown("BatchHost", "job", str(job))
    address = _shown("NodeAddr", "node", host), int(_shown("Port", "node", host))
    try:
        socket.create_connection(address, timeout=_TIMEOUT_S).close()
    except OSError:
        return True
    return False


def _shown(name: str, kind: str, which: str) -> str:
    """Return the first value of this name in what `scontrol show` says."""
    done = call("scontrol", "show", kind, which)
    value = re.search(rf"\b{name}=(\S+)", done.stdout)
    if value is None:
        raise InputError(f"Slurm does not tell {name} of {kind} {which}: {done.stderr.strip()}")
    return value[1]


def requeue(job: int) -> None:
    """Let a running job begin again.

    Raises:
        InputError: with Slurm's whole answer.
    """
    done = call("scontrol", "requeue", str(job))
    if done.returncode:
        raise InputError(f"Slurm would not requeue job {job}:\n{done.stderr.strip()}")


def cancel(job: int) -> None:
    """End a job, all its components; harmless when it has ended.

    Raises:
        InputError: with Slurm's whole answer.
    """
    done = call("scancel", str(job))
    if done.returncode and "Invalid job id" not in done.stderr:
        raise InputError(f"Slurm would not cancel job {job}:\n{done.stderr.strip()}")
