"""Heterogeneous Slurm jobs through submitit: several roles, each on nodes of its own kind.

    executor = HetSlurmExecutor(folder)
    executor.update_parameters(job_name="distill", time_min=60, requeue=True)
    executor.set_components([Component("student", nodes=2), Component("teacher", nodes=4)])
    job = executor.submit(Roles(student=train, teacher=serve), config)
    job.role_results("student")

The first component leads: the batch script runs there, and its first task is the one whose
`checkpoint` submitit calls before the time limit.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from submitit import JobEnvironment
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor

from jobs.slurm.client import check_controller, submit
from jobs.slurm.components import Component, Value, role_ranks, sbatch_header, srun_command
from jobs.slurm.environment import ROLES_VARIABLE, HetSlurmJobEnvironment, write_roles
from jobs.slurm.job import HetSlurmJob
from toolkit.errors import InputError


@dataclass(frozen=True)
class JobParameters:
    """What holds for a job as a whole.

    Attributes:
        job_name: its name in Slurm's lists.
        time_min: time limit of a run; a requeue begins it anew.
        requeue: whether the job may be run again; None leaves it to the cluster.
        signal_delay_s: how long before the time limit tasks get the signal to checkpoint.
        max_requeues: how often the job requeues itself at that signal. Below ten minutes of time
            limit submitit counts any such signal, else only those near the limit.
        options: further sbatch options of every component, by their long names.
        srun_options: further options of srun; they win over `--kill-on-bad-exit=1`, by which a
            failed task ends all others, and over `--cpu-bind=none`.
        setup: shell lines before the tasks start: modules, conda.
        environment: variables of the tasks, taken literally. PYTHONSAFEPATH is set, so that no
            folder at hand hides an installed package: own modules need PYTHONPATH.
        epilogue: shell lines after the tasks have ended, with srun's exit code in `$code`. To run
            the job again: `trap "" TERM; scontrol requeue "$SLURM_JOB_ID"`.
    """

    job_name: str = "disaggkd"
    time_min: int = 60
    requeue: bool | None = None
    signal_delay_s: int = 90
    max_requeues: int = 3
    options: Mapping[str, Value] = field(default_factory=dict)
    srun_options: Sequence[str] = ()
    setup: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    epilogue: Sequence[str] = ()

    def leading_options(self) -> dict[str, Value]:
        """Return the sbatch options of the first component alone.

        The script writes its own log: of a path in an `#SBATCH` line Slurm would expand `%`.
        """
        signal = f"{JobEnvironment.USR_SIG}@{self.signal_delay_s}"
        return {"job-name": self.job_name, "output": "/dev/null", "signal": signal}

    def common_options(self) -> dict[str, Value]:
        """Return the sbatch options of every component."""
        requeue: dict[str, Value] = {}
        if self.requeue is not None:
            requeue = {"requeue" if self.requeue else "no-requeue": True}
        return {"time": self.time_min, **requeue, **self.options}


class Roles:
    """What the tasks of each role run, as one function; all roles get the same arguments.

    If the function of the first component's role has a method `checkpoint`, it is what submitit
    calls, and what it returns takes the function's place in the next run.
    """

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.functions = functions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function of this task's role."""
        return self.functions[_role()](*args, **kwargs)

    @property
    def checkpoint(self) -> Callable[..., DelayedSubmission]:
        """The checkpoint of this task's role.

        Raises:
            AttributeError: it has none; to submitit this function then has none either.
        """
        role = _role()
        own: Callable[..., DelayedSubmission] = self.functions[role].checkpoint  # type: ignore[attr-defined]

        def checkpoint(*args: Any, **kwargs: Any) -> DelayedSubmission:
            new = own(*args, **kwargs)
            new.function = Roles(**self.functions | {role: new.function})
            return new

        return checkpoint


def _role() -> str:
    environment = JobEnvironment()
    assert isinstance(environment, HetSlurmJobEnvironment)
    return environment.role


class HetSlurmExecutor(SlurmExecutor):
    """Submits functions as heterogeneous Slurm jobs.

    Args:
        folder: holds pickles, results and logs; on a file system that all nodes share.
        python: what starts Python in the tasks, words quoted as in a shell; by default this
            interpreter.

    Raises:
        InputError: submitit would replace a part of the folder's name.
    """

    job_class = HetSlurmJob

    def __init__(self, folder: str | Path, python: str | None = None) -> None:
        super().__init__(folder, python=python)
        if re.search("%[jtAa]", str(self.folder)):
            raise InputError(
                f"folder = {self.folder}: submitit would replace %j, %t, %A or %a; "
                "choose a folder without them"
            )
        self._job = JobParameters()
        self._components: Sequence[Component] = ()

    @classmethod
    def affinity(cls) -> int:
        """Return that jobs can be prepared anywhere; whether Slurm is there, `submit` checks."""
        return 1

    def set_components(self, components: Sequence[Component]) -> None:
        """Choose the parts of the next jobs; the first one leads.

        Raises:
            InputError: fewer than two, or roles that cannot be told apart.
        """
        roles = [component.role for component in components]
        if len(set(roles)) < max(2, len(roles)) or not all(map(_is_name, roles)):
            raise InputError(
                f"components with the roles {roles}: a heterogeneous job has two or more, "
                "each with a role of its own, named by letters, digits and _"
            )
        self._components = tuple(components)

    def script(self, command: str | None = None) -> str:
        """Return the batch file of a job.

        Args:
            command: what each task runs, words quoted as in a shell; by default submitit.

        Raises:
            InputError: an option or a variable that cannot be written there.
        """
        assert self._components, "set_components comes first"
        job, components = self._job, self._components
        log = '"${DISAGGKD_LOG}_${SLURM_PROCID}_log'
        words = shlex.split(command or self._submitit_command_str)
        task = ["bash", "-c", f'exec >>{log}.out" 2>>{log}.err"; exec "$@"', "task", *words]
        commands = {component.role: task for component in components}
        lines = [
            "#!/bin/bash",
            *sbatch_header(components, job.leading_options(), job.common_options()),
            f'export DISAGGKD_LOG={shlex.quote(str(self.folder))}"/$SLURM_JOB_ID"',
            'exec >>"${DISAGGKD_LOG}_${SLURM_RESTART_COUNT:-0}_batch.log" 2>&1',
            "# Results of an earlier run of this job would be taken for this run's.",
            'rm -f "$DISAGGKD_LOG"_*_result.pkl "$DISAGGKD_LOG"_*.save_tmp',
            "",
            *job.setup,
            *self._exports(),
            "",
            srun_command(components, commands, ["--kill-on-bad-exit=1", *job.srun_options]),
            "code=$?",
            *job.epilogue,
            'exit "$code"',
        ]
        return "\n".join(lines) + "\n"

    def _exports(self) -> list[str]:
        variables = {
            "PYTHONSAFEPATH": "1",
            **self._job.environment,
            "SLURM_EXPORT_ENV": "ALL",  # after `sbatch --export=NONE` tasks would get nothing
            "SUBMITIT_EXECUTOR": HetSlurmJobEnvironment.name(),
            ROLES_VARIABLE: write_roles(self._components),
        }
        wrong = [name for name in variables if not _is_name(name)]
        if wrong:
            raise InputError(f"environment: {wrong[0]!r} is no name of a variable; rename it")
        return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        known = [field.name for field in fields(JobParameters)]
        unknown = sorted(set(kwargs) - set(known))
        if unknown:
            raise InputError(
                f"unknown parameter {unknown[0]}: choose from {', '.join(known)}; sbatch's own "
                "options go into `options`, those of one role into its Component"
            )
        self._job = replace(self._job, **kwargs)

    def _num_tasks(self) -> int:
        return sum(component.num_tasks for component in self._components)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[Any]:
        check_controller()
        # One by one: Slurm has no arrays of heterogeneous jobs.
        return [self._submit(delayed) for delayed in delayed_submissions]

    def _submit(self, delayed: DelayedSubmission) -> HetSlurmJob:
        self._check_roles(delayed.function)
        delayed.set_timeout(self._job.time_min, self._job.max_requeues)
        self.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".submit-", dir=self.folder) as temporary:
            pickle, script = Path(temporary, "submitted.pkl"), Path(temporary, "submission.sh")
            delayed.dump(pickle)
            script.write_text(self.script())
            job = HetSlurmJob(self.folder, self._sbatch(script), range(self._num_tasks()))
            job.role_ranks = role_ranks(self._components)
            pickle.rename(job.paths.submitted_pickle)
            script.rename(job.paths.submission_file)
        return job

    def _check_roles(self, function: Any) -> None:
        roles = [component.role for component in self._components]
        if isinstance(function, Roles) and set(function.functions) != set(roles):
            raise InputError(
                f"functions for the roles {sorted(function.functions)}, components for "
                f"{sorted(roles)}: give each component one function"
            )

    def _sbatch(self, script: Path) -> str:
        try:
            return str(submit(str(script)))
        except InputError as error:
            asked = "".join(
                f"\n{c.role} asks for {self._asked(c, str(error))}" for c in self._components
            )
            raise InputError(f"{error}{asked}") from error

    def _asked(self, component: Component, refusal: str) -> str:
        """Return the options that a refusal names, with their values, or all if it names none."""
        own = {**self._job.common_options(), **component.sbatch_options()}
        given = {name: f"--{name}={value}" for name, value in own.items() if value is not None}
        named = [text for name, text in given.items() if re.search(rf"\b{name}\b", refusal)]
        return " ".join(named or given.values())


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*", text) is not None
