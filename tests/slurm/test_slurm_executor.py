"""Heterogeneous jobs through submitit, on a real Slurm."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster
from command_line import wait_for
from submitit.core.utils import FailedJobError
from task_functions import (
    Train,
    describe,
    die_in_rank_1,
    die_in_second_run,
    raise_after_a_death,
    raise_in_rank_1,
    raise_when_told,
    run_number,
    sleep,
)

from jobs.slurm.components import Component
from jobs.slurm.executor import HetSlurmExecutor, Roles
from jobs.slurm.job import MAX_POLL_S, HetInfoWatcher, HetSlurmJob
from toolkit.errors import InputError

pytestmark = pytest.mark.slurm

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden" / "executor.sh"
STUDENT = Component("student", partition="students")
TEACHER = Component("teacher", partition="teachers")
END_TIMEOUT_S = 45.0
# Submits from inside a job whose environment would spoil the new one.
INSIDE = """\
import os, sys
from jobs.slurm.components import Component
from jobs.slurm.executor import HetSlurmExecutor, Roles
from task_functions import run_number
assert "SLURM_JOB_ID" in os.environ
executor = HetSlurmExecutor(sys.argv[1])
executor.update_parameters(environment={"PYTHONPATH": sys.argv[2]})
parts = [Component("student", partition="students"), Component("teacher", partition="teachers")]
executor.set_components(parts)
job = executor.submit(Roles(student=run_number, teacher=run_number), "")
print(f"inner {job.job_id} outer {os.environ['SLURM_JOB_ID']}")
"""
REQUEUE_ONCE = """\
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then trap "" TERM; scontrol requeue "$SLURM_JOB_ID"; fi"""


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


@pytest.fixture
def client(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster with accounting, used by this process; no job is left in it."""
    use(slurm, monkeypatch)
    yield slurm
    slurm.cancel_jobs()


def test_every_task_knows_its_role_and_its_peers(client: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "hetjob" of $HOME & `date` #SBATCH'
    student = Component("student", 2, 2, partition="students", gpus_per_node=2)
    executor = executor_in(folder, student, Component("teacher", 1, 2, partition="teachers"))
    executor.update_parameters(
        job_name="it's $x",
        options={"export": "NONE", "comment": "two words"},
        setup=['export SET_UP="$((1 + 1))"'],
        environment={"PYTHONPATH": str(HERE), "WORD": "$HOME's"},
    )
    job = submit(executor, describe, describe)
    assert (
        client.run("squeue", "--noheader", "-o%j|%k").stdout.splitlines()[0] == "it's $x|two words"
    )
    wait_for(job.done, END_TIMEOUT_S, "the end, asked for at submitit's intervals")
    students, teachers = job.role_results("student"), job.role_results("teacher")
    assert job.results() == [*students, *teachers]
    assert job.state == "COMPLETED"
    assert job.first_failure() is None and job.exception() is None
    assert [task["role"] for task in students] == [("student", rank, 4) for rank in range(4)]
    assert [task["role"] for task in teachers] == [("teacher", rank, 2) for rank in range(2)]
    assert [task["ranks"] for task in job.results()] == [(k, 6, k % 2, 2) for k in range(6)]
    nodes = ["student1", "student2", "teacher1"]
    assert [task["node"] for task in job.results()] == [node for node in nodes for _ in "ab"]
    assert all(task["nodes"] == (nodes, nodes[:2], nodes[2:]) for task in job.results())
    assert [task["devices"] for task in students] == [["0"], ["1"], ["0"], ["1"]]
    assert [task["devices"] for task in teachers] == [[], []]
    for task in job.results():
        assert task["word"] == str(folder)
        assert task["variables"] == {"WORD": "$HOME's", "SET_UP": "2", "OUTER": None}
        assert task["binding"].endswith("none")
    assert f"{folder} from teacher 1" in job.role_logs("teacher")[1].stdout
    assert "Job completed successfully" in job.role_logs("student")[3].stdout
    left = {re.sub(r"\d+", "N", path.name) for path in folder.iterdir()}
    assert left == {
        *("N_submission.sh", "N_submitted.pkl", "N_N_batch.log"),
        *("N_N_result.pkl", "N_N_log.out", "N_N_log.err"),
    }


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


def test_submits_from_inside_a_job(client: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "inside.py"
    script.write_text(INSIDE)
    command = (
        f"OUTER=1 SBATCH_PARTITION=nosuch srun {sys.executable} {script} {tmp_path}/inner {HERE}"
    )
    options = ["--mem=100", "--cpus-per-task=8", "--partition=students", "--wait"]
    path = f"--export=ALL,PYTHONPATH={HERE}"
    out = tmp_path / "out"
    client.run("sbatch", *options, path, f"--output={out}", f"--wrap={command}", timeout_s=30.0)
    found = re.search(r"inner (\d+) outer (\d+)", out.read_text())
    assert found is not None and found[1] != found[2], out.read_text()
    job = HetSlurmJob(tmp_path / "inner", found[1], tasks=(0, 1))
    await_end(job)
    assert [job.task(k).result() for k in (0, 1)] == [0, 0]


def test_no_controller_is_told(
    client: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor_in(tmp_path / "run")
    text = Path(client.env["SLURM_CONF"]).read_text()
    dead = tmp_path / "slurm.conf"
    dead.write_text(re.sub("(?m)^SlurmctldPort=.*$", "SlurmctldPort=1", text))
    monkeypatch.setenv("SLURM_CONF", str(dead))
    with pytest.raises(InputError, match=r"no Slurm controller answers: .* is DOWN"):
        submit(executor, run_number, run_number)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="scontrol is not on PATH"):
        submit(executor, run_number, run_number)
    assert not executor.folder.exists()


@pytest.mark.parametrize(
    ("teacher", "refusal", "option"),
    [
        (
            Component("teacher", partition="nosuch"),
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            r"teacher asks for --partition=nosuch$",
        ),
        (
            Component("teacher", partition="teachers", gpus_per_node=5),
            "sbatch: error: Batch job submission failed: Requested node configuration is not "
            "available",
            r"teacher asks for .*--gres=gpu:5$",
        ),
    ],
)
def test_refusals_are_told_whole(
    client: SlurmCluster, tmp_path: Path, teacher: Component, refusal: str, option: str
) -> None:
    executor = executor_in(tmp_path, STUDENT, teacher)
    with pytest.raises(InputError, match=option) as caught:
        submit(executor, run_number, run_number)
    assert refusal in str(caught.value)
    assert client.run("squeue", "--noheader").stdout == ""
    assert not list(tmp_path.iterdir())


def test_the_script_is_the_golden_one_and_passes(client: SlurmCluster, tmp_path: Path) -> None:
    executor = HetSlurmExecutor("/shared/it's a run", python="/venv/bin/python")
    executor.update_parameters(
        job_name="distill",
        time_min=30,
        requeue=True,
        signal_delay_s=120,
        options={"comment": "two words", "exclusive": True, "mem": "500M", "wckey": None},
        setup=["true  # module load cuda"],
        environment={"NCCL_DEBUG": "WARN"},
        epilogue=['echo "srun ended with $code"'],
        srun_options=["--label"],
    )
    student = Component("student", 2, 4, 1, 2, "students", srun_options=["--cpu-bind=cores"])
    executor.set_components(
        [student, Component("teacher", partition="teachers", options={"mem": 0})]
    )
    text = executor.script()
    if "DISAGGKD_WRITE_GOLDEN" in os.environ:
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    client.run("sbatch", "--test-only", GOLDEN)
    subprocess.run(["bash", "-n", GOLDEN], check=True)


def test_each_role_needs_its_function(client: SlurmCluster, tmp_path: Path) -> None:
    executor = executor_in(tmp_path)
    with pytest.raises(InputError, match=r"functions for the roles \['student'\]"):
        executor.submit(Roles(student=run_number))
