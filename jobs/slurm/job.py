"""A submitted heterogeneous job: how it stands, its results by role, and what failed first."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from submitit.core import utils
from submitit.core.logger import get_logger
from submitit.slurm import slurm

from jobs.slurm.client import call
from toolkit.errors import InputError

MAX_POLL_S = 30
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "PURGED", "REVOKED", "TIMEOUT"),
}
"""States that a job does not leave; all others, also unknown ones, may go on."""

_DEATH = re.compile(r"^srun: error: (\S+): tasks? (\d+)\S*: (.+)$", re.MULTILINE)
_LOG_TAIL = 4_000


class HetInfoWatcher(slurm.SlurmInfoWatcher):
    """Follows jobs by their leader's id.

    The controller is asked first: it needs no accounting, and accounting lags seconds behind.
    Accounting then knows how jobs ended that the controller has purged; without it, or until it
    knows, their state is `PURGED`.
    """

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Fold lines such as `7+0|RUNNING|node[1-2]` of all components of a job."""
        jobs: dict[str, list[list[str]]] = {}
        text = string if isinstance(string, str) else string.decode()
        for job, state, nodes in (line.split("|") for line in text.splitlines()):
            if "+" in job:  # a row without it is half-recorded, and its state may be wrong
                jobs.setdefault(job.split("+")[0], []).append([state.split()[0], nodes])
        return {job: _fold(rows) for job, rows in jobs.items()}

    def update(self) -> None:
        """Ask Slurm for all jobs that go on."""
        jobs = sorted(self._registered - self._finished)
        if not jobs:
            return
        self._num_calls += 1
        self._last_status_check = time.time()
        ids = f"--jobs={','.join(jobs)}"
        answer = _ask("squeue", "--states=all", "--noheader", "--format=%i|%T|%N", ids)
        if answer is None:
            return
        known = self.read_info(answer)
        purged = set(jobs) - known.keys()
        if purged:
            columns = "--format=JobID,State,NodeList"
            answer = _ask("sacct", "-X", "--noheader", "--parsable2", columns, ids)
            recorded = self.read_info(answer or "").items()
            known |= {job: {"State": "PURGED", "NodeList": ""} for job in purged}
            known |= {job: info for job, info in recorded if info["State"] in ENDED}
        self._info_dict.update(known)
        self._finished |= {job for job in jobs if self.is_done(job, mode="cache")}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether no component of a job goes on."""
        return self.get_state(job_id, mode) in ENDED


def _fold(rows: list[list[str]]) -> dict[str, str]:
    """Return the state of a job: of a component that goes on, else of one that did not succeed."""
    states = [state for state, _ in rows]
    telling = [state for state in states if state not in ENDED] or [
        state for state in states if state != "COMPLETED"
    ]
    return {"State": (telling or states)[0], "NodeList": " ".join(nodes for _, nodes in rows)}


def _ask(*command: str) -> str | None:
    """Return what Slurm answers, "" if it does not know the jobs, or None if it is not there."""
    try:
        done = call(*command)
    except InputError as error:
        get_logger().warning(f"Job states may be old: {error}")
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        get_logger().warning(f"Job states may be old: {done.stderr.strip()}")
        return None
    return done.stdout


class TaskLogs(NamedTuple):
    """What a task has written so far, in all runs of a requeued job."""

    stdout: str
    stderr: str


@dataclass(frozen=True)
class TaskFailure:
    """How a task failed.

    Attributes:
        role: role of the task.
        rank: its rank in the role.
        reason: its traceback, or what srun said of its death and the end of its stderr.
    """

    role: str
    rank: int
    reason: str

    def __str__(self) -> str:
        return f"{self.role} {self.rank} failed first:\n{self.reason}"


class HetSlurmJob(slurm.SlurmJob[Any]):
    """A heterogeneous job; its results count once it has ended, since a requeue voids them.

    Attributes:
        role_ranks: global ranks of each role; the executor sets them.
    """

    watcher = HetInfoWatcher(delay_s=MAX_POLL_S)
    _results_timeout_s = 3
    _was_complete = False
    role_ranks: Mapping[str, range]

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job has ended, by Slurm's word."""
        complete = not self._missing()
        if complete and not self._was_complete:
            self.watcher.register_job(self.job_id)  # the end is near: ask at short intervals again
        self._was_complete = complete
        return self.watcher.is_done(self.job_id, mode="force" if force_check else "standard")

    def results(self) -> list[Any]:
        """Wait for the end, and return the results of all tasks by global rank.

        Raises:
            FailedJobError: a task failed; the message is about the one that failed first.
        """
        if not self._sub_jobs:
            return super().results()
        outcomes = self._outcomes()
        failure = self._failure(outcomes)
        if failure is not None:
            raise utils.FailedJobError(f"Job {self.job_id}: {failure}")
        return [outcomes[rank][1] for rank in range(self.num_tasks)]

    def exception(self) -> utils.UncompletedJobError | utils.FailedJobError | None:
        """Wait for the end, and return what `results` would raise."""
        if not self._sub_jobs:
            return super().exception()
        try:
            self.results()
        except utils.FailedJobError as error:
            return error
        return None

    def first_failure(self) -> TaskFailure | None:
        """Wait for the end, and return the failure that others may have followed from, if any."""
        return self._failure(self._outcomes())

    def role_results(self, role: str) -> list[Any]:
        """Return the part of `results` of one role, by rank in the role."""
        ranks = self.role_ranks[role]
        return self.results()[ranks.start : ranks.stop]

    def role_logs(self, role: str) -> list[TaskLogs]:
        """Return the output of the tasks of one role so far, by rank in the role."""
        tasks = [self.task(rank) for rank in self.role_ranks[role]]
        return [TaskLogs(task.stdout() or "", task.stderr() or "") for task in tasks]

    def batch_log(self) -> str:
        """Return the output of the batch script and of srun in the newest run so far."""
        logs = self.paths.folder.glob(f"{self.job_id}_*_batch.log")
        newest = max(logs, key=lambda path: int(path.name.split("_")[1]), default=None)
        return newest.read_text(errors="replace") if newest else ""

    def _missing(self) -> list[int]:
        tasks = self._sub_jobs or [self]
        return [rank for rank, task in enumerate(tasks) if not task.paths.result_pickle.exists()]

    def _outcomes(self) -> dict[int, tuple[str, Any]]:
        """Wait for the end; return `success` and result, or `error` and traceback, as far known."""
        self.wait()
        deadline = time.monotonic() + self._results_timeout_s
        while self._missing() and time.monotonic() < deadline:  # a network file system may lag
            time.sleep(0.2)
        ranks = set(range(self.num_tasks)) - set(self._missing())
        return {rank: self.task(rank)._get_outcome_and_result() for rank in ranks}

    def _failure(self, outcomes: Mapping[int, tuple[str, Any]]) -> TaskFailure | None:
        traced = [rank for rank, (kind, _) in outcomes.items() if kind == "error"]
        dead = [rank for rank in range(self.num_tasks) if rank not in outcomes]
        if not traced and not dead:
            return None
        death = self._first_death()
        if traced and (death is None or death[1].startswith("Exited")):
            files = {rank: self.task(rank).paths.result_pickle for rank in traced}
            rank = min(traced, key=lambda rank: files[rank].stat().st_mtime)
            return self._failure_of(rank, outcomes[rank][1])
        rank, what = death or (dead[0], "no result")
        log = self.task(rank).stderr() or self.batch_log()
        tail = log[-_LOG_TAIL:] or f"no log in {self.paths.folder}: do all nodes share this folder?"
        return self._failure_of(rank, f"{what}; the job is {self.state}\n{tail}")

    def _failure_of(self, rank: int, reason: str) -> TaskFailure:
        role = next(role for role, ranks in self.role_ranks.items() if rank in ranks)
        return TaskFailure(role, self.role_ranks[role].index(rank), reason)

    def _first_death(self) -> tuple[int, str] | None:
        """Return the global rank of the task whose end srun complained of first, and its words.

        srun counts the tasks of each component from 0; its node tells the component.
        """
        found = _DEATH.search(self.batch_log())
        if found is None:
            return None
        node, task, what = found.groups()
        components = self.get_info(mode="cache")["NodeList"].split(" ")
        for ranks, nodes in zip(self.role_ranks.values(), components, strict=False):
            if node in slurm._parse_node_list(nodes):
                return ranks[int(task)], what
        return None
