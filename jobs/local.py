"""The roles of a run as processes on this machine, started, watched and reaped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from types import FrameType

from jobs.run_folder import Failure, RunFolder
from toolkit.config import Config

_TICK_S = 0.2
_GRACE_S = 5.0
_END_S = 30.0
_EXIT_STOPPED = 75


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: 0 done, 1 failed, 130 stopped by the user.
        message: what to tell the user, or "".
    """

    exit_code: int
    message: str = ""


@dataclass
class _Role:
    name: str
    rank: int
    process: subprocess.Popen[bytes]

    @property
    def ending(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with {code}"

    def __str__(self) -> str:
        return f"{self.name} {self.rank} {self.ending}"


class LocalRun:
    """Supervises the processes of one run."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._roles: list[_Role] = []
        self._stop_asked = 0

    def run(self, on_tick: Callable[[], object] = lambda: None) -> Outcome:
        """Start the roles, call `on_tick` several times a second, and return when all have ended.

        SIGINT and SIGTERM save a checkpoint and end the run; a second one ends it at once.
        """
        with self._signals():
            try:
                for rank in range(self._config.num_teachers):
                    self._start("teacher", rank)
                for rank in range(self._config.student.replicas):
                    self._start("student", rank)
                self._watch(on_tick)
                return self._outcome()
            finally:
                self._kill()

    def _start(self, name: str, rank: int) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self._config.run.threads),
            "OMP_WAIT_POLICY": "passive",
            "PYTHONSAFEPATH": "1",
        }
        command = [sys.executable, "-m", "jobs", "role", name, "--run", str(self._folder.path)]
        with self._folder.log_file(name, rank).open("ab") as log:
            process = subprocess.Popen(
                [*command, "--rank", str(rank), "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then decides
            )
        self._roles.append(_Role(name, rank, process))

    def _watch(self, on_tick: Callable[[], object]) -> None:
        """Return when all processes have ended, or have had their time to.

        The run goes on without a teacher. When a student has ended, the others save and end, and
        then the teachers. Of a run that is done nothing is left to save.
        """
        transport = self._config.transport
        limits = {"student": transport.take_timeout_s, "teacher": transport.dead_after_s + _GRACE_S}
        waited_since = {"student": inf, "teacher": inf}
        while self._running():
            on_tick()
            time.sleep(_TICK_S)
            now = time.monotonic()
            students = self._running("student")
            if len(students) < self._config.student.replicas:
                waited_since["student"] = min(now, waited_since["student"])
            if self._folder.done.exists():
                limits["student"] = _END_S
            if not students:
                waited_since["teacher"] = min(now, waited_since["teacher"])
            role = "student" if students else "teacher"
            if self._stop_asked > 1 or now - waited_since[role] > limits[role]:
                return
        on_tick()

    def _running(self, name: str = "") -> list[_Role]:
        return [r for r in self._roles if name in ("", r.name) and r.process.poll() is None]

    def _outcome(self) -> Outcome:
        students = {role.process.poll() for role in self._roles if role.name == "student"}
        # By the signal itself ends who has not come to handle it: there is nothing to save yet.
        if self._stop_asked and students <= {None, _EXIT_STOPPED, -signal.SIGTERM}:
            return Outcome(130, "stopped; the same command goes on from the last checkpoint")
        if students == {0} or (self._folder.done.exists() and students <= {0, None}):
            return Outcome(0, "\n".join([*self._stuck_students(), *self._lost_teachers()]))
        return Outcome(1, self._describe_failure())

    def _stuck_students(self) -> list[str]:
        return [
            f"student {role.rank} did not end and was killed, but the run is done; "
            f"{self._folder.log_file('student', role.rank)} shows where it was"
            for role in self._running("student")
        ]

    def _lost_teachers(self) -> list[str]:
        notes = {failure.rank: str(failure) for failure in self._folder.teacher_failures()}
        return [
            f"{notes.get(role.rank) or role}; the run went on without it"
            for role in self._roles
            if role.name == "teacher" and role.process.poll() not in (None, 0)
        ]

    def _describe_failure(self) -> str:
        for role in self._roles:
            if role.name == "student" and (role.process.poll() or 0) < 0:
                self._folder.write_failure(Failure("student", role.rank, role.ending, again=True))
        lines = [str(role) for role in self._roles if (role.process.returncode or 0) < 0]
        failure = self._folder.failure()
        if failure is not None:
            lines += [str(failure), *failure.traceback.splitlines()]
        if lines:
            return "\n".join([*lines, f"logs are in {self._folder.logs}"])
        role = next(r for r in self._roles if r.process.poll() != 0)
        log = self._folder.log_file(role.name, role.rank)
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        return "\n".join([f"{role}:", *tail])

    def _kill(self) -> None:
        left = self._running()
        for role in left:
            role.process.send_signal(signal.SIGQUIT)  # it writes its stacks into its log
        if left:
            time.sleep(_TICK_S)
        for role in self._roles:
            if role.process.poll() is None:
                role.process.kill()
            role.process.wait()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(signum: int, frame: FrameType | None) -> None:
            self._stop_asked += 1
            for role in self._roles:
                if role.name == "student" and role.process.poll() is None:
                    role.process.terminate()

        previous = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
