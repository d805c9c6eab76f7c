"""Batch files, to the letter, and the questions that Slurm is asked."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from command_line import TINY, CommandLine, wait_for

from jobs.monitor.state import StateReader
from jobs.run_folder import RunFolder
from jobs.slurm.batch import batch_file, components_of, teachers_file
from toolkit.config import Config
from toolkit.config_file import load_config
from toolkit.errors import InputError
from toolkit.training.metrics import read_steps

GOLDEN = Path(__file__).resolve().parent / "golden"
CLUSTER = (
    "run.folder=/runs/it's $5 hetjob",
    "student.replicas=4",
    "teacher.replicas=2",
    "transport.interface=ib0",
    "cluster.time_min=90",
    'cluster.setup=["module load cuda"]',
    'cluster.environment={NCCL_DEBUG="INFO x"}',
    'cluster.options={account="lab", mail-type="END", requeue=false}',
    "cluster.student.nodes=2",
    "cluster.student.partition=train",
    "cluster.student.gpus_per_node=2",
    "cluster.student.cpus_per_task=8",
    'cluster.student.options={gres=false, gpus-per-node="h100:2", exclusive=true}',
    "cluster.teacher.partition=serve",
    'cluster.teacher.srun_options=["--container-image=a b"]',
)


def _config(*overrides: str) -> Config:
    return load_config(TINY, [*CLUSTER, *overrides])


def _golden(name: str, text: str) -> None:
    text = text.replace(sys.executable, "/env/bin/python")
    path = GOLDEN / name
    if os.environ.get("DISAGGKD_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_plain_batch_file() -> None:
    config = _config()
    _golden("run.sbatch", batch_file(config, RunFolder(Path(config.run.folder))))


def test_batch_file_of_further_teachers() -> None:
    config = _config()
    _golden("teachers.sbatch", teachers_file(config, RunFolder(Path(config.run.folder)), 3, 2))


def test_nothing_is_asked_for_that_was_not_named() -> None:
    config = load_config(TINY, ["transport.interface=lo"])
    text = batch_file(config, RunFolder(Path("run")))
    assert set(re.findall(r"#SBATCH --([\w-]+)", text)) == {
        *("job-name", "output", "time", "requeue", "signal", "nodes"),
        *("ntasks-per-node", "no-kill"),
    }


def test_a_job_needs_a_network_and_teachers() -> None:
    with pytest.raises(InputError, match=r"transport\.interface is not set"):
        components_of(load_config(TINY))
    with pytest.raises(InputError, match="only disaggregated runs are submitted"):
        components_of(_config("teacher.placement=colocated"))
    with pytest.raises(InputError, match=r"student\.replicas = 3 cannot be spread evenly over"):
        _config("student.replicas=3")


def test_slurm_is_asked_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\necho x >>{asked}\necho 'PENDING|Resources|0:00|1:00'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    folder = RunFolder(tmp_path / "run")
    folder.create(load_config(TINY))
    folder.set_job(7)
    reader = StateReader(folder)
    states = [reader.read() for _ in range(20)]
    assert asked.read_text().count("x") == 1
    job = states[-1].job_state
    assert job is not None and (job.state, job.reason) == ("PENDING", "Resources")
    assert not states[-1].ended


def test_cancel_ends_a_local_run_after_a_checkpoint(disaggkd: CommandLine) -> None:
    folder = disaggkd.folder / "run"
    assert "has no config.toml" in disaggkd("cancel", folder, expect=2)
    process = disaggkd.start(*disaggkd.run_arguments("run", "data.eval_rows=0", steps=400))
    metrics = folder / "metrics" / "student-0.jsonl"
    wait_for(lambda: len(read_steps(metrics)) >= 2, what="the second step")
    assert re.search(r"process \d+ was asked to save and end", disaggkd("cancel", folder))
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert list((folder / "checkpoints").glob("step-*"))
    assert "nothing works on" in disaggkd("cancel", folder)


def test_logs_are_followed(disaggkd: CommandLine) -> None:
    folder = RunFolder(disaggkd.folder)
    assert "has no log of student yet" in disaggkd(
        "logs", disaggkd.folder, "--role", "student", expect=2
    )
    folder.logs.mkdir()
    log = folder.log_file("student")
    log.write_text("one\ntwo")
    (folder.log_file("teacher")).write_text("other\n")
    assert disaggkd("logs", disaggkd.folder).splitlines() == [
        *("student-0: one", "student-0: two", "teacher-0: other")
    ]
    process = disaggkd.start("logs", disaggkd.folder, "--role", "student", "--follow")
    assert process.stdout is not None
    assert process.stdout.readline() == "student-0: one\n"
    with log.open("a") as stream:
        stream.write(" and a half\n")
    assert process.stdout.readline() == "student-0: two and a half\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 0
