"""What is known of a run, read from its folder; nothing is asked of any process."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from jobs.run_folder import Failure, RunFolder
from jobs.slurm.client import JobState, job_state
from toolkit.config import Config
from toolkit.training.metrics import MetricsReader, Record

_RECENT = 20
_HISTORY = 2000
_NOTABLE_SHARE = 0.1
_QUESTION_S = 30.0


@dataclass
class TeacherState:
    """One teacher; figures are means over its last orders.

    Attributes:
        index: which teacher.
        tokens_per_s: tokens that it computes in a second of work.
        waiting: share of its time in which it has no order.
        write_gb_per_s: speed of its writes into the ring.
        num_orders: orders served.
    """

    index: int
    tokens_per_s: float
    waiting: float
    write_gb_per_s: float
    num_orders: int


@dataclass
class RunState:
    """A run at one moment.

    Attributes:
        path: run folder.
        config: its configuration.
        phase: what the student does, in words.
        steps: step records since the run began, the newest last.
        teachers: one for each teacher that has served an order.
        results: evaluations by `before` and `after`.
        failure: what ended the run, or None.
        done: whether all is done.
        job: id of its Slurm job, or None.
        job_state: what Slurm says of that job, or None when it knows nothing.
        restarts: why the job was started again, each time.
    """

    path: str
    config: Config
    phase: str = "starting"
    steps: deque[Record] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    teachers: list[TeacherState] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    done: bool = False
    job: int | None = None
    job_state: JobState | None = None
    restarts: list[str] = field(default_factory=list)

    @property
    def last(self) -> Record | None:
        """The newest step, or None."""
        return self.steps[-1] if self.steps else None

    def recent(self, name: str) -> float:
        """Return the mean of a value over the last steps."""
        values = [float(record[name]) for record in list(self.steps)[-_RECENT:]]
        return sum(values) / len(values)

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come: done, failed for good, or out of Slurm's queue."""
        if self.done or self.job is None:
            return self.done or self.failure is not None
        return self.job_state is None

    @property
    def waiting(self) -> float:
        """Share of its time that the student waits for hidden states."""
        return self.recent("wait_s") / self.recent("step_s")

    @property
    def remaining_s(self) -> float:
        """Seconds until the last step, at the pace of the last ones."""
        last = self.steps[-1]
        return float((last["steps"] - last["step"]) * self.recent("step_s"))

    @property
    def bottleneck(self) -> str:
        """Who waits for whom, in one sentence."""
        if not self.teachers:
            return "teacher and student share this process"
        if self.waiting > _NOTABLE_SHARE:
            return f"teachers set the pace: the student waits {self.waiting:.0%} of its time"
        idle = min(teacher.waiting for teacher in self.teachers)
        if idle > _NOTABLE_SHARE:
            return f"the student sets the pace: teachers wait {idle:.0%} of their time or more"
        return "teachers and student keep pace"


class StateReader:
    """Follows the files of a run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._state = RunState(str(folder.path), folder.load())
        self._student = MetricsReader(folder.metrics_file("student"))
        self._teachers: dict[int, tuple[MetricsReader, deque[Record]]] = {}
        self._num_orders: dict[int, int] = {}
        self._next_question = 0.0

    def read(self) -> RunState:
        """Take in what is new and return the state; Slurm is asked once in 30 s."""
        for record in self._student.read():
            self._take(record)
        self._state.teachers = self._read_teachers()
        self._state.results = self._folder.results()
        self._state.failure = self._folder.failure()
        self._state.done = self._folder.done.exists()
        self._state.restarts = self._folder.restart_reasons()
        self._state.job = self._folder.job_id()
        if self._state.job is not None and time.monotonic() >= self._next_question:
            self._state.job_state = job_state(self._state.job)
            self._next_question = time.monotonic() + _QUESTION_S
        return self._state

    def _take(self, record: Record) -> None:
        steps = self._state.steps
        if record["kind"] == "phase":
            self._state.phase = record["phase"]
        elif record["kind"] == "step":
            while steps and steps[-1]["step"] >= record["step"]:
                steps.pop()  # done again after a resume
            steps.append(record)

    def _read_teachers(self) -> list[TeacherState]:
        for path in self._folder.metrics.glob("teacher-*.jsonl"):
            index = int(path.stem.removeprefix("teacher-"))
            self._teachers.setdefault(index, (MetricsReader(path), deque(maxlen=_RECENT)))
        return [
            state
            for index in sorted(self._teachers)
            if (state := self._read_teacher(index)) is not None
        ]

    def _read_teacher(self, index: int) -> TeacherState | None:
        reader, recent = self._teachers[index]
        new = reader.read()
        recent.extend(new)
        self._num_orders[index] = self._num_orders.get(index, 0) + len(new)
        if not recent:
            return None
        total = {
            name: sum(record[name] for record in recent)
            for name in ("num_tokens", "num_bytes", "waited_s", "compute_s", "write_s")
        }
        busy_s = total["compute_s"] + total["write_s"]
        return TeacherState(
            index=index,
            tokens_per_s=total["num_tokens"] / busy_s,
            waiting=total["waited_s"] / (total["waited_s"] + busy_s),
            write_gb_per_s=total["num_bytes"] / total["write_s"] / 1e9,
            num_orders=self._num_orders[index],
        )


def read_state(folder: RunFolder) -> RunState:
    """Return where a run stands."""
    return StateReader(folder).read()
