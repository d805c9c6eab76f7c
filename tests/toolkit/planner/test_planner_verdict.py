"""What the planner advises, and whether its advice holds."""

import re
from dataclasses import replace

import pytest
from planner_cases import make_job, make_pair

from toolkit.planner.hardware import find_network
from toolkit.planner.job import Job
from toolkit.planner.plans import fits, make_plan, make_plans, max_tokens, plan_teachers
from toolkit.planner.verdict import best_split, compatibility, remedies, verdict


def test_colocated_is_better_where_nothing_is_gained() -> None:
    job = make_job(student_gpus=56)
    plans = make_plans(job, choose=True)
    assert "Colocated with the fused loss is the better plan" in verdict(job, plans)
    assert plans["colocated_fused"].tokens_per_s > plans["disaggregated"].tokens_per_s
    assert plans["colocated_fused"].student_gpus == 64


def test_disaggregated_is_better_where_a_teacher_would_be_gathered() -> None:
    job = make_pair("Qwen3.5-397B-A17B -> Qwen3.5-35B-A3B", student_gpus=32, teacher_gpus=32)
    plans = make_plans(job, choose=True)
    assert plans["colocated_fused"].bound == "network"
    text = verdict(job, plans)
    assert text.startswith("Disaggregated: 1.1") and "gathered over the network" in text


def test_teachers_that_do_not_fit_are_named() -> None:
    job = make_pair("Qwen3.5-397B-A17B -> Qwen3.5-35B-A3B", student_gpus=32, teacher_gpus=8)
    plans = make_plans(job, choose=True)
    assert not plans["disaggregated"].fits
    assert plans["disaggregated"].reason == "a teacher takes a replica of 16 GPUs, given are 8"
    assert plans["disaggregated"].reason in verdict(job, plans)
    assert list(remedies(job, "disaggregated")) == ["2 nodes of teachers"]
    one = replace(job, replica_gpus=1)
    assert not list(remedies(one, "disaggregated"))
    reason = make_plans(one)["disaggregated"].reason
    assert reason == "no teacher fits a replica of 1 GPUs"


def test_nothing_fits_on_small_gpus() -> None:
    job = make_pair("Llama-3.1-405B -> Llama-3.1-70B")
    assert verdict(job, make_plans(job, choose=True)).startswith("No layout fits")


def test_slow_network_is_the_bound() -> None:
    job = make_pair("Qwen3-8B -> Qwen3-0.6B", network=find_network("1x25tcp"), teacher_gpus=64)
    plan = make_plans(job)["disaggregated"]
    assert plan.bound == "network"
    assert plan.network_share == pytest.approx(1.0)
    fast = make_plans(replace(job, network=find_network("8x400")))["disaggregated"]
    assert fast.bound == "student" and fast.tokens_per_s > plan.tokens_per_s


def test_remedies_make_it_fit() -> None:
    job, layout = make_job(), "colocated_full"
    found = list(remedies(job, layout))
    tokens = int(re.sub(r"\D", "", found[0]))
    assert fits(replace(job, tokens=tokens), layout)
    assert not fits(replace(job, tokens=tokens + 1024), layout)
    assert max_tokens(job, layout) == tokens
    nodes = next(int(text.split()[0]) for text in found if "nodes" in text)
    assert fits(replace(job, student_gpus=8 * nodes), layout)
    assert not fits(replace(job, student_gpus=8 * (nodes - 1)), layout)
    other = make_job(recompute="none", window_rows=None, shard_columns=8192)
    assert "recompute = selective" in list(remedies(other, "colocated_fused"))
    assert fits(replace(other, recompute="selective"), "colocated_fused")
    assert not fits(other, "colocated_fused")


@pytest.mark.parametrize(
    "job",
    [make_job(), make_pair("Qwen3-8B -> Qwen3-0.6B", network=find_network("1x25tcp"))],
    ids=["computing", "network"],
)
def test_best_split_is_the_fastest_that_fits(job: Job) -> None:
    best = best_split(job, 64)
    assert best is not None
    rates = {}
    for teachers in range(1, 57):
        students = (64 - teachers) // 8 * 8
        divided = replace(job, student_gpus=students, teacher_gpus=teachers)
        rates[students, teachers] = make_plan(divided, "disaggregated").tokens_per_s
    assert rates[best[1:]] == pytest.approx(best.tokens_per_s)
    assert max(rates.values()) == pytest.approx(best.tokens_per_s)
    assert best_split(job, 8) is None


def test_less_computed_again_is_the_faster_split() -> None:
    job = make_job()
    best, free = best_split(job, 64), best_split(job, 64, choose=True)
    assert best is not None and free is not None
    assert free.tokens_per_s > best.tokens_per_s


def test_teachers_that_are_needed_are_enough() -> None:
    job = make_job(student_gpus=56)
    needed = plan_teachers(job).needed_gpus
    enough = plan_teachers(replace(job, teacher_gpus=needed)).ring
    few = plan_teachers(replace(job, teacher_gpus=needed // 2)).ring
    assert enough is not None and enough.kappa >= job.coefficients.spare_teacher
    assert enough.slots is not None
    assert few is not None and few.slots is None  # of too slow a teacher, no depth helps


def test_what_stands_between_two_models_is_said() -> None:
    job = make_pair("Gemma-3-27B -> Gemma-3-4B")
    texts = [finding.text for finding in compatibility(job)]
    assert sum("head is its embedding" in text for text in texts) == 2
    assert any("bfloat16" in text for text in texts)
    mixed = replace(job, teacher=make_job().teacher)
    blocking = [finding.text for finding in compatibility(mixed) if finding.is_blocking]
    assert len(blocking) == 1
    assert "262,208 rows" in blocking[0] and "248,320" in blocking[0]
    assert verdict(mixed, make_plans(mixed)) == f"Not possible as it is: {blocking[0]}."
