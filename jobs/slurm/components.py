"""The parts of a heterogeneous job, and what sbatch and srun are told about them.

Slurm hands some options of the first part on to the others and some not; hence every option stands
in every part. Nothing is emitted that was not asked for.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.errors import InputError

Value = str | int | bool | None
"""An option's value: True is a flag without value, False and None leave the option out."""


@dataclass(frozen=True)
class Component:
    """The tasks of one role, on nodes of one kind.

    Attributes:
        role: what these tasks are; unique in a job.
        nodes: number of nodes.
        tasks_per_node: tasks on each.
        cpus_per_task: CPUs of a task, given to sbatch and to srun.
        gpus_per_node: GPUs of a node.
        partition: where the nodes come from.
        options: further sbatch options by their long names; they win over the fields above.
        srun_options: further options of this component's part of srun.
    """

    role: str
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    partition: str | None = None
    options: Mapping[str, Value] = field(default_factory=dict)
    srun_options: Sequence[str] = ()

    @property
    def num_tasks(self) -> int:
        """Tasks of this role."""
        return self.nodes * self.tasks_per_node

    def sbatch_options(self) -> dict[str, Value]:
        """Return the options of this component alone."""
        gres = None if self.gpus_per_node is None else f"gpu:{self.gpus_per_node}"
        return {
            "partition": self.partition,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "gres": gres,
            **self.options,
        }


def role_ranks(components: Sequence[Component]) -> dict[str, range]:
    """Return the global ranks of each role, where one srun starts the tasks of all components."""
    ranks, first = {}, 0
    for component in components:
        ranks[component.role] = range(first, first + component.num_tasks)
        first += component.num_tasks
    return ranks


def sbatch_header(
    components: Sequence[Component], job: Mapping[str, Value], every: Mapping[str, Value]
) -> list[str]:
    """Return the `#SBATCH` lines of a heterogeneous job.

    Args:
        components: the first one leads: the batch script runs on its first node.
        job: options of the job as a whole, such as its name; they stand in the first part alone.
        every: options that stand in every part; those of a component win.

    Raises:
        InputError: Slurm would misread an option.
    """
    lines: list[str] = []
    for number, component in enumerate(components):
        own = {**every, **component.sbatch_options()}
        lines += ["#SBATCH hetjob"] if number else _lines(job)
        lines += _lines(own)
    return lines


def srun_command(
    components: Sequence[Component], commands: Mapping[str, Sequence[str]], options: Sequence[str]
) -> str:
    """Return one srun with the tasks of all components, so that ranks are global.

    Args:
        components: as in `sbatch_header`.
        commands: what the tasks of each role run, as words that the shell shall not touch.
        options: options of srun before the first component. Unless somebody chooses, tasks are not
            bound to CPUs: roles set their own number of threads.
    """
    chosen = [*options, *(option for part in components for option in part.srun_options)]
    if not any(option.startswith("--cpu-bind") for option in chosen):
        options = [*options, "--cpu-bind=none"]
    parts = []
    for number, component in enumerate(components):
        part = [f"--het-group={number}"] if len(components) > 1 else []
        if component.cpus_per_task is not None:  # since Slurm 22.05 srun does not take it over
            part.append(f"--cpus-per-task={component.cpus_per_task}")
        words = [*part, *component.srun_options, *commands[component.role]]
        parts.append(" ".join(map(shlex.quote, words)))
    return " ".join(["srun", *map(shlex.quote, options)]) + " \\\n    " + " : \\\n    ".join(parts)


def _lines(options: Mapping[str, Value]) -> list[str]:
    lines = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        text = f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
        if "hetjob" in text or "\n" in text:
            raise InputError(
                f"Slurm cannot read the option {text!r}: a line break ends it, and the word hetjob "
                "begins the next component; choose another value"
            )
        lines.append(f"#SBATCH {text}")
    return lines
