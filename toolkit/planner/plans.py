"""The three layouts of a job side by side: what each needs, how fast it is, and what limits it."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, get_args

from toolkit.planner.job import Job, Recompute
from toolkit.planner.memory import LAYOUTS, Layout, Memory, student_memory, teacher_memory
from toolkit.planner.traffic import Ring, gather_bytes, rates, ring_slots, token_bytes

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
        node_ingress: bytes that enter a node of the student in a second for the teacher's sake.
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
    node_ingress: float
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
    fits, reason = memory.peak <= usable, ""
    if not fits:
        reason = f"a student GPU lacks memory at the moment of {memory.moment}"
    if layout == "disaggregated":
        tokens_per_s, bound, ingress = _disaggregated_rate(job)
        teachers = plan_teachers(job)
        if fits and not teachers.replicas:
            fits = False
            reason = (
                f"no replica of the teacher fits {job.replica_gpus or REPLICA_GPUS[-1]} GPUs"
                if teachers.replica_gpus is None
                else f"a replica of the teacher takes {teachers.replica_gpus} GPUs,"
                f" {job.teacher_gpus} are given"
            )
    else:
        passes = 1 if layout == "colocated_full" else None
        tokens_per_s, bound, ingress = _colocated_rate(job, passes)
    step_tokens = job.tokens * job.replicas * job.micro_batches
    return Plan(
        layout=layout,
        student_gpus=job.student_gpus,
        recompute=job.recompute,
        teacher_shards=None if layout == "disaggregated" else _teacher_shards(job),
        memory=memory,
        fits=fits,
        max_tokens=max_tokens(job, layout),
        tokens_per_s=tokens_per_s,
        step_s=step_tokens / tokens_per_s if tokens_per_s else float("inf"),
        bound=bound if fits else "memory",
        node_ingress=ingress,
        network_share=ingress / job.network.bytes_per_s(job.coefficients),
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
    usable = job.gpu.usable_bytes(job.coefficients)

    def fits(steps: int) -> bool:
        more = replace(job, tokens=steps * TOKEN_STEP)
        return student_memory(more, layout).peak <= usable

    low, high = 0, MAX_TOKENS // TOKEN_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * TOKEN_STEP


def _disaggregated_rate(job: Job) -> tuple[float, Bound, float]:
    """Return tokens/s, what limits it, and the bytes that enter a student node in a second."""
    both, teachers = rates(job), plan_teachers(job)
    of_teachers = teachers.replicas * (teachers.replica_gpus or 0) * both.teacher
    token = token_bytes(job.teacher, job.teacher_bytes).hidden * job.trained_share
    on_node = min(job.node_gpus, job.student_gpus)
    nodes = ceil(job.student_gpus / job.node_gpus)
    of_network = nodes * job.network.bytes_per_s(job.coefficients) / token
    limits: dict[Bound, float] = {
        "student": job.student_gpus * both.student,
        "teacher": of_teachers,
        "network": of_network,
    }
    bound = min(limits, key=limits.__getitem__)
    return limits[bound], bound, limits[bound] * token * on_node / job.student_gpus


def _colocated_rate(job: Job, passes: int | None) -> tuple[float, Bound, float]:
    """Return the same where every GPU runs the teacher, then the student.

    A teacher that is sharded over nodes is gathered in each micro-batch, beside its computation.
    """
    both, nodes = rates(job, passes), ceil(job.student_gpus / job.node_gpus)
    tokens = job.tokens / job.model_parallel
    student_s, teacher_s = tokens / both.student, tokens / both.teacher
    over_nodes = _teacher_shards(job) > job.node_gpus
    gathered = gather_bytes(job.teacher, nodes) if over_nodes else 0.0
    gather_s = gathered / job.network.bytes_per_s(job.coefficients)
    step_s = student_s + max(teacher_s, gather_s)
    tokens_per_s = job.replicas * job.tokens / step_s
    bound: Bound = "network" if gather_s > teacher_s else "student"
    if bound == "student" and teacher_s > student_s:
        bound = "teacher"
    return tokens_per_s, bound, gathered / step_s


def _teacher_shards(job: Job) -> int:
    return job.teacher_shards or job.student_gpus
