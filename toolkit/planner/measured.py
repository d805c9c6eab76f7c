"""What a run measured: beside its plan, and as coefficients for the next one."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

from toolkit.errors import InputError
from toolkit.planner.hardware import GIB
from toolkit.planner.job import Job
from toolkit.planner.memory import Layout, student_memory
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

MIN_STEPS = 3
"""The first step of a run is left out: it makes buffers and waits for the first orders."""


@dataclass(frozen=True)
class Measured:
    """Means over the steps of a run.

    Attributes:
        peak_bytes: memory of the student rank that took the most.
        tokens_per_s: of all ranks.
        step_s: seconds of a step.
        busy_s: of them, those in which the student did not wait for teachers.
        busy_variation: standard deviation of that over its mean, of a micro-batch.
        bytes_per_token: of hidden states that came over the wire; 0 with a colocated teacher.
        teacher_s: seconds of a teacher for an order; 0 without one.
        teacher_tokens_per_s: of one teacher while it computes.
        teacher_variation: standard deviation of teacher_s over its mean.
    """

    peak_bytes: float
    tokens_per_s: float
    step_s: float
    busy_s: float
    busy_variation: float
    bytes_per_token: float
    teacher_s: float
    teacher_tokens_per_s: float
    teacher_variation: float

    @property
    def waiting_share(self) -> float:
        """Share of its time that the student waits."""
        return 1 - self.busy_s / self.step_s


def measure(students: Sequence[Sequence[Record]], teachers: Sequence[Record], job: Job) -> Measured:
    """Return what the metrics of a run say.

    Args:
        students: step records of each rank.
        teachers: `served` records of all teachers.
        job: of the run.

    Raises:
        InputError: there are too few steps.
    """
    ranks = [records[1:] for records in students]
    if min(map(len, ranks), default=0) < MIN_STEPS:
        raise InputError(f"the run has fewer than {MIN_STEPS + 1} steps: let it run on")
    if "peak_bytes" not in ranks[0][0]:
        raise InputError("the run has no figures of its memory: an older version made it")
    first = ranks[0]
    busy = [record["step_s"] - record["wait_s"] for record in first]
    tokens = sum(record["step_tokens"] for record in first)
    received = sum(record["num_bytes"] for records in ranks for record in records)
    served = [record["compute_s"] + record["write_s"] for record in teachers]
    computed_s = sum(record["compute_s"] for record in teachers)
    return Measured(
        peak_bytes=max(record["peak_bytes"] for records in ranks for record in records),
        tokens_per_s=tokens / sum(record["step_s"] for record in first),
        step_s=fmean(record["step_s"] for record in first),
        busy_s=fmean(busy),
        busy_variation=_variation(busy) * job.micro_batches**0.5,
        bytes_per_token=received / tokens,
        teacher_s=fmean(served) if served else 0.0,
        teacher_tokens_per_s=job.tokens * len(teachers) / computed_s if computed_s else 0.0,
        teacher_variation=_variation(served) if served else 0.0,
    )


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
    plan, found = make_plan(job, layout), []
    needed = student_memory(job, layout).peak + _process_bytes(job)
    found.append(Comparison("memory of a student rank", "B", needed, measured.peak_bytes))
    found.append(Comparison("tokens/s", "1/s", plan.tokens_per_s, measured.tokens_per_s))
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


def calibrated(job: Job, layout: Layout, measured: Measured) -> dict[str, float]:
    """Return the coefficients that a run determines."""
    peak = job.gpu.peak_tflops * 1e12
    flops = student_flops(
        job.student, job.teacher, job.sequence_length, job.recompute, head_passes(job)
    )
    step_tokens = job.tokens * job.micro_batches
    found = {
        "student_mfu": flops * step_tokens / measured.busy_s / peak,
        "student_variation": measured.busy_variation,
    }
    if job.gpu.is_cpu:
        tensors = student_memory(job, layout).peak
        found["process_gib"] = max(0.0, measured.peak_bytes - tensors) / GIB
    if measured.teacher_s:
        is_moe = any(isinstance(layer.mlp, MoeMlp) for layer in job.teacher.layers)
        rate = forward_flops(job.teacher, job.sequence_length) * measured.teacher_tokens_per_s
        found[f"teacher_mfu_{'moe' if is_moe else 'dense'}"] = rate / peak
        found["teacher_variation"] = measured.teacher_variation
    return found


def merged(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each coefficient over the runs that determine it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: median(run[name] for run in runs if name in run) for name in names}
