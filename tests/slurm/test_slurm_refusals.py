"""What Slurm or the machine refuses: one clear message, nothing queued; and unusual places."""

import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster
from command_line import ROOT, CommandLine, wait_for
from test_slurm_runs import ONE, TWO

pytestmark = pytest.mark.slurm

EVIL = "a 'b' \"c\" $HOME hetjob"


@pytest.fixture
def command(slurm: SlurmCluster, tmp_path: Path) -> Iterator[CommandLine]:
    """The command line on the cluster; the test must leave the queue empty."""
    yield CommandLine(tmp_path, slurm.env)
    left = slurm.run("squeue", "--noheader").stdout
    slurm.cancel_jobs()
    assert left == ""


def submit(command: CommandLine, *settings: str, expect: int = 2) -> str:
    arguments = command.run_arguments("run", *TWO, *settings, command="submit")
    return command(*arguments, expect=expect)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cluster.student.partition=nowhere", ("invalid partition", "--partition=nowhere")),
        ("cluster.student.gpus_per_node=9", ("configuration is not available", "--gres=gpu:9")),
        ("cluster.options.nonsense=1", ("unrecognized option", "--nonsense=1")),
        ("cluster.time_min=1000000", ("would wait forever (Partition", "cluster.time_min")),
    ],
)
def test_what_slurm_refuses_is_shown_whole(
    command: CommandLine, setting: str, words: tuple[str, str]
) -> None:
    output = submit(command, setting)
    assert all(word in output for word in words), output
    assert not (command.folder / "run" / "job.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("student.replicas=3",), "student.replicas = 3 cannot be spread evenly over cluster"),
        (("teacher.placement=colocated",), "only disaggregated runs are submitted"),
        (("data.tokens=no/such.bin",), "make it with `disaggkd prepare`"),
    ],
)
def test_what_cannot_work_is_refused_before_slurm_is_asked(
    command: CommandLine, settings: tuple[str, ...], message: str
) -> None:
    assert message in submit(command, *settings)
    assert not (command.folder / "run").exists()


def test_the_network_must_be_named(command: CommandLine) -> None:
    arguments = command.run_arguments("run", command="submit")
    assert "transport.interface is not set" in command(*arguments, expect=2)


def test_a_blocked_log_folder(command: CommandLine) -> None:
    (command.folder / "run").mkdir()
    (command.folder / "run" / "logs").write_text("not a folder")
    assert "cannot be written: File exists" in submit(command)


def test_clients_without_a_controller(slurm: SlurmCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = Path(slurm.env["SLURM_CONF"]).read_text(encoding="utf-8")
    dead = tmp_path / "slurm.conf"
    dead.write_text(re.sub(r"SlurmctldPort=\d+", f"SlurmctldPort={port}", text))
    command = CommandLine(tmp_path, slurm.env | {"SLURM_CONF": str(dead)})
    assert "no Slurm controller answers" in submit(command)


def test_no_clients_at_all(tmp_path: Path) -> None:
    command = CommandLine(tmp_path, os.environ | {"PATH": str(tmp_path)})
    assert "is not on PATH" in submit(command)


def test_the_plain_file_runs_by_hand_and_again(command: CommandLine, slurm: SlurmCluster) -> None:
    file = command.folder / "my job.sbatch"
    arguments = command.run_arguments(EVIL, *ONE, command="sbatch")
    output = command(*arguments, "-o", file)
    assert output.strip() == f"sbatch {shlex.quote(str(file))}"
    slurm.run("sbatch", "--test-only", str(file))
    for _ in range(2):  # the second time there is nothing to do
        slurm.run("sbatch", str(file))
        wait_for(lambda: (command.folder / EVIL / "done").exists(), 120, "the end of the run")
        wait_for(lambda: not slurm.run("squeue", "--noheader").stdout, 120, "the end of the job")


def test_a_job_submitted_from_inside_another(command: CommandLine, slurm: SlurmCluster) -> None:
    arguments = command.run_arguments(EVIL, *ONE, command="submit")
    inner = shlex.join([sys.executable, "-m", "jobs", *arguments])
    said = shlex.quote(str(command.folder / "out"))
    outer = f"cd {shlex.quote(str(ROOT))} && {inner} >{said} 2>&1"
    slurm.run("sbatch", "--output=/dev/null", "--ntasks=3", "--mem=200", f"--wrap={outer}")
    done = command.folder / EVIL / "done"
    wait_for(done.exists, 120, f"the end of the run, see {said},")
    wait_for(lambda: not slurm.run("squeue", "--noheader").stdout, 30, "the end of the jobs")
