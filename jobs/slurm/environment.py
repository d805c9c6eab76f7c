"""What a task of a heterogeneous submitit job knows about itself and its peers."""

import os
import re
import subprocess
from collections.abc import Sequence

from submitit.slurm.slurm import SlurmJobEnvironment, _parse_node_list

from jobs.slurm.components import Component, role_ranks
from toolkit.errors import InputError

ROLES_VARIABLE = "DISAGGKD_ROLES"
"""The roles in rank order, each with its nodes and tasks per node: `student:2x4,teacher:1x8`."""


def write_roles(components: Sequence[Component]) -> str:
    """Return the value of `ROLES_VARIABLE`."""
    return ",".join(f"{c.role}:{c.nodes}x{c.tasks_per_node}" for c in components)


def _read_roles() -> list[Component]:
    parts = re.findall(r"([\w-]+):(\d+)x(\d+)", os.environ[ROLES_VARIABLE])
    return [Component(role, int(nodes), int(tasks)) for role, nodes, tasks in parts]


class HetSlurmJobEnvironment(SlurmJobEnvironment):
    """The environment of a task: its ranks, its peers' hosts, its GPUs.

    `submitit.JobEnvironment()` returns it in a task; submitit finds it by an entry point.
    """

    @property
    def role(self) -> str:
        """Role of this task."""
        return self._component.role

    @property
    def role_rank(self) -> int:
        """Rank of this task among those of its role."""
        return role_ranks(_read_roles())[self.role].index(self.global_rank)

    @property
    def role_size(self) -> int:
        """Number of tasks of this task's role."""
        return self._component.num_tasks

    @property
    def local_size(self) -> int:
        """Number of tasks of this task's role on this node."""
        return self._component.tasks_per_node

    @property
    def hostnames(self) -> list[str]:
        """All nodes in rank order, where Slurm's own list is sorted by name."""
        return [node for c in _read_roles() for node in self.role_hostnames(c.role)]

    def role_hostnames(self, role: str) -> list[str]:
        """Return the nodes of a role in rank order."""
        group = list(role_ranks(_read_roles())).index(role)
        nodes: list[str] = _parse_node_list(os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])
        return nodes

    @property
    def devices(self) -> list[str]:
        """This task's share of the GPUs that all tasks of the node see, for CUDA_VISIBLE_DEVICES.

        Not for tasks to which srun binds GPUs, as with `--gpus-per-task`: they see only their own.

        Raises:
            InputError: the tasks of the node cannot have equally many.
        """
        visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        share, rest = divmod(len(visible), self.local_size)
        if rest:
            raise InputError(
                f"{len(visible)} GPUs of a node cannot be shared by tasks_per_node = "
                f"{self.local_size}: change either"
            )
        return visible[self.local_rank * share :][:share]

    @property
    def _component(self) -> Component:
        components = _read_roles()
        ranks = role_ranks(components)
        return next(c for c in components if self.global_rank in ranks[c.role])

    def _requeue(self, countdown: int) -> None:
        # Slurm ends this step, scontrol with it, before scontrol has its answer. Seen as a failure,
        # that would leave an error behind as the result of a job that goes on.
        command = 'trap "" TERM; exec scontrol requeue "$0"'
        subprocess.run(["sh", "-c", command, self.job_id], check=True, timeout=60)
