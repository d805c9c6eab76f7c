"""How jobs of the executor end: by failure, cancellation, requeue, and after Slurm forgot them."""

import os
import shutil
from pathlib import Path

import pytest
from cluster import SlurmCluster
from command_line import wait_for
from executor_jobs import STUDENT, TEACHER, await_end, await_tasks, executor_in, submit, use
from submitit.core.utils import FailedJobError
from task_functions import (
    Train,
    die_in_rank_1,
    die_in_second_run,
    raise_after_a_death,
    raise_in_rank_1,
    raise_when_told,
    run_number,
    sleep,
)

from jobs.slurm.components import Component
from jobs.slurm.job import MAX_POLL_S, HetInfoWatcher, HetSlurmJob

pytestmark = pytest.mark.slurm

REQUEUE_ONCE = """\
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then trap "" TERM; scontrol requeue "$SLURM_JOB_ID"; fi"""


def replace_client(folder: Path, name: str, text: str) -> Path:
    """Write a shell script with the name of one of Slurm's clients; return what PATH needs."""
    client = folder / "bin" / name
    client.parent.mkdir()
    client.write_text(f"#!/bin/sh\n{text}\n")
    client.chmod(0o755)
    return client.parent


def forget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let squeue answer as for jobs that the controller has purged."""
    bin_folder = replace_client(
        folder, "squeue", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
    )
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setattr(HetSlurmJob, "watcher", HetInfoWatcher(MAX_POLL_S))


def test_the_first_failure_is_told(client: SlurmCluster, tmp_path: Path) -> None:
    raising = executor_in(
        tmp_path / "raising", STUDENT, Component("teacher", 1, 2, partition="teachers")
    )
    raised = submit(raising, sleep, raise_in_rank_1)
    dying = executor_in(tmp_path / "dying", Component("student", 2, partition="students"), TEACHER)
    dying.update_parameters(srun_options=["--kill-on-bad-exit=0"])
    died = submit(dying, die_in_rank_1, raise_after_a_death)
    await_end(raised, died)

    failure = raised.first_failure()
    assert failure is not None and (failure.role, failure.rank) == ("teacher", 1)
    assert failure.reason.startswith("Traceback")
    assert "LookupError: the needle" in failure.reason
    with pytest.raises(FailedJobError, match="teacher 1 failed first:\nTraceback"):
        raised.results()
    assert not raised.paths.result_pickle.exists(), "the student was killed"

    failure = died.first_failure()
    assert failure is not None and (failure.role, failure.rank) == ("student", 1)
    assert failure.reason.startswith("Killed; the job is FAILED")
    assert "ConnectionError" in str(died.task(2).exception()), "the teacher was not the first"


def test_cancelled_jobs_end(client: SlurmCluster, tmp_path: Path) -> None:
    functions = {"whole": sleep, "part": raise_when_told}
    jobs = [submit(executor_in(tmp_path / n), student, sleep) for n, student in functions.items()]
    for name in ("whole", "part"):
        await_tasks(tmp_path / name, "student-0", "teacher-0")
    assert [job.state for job in jobs] == ["RUNNING"] * 2
    jobs[0].cancel()
    client.run("scancel", f"{jobs[1].job_id}+1")
    await_end(jobs[0])
    assert jobs[0].state == "CANCELLED"
    failure = jobs[0].first_failure()
    assert failure is not None and "the job is CANCELLED" in failure.reason
    # Slurm leaves the other component alone: its tasks have to notice, and end.
    wait_for(lambda: "Timed out" in jobs[1].batch_log(), 20.0, "srun's complaint")
    assert jobs[1].state == "RUNNING" and not jobs[1].done(force_check=True)
    (tmp_path / "part" / "told").touch()
    await_end(jobs[1])
    failure = jobs[1].first_failure()
    assert failure is not None and failure.role == "student"
    assert "ConnectionError: lost a peer" in failure.reason


def test_only_the_last_run_counts(client: SlurmCluster, tmp_path: Path) -> None:
    names = ("signal", "outside", "epilogue", "dying")
    executors = {name: executor_in(tmp_path / name) for name in names}
    executors["epilogue"].update_parameters(epilogue=[REQUEUE_ONCE])
    # Slurm ends the step before this scontrol has its answer.
    slow = replace_client(tmp_path, "scontrol", f'{shutil.which("scontrol")} "$@"; sleep 1')
    executors["signal"].update_parameters(setup=[f"export PATH={slow}:$PATH"])
    jobs = {
        "signal": submit(executors["signal"], Train(), run_number),
        "outside": submit(executors["outside"], Train(), run_number),
        "epilogue": submit(executors["epilogue"], run_number, run_number),
        "dying": submit(executors["dying"], Train(), die_in_second_run),
    }
    for name in ("signal", "outside", "dying"):
        await_tasks(tmp_path / name, "student-0")
        stale = jobs[name].task(1).paths.result_pickle
        wait_for(stale.exists, 10.0, "the teacher's result in the first run")
    client.run("scancel", "--signal=USR2", jobs["signal"].job_id)
    for name in ("outside", "dying"):
        client.run("scontrol", "requeue", jobs[name].job_id)
    await_end(*jobs.values())
    assert jobs["signal"].results() == [(1, 1), 1]
    assert jobs["outside"].results() == [(1, 0), 1]
    assert jobs["epilogue"].results() == [1, 1]
    failure = jobs["dying"].first_failure()
    assert failure is not None and (failure.role, failure.rank) == ("teacher", 0)
    log = jobs["signal"].role_logs("student")[0].stdout
    assert "Exiting gracefully" in log and "triggered an exception" not in log


def test_jobs_end_without_accounting(
    slurm_without_accounting: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(slurm_without_accounting, monkeypatch)
    good = submit(executor_in(tmp_path / "good"), run_number, run_number)
    bad = submit(executor_in(tmp_path / "bad"), sleep, sleep)
    assert bad.state == "PENDING"
    await_tasks(tmp_path / "bad", "student-0", "teacher-0")
    bad.cancel()
    await_end(good, bad)
    assert good.results() == [0, 0]
    assert bad.state == "CANCELLED" and bad.first_failure() is not None
    forget(tmp_path, monkeypatch)
    assert good.done()
    assert (good.state, good.results()) == ("PURGED", [0, 0])


def test_accounting_knows_purged_jobs(
    client: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(executor_in(tmp_path / "run"), run_number, run_number)
    await_end(job)
    forget(tmp_path, monkeypatch)

    def recorded() -> bool:
        monkeypatch.setattr(HetSlurmJob, "watcher", HetInfoWatcher(MAX_POLL_S))
        return job.state == "COMPLETED"

    wait_for(recorded, 15.0, "the record of the end")
    assert job.get_info(mode="cache")["NodeList"] == "student1 teacher1"
