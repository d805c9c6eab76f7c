"""Submitting a run: one heterogeneous job through submitit, checked before it is queued."""

from dataclasses import dataclass
from pathlib import Path

from jobs.preflight import check_inputs
from jobs.run_folder import Failure, RunFolder
from jobs.slurm import client
from jobs.slurm.batch import (
    SRUN_OPTIONS,
    begin,
    components_of,
    epilogue,
    job_name,
    prologue,
    teachers_file,
)
from jobs.slurm.executor import HetSlurmExecutor, Roles
from jobs.slurm.task import run_task
from toolkit.config import Config
from toolkit.errors import InputError
from transport.rendezvous import write_atomically


@dataclass(frozen=True)
class RunTask:
    """What submitit runs in each task of one role of a run."""

    role: str
    folder: Path
    shift: int

    def __call__(self) -> int:
        """Run the role to its end.

        Raises:
            RuntimeError: it failed; the message is what the run folder says of it.
        """
        code = run_task(self.role, self.folder, self.shift)
        if code:
            folder = RunFolder(self.folder)
            noted = [folder.failure(), *folder.teacher_failures()]
            failure = next(filter(None, noted), Failure(self.role, 0, "see its log"))
            raise RuntimeError(f"{failure}\n{failure.traceback}".strip())
        return code


def executor_for(config: Config, folder: RunFolder) -> HetSlurmExecutor:
    """Return the submitit executor of a run's job.

    Raises:
        InputError: the configuration cannot be submitted.
    """
    cluster = config.cluster
    executor = HetSlurmExecutor(folder.path / "submitit")
    executor.update_parameters(
        job_name=job_name(config),
        time_min=cluster.time_min,
        requeue=True,
        signal_delay_s=cluster.warning_s,
        options=cluster.options,
        setup=[*prologue(config, folder), *begin(config)],
        srun_options=SRUN_OPTIONS,
        epilogue=epilogue(config),
    )
    executor.set_components(components_of(config))
    return executor


def dry_run_text(config: Config) -> str:
    """Return the batch file that `submit_run` would queue; nothing is written or started."""
    return executor_for(config, RunFolder(Path(config.run.folder))).script()


def roles_of(config: Config, folder: RunFolder) -> Roles:
    """Return what the tasks of a run's job do."""
    return Roles(
        student=RunTask("student", folder.path, 0),
        teacher=RunTask("teacher", folder.path, -config.student.replicas),
    )


def submit_run(config: Config, folder: RunFolder) -> str:
    """Queue the job of a run, unless it is queued or done; return what is so now.

    Raises:
        InputError: inputs are missing, no controller answers, or Slurm would not take the job.
    """
    check_inputs(config)
    executor = executor_for(config, folder)
    client.check_controller()
    folder.create(config)
    with folder.locked():
        if folder.done.exists():
            return f"{folder.path} is done already"
        if (job := active_job(folder)) is not None:
            return f"job {job} works on {folder.path} already"
        write_atomically(folder.batch_file, executor.script())
        client.check_script(str(folder.batch_file))
        job = int(executor.submit(roles_of(config, folder)).job_id)
        client.refuse_hopeless(job)
        folder.set_job(job)
    return f"job {job}, run folder {folder.path}"


def submit_teachers(folder: RunFolder, nodes: int) -> str:
    """Queue a job of further teachers for a run that goes on.

    Raises:
        InputError: the run does not go on, or Slurm would not take the job.
    """
    config = folder.load()
    if active_job(folder) is None:
        raise InputError(f"no Slurm job works on {folder.path}: submit it first")
    first = max(map(_index, folder.metrics.glob("teacher-*.jsonl")), default=-1) + 1
    first = max(first, config.teacher.replicas)
    path = folder.path / f"teachers-{first}.sbatch"
    write_atomically(path, teachers_file(config, folder, nodes, first))
    client.check_script(str(path))
    job = client.submit(str(path))
    return f"job {job}: teachers from {first} on for {folder.path}"


def active_job(folder: RunFolder) -> int | None:
    """Return the Slurm job that is queued or runs for this folder, or None."""
    job = folder.job_id()
    return job if job is not None and client.job_state(job) is not None else None


def _index(path: Path) -> int:
    return int(path.stem.removeprefix("teacher-"))
