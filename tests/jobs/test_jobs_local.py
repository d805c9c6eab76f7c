"""The supervisor of a local run, with students that do what a script says."""

import stat
import sys
import time
from pathlib import Path

import psutil
import pytest
from command_line import TINY

from jobs import local
from jobs.run_folder import RunFolder
from toolkit.config_file import load_config

STUDENT = """#!{python}
import faulthandler, signal, sys, time
from pathlib import Path
faulthandler.register(signal.SIGQUIT)
folder = Path(sys.argv[sys.argv.index("--run") + 1])
if sys.argv[sys.argv.index("--rank") + 1] == "0":
    {first}
else:
    time.sleep(1000)
"""


def run_with_a_stuck_student(folder: Path, monkeypatch: pytest.MonkeyPatch, first: str):
    """Run two students of which the second never ends; return outcome, run folder, seconds."""
    program = folder / "student"
    program.write_text(STUDENT.format(python=sys.executable, first=first))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(local.sys, "executable", str(program))
    settings = ["student.replicas=2", "teacher.placement=colocated", "transport.take_timeout_s=4"]
    config = load_config(TINY, [f"run.folder={folder / 'run'}", *settings])
    run_folder = RunFolder(folder / "run")
    run_folder.create(config)
    started = time.monotonic()
    outcome = local.LocalRun(config, run_folder).run()
    assert not psutil.Process().children()
    return outcome, run_folder, time.monotonic() - started


def test_a_student_that_does_not_end_spoils_no_run_that_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_END_S", 2.0)
    first = "(folder / 'done').touch()"
    outcome, folder, _ = run_with_a_stuck_student(tmp_path, monkeypatch, first)
    assert outcome.exit_code == 0
    assert "student 1 did not end and was killed, but the run is done" in outcome.message
    assert "most recent call first" in folder.log_file("student", 1).read_text()


def test_a_student_that_waits_for_a_lost_one_has_its_time(tmp_path, monkeypatch):
    outcome, _, seconds = run_with_a_stuck_student(tmp_path, monkeypatch, "sys.exit(3)")
    assert outcome.exit_code == 1 and "student 0 ended with 3" in outcome.message
    assert seconds > 4
