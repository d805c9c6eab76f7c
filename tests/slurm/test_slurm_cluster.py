"""The Slurm that tests run against: it does what a real cluster does, and leaves nothing."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import NODES, SlurmCluster
from command_line import wait_for
from daemons import descendants, is_alive

pytestmark = pytest.mark.slurm

# Script and tasks leave their environments in ROLE-RESTARTS.env before they do anything.
HET_JOB = """\
#!/bin/bash
#SBATCH --partition=students
#SBATCH --gres=gpu:1
#SBATCH {requeue}
#SBATCH hetjob
#SBATCH --partition=teachers
#SBATCH --gres=gpu:2
#SBATCH {requeue}
export NAME=${{SLURM_RESTART_COUNT:-0}}.env
save='env > $ROLE.new; mv $ROLE.new $ROLE-$NAME'
ROLE=batch bash -c "$save"
srun --kill-on-bad-exit=1 \\
    --het-group=0 env ROLE=student bash -c "$save; "'{task}' : \\
    --het-group=1 env ROLE=teacher bash -c "$save; "'{task}'
"""
# A daemon that Slurm itself loses sight of: no parent, no session, no environment.
RUNAWAY = """\
#!/bin/bash
env -i setsid sleep 300 < /dev/null &> /dev/null &
echo $! > runaway.new && mv runaway.new runaway
"""
OWNER = """\
import pathlib, sys, time
from cluster import SlurmCluster
with SlurmCluster(pathlib.Path(sys.argv[1]), accounting=False):
    print("up", flush=True)
    time.sleep(300)
"""


@pytest.fixture(autouse=True)
def no_jobs_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel what a test left in the shared clusters."""
    yield
    for name in {"slurm", "slurm_without_accounting"} & set(request.fixturenames):
        request.getfixturevalue(name).cancel_jobs()


def _submit(slurm: SlurmCluster, folder: Path, text: str, *options: str) -> int:
    script = folder / f"{time.monotonic_ns()}.sh"
    script.write_text(text)
    where = (f"--chdir={folder}", f"--output={folder}/%j.out")
    return int(slurm.run("sbatch", "--parsable", *where, *options, script).stdout)


def _submit_het(slurm: SlurmCluster, folder: Path, task: str, requeue: str = "--no-requeue") -> int:
    return _submit(slurm, folder, HET_JOB.format(task=task, requeue=requeue))


def _wait_for_start(folder: Path, restarts: int = 0) -> None:
    files = [folder / f"{role}-{restarts}.env" for role in ("student", "teacher")]
    wait_for(lambda: all(file.exists() for file in files), 15.0, f"start {restarts}")


def _states(slurm: SlurmCluster, job: int) -> set[str]:
    """Return the states of a job's components, also after their end."""
    command = ("squeue", "--states=all", "--noheader", "--format=%T", f"--jobs={job}")
    return set(slurm.run(*command).stdout.split())


def _wait_for_state(slurm: SlurmCluster, job: int, state: str) -> None:
    wait_for(lambda: _states(slurm, job) == {state}, 10.0, f"{state} of job {job}")


def _environment(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines() if "=" in line)


def _is_free(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) != 0


def test_all_nodes_are_idle_at_first(slurm: SlurmCluster) -> None:
    assert slurm.nodes() == dict.fromkeys(NODES, "idle")


def test_a_het_job_is_one_step_with_global_ranks(slurm: SlurmCluster, tmp_path: Path) -> None:
    submitted = time.monotonic()
    job = _submit_het(slurm, tmp_path, "true")
    _wait_for_start(tmp_path)
    assert time.monotonic() - submitted < 10.0
    roles = ("batch", "student", "teacher")
    batch, student, teacher = (_environment(tmp_path / f"{role}-0.env") for role in roles)
    assert batch["SLURM_HET_SIZE"] == "2"
    assert batch["SLURM_JOB_ID_HET_GROUP_1"] == str(job + 1)
    assert batch["SLURM_JOB_NODELIST_HET_GROUP_0"] == batch["SLURMD_NODENAME"] == "student1"
    assert batch["SLURM_JOB_NODELIST_HET_GROUP_1"] == "teacher1"
    assert "SLURM_HET_JOB_ID" not in batch
    assert (student["SLURM_PROCID"], student["SLURMD_NODENAME"]) == ("0", "student1")
    assert (teacher["SLURM_PROCID"], teacher["SLURMD_NODENAME"]) == ("1", "teacher1")
    assert (student["CUDA_VISIBLE_DEVICES"], teacher["CUDA_VISIBLE_DEVICES"]) == ("0", "0,1")
    for task in (student, teacher):
        assert (task["SLURM_JOB_ID"], task["SLURM_NTASKS"]) == (str(job), "2")
        assert task["SLURM_JOB_NODELIST"] == "student1,teacher1"


def test_accounting_names_the_components(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = _submit_het(slurm, tmp_path, "true")
    command = ("sacct", "-X", "--noheader", "--parsable2", "--format=JobID,JobIDRaw,State")
    rows = {f"{job}+0|{job}|COMPLETED", f"{job}+1|{job + 1}|COMPLETED"}
    wait_for(lambda: set(slurm.run(*command, "-j", str(job)).stdout.split()) == rows, 15.0)


def test_without_accounting_only_squeue_knows(
    slurm_without_accounting: SlurmCluster, tmp_path: Path
) -> None:
    job = _submit_het(slurm_without_accounting, tmp_path, "true")
    _wait_for_state(slurm_without_accounting, job, "COMPLETED")
    sacct = slurm_without_accounting.run("sacct", "-j", str(job), check=False)
    assert sacct.returncode != 0
    assert "accounting storage is disabled" in sacct.stderr


def test_a_requeued_job_starts_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = _submit_het(slurm, tmp_path, "sleep 300", "--requeue")
    _wait_for_start(tmp_path)
    slurm.run("scontrol", "requeue", str(job))
    _wait_for_start(tmp_path, restarts=1)
    assert _environment(tmp_path / "teacher-1.env")["SLURM_RESTART_COUNT"] == "1"


@pytest.mark.slow
def test_a_dead_node_is_noticed(slurm: SlurmCluster, tmp_path: Path) -> None:
    final = _submit_het(slurm, tmp_path, "sleep 300")
    requeued = ("--partition=teachers", "--nodelist=teacher1", "--requeue", "--wrap=sleep 300")
    again = int(slurm.run("sbatch", "--parsable", "--output=/dev/null", *requeued).stdout)
    _wait_for_start(tmp_path)
    _wait_for_state(slurm, again, "RUNNING")
    on_node = descendants(slurm.daemons.processes["teacher1"])
    assert {"slurmstepd", "sleep"} <= {process.name() for process in on_node}
    slurm.kill_node("teacher1")
    try:
        assert not any(map(is_alive, on_node))
        wait_for(lambda: slurm.nodes()["teacher1"] == "down*", 30.0, "the end of teacher1")
        _wait_for_state(slurm, final, "NODE_FAIL")
        _wait_for_state(slurm, again, "PENDING")
    finally:
        slurm.start_node("teacher1")


def test_a_job_outlives_the_controller(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = _submit_het(slurm, tmp_path, "until test -e go; do sleep 0.1; done; touch $ROLE-end")
    _wait_for_start(tmp_path)
    slurm.restart_controller()
    _wait_for_state(slurm, job, "RUNNING")
    (tmp_path / "go").touch()
    _wait_for_state(slurm, job, "COMPLETED")
    assert {path.name for path in tmp_path.glob("*-end")} == {"student-end", "teacher-end"}


def test_down_leaves_nothing(slurm_installed: None, tmp_path: Path) -> None:
    devices = set(os.listdir("/dev"))
    started = time.monotonic()
    with SlurmCluster(tmp_path, accounting=True) as slurm:
        assert time.monotonic() - started < 20.0
        ports = re.findall(r"Port=(\d+)", Path(slurm.env["SLURM_CONF"]).read_text())
        assert not any(map(_is_free, ports))
        _submit(slurm, tmp_path, RUNAWAY)
        wait_for((tmp_path / "runaway").exists, 10.0, "the runaway")
        roots = list(slurm.daemons.processes.values())
        processes = [p for root in roots for p in (root, *descendants(root))]
        assert int((tmp_path / "runaway").read_text()) in [process.pid for process in processes]
    assert not any(map(is_alive, processes))
    assert all(map(_is_free, ports))
    assert set(os.listdir("/dev")) == devices
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert not (tmp_path / "live").exists()
    slurm.down()


def test_nothing_outlives_a_killed_owner(slurm_installed: None, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        processes = list(SlurmCluster(tmp_path, accounting=False).daemons.processes.values())
        assert len(processes) == 2 + len(NODES)
        owner.kill()
    wait_for(lambda: not any(map(is_alive, processes)), 10.0, "the cluster's end")
    wait_for(lambda: not (tmp_path / "live").exists(), 10.0, "an empty folder")
