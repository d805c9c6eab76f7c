"""What a run measured: beside its plan, and as coefficients for the next one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev
from typing import Any

from toolkit.errors import InputError
from toolkit.planner.hardware import GIB
from toolkit.planner.job import Job
from toolkit.planner.memory import Layout, Memory, state_bytes, student_memory
from toolkit.planner.plans import make_plan
from toolkit.planner.shapes import MoeMlp
from toolkit.planner.traffic import (
    forward_flops,
    head_passes,
    share_of_waiting,
    student_flops,
    token_bytes,
)

Record = dict[str, Any]

LEAST_SHARE = 0.1
"""Of the peak: what a layer's activations take at least to be told from the noise."""
MIN_STEPS = 3
"""The first step of a run is left out: it makes buffers and waits for the first orders."""


@dataclass(frozen=True)
class Measured:
    """Means over the steps of a run.

    Attributes:
        peak_bytes: memory of the student rank that took the most.
        held: bytes of a student rank by component; gradients are there in backward alone.
        other_bytes: what is in use between two steps besides.
        moments: bytes by moment of a step, beside what is in use between two steps.
        outside: of a GPU, its share of memory by coefficient that no tensor takes.
        tokens_per_s: of all ranks.
        step_s: seconds of a step.
        busy_s: of them, those in which the student did not wait for teachers.
        busy_variation: standard deviation of that over its mean, of a micro-batch.
        bytes_per_token: of hidden states that came over the wire; 0 with a colocated teacher.
        teacher_s: seconds of a teacher for an order; 0 without one.
        teacher_tokens_per_s: of one teacher while it computes.
        teacher_variation: standard deviation of teacher_s over its mean.
        write_bytes_per_s: of a teacher while it writes.
    """

    peak_bytes: float
    held: dict[str, float]
    other_bytes: float
    moments: dict[str, float]
    outside: dict[str, float]
    tokens_per_s: float
    step_s: float
    busy_s: float
    busy_variation: float
    bytes_per_token: float
    teacher_s: float
    teacher_tokens_per_s: float
    teacher_variation: float
    write_bytes_per_s: float

    @property
    def waiting_share(self) -> float:
        """Share of its time that the student waits."""
        return 1 - self.busy_s / self.step_s


def measure(
    students: Sequence[Sequence[Record]],
    memory: Record | None,
    teachers: Sequence[Record],
    job: Job,
) -> Measured:
    """Return what the metrics of a run say.

    Args:
        students: step records of each rank.
        memory: the last `memory` record of the first rank.
        teachers: `served` records of all teachers.
        job: of the run.

    Raises:
        InputError: there are too few steps.
    """
    ranks = [records[1:] for records in students]
    if min(map(len, ranks), default=0) < MIN_STEPS:
        raise InputError(f"the run has fewer than {MIN_STEPS + 1} steps: let it run on")
    if memory is None:
        raise InputError("the run has no figures of its memory: an older version made it")
    first = ranks[0]
    busy = [record["step_s"] - record["wait_s"] for record in first]
    tokens = sum(record["step_tokens"] for record in first)
    received = sum(record["num_bytes"] for records in ranks for record in records)
    served = [record["compute_s"] + record["write_s"] for record in teachers]
    computed_s = sum(record["compute_s"] for record in teachers)
    written_s = sum(record["write_s"] for record in teachers)
    between_steps, held = memory["between_steps"], dict(memory["held"])
    if "teacher weights" in held:  # of a colocated teacher the plan counts its head with them
        head = held.pop("teacher head")
        held["teacher weights"] += 0 if job.teacher.is_tied else head
    lasting = sum(held.values()) - held["gradients"]
    return Measured(
        peak_bytes=max(record["peak_bytes"] for records in ranks for record in records),
        held=held,
        other_bytes=between_steps - lasting,
        moments={name: size - between_steps for name, size in memory["moments"].items()},
        outside=_outside(memory, job),
        tokens_per_s=tokens / sum(record["step_s"] for record in first),
        step_s=fmean(record["step_s"] for record in first),
        busy_s=fmean(busy),
        busy_variation=_variation(busy) * job.micro_batches**0.5,
        bytes_per_token=received / tokens,
        teacher_s=fmean(served) if served else 0.0,
        teacher_tokens_per_s=job.tokens * len(teachers) / computed_s if computed_s else 0.0,
        teacher_variation=_variation(served) if served else 0.0,
        write_bytes_per_s=received / written_s if written_s else 0.0,
    )


def _outside(memory: Record, job: Job) -> dict[str, float]:
    """Return what a GPU's memory says of the coefficients that no tensor takes."""
    if "reserved_bytes" not in memory:
        return {}
    context = memory["context_bytes"] / GIB
    if job.student_gpus > 1:
        ours = {"nccl_gib": max(0.0, context - job.coefficients.context_gib)}
    else:
        ours = {"context_gib": context}
    most = max(memory["between_steps"], *memory["moments"].values())
    return ours | {"fragmentation": max(0.0, memory["reserved_bytes"] / most - 1)}


def _variation(values: Sequence[float]) -> float:
    return pstdev(values) / fmean(values)


@dataclass(frozen=True)
class Comparison:
    """One figure of the plan and of the run, in one unit."""

    name: str
    unit: str
    planned: float
    measured: float


def compare(job: Job, layout: Layout, measured: Measured) -> list[Comparison]:
    """Return the plan beside the run; the last ones follow from the run's own rates."""
    plan, memory = make_plan(job, layout), student_memory(job, layout)
    needed, other = memory.peak + _process_bytes(job), _other_bytes(job, memory)
    planned = memory.static | {"gradients": state_bytes(job)["gradients"]}
    accumulated = memory.static.get("gradients", 0.0)
    found = [
        Comparison("memory of a student rank", "B", needed, measured.peak_bytes),
        *(Comparison(name, "B", planned[name], size) for name, size in measured.held.items()),
        Comparison("other memory", "B", other, measured.other_bytes),
        *(
            Comparison(f"at {name}", "B", memory.moments[name] + accumulated, size)
            for name, size in measured.moments.items()
            if name in memory.moments
        ),
        Comparison("tokens/s", "1/s", plan.tokens_per_s, measured.tokens_per_s),
    ]
    if layout == "disaggregated":
        token = token_bytes(job.teacher, job.teacher_bytes).hidden
        share, step_s = predicted_waiting(job, measured)
        found += [
            Comparison("hidden states a token", "B", token, measured.bytes_per_token),
            Comparison("step, from the run's rates", "s", step_s, measured.step_s),
            Comparison("waiting, from the run's rates", "", share, measured.waiting_share),
        ]
    return found


def predicted_waiting(job: Job, measured: Measured) -> tuple[float, float]:
    """Return share of waiting and seconds of a step, from what both sides take by themselves."""
    share = share_of_waiting(
        job.teacher_gpus / job.replicas,
        measured.teacher_s,
        measured.busy_s / job.micro_batches,
        job.host_slots - job.spare_slots,
        (measured.busy_variation, measured.teacher_variation),
    )
    return share, measured.busy_s / (1 - share)


def _process_bytes(job: Job) -> float:
    return job.coefficients.process_gib * GIB if job.gpu.is_cpu else 0.0


def _other_bytes(job: Job, memory: Memory) -> float:
    return _process_bytes(job) + memory.static.get("gradient buckets", 0.0)


def calibrated(
    job: Job, layout: Layout, measured: Measured, *, knows_network: bool
) -> dict[str, float]:
    """Return the coefficients that a run determines.

    Args:
        job: of the run.
        layout: of the run.
        measured: by the run.
        knows_network: whether teachers wrote over the job's network.
    """
    peak = job.gpu.peak_tflops * 1e12
    flops = student_flops(
        job.student, job.teacher, job.sequence_length, job.recompute, head_passes(job)
    )
    step_tokens = job.tokens * job.micro_batches
    found = {
        "student_mfu": flops * step_tokens / measured.busy_s / peak,
        "student_variation": measured.busy_variation,
    }
    found |= measured.outside
    if job.gpu.is_cpu:
        buckets = student_memory(job, layout).static.get("gradient buckets", 0.0)
        found["process_gib"] = max(0.0, measured.other_bytes - buckets) / GIB
    without, work = (_backward_bytes(job, layout, share) for share in (0.0, 1.0))
    if work - without > LEAST_SHARE * measured.peak_bytes:
        share = (measured.moments["backward"] - without) / (work - without)
        found["work_layer"] = max(0.0, share)
    if knows_network and measured.write_bytes_per_s:
        name = "rdma_efficiency" if job.network.is_rdma else "tcp_efficiency"
        found[name] = measured.write_bytes_per_s / (job.network.gigabits * 1e9 / 8)
    if measured.teacher_s:
        is_moe = any(isinstance(layer.mlp, MoeMlp) for layer in job.teacher.layers)
        rate = forward_flops(job.teacher, job.sequence_length) * measured.teacher_tokens_per_s
        found[f"teacher_mfu_{'moe' if is_moe else 'dense'}"] = rate / peak
        found["teacher_variation"] = measured.teacher_variation
    return found


def _backward_bytes(job: Job, layout: Layout, work_layer: float) -> float:
    coefficients = replace(job.coefficients, work_layer=work_layer)
    memory = student_memory(replace(job, coefficients=coefficients), layout)
    return memory.moments["backward"] + memory.static.get("gradients", 0.0)


def merged(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each coefficient over the runs that determine it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: median(run[name] for run in runs if name in run) for name in names}
