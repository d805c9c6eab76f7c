"""Jobs of the executor's tests: how they are made, submitted and awaited."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import SlurmCluster
from command_line import wait_for

from jobs.slurm.components import Component
from jobs.slurm.executor import HetSlurmExecutor, Roles
from jobs.slurm.job import MAX_POLL_S, HetInfoWatcher, HetSlurmJob

HERE = Path(__file__).resolve().parent
STUDENT = Component("student", partition="students")
TEACHER = Component("teacher", partition="teachers")
END_TIMEOUT_S = 45.0


def use(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be a client of a cluster; each numbers its jobs from 1."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.env[name])
    monkeypatch.setattr(HetSlurmJob, "watcher", HetInfoWatcher(MAX_POLL_S))


def executor_in(folder: Path, *components: Component) -> HetSlurmExecutor:
    """Return an executor whose tasks can import the test functions."""
    executor = HetSlurmExecutor(folder)
    executor.update_parameters(environment={"PYTHONPATH": str(HERE)}, time_min=5)
    executor.set_components(components or [STUDENT, TEACHER])
    return executor


def submit(
    executor: HetSlurmExecutor, student: Callable[..., object], teacher: object
) -> HetSlurmJob:
    """Submit functions that get the executor's folder."""
    functions = {"student": student, "teacher": teacher}
    job = executor.submit(Roles(**functions), str(executor.folder))
    assert isinstance(job, HetSlurmJob)
    return job


def await_end(*jobs: HetSlurmJob) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    for job in jobs:
        while not job.done(force_check=True):
            assert time.monotonic() < deadline, f"{job} does not end"
            time.sleep(0.3)


def await_tasks(folder: Path, *names: str) -> None:
    files = [folder / f"{name}.runs" for name in names]
    wait_for(lambda: all(file.exists() for file in files), 20.0, f"the start of {names}")
