"""Heterogeneous jobs through submitit: what needs no Slurm."""

import re
from pathlib import Path

import pytest

from jobs.slurm.components import Component, sbatch_header
from jobs.slurm.executor import HetSlurmExecutor
from jobs.slurm.job import HetInfoWatcher, TaskFailure
from toolkit.errors import InputError

STUDENT = Component("student", partition="students")
TEACHER = Component("teacher", partition="teachers")


def test_components_are_folded() -> None:
    rows = "7+0|RUNNING|a[1-2]\n7+1|CANCELLED by 0|b\n8|COMPLETED|c\n9+0|COMPLETED|d\n9+1|FAILED|e"
    assert HetInfoWatcher().read_info(rows) == {
        "7": {"State": "RUNNING", "NodeList": "a[1-2] b"},
        "9": {"State": "FAILED", "NodeList": "d e"},
    }


def test_a_script_needs_no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    executor = HetSlurmExecutor("/shared")
    executor.set_components([STUDENT, TEACHER])
    script = executor.script("echo 'a b'")
    assert script.count("task echo 'a b'") == 2
    assert not re.search(r"--(mem|wckey|requeue|no-requeue)\b", script)


def test_bad_input_is_told(tmp_path: Path) -> None:
    executor = HetSlurmExecutor(tmp_path)
    with pytest.raises(InputError, match="would replace %j"):
        HetSlurmExecutor(tmp_path / "%j")
    with pytest.raises(InputError, match="unknown parameter partition: choose from job_name"):
        executor.update_parameters(partition="students")
    for components in ([STUDENT], [STUDENT, STUDENT], [STUDENT, Component("a b")]):
        with pytest.raises(InputError, match="two or more, each with a role of its own"):
            executor.set_components(components)
    executor.set_components([STUDENT, TEACHER])
    executor.update_parameters(environment={"A B": "c"})
    with pytest.raises(InputError, match="'A B' is no name of a variable"):
        executor.script()
    for value in ("a hetjob", "a\nb"):
        with pytest.raises(InputError, match="Slurm cannot read the option"):
            sbatch_header([STUDENT], {"comment": value}, {})


def test_failures_read_well() -> None:
    assert str(TaskFailure("teacher", 3, "why")) == "teacher 3 failed first:\nwhy"
