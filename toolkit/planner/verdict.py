"""What to make of the plans: which layout, why, what would make the others fit."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import NamedTuple, get_args

from toolkit.planner.activations import HALF
from toolkit.planner.facts import bundled
from toolkit.planner.job import Job, Recompute
from toolkit.planner.memory import Layout
from toolkit.planner.plans import Plan, fits, max_tokens, plan_teachers, smallest_replica
from toolkit.planner.traffic import network_rate, rates

NAMES: dict[Layout, str] = {
    "colocated_full": "colocated, full logits",
    "colocated_fused": "colocated, fused loss",
    "disaggregated": "disaggregated, fused loss",
}
_WORTH = 1.02
"""A layout must be so much faster to be better than one with fewer parts."""
_MAX_NODES = 128


class Split(NamedTuple):
    """How GPUs are divided between student and teacher."""

    tokens_per_s: float
    student_gpus: int
    teacher_gpus: int


def best_split(job: Job, gpus: int, *, choose: bool = False) -> Split | None:
    """Return the split with the highest rate that fits: whole nodes train, whole replicas teach.

    Args:
        job: whose own numbers of GPUs do not matter.
        gpus: to be divided; some may be left over.
        choose: how much is computed again, too.
    """
    if choose:
        ways = (best_split(replace(job, recompute=way), gpus) for way in get_args(Recompute))
        return max((way for way in ways if way is not None), default=None)
    replica, both = smallest_replica(job), rates(job)
    if replica is None:
        return None
    best = None
    for student_gpus in range(job.node_gpus, gpus, job.node_gpus):
        most = (gpus - student_gpus) // replica * replica
        if not most or not _fits_on(job, "disaggregated", student_gpus):
            continue
        network = network_rate(replace(job, student_gpus=student_gpus))
        wanted = min(student_gpus * both.student, network)
        teacher_gpus = min(ceil(wanted / both.teacher / replica) * replica, most)
        rate = min(wanted, teacher_gpus * both.teacher)
        if best is None or rate >= best.tokens_per_s:
            best = Split(rate, student_gpus, teacher_gpus)
    return best


def verdict(job: Job, plans: Mapping[Layout, Plan]) -> str:
    """Return which layout to take, and the reason, in a few sentences."""
    blocking = [finding.text for finding in compatibility(job) if finding.is_blocking]
    if blocking:
        return f"Not possible as it is: {blocking[0]}."
    fused, disaggregated = plans["colocated_fused"], plans["disaggregated"]
    job = replace(job, recompute=disaggregated.recompute)
    fitting = [plan for plan in plans.values() if plan.fits]
    if not fitting:
        return "No layout fits: see what would make one fit."
    if not disaggregated.fits:
        best = max(fitting, key=lambda plan: plan.tokens_per_s)
        return f"{_title(best.layout)} fits, disaggregated does not: {disaggregated.reason}."
    gain = disaggregated.tokens_per_s / fused.tokens_per_s
    if not fused.fits:
        return (
            f"Disaggregated: colocated with the fused loss does not fit ({fused.reason});"
            f" {_limit(job, disaggregated)}."
        )
    if gain >= _WORTH:
        return f"Disaggregated: {gain:.2f} times as fast as colocated; {_why_faster(fused)}."
    reason = _limit(job, disaggregated)
    return (
        f"Colocated with the fused loss is the better plan: both fit, and on the same GPUs"
        f" disaggregated reaches {gain:.2f} times its rate; {reason}."
    )


def _why_faster(fused: Plan) -> str:
    if fused.bound == "network":
        return "there the sharded teacher must be gathered over the network in every micro-batch"
    return "the same GPUs are divided better than by taking turns"


def _limit(job: Job, plan: Plan) -> str:
    match plan.bound:
        case "teacher":
            needed = plan_teachers(job).needed_gpus
            return (
                f"the teacher's {job.teacher_gpus} GPUs are too slow for the student,"
                f" {needed} would keep it busy"
            )
        case "network":
            own = plan.own_ingress / (plan.own_ingress + plan.teacher_ingress)
            return (
                f"the network {job.network} is full, {own:.1%} of it with the student's own"
                " weights and gradients"
            )
        case _:
            return "the student's GPUs are the limit, the teacher's have time to spare"


def _title(layout: Layout) -> str:
    return NAMES[layout][0].upper() + NAMES[layout][1:]


def remedies(job: Job, layout: Layout) -> Iterator[str]:
    """Yield single changes that would make a layout fit, the least ones first."""
    if fits(job, layout):  # so it is the teacher that does not
        replica = smallest_replica(job)
        if replica is not None:
            yield f"{ceil(replica / job.node_gpus)} nodes of teachers"
        return
    largest = max_tokens(job, layout)
    if largest:
        yield f"micro-batches of at most {largest:,} tokens"
    for recompute in ("selective", "full"):
        if fits(replace(job, recompute=recompute), layout):
            yield f"recompute = {recompute}"
            break
    for nodes in range(ceil(job.student_gpus / job.node_gpus) + 1, _MAX_NODES + 1):
        if _fits_on(job, layout, nodes * job.node_gpus):
            yield f"{nodes} nodes of students"
            break
    for parallel in (2, 4, 8):
        wider = job.tensor_parallel * parallel
        divides = job.student_gpus % (job.model_parallel * parallel) == 0
        if wider > job.node_gpus or not divides:
            break
        if fits(replace(job, tensor_parallel=wider), layout):
            yield f"tensor parallel over {wider} GPUs"
            break
    if layout == "colocated_full" and fits(job, "colocated_fused"):
        yield "the fused loss"


def _fits_on(job: Job, layout: Layout, student_gpus: int) -> bool:
    if not student_gpus or student_gpus % (job.model_parallel * job.expert_parallel):
        return False
    return fits(replace(job, student_gpus=student_gpus), layout)


class Finding(NamedTuple):
    """Something to know of the two models together."""

    is_blocking: bool
    text: str


def compatibility(job: Job) -> Iterator[Finding]:
    """Yield what stands between the models or is easily overlooked."""
    student, teacher = job.student, job.teacher
    if student.vocab_size != teacher.vocab_size:
        yield Finding(
            True,
            f"vocabularies differ: the student's head has {student.vocab_size:,} rows, the"
            f" teacher's {teacher.vocab_size:,}; the loss compares them row by row, so bring both"
            " heads to one vocabulary first",
        )
    for role, model in (("student", student), ("teacher", teacher)):
        if model.is_tied:
            yield Finding(False, f"the {role}'s head is its embedding: it stays where it is")
        if model.softcap is not None:
            yield Finding(False, f"the {role}'s logits are capped at {model.softcap:g}")
        if model.scale != 1:
            yield Finding(False, f"the {role}'s logits are multiplied by {model.scale:g}")
        note = bundled()[model.name].get("vocab_note") if model.name in bundled() else None
        if note:
            yield Finding(False, f"the {role}'s vocabulary is {note}")
        if model.uncertain:
            yield Finding(False, f"of {model.name} is uncertain: {model.uncertain}")
    dtype = "bfloat16" if job.teacher_bytes == HALF else "float32"
    yield Finding(False, f"hidden states travel in {dtype}, after the teacher's last norm")
