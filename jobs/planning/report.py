"""Everything that the planner says of a job, as one value, and as JSON."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from jobs.run_folder import RunFolder
from toolkit.config import Config
from toolkit.errors import InputError
from toolkit.planner.coefficients import Coefficients
from toolkit.planner.hardware import GIB, find_gpu, find_network
from toolkit.planner.job import Job
from toolkit.planner.measured import Comparison, Measured, compare, measure
from toolkit.planner.memory import Layout, ring_geometry
from toolkit.planner.plans import Plan, Teachers, job_of, make_plans, plan_teachers
from toolkit.planner.run import job_of_run, layout_of
from toolkit.planner.traffic import break_even_tokens
from toolkit.planner.verdict import (
    Finding,
    Split,
    best_split,
    compatibility,
    remedies,
    verdict,
)
from toolkit.training.metrics import MetricsReader, read_steps

DEFAULT_GPU = "h100-80"
DEFAULT_NETWORK = "8x400"
REMEDIES = 3
"""Changes that are shown of those that would make a layout fit."""


def job_of_config(
    config: Config,
    gpu: str | None,
    network: str | None,
    hardware: Path | None,
    coefficients: Coefficients,
) -> Job:
    """Return the job of a run's configuration.

    Args:
        config: the run.
        gpu: instead of `cluster.gpu`; a run on processors has none.
        network: instead of `cluster.network`.
        hardware: TOML with further GPUs.
        coefficients: of the models.
    """
    name = gpu
    if name is None and config.run.device == "cuda":
        name = config.cluster.gpu or DEFAULT_GPU
    return job_of_run(
        config,
        None if name is None else find_gpu(name, hardware),
        find_network(network or config.cluster.network or DEFAULT_NETWORK, hardware),
        coefficients,
    )


@dataclass(frozen=True)
class Report:
    """What is shown of a job.

    Attributes:
        job: what was asked.
        plans: the layouts.
        teachers: of the disaggregated one.
        remedies: of the layouts that do not fit.
        findings: of the two models.
        verdict: which layout, and why.
        ring_bytes: pinned memory of each student rank.
        break_even_tokens: up to which hidden states are less traffic than a sharded teacher.
        split: the best one of all the job's GPUs.
    """

    job: Job
    plans: dict[Layout, Plan]
    teachers: Teachers
    remedies: dict[Layout, list[str]]
    findings: list[Finding]
    verdict: str
    ring_bytes: int
    break_even_tokens: float
    split: Split | None


def make_report(job: Job, *, choose: bool, tokenizers: Sequence[Path] = ()) -> Report:
    """Plan a job and judge the plans.

    Args:
        job: what is asked.
        choose: take for each layout the fastest way that fits.
        tokenizers: folders of the student's and the teacher's, where they are known.
    """
    plans = make_plans(job, choose=choose)
    gpus = job.student_gpus + job.teacher_gpus
    return Report(
        job=job,
        plans=plans,
        teachers=plan_teachers(replace(job, recompute=plans["disaggregated"].recompute)),
        remedies={
            layout: list(remedies(replace(job_of(job, layout), recompute=plan.recompute), layout))
            for layout, plan in plans.items()
            if not plan.fits
        },
        findings=[*compatibility(job), *_tokenizers(tokenizers)],
        verdict=verdict(job, plans),
        ring_bytes=ring_geometry(job).total_bytes,
        break_even_tokens=break_even_tokens(
            job.teacher, ceil(job.student_gpus / job.node_gpus), job.node_gpus
        ),
        split=best_split(job, gpus, choose=choose),
    )


def _tokenizers(folders: Sequence[Path]) -> Iterator[Finding]:
    """Yield whether the tokenizers of two folders are one."""
    if len(folders) < 2 or not all((folder / "tokenizer.json").is_file() for folder in folders):
        return
    from toolkit.data.tokenizer import tokenizer_digest

    if len({tokenizer_digest(folder) for folder in folders}) > 1:
        yield Finding(
            True,
            f"the tokenizers of {folders[0]} and {folders[1]} differ: use models that share one",
        )
    else:
        yield Finding(False, "the tokenizers have the same tokens")


def as_json(report: Report) -> str:
    """Return the report under stable names; sizes in GiB unless a name says otherwise."""
    teachers, ring = report.teachers, report.teachers.ring
    found: dict[str, Any] = {layout: _plan(plan) for layout, plan in report.plans.items()}
    found["teachers"] = {
        "replica_gpus": teachers.replica_gpus,
        "replicas": teachers.replicas,
        "peak_gib": None if teachers.memory is None else teachers.memory.peak / GIB,
        "needed_gpus": teachers.needed_gpus,
        "ring_slots": None if ring is None else ring.slots,
        "kappa": None if ring is None else ring.kappa,
        "ring_gib": report.ring_bytes / GIB,
        "break_even_tokens": report.break_even_tokens,
    }
    found["best_split"] = None if report.split is None else report.split._asdict()
    found["remedies"] = report.remedies
    found["findings"] = [finding._asdict() for finding in report.findings]
    found["verdict"] = report.verdict
    return json.dumps(found, indent=1)


def _plan(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    return {
        "peak_gib": memory.peak / GIB,
        "fits": plan.fits,
        "max_tokens": plan.max_tokens,
        "tokens_per_s": plan.tokens_per_s,
        "bound": plan.bound,
        "student_gpus": plan.student_gpus,
        "recompute": plan.recompute,
        "teacher_shards": plan.teacher_shards,
        "step_s": plan.step_s if isfinite(plan.step_s) else None,
        "teacher_ingress_bytes_per_s": plan.teacher_ingress,
        "own_ingress_bytes_per_s": plan.own_ingress,
        "network_share": plan.network_share,
        "moment": memory.moment,
        "static_gib": {name: size / GIB for name, size in memory.static.items()},
        "moments_gib": {name: size / GIB for name, size in memory.moments.items()},
        "kept_gib": memory.kept / GIB,
        "reason": plan.reason,
    }


@dataclass(frozen=True)
class SweepRow:
    """What some nodes give.

    Attributes:
        nodes: in all.
        plans: the layouts; the disaggregated one with its best split, or without it if none fits.
        teacher_gpus: of that split.
    """

    nodes: int
    plans: dict[Layout, Plan]
    teacher_gpus: int


def sweep_range(text: str) -> range:
    """Return the numbers of nodes from text such as `nodes=1..16`.

    Raises:
        InputError: it is not of this form.
    """
    match = re.fullmatch(r"nodes=(\d+)\.\.(\d+)", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]):
        raise InputError(f"sweep = {text!r} is not of the form nodes=1..16")
    return range(int(match[1]), int(match[2]) + 1)


def sweep(job: Job, nodes: range, *, choose: bool) -> list[SweepRow]:
    """Return what each number of nodes gives, student and teacher together."""
    return [_sweep_row(job, count, choose) for count in nodes]


def _sweep_row(job: Job, nodes: int, choose: bool) -> SweepRow:
    gpus = nodes * job.node_gpus
    split = best_split(job, gpus, choose=choose)
    divided = replace(
        job,
        student_gpus=split.student_gpus if split else gpus,
        teacher_gpus=split.teacher_gpus if split else 0,
    )
    plans = make_plans(divided, choose=choose)
    if split is None:
        del plans["disaggregated"]
    return SweepRow(nodes, plans, divided.teacher_gpus)


def check_run(folder: RunFolder, job: Job) -> list[Comparison]:
    """Return the plan of a run beside what it measured.

    Raises:
        InputError: it has too few steps.
    """
    return compare(job, layout_of(folder.load()), measured_of(folder, job))


def measured_of(folder: RunFolder, job: Job) -> Measured:
    """Return what a run measured.

    Raises:
        InputError: it has too few steps.
    """
    files = [folder.metrics_file("student", r) for r in range(folder.load().student.replicas)]
    memory = [r for r in MetricsReader(files[0]).read() if r["kind"] == "memory"]
    served = [
        record
        for path in sorted(folder.metrics.glob("teacher-*.jsonl"))
        for record in MetricsReader(path).read()
        if record["kind"] == "served"
    ]
    students = [list(read_steps(file).values()) for file in files]
    return measure(students, memory[-1] if memory else None, served, job)
