"""What lies where in a run folder, and how a run begins and ends in it."""

import fcntl
import json
import os
import shutil
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.config import Config
from toolkit.config_file import changes, dump_config, parse_config
from toolkit.errors import InputError
from transport.errors import TransportError
from transport.rendezvous import PEERS_FOLDER, RunKeys, write_atomically


@dataclass(frozen=True)
class Failure:
    """Why a process failed.

    Attributes:
        role: who failed.
        rank: which of them.
        error: what to tell the user.
        traceback: for errors of which the message does not say all.
        again: whether the run may come to its end when it is started again.
    """

    role: str
    rank: int
    error: str
    traceback: str = ""
    again: bool = False

    def __str__(self) -> str:
        return f"{self.role} {self.rank} failed: {self.error}"


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.metrics = path / "metrics"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.done = path / "done"
        self.failed = path / "failed"
        self.lost_teachers = path / "lost-teachers"
        self.restarts = path / "restarts"
        self.batch_file = path / "job.sbatch"
        self.job = path / "job.json"
        self.lock = path / "lock"
        self.result = path / "result.json"

    def metrics_file(self, role: str, rank: int = 0) -> Path:
        """Return where a role writes its metrics."""
        return self.metrics / f"{role}-{rank}.jsonl"

    def log_file(self, role: str, rank: int = 0) -> Path:
        """Return where a role's output goes."""
        return self.logs / f"{role}-{rank}.log"

    def load(self) -> Config:
        """Read the run's configuration.

        Raises:
            InputError: this is no run folder.
        """
        try:
            tables = tomllib.loads(self.config_file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{self.path} is no run folder: it has no config.toml") from error
        return parse_config(tables, source=str(self.config_file))

    def create(self, config: Config) -> None:
        """Make the folder, or take up one that was begun with an equal configuration.

        Raises:
            InputError: the folder cannot be written, others can write in it, or it belongs to
                another configuration.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.config_file.exists():
                self._check_same(config)
            self.logs.mkdir(exist_ok=True)
            write_atomically(self.config_file, dump_config(config))
            RunKeys.create(self.path)
        except OSError as error:
            raise InputError(
                f"run.folder = {self.path} cannot be written: {error.strerror}"
            ) from error
        except TransportError as error:
            raise InputError(f"run.folder = {self.path}: {error}") from error

    def begin(self) -> None:
        """Clear what the processes of an earlier start have left; the lock must be held."""
        shutil.rmtree(self.path / PEERS_FOLDER, ignore_errors=True)
        shutil.rmtree(self.lost_teachers, ignore_errors=True)
        self.failed.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second start of the same run out while this one goes on.

        Raises:
            InputError: the run is going on.
        """
        with self.lock.open("a+") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"{self.path} is in use by a run that is going on: stop it, or choose another "
                    "run.folder"
                ) from error
            stream.truncate(0)
            stream.write(str(os.getpid()))
            stream.flush()
            yield

    def holder(self) -> int | None:
        """Return the process id of the local run that goes on in this folder, or None."""
        if not self.lock.exists():
            return None
        with self.lock.open() as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(stream.read() or 0) or None
        return None

    def write_failure(self, failure: Failure) -> None:
        """Note why the run failed; only the first failure is kept.

        A run goes on without a teacher that failed; such a failure is noted beside the others. It
        becomes the run's when all teachers have failed and a student fails for that.
        """
        if failure.role == "teacher":
            self.lost_teachers.mkdir(exist_ok=True)
            _write_json(self.lost_teachers / f"{failure.rank}.json", asdict(failure))
            return
        causes = self.teacher_failures()
        if failure.again and causes and len(causes) >= self.load().num_teachers:
            failure = next((cause for cause in causes if not cause.again), failure)
        _write_once(self.failed, asdict(failure))

    def teacher_failures(self) -> list[Failure]:
        """Return why teachers of this start failed."""
        files = sorted(self.lost_teachers.glob("*.json"))
        return [Failure(**values) for file in files if (values := _read_json(file))]

    def failure(self) -> Failure | None:
        """Return why the run failed, or None."""
        values = _read_json(self.failed)
        return None if values is None else Failure(**values)

    def add_restart(self, job: int, start: int, reason: str) -> bool:
        """Note why a Slurm job begins again, as its script does, unless somebody has.

        Args:
            job: its id.
            start: how often it has begun again so far.
            reason: why.

        Returns:
            Whether this was the first note of this start.
        """
        return _write_once(self.restarts / f"{job}-{start}.json", {"error": reason})

    def restart_reasons(self) -> list[str]:
        """Return why the run's jobs were started again, in order."""
        files = sorted(self.restarts.glob("*.json"), key=lambda path: path.stat().st_mtime)
        return [str((_read_json(file) or {}).get("error")) for file in files]

    def job_id(self) -> int | None:
        """Return the id of the Slurm job that was submitted last, or None."""
        job = _read_json(self.job)
        return None if job is None else int(job["id"])

    def set_job(self, job: int) -> None:
        """Note the Slurm job that works on this run."""
        _write_json(self.job, {"id": job})

    def results(self) -> dict[str, Any]:
        """Return the evaluations, by `before` and `after`, as far as they are made."""
        return _read_json(self.result) or {}

    def add_result(self, name: str, values: dict[str, Any]) -> None:
        """Add one evaluation."""
        _write_json(self.result, self.results() | {name: values})

    def _check_same(self, config: Config) -> None:
        differing = changes(self.load(), config)
        if differing:
            lines = "".join(f"\n  {c.key}: {c.old!r} there, {c.new!r} now" for c in differing)
            raise InputError(
                f"run.folder = {self.path} belongs to another configuration:{lines}\n"
                "choose another run.folder, or remove this one"
            )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return values


def _write_once(path: Path, values: dict[str, Any]) -> bool:
    """Write a file that is not there yet; return whether it was not."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    _write_json(temporary, values)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=1) + "\n")
