"""The monitor: exact text from a state, and states from files as they grow."""

import io
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from jobs.monitor.state import RunState, StateReader, TeacherState
from jobs.monitor.view import dashboard, plain_line, result_table, sparkline, summary
from jobs.run_folder import Failure, RunFolder
from toolkit.config_file import load_config
from toolkit.training.metrics import MetricsWriter

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny.toml"


def _step(step: int, **values: Any) -> dict[str, Any]:
    record = {"kind": "step", "step": step, "steps": 10, "kd": 4.0 - step / 2, "ce": 5.0}
    record |= {"grad_norm": 1.5, "lr": 3e-4, "tokens_per_s": 2000.0, "step_s": 2.0, "wait_s": 1.0}
    return record | {"ring_ready": 1, "num_teachers": 2, "loss": 1.0} | values


def _state(**values: Any) -> RunState:
    teachers = [TeacherState(0, 1234.0, 0.25, 3.5, 42), TeacherState(1, 999.0, 0.0, 2.0, 40)]
    state = RunState("runs/x", load_config(EXAMPLE), "training", teachers=teachers)
    state.steps = deque([_step(1), _step(2)])
    for name, value in values.items():
        setattr(state, name, value)
    return state


def _text(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_dashboard_shows_both_sides_and_who_waits() -> None:
    assert _text(dashboard(_state())) == "\n".join(
        [
            "disaggkd runs/x  training",
            "step 2/10 ━━━━━━━━                                 0:00:16 left",
            " KD loss   3.0000  █▁",
            " CE loss   5.0000",
            " student   2,000 tokens/s",
            " gradient  norm 1.500, learning rate 3.00e-04",
            " teacher  capacity        waits  writes     orders",
            " 0        1,234 tokens/s  25%    3.50 GB/s  42",
            " 1        999 tokens/s    0%     2.00 GB/s  40",
            "ring ■□□□ 1/4 ready, student waits 50%, 2 teachers connected",
            "teachers set the pace: the student waits 50% of its time",
        ]
    )


def test_dashboard_before_the_first_step() -> None:
    state = _state(steps=deque(), phase="waiting for teachers")
    assert _text(dashboard(state)) == "disaggkd runs/x  waiting for teachers"
    assert plain_line(state) == "waiting for teachers"


def test_plain_line() -> None:
    line = "training: step 2/10  kd 3.0000  ce 5.0000  2000 tokens/s  waiting 50%"
    assert plain_line(_state()) == line


@pytest.mark.parametrize(
    ("wait_s", "waiting", "sentence"),
    [
        (1.0, 0.0, "teachers set the pace: the student waits 50% of its time"),
        (0.0, 0.5, "the student sets the pace: teachers wait 50% of their time or more"),
        (0.0, 0.05, "teachers and student keep pace"),
    ],
)
def test_bottleneck(wait_s: float, waiting: float, sentence: str) -> None:
    state = _state(
        steps=deque([_step(1, wait_s=wait_s)]), teachers=[TeacherState(0, 1.0, waiting, 1.0, 1)]
    )
    assert state.bottleneck == sentence
    state.teachers = []
    assert state.bottleneck == "teacher and student share this process"


def test_summary_tells_how_it_ended() -> None:
    failure = Failure("teacher", 1, "out of memory")
    text = _text(summary(_state(failure=failure)))
    assert "disaggkd runs/x  failed" in text and "teacher 1 failed: out of memory" in text
    assert "disaggkd runs/x  done" in _text(summary(_state(done=True)))


def test_result_table_shows_what_is_there() -> None:
    before = {"kd": 1.23456, "perplexity": 51234.5, "agreement": 0.0123}
    assert "51,234.5" in _text(result_table({"before": before}))
    assert "1.23%" in _text(result_table({"before": before, "after": before}))


def test_sparkline() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([1.0], 5) == "▁"
    assert sparkline([3.0, 2.0, 1.0], 5) == "█▅▁"
    assert len(sparkline(list(range(100)), 7)) == 7


def test_state_follows_files_through_a_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(load_config(EXAMPLE))
    reader = StateReader(folder)
    assert reader.read().phase == "starting" and reader.read().last is None
    with MetricsWriter(folder.metrics_file("student")) as student:
        student.write("phase", phase="training")
        for step in (1, 2, 3):
            student.write(**_step(step))
    assert [r["step"] for r in reader.read().steps] == [1, 2, 3]
    with MetricsWriter(folder.metrics_file("student")) as student:
        student.write(**_step(2, kd=9.0))  # resumed from the checkpoint of step 1
    served = {"num_tokens": 100, "num_bytes": 10**9, "waited_s": 1.0}
    served |= {"compute_s": 0.5, "write_s": 0.5}
    with MetricsWriter(folder.metrics_file("teacher", 0)) as teacher:
        teacher.write("served", **served)
        teacher.write("served", **served)
    folder.write_failure(Failure("student", 0, "first"))
    folder.write_failure(Failure("student", 1, "second"))
    state = reader.read()
    assert [(r["step"], r["kd"]) for r in state.steps] == [(1, 3.5), (2, 9.0)]
    assert state.teachers == [TeacherState(0, 100.0, 0.5, 2.0, 2)]
    assert state.failure is not None and state.failure.error == "first"
    assert [p.name for p in folder.path.glob(".*")] == []


def test_a_teacher_s_failure_is_the_run_s_when_all_have_failed(tmp_path: Path) -> None:
    """Else the run had gone on without it, and something else ended it: it may start again."""
    lost = Failure("student", 0, "another rank is lost", again=True)
    teacher = Failure("teacher", 1, "out of memory")
    for num_teachers, cause in ((2, lost), (1, teacher)):
        folder = RunFolder(tmp_path / str(num_teachers))
        settings = [f"run.folder={folder.path}", f"teacher.replicas={num_teachers}"]
        folder.create(load_config(EXAMPLE, settings))
        folder.write_failure(teacher)
        assert folder.failure() is None
        folder.write_failure(lost)
        assert folder.failure() == cause
