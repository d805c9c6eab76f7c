"""The three layouts of a job side by side: what each needs, how fast it is, and what limits it."""

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal, NamedTuple, get_args

from toolkit.errors import InputError
from toolkit.planner.job import Job, Recompute
from toolkit.planner.memory import LAYOUTS, Layout, Memory, student_memory, teacher_memory
from toolkit.planner.traffic import (
    Ring,
    gather_bytes,
    hidden_bytes,
    network_rate,
    own_bytes,
    rates,
    ring_slots,
    token_bytes,
)

Bound = Literal["student", "teacher", "network", "memory"]

REPLICA_GPUS = (1, 2, 4, 8, 16, 32, 64)
"""Sizes of a teacher replica that are tried."""
TOKEN_STEP = 1024
"""Largest micro-batches are found in steps of so many tokens."""
MAX_TOKENS = 2**20


@dataclass(frozen=True)
class Plan:
    """One layout.

    Attributes:
        layout: which.
        student_gpus: that train.
        recompute: of activations.
        teacher_shards: GPUs among which a colocated teacher is sharded.
        memory: of a GPU that trains the student.
        fits: whether it does, and the teacher too.
        max_tokens: largest micro-batch of a rank that fits, 0 if none.
        tokens_per_s: of the whole job, where it waits for nothing but its `bound`.
        step_s: seconds of an optimizer step.
        bound: what limits the rate; `memory` where it does not fit.
        teacher_ingress: bytes that enter a node of students in a second for the teacher's sake.
        own_ingress: the same for the student's: weights and gradients.
        network_share: of what the node's network can.
        reason: in words, where it does not fit.
    """

    layout: Layout
    student_gpus: int
    recompute: Recompute
    teacher_shards: int | None
    memory: Memory
    fits: bool
    max_tokens: int
    tokens_per_s: float
    step_s: float
    bound: Bound
    teacher_ingress: float
    own_ingress: float
    network_share: float
    reason: str = ""


@dataclass(frozen=True)
class Teachers:
    """The teachers of a disaggregated layout.

    Attributes:
        replica_gpus: GPUs of a replica: the fewest that hold it; None if 64 do not.
        replicas: that the teacher's GPUs make.
        memory: of one of its GPUs.
        needed_gpus: that keep the students busy, with spare capacity.
        ring: of each student rank.
    """

    replica_gpus: int | None
    replicas: int
    memory: Memory | None
    needed_gpus: int
    ring: Ring | None


def smallest_replica(job: Job) -> int | None:
    """Return the fewest GPUs that hold a teacher replica."""
    usable = job.gpu.usable_bytes(job.coefficients)
    sizes = REPLICA_GPUS if job.replica_gpus is None else (job.replica_gpus,)
    fitting = (gpus for gpus in sizes if teacher_memory(job, gpus).peak <= usable)
    return next(fitting, None)


def plan_teachers(job: Job) -> Teachers:
    """Return how the teacher's GPUs are used."""
    both, gpus = rates(job), smallest_replica(job)
    if gpus is None:
        return Teachers(None, 0, None, 0, None)
    wanted = job.coefficients.spare_teacher * job.student_gpus * both.teachers_per_student
    replicas = job.teacher_gpus // gpus
    ring = None
    if replicas:
        student_s = job.tokens / (job.model_parallel * both.student)
        payload = (
            job.tokens * job.trained_share * token_bytes(job.teacher, job.teacher_bytes).hidden
        )
        port = replace(job.network, ports=1).bytes_per_s(job.coefficients)
        teacher_s = job.tokens / (gpus * both.teacher) + payload / port
        ring = ring_slots(job, replicas / job.replicas, teacher_s, student_s)
    needed = gpus * ceil(wanted / gpus)
    return Teachers(gpus, replicas, teacher_memory(job, gpus), needed, ring)


def make_plan(job: Job, layout: Layout) -> Plan:
    """Return one layout of a job."""
    memory, usable = student_memory(job, layout), job.gpu.usable_bytes(job.coefficients)
    is_enough, reason = memory.peak <= usable, ""
    if not is_enough:
        reason = f"a student GPU lacks memory at the moment of {memory.moment}"
    if layout == "disaggregated":
        pace = _disaggregated_pace(job)
        teachers = plan_teachers(job)
        if is_enough and not teachers.replicas:
            is_enough = False
            reason = (
                f"no teacher fits a replica of {job.replica_gpus or REPLICA_GPUS[-1]} GPUs"
                if teachers.replica_gpus is None
                else f"a teacher takes a replica of {teachers.replica_gpus} GPUs, given are"
                f" {job.teacher_gpus}"
            )
    else:
        passes = 1 if layout == "colocated_full" else None
        pace = _colocated_pace(job, passes)
    teacher_ingress, own_ingress = pace.teacher_bytes / pace.seconds, own_bytes(job) / pace.seconds
    capacity = job.network.bytes_per_s(job.coefficients)
    return Plan(
        layout=layout,
        student_gpus=job.student_gpus,
        recompute=job.recompute,
        teacher_shards=None if layout == "disaggregated" else job.teacher_ranks,
        memory=memory,
        fits=is_enough,
        max_tokens=max_tokens(job, layout),
        tokens_per_s=job.tokens * job.replicas / pace.seconds,
        step_s=pace.seconds * job.micro_batches,
        bound=pace.bound if is_enough else "memory",
        teacher_ingress=teacher_ingress,
        own_ingress=own_ingress,
        network_share=(teacher_ingress + own_ingress) / capacity,
        reason=reason,
    )


def make_plans(job: Job, *, choose: bool = False) -> dict[Layout, Plan]:
    """Return all layouts; a colocated one has the teacher's GPUs too.

    Args:
        job: as it is disaggregated.
        choose: take for each layout the fastest way that fits, whatever the job says: how much is
            computed again, and whether a colocated teacher is sharded inside of nodes.
    """
    plans = {}
    for layout in LAYOUTS:
        own = job_of(job, layout)
        ways = _ways(own, layout) if choose else [own]
        plans[layout] = max((make_plan(way, layout) for way in ways), key=_preference)
    return plans


def job_of(job: Job, layout: Layout) -> Job:
    """Return the job with the GPUs of a layout: a colocated one trains on all of them."""
    if layout == "disaggregated":
        return job
    whole = job.student_gpus + job.teacher_gpus
    step = job.model_parallel * job.expert_parallel
    return replace(job, student_gpus=max(whole // step * step, job.student_gpus), teacher_gpus=0)


def _ways(job: Job, layout: Layout) -> list[Job]:
    ways = [replace(job, recompute=recompute) for recompute in get_args(Recompute)]
    if layout != "disaggregated" and job.student_gpus > job.node_gpus:
        ways += [replace(way, teacher_shards=job.node_gpus) for way in ways]
    return ways


def _preference(plan: Plan) -> tuple[bool, float]:
    return plan.fits, plan.tokens_per_s if plan.fits else -plan.memory.peak


def max_tokens(job: Job, layout: Layout) -> int:
    """Return the largest micro-batch of a rank that fits, in steps of 1,024 tokens."""
    low, high = 0, MAX_TOKENS // TOKEN_STEP
    while low < high:
        middle = (low + high + 1) // 2
        is_small = fits(replace(job, tokens=middle * TOKEN_STEP), layout)
        low, high = (middle, high) if is_small else (low, middle - 1)
    return low * TOKEN_STEP


def fits(job: Job, layout: Layout) -> bool:
    """Return whether a GPU that trains the student has enough memory."""
    try:
        peak = student_memory(job, layout).peak
    except InputError:  # the loss cannot keep to its budget
        return False
    return peak <= job.gpu.usable_bytes(job.coefficients)


class _Pace(NamedTuple):
    """A micro-batch of all ranks: its time, what sets it, what enters a node for the teacher."""

    seconds: float
    bound: Bound
    teacher_bytes: float


def _disaggregated_pace(job: Job) -> _Pace:
    both, teachers = rates(job), plan_teachers(job)
    of_teachers = teachers.replicas * (teachers.replica_gpus or 0) * both.teacher
    found: dict[Bound, float] = {
        "student": job.student_gpus * both.student,
        "teacher": of_teachers,
        "network": network_rate(job),
    }
    bound = min(found, key=found.__getitem__)
    seconds = job.tokens * job.replicas / found[bound] if found[bound] else inf
    return _Pace(seconds, bound, hidden_bytes(job))


def _colocated_pace(job: Job, passes: int | None) -> _Pace:
    """Every GPU runs the teacher, then the student; what travels, travels meanwhile.

    A teacher that is sharded over nodes is gathered in each micro-batch.
    """
    both, nodes = rates(job, passes), ceil(job.student_gpus / job.node_gpus)
    capacity, tokens = job.network.bytes_per_s(job.coefficients), job.tokens / job.model_parallel
    over_nodes = job.teacher_ranks > job.node_gpus
    gathered = gather_bytes(job.teacher, nodes) if over_nodes else 0.0
    student_s, teacher_s = tokens / both.student, tokens / both.teacher
    own_s, gather_s = own_bytes(job) / capacity, gathered / capacity
    bound: Bound = "student" if student_s >= teacher_s else "teacher"
    if max(own_s - student_s, gather_s - teacher_s) > 0:
        bound = "network"
    return _Pace(max(student_s, own_s) + max(teacher_s, gather_s), bound, gathered)
