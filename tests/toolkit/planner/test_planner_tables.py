"""The planner's formulas against the tables, to the digit shown."""

from dataclasses import replace

import pytest
from planner_cases import make_job, make_pair, table

from toolkit.planner.facts import read_model
from toolkit.planner.hardware import GIB, GPUS, find_network
from toolkit.planner.memory import student_memory
from toolkit.planner.parameters import count
from toolkit.planner.plans import make_plan, max_tokens, smallest_replica
from toolkit.planner.traffic import (
    break_even_tokens,
    forward_flops,
    gather_bytes,
    jitter_slots,
    rates,
    student_flops,
    token_bytes,
)
from toolkit.planner.verdict import best_split

LAYOUTS = {
    "colocated, full fp32 KL": ("colocated_full", "fp32"),
    "colocated, full bf16 KL (TRL)": ("colocated_full", "bf16"),
    "colocated, full JSD (GKD)": ("colocated_full", "jsd"),
    "colocated, fused": ("colocated_fused", "fp32"),
    "disaggregated, fused": ("disaggregated", "fp32"),
}
NETWORKS = ("8x400", "8x200", "1x400", "1x200", "1x100tcp", "1x25tcp")
SIZES = (*range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, 513, 64), 1024)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


@pytest.mark.parametrize("row", table("T1"), ids=lambda row: row[0])
def test_parameters(row: list[str]) -> None:
    model = read_model(row[0])
    counts = count(model)
    sizes = (
        counts.total,
        counts.body,
        counts.body_active,
        counts.head_matrix,
        counts.largest_layer,
    )
    h, vocab = model.hidden_size, model.vocab_size
    assert row[1:] == [
        *(f"{size / 1e9:.3f}B" for size in sizes),
        str(2 * h),
        str(2 * vocab),
        f"{vocab / h:.0f}x",
    ]


@pytest.mark.parametrize("row", table("T2"), ids=lambda row: "-".join(row[:4]))
def test_memory_of_a_student(row: list[str]) -> None:
    gpu, name, gpus, recompute, *expected = row
    layout, full_loss = LAYOUTS[name]
    job = make_job(gpu=GPUS[gpu], student_gpus=int(gpus), recompute=recompute, full_loss=full_loss)
    memory = student_memory(job, layout)
    moments = memory.moments
    assert expected == [
        gib(sum(memory.static.values())),
        gib(memory.kept),
        gib(moments["loss"]),
        gib(moments["backward"]),
        gib(moments["teacher forward"]) if "teacher forward" in moments else "-",
        gib(memory.peak),
        "yes" if memory.peak <= job.gpu.usable_bytes(job.coefficients) else "OOM",
        str(max_tokens(job, layout)),
    ]


@pytest.mark.parametrize("row", table("T3"), ids=lambda row: f"{row[0]}-{row[1]}")
def test_smallest_number_of_gpus(row: list[str]) -> None:
    job = make_pair(row[0], gpu=GPUS[row[1].lower()])
    usable = job.gpu.usable_bytes(job.coefficients)
    smallest = [
        next(
            gpus
            for gpus in SIZES
            if student_memory(replace(job, student_gpus=gpus), layout).peak <= usable
        )
        for layout in ("colocated_full", "colocated_fused", "disaggregated")
    ]
    replica, counts = smallest_replica(job), count(job.teacher)
    assert replica is not None
    assert row[2:] == [
        *map(str, (*smallest, replica, smallest[-1] + replica)),
        gib(2 * counts.total / 64),
        gib(4 * counts.largest_layer),
    ]


@pytest.mark.parametrize("row", table("T4"), ids=lambda row: row[0])
def test_rates_and_traffic(row: list[str]) -> None:
    job = make_pair(row[0])
    both, token = rates(job), token_bytes(job.teacher)
    full, none = (
        student_flops(job.student, job.teacher, 8192, recompute) for recompute in ("full", "none")
    )
    assert row[1:] == [
        f"{full / 1e9:.1f} / {none / 1e9:.1f}",
        f"{forward_flops(job.teacher, 8192) / 1e9:.1f}",
        f"{both.student:.0f}",
        f"{both.student * token.hidden / 1e6:.1f}",
        f"{8 * both.student * token.hidden / 1e9:.3f}",
        f"{both.student * token.logits / 1e9:.2f}",
        f"{8 * both.student * token.logits / 1e9:.1f}",
        f"{both.student * token.top_k / 1e6:.2f}",
        f"{both.teachers_per_student:.2f}",
        f"{full / none:.2f}x",
    ]


@pytest.mark.parametrize("row", table("T5"), ids=lambda row: row[0])
def test_share_of_the_network(row: list[str]) -> None:
    job = make_pair(row[0])
    student, token = rates(job).student, token_bytes(job.teacher)
    per_s = [find_network(text).bytes_per_s(job.coefficients) for text in NETWORKS]
    assert row[1:] == [
        f"{800 * student * token.hidden / rate:.2f}% / {800 * student * token.logits / rate:.0f}%"
        for rate in per_s
    ]


@pytest.mark.parametrize("row", table("T6"), ids=lambda row: row[0])
def test_gathered_teacher_against_hidden_states(row: list[str]) -> None:
    job = make_pair(row[0])
    gathered, hidden = gather_bytes(job.teacher, 8), 8 * 8192 * token_bytes(job.teacher).hidden
    fast, slow = (
        find_network(text).bytes_per_s(job.coefficients) for text in ("8x400", "1x100tcp")
    )
    assert row[1:] == [
        f"{gathered / 1e9:.0f}",
        f"{gathered / fast:.2f}",
        f"{gathered / slow:.1f}",
        f"{hidden / 1e9:.3f}",
        f"{hidden / fast:.4f}",
        f"{hidden / slow:.3f}",
        f"{8192 / rates(job).student:.2f}",
        f"{break_even_tokens(job.teacher, 8, 8) / 1e6:.2f}M",
    ]


@pytest.mark.parametrize("row", table("T7"), ids=lambda row: row[0])
def test_throughput_of_64_gpus(row: list[str]) -> None:
    job = make_pair(row[0], student_gpus=64, teacher_gpus=0)
    both = rates(job)
    split, free = best_split(job, 64), best_split(replace(job, recompute="none"), 64)
    assert split is not None
    is_student = split.student_gpus * both.student < split.teacher_gpus * both.teacher
    assert row[1:] == [
        f"{64 / (1 / both.student + 1 / both.teacher):.0f}",
        f"{make_plan(job, 'colocated_fused').tokens_per_s:.0f}",
        f"{split.tokens_per_s:.0f}",
        f"{split.student_gpus} + {split.teacher_gpus}",
        "does not fit"
        if free is None
        else f"{free.tokens_per_s:.0f} ({free.student_gpus} + {free.teacher_gpus})",
        "student" if is_student else "teacher",
    ]


@pytest.mark.parametrize("row", table("T8"), ids=lambda row: row[0])
def test_slots_of_a_ring(row: list[str]) -> None:
    variances = (0.02, 0.25, 1.0, 4.0)
    assert row[1:] == [f"{jitter_slots(float(row[0]), c2, 0.01):.1f}" for c2 in variances]
