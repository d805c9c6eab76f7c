"""Whole runs from the command line: real processes, real UCX, real models."""

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from command_line import CommandLine, wait_for

from toolkit.config import StudentSection
from toolkit.models.load import load_model
from toolkit.training.checkpoint import load_weights
from toolkit.training.metrics import read_steps

QUICK = ("transport.heartbeat_s=0.2", "transport.dead_after_s=2.0", "transport.grace_s=2.0")
LONG = 400


def _steps_done(folder: Path) -> int:
    return len(read_steps(folder / "metrics" / "student-0.jsonl"))


def _logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "logs").iterdir()))


def test_placements_compute_the_same_bit_for_bit(disaggkd: CommandLine) -> None:
    colocated = disaggkd.run("colocated", "teacher.placement=colocated", "loss.ce_weight=0.5")
    disaggkd.run("one", "loss.ce_weight=0.5")
    disaggkd.run("two", "teacher.replicas=2", "loss.ce_weight=0.5")
    assert "held-out tokens" in colocated
    folders = [disaggkd.folder / name for name in ("colocated", "one", "two")]
    for other in folders[1:]:
        output = disaggkd("compare", folders[0], other, "--tolerance", "0")
        assert "6 steps, largest difference of losses 0 " in output
        assert "largest difference of final weights 0 " in output
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    assert results[0] == results[1] == results[2]
    assert results[0].keys() == {"before", "after"}
    assert (folders[1] / "done").exists()
    assert re.search(r"is there, over .*(posix|sysv)/memory", _logs(folders[1]))
    again = disaggkd.run("one", "loss.ce_weight=0.5")
    assert "is done already" in again
    disaggkd("export", folders[1], "-o", disaggkd.folder / "model")
    exported = load_model(StudentSection(path=str(disaggkd.folder / "model"))).state_dict()
    trained = load_weights(folders[1] / "checkpoints" / "step-00000006")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in exported.items())
    assert "exists; remove it" in disaggkd(
        "export", folders[1], "-o", disaggkd.folder / "model", expect=2
    )
    state = disaggkd("status", folders[1])
    assert "done" in state and "step 6/6" in state and "held-out tokens" in state


def test_compare_tells_runs_apart(disaggkd: CommandLine) -> None:
    settings = ("teacher.placement=colocated", "data.eval_rows=0")
    disaggkd.run("a", *settings, steps=2)
    disaggkd.run("b", *settings, "optim.lr=2e-3", steps=2)
    folders = [disaggkd.folder / name for name in ("a", "b")]
    assert "NOT within the tolerance of 0" in disaggkd("compare", *folders, expect=1)
    assert "within the tolerance of 10" in disaggkd("compare", *folders, "--tolerance", "10")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 40 steps that nothing has disturbed."""
    command = CommandLine(tmp_path_factory.mktemp("whole"))
    command.run("run", "teacher.placement=colocated", "data.eval_rows=0", steps=40)
    return command.folder / "run"


def test_an_interrupted_run_goes_on_where_it_was(disaggkd: CommandLine, whole: Path) -> None:
    """Ctrl-C; SIGTERM is what `cancel` sends, in test_jobs_batch."""
    settings = ("data.eval_rows=0", "checkpoint.every_steps=1000", *QUICK)
    folder = disaggkd.folder / "cut"
    process = disaggkd.start(*disaggkd.run_arguments("cut", *settings, steps=40))
    wait_for(lambda: _steps_done(folder) >= 3, what="the third step")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "stopped; the same command goes on from the last checkpoint" in output
    done = _steps_done(folder)
    assert 3 <= done < 40
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    assert not disaggkd.children()
    assert not (folder / "failed").exists()
    disaggkd.run("cut", *settings, steps=40)
    disaggkd("compare", folder, whole, "--tolerance", "0")


@pytest.mark.parametrize("victim", ["teacher", "student"])
def test_a_killed_process_ends_the_run_with_a_clear_error(
    disaggkd: CommandLine, victim: str
) -> None:
    """The only teacher, or the only student."""
    settings = ("data.eval_rows=0", "checkpoint.every_steps=2", *QUICK)
    folder = disaggkd.folder / "run"
    process = disaggkd.start(*disaggkd.run_arguments("run", *settings, steps=LONG))
    wait_for(lambda: _steps_done(folder) >= 4, what="the fourth step")
    disaggkd.role(victim).send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{victim} 0 was ended by SIGKILL" in output
    reason = {
        "teacher": r"order \d+ waited 2 s: no teacher is left",
        "student": "was ended by SIGKILL",
    }[victim]
    assert re.search(rf"student 0 failed: {reason}", output)
    failure = json.loads((folder / "failed").read_text())
    assert failure["role"] == "student" and failure["again"]
    if victim == "student":
        assert "no student is left since 2 s" in (folder / "logs" / "teacher-0.log").read_text()
    assert "student 0 failed" in disaggkd("status", folder)
    assert not disaggkd.children()
    steps = sorted((folder / "checkpoints").glob("step-*"))
    assert steps  # from which the same command goes on
    if victim == "teacher":  # the student has saved all that it had done
        assert steps[-1].name == f"step-{_steps_done(folder):08d}"
    resumed = disaggkd.start(*disaggkd.run_arguments("run", *settings, steps=LONG))
    last = int(steps[-1].name.removeprefix("step-"))
    wait_for(lambda: _steps_done(folder) > last + 2, what="a step after the resume")
    resumed.send_signal(signal.SIGINT)
    output, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 130, output


def test_a_run_goes_on_without_a_teacher(disaggkd: CommandLine, whole: Path) -> None:
    settings = ("data.eval_rows=0", "teacher.replicas=2", *QUICK)
    folder = disaggkd.folder / "run"
    process = disaggkd.start(*disaggkd.run_arguments("run", *settings, steps=40))
    wait_for(lambda: _steps_done(folder) >= 2, what="the second step")
    disaggkd.role("teacher").kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert re.search(r"teacher \d was ended by SIGKILL; the run went on without it", output)
    disaggkd("compare", folder, whole, "--tolerance", "0")


def test_a_killed_parent_leaves_nothing(disaggkd: CommandLine) -> None:
    folder = disaggkd.folder / "run"
    process = disaggkd.start(*disaggkd.run_arguments("run", "data.eval_rows=0", steps=LONG))
    wait_for(lambda: _steps_done(folder) >= 2, what="the second step")
    process.kill()
    process.communicate(timeout=10)
    wait_for(lambda: not disaggkd.children(), timeout_s=20, what="the end of all children")
    assert list((folder / "checkpoints").glob("step-*"))


def test_a_second_interrupt_ends_the_run_at_once(disaggkd: CommandLine) -> None:
    process = disaggkd.start(*disaggkd.run_arguments("run", steps=LONG))
    disaggkd.role("student").suspend()  # it cannot save now
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output


def test_a_run_that_goes_on_listens_on_loopback_alone_and_keeps_others_out(
    disaggkd: CommandLine,
) -> None:
    folder = disaggkd.folder / "run"
    arguments = disaggkd.run_arguments(
        "run", "data.eval_rows=0", "transport.tls=tcp,self", steps=LONG
    )
    process = disaggkd.start(*arguments)
    wait_for(lambda: _steps_done(folder) >= 1, what="the first step")
    assert "is in use by a run that is going on" in disaggkd(*arguments, expect=2)
    listening = [
        connection.laddr.ip
        for child in disaggkd.children()
        for connection in child.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) <= {"127.0.0.1", "::1"}
    assert "over tcp/lo" in _logs(folder)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_an_error_in_a_child_is_shown(disaggkd: CommandLine) -> None:
    output = disaggkd.run("run", "teacher.config.hidden_act=nonsense", expect=1)
    assert re.search(r"(teacher|student) 0 failed: KeyError: 'nonsense'", output)
    assert "Traceback" in output and "in load_model" in output


def test_a_diverging_run_says_what_to_do(disaggkd: CommandLine) -> None:
    settings = ("teacher.placement=colocated", "optim.lr=1e30", "optim.schedule=constant")
    output = disaggkd.run("run", *settings, steps=50, expect=1)
    assert re.search(r"student 0 failed: step \d+: loss .*: lower optim.lr", output)
    assert "Traceback" not in output


def test_orphans_of_an_earlier_start_end_themselves(disaggkd: CommandLine) -> None:
    """A role whose parent has gone before it looked ends instead of running on."""
    output = disaggkd(
        *("role", "student", "--run", disaggkd.folder, "--parent", str(os.getppid())), expect=1
    )
    assert "which started this one, is gone" in output
