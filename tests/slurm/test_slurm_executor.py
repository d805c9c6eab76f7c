"""Heterogeneous jobs through submitit, on a real Slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster
from command_line import wait_for
from executor_jobs import END_TIMEOUT_S, HERE, STUDENT, await_end, executor_in, submit
from task_functions import describe, run_number

from jobs.slurm.components import Component
from jobs.slurm.executor import HetSlurmExecutor, Roles
from jobs.slurm.job import HetSlurmJob
from toolkit.errors import InputError

pytestmark = pytest.mark.slurm

GOLDEN = HERE / "golden" / "executor.sh"
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
