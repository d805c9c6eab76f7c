"""What must hold of the formulas for any job."""

import heapq
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import make_job

from toolkit.planner.coefficients import Coefficients
from toolkit.planner.job import Job
from toolkit.planner.memory import (
    LAYOUTS,
    activation_bytes,
    loss_bytes,
    ring_geometry,
    student_memory,
)
from toolkit.planner.parameters import count
from toolkit.planner.traffic import jitter_slots, rates, waiting_share
from transport.layout import RingGeometry

REAL = Coefficients()
layouts = st.sampled_from(LAYOUTS)
recomputes = st.sampled_from(["none", "selective", "full"])
gpus = st.sampled_from([8, 16, 64, 256])


def real_job(**changes: Any) -> Job:
    return make_job(**{"coefficients": REAL, "window_rows": None, "shard_columns": 8192} | changes)


@given(st.integers(1, 2**18), st.integers(1, 2**16), layouts, recomputes)
def test_more_tokens_never_take_less(tokens: int, more: int, layout: Any, recompute: Any) -> None:
    job = real_job(tokens=tokens, recompute=recompute, window_rows=1024)
    larger = replace(job, tokens=tokens + more)
    small, large = (student_memory(one, layout) for one in (job, larger))
    assert small.peak <= large.peak
    assert all(large.moments[name] >= size for name, size in small.moments.items())


@given(gpus, st.integers(2, 8), layouts)
def test_more_ranks_take_less_of_the_state(ranks: int, factor: int, layout: Any) -> None:
    job = real_job(student_gpus=ranks)
    few, many = (
        student_memory(replace(job, student_gpus=n), layout) for n in (ranks, ranks * factor)
    )
    for name in ("weights", "gradients", "optimizer"):
        assert many.static[name] == pytest.approx(few.static[name] / factor)
    assert many.peak <= few.peak


@given(st.integers(1, 8192), st.integers(1, 4096))
def test_larger_windows_take_more(rows: int, more: int) -> None:
    job = real_job(window_rows=rows)
    wider = replace(job, window_rows=rows + more)
    assert loss_bytes(job, "disaggregated") <= loss_bytes(wider, "disaggregated")


@given(st.integers(400, 4096))
def test_loss_stays_within_its_budget(budget_mib: int) -> None:
    job = real_job(memory_budget_mib=budget_mib)
    assert loss_bytes(job, "disaggregated") <= budget_mib * 2**20


@given(st.integers(1, 2**17))
def test_recomputation_keeps_less_and_costs_time(tokens: int) -> None:
    jobs = [real_job(tokens=tokens, recompute=way) for way in ("none", "selective", "full")]
    kept = [activation_bytes(job)[0] for job in jobs]
    assert kept[0] > kept[1] > kept[2]
    speeds = [rates(job).student for job in jobs]
    assert speeds[0] > speeds[1] > speeds[2]


@given(st.sampled_from([2, 4, 8]))
def test_tensor_parallel_ranks_share_state_and_activations(parallel: int) -> None:
    job = real_job(sharding="ddp", student_gpus=8)
    shared = replace(job, tensor_parallel=parallel)
    alone, together = (student_memory(one, "disaggregated") for one in (job, shared))
    assert together.static["weights"] == pytest.approx(alone.static["weights"] / parallel)
    assert together.kept == pytest.approx(alone.kept / parallel)


@pytest.mark.parametrize("parallel", [2, 4])
def test_expert_parallel_ranks_share_experts_but_not_activations(parallel: int) -> None:
    job = real_job(student="Qwen3-30B-A3B", teacher="Qwen3-235B-A22B", sharding="ddp")
    shared = replace(job, expert_parallel=parallel)
    alone, together = (student_memory(one, "disaggregated") for one in (job, shared))
    assert together.kept == alone.kept
    counts = count(job.student)
    shared_weights = counts.total - counts.routed + counts.routed / parallel
    assert together.static["weights"] == pytest.approx(2 * shared_weights)


def test_context_parallel_ranks_share_tokens() -> None:
    job = real_job(student_gpus=64)
    shared = replace(job, context_parallel=4)
    alone, together = (student_memory(one, "disaggregated") for one in (job, shared))
    assert together.kept == pytest.approx(alone.kept / 4)
    assert together.static["weights"] == alone.static["weights"]


def test_ring_is_that_of_the_transport() -> None:
    job = real_job(tokens=4096, host_slots=6)
    assert ring_geometry(job) == RingGeometry(6, 4096, job.teacher.hidden_size, 2)


@given(st.floats(1.0, 2.0), st.floats(0.001, 4.0), st.floats(0.001, 0.2), st.floats(1e-4, 1.0))
def test_waiting_and_slots_are_inverse(
    kappa: float, variance: float, share: float, more: float
) -> None:
    slots = jitter_slots(kappa, variance, share)
    assert waiting_share(kappa, variance, slots) == pytest.approx(share, rel=1e-6)
    assert jitter_slots(kappa + more, variance, share) <= slots * (1 + 1e-9)
    assert jitter_slots(kappa, variance + more, share) >= slots


def test_too_slow_a_teacher_needs_endless_slots() -> None:
    assert jitter_slots(0.9, 0.25, 0.01) == math.inf
    assert waiting_share(0.9, 0.25, 1000) == pytest.approx(0.1)


def simulated_waiting(
    kappa: float, replicas: int, variations: tuple[float, float], slots: int
) -> float:
    """Return the share of its time that a student with period 1 waits, by simulating events."""
    draw, steps = random.Random(1), 40_000
    of_student, of_teacher = variations
    period = replicas / kappa

    def took(mean: float, variation: float) -> float:
        return draw.gammavariate(1 / variation**2, mean * variation**2)

    events = [(took(period, of_teacher) * draw.random(), index) for index in range(replicas)]
    heapq.heapify(events)
    ready, blocked, now, idle = 0, [], 0.0, 0.0

    def begin(index: int, at: float) -> None:
        heapq.heappush(events, (at + took(period, of_teacher), index))

    for _ in range(steps):
        while events and events[0][0] <= now:
            at, index = heapq.heappop(events)
            if ready < slots:
                ready += 1
                begin(index, at)
            else:
                blocked.append(index)
        if ready == 0:
            at, index = heapq.heappop(events)
            idle += at - now
            now = at
            ready = 1
            begin(index, at)
        ready -= 1
        if blocked:
            ready += 1
            begin(blocked.pop(0), now)
        now += took(1.0, of_student)
    return idle / now


@pytest.mark.parametrize("slots", [2, 4, 8])
@pytest.mark.parametrize("kappa", [1.0, 1.05, 1.1, 1.2])
@pytest.mark.parametrize("replicas", [1, 4])
def test_waiting_is_on_the_safe_side_of_a_simulation(
    kappa: float, replicas: int, slots: int
) -> None:
    variations = (0.1, 0.5)
    variance = variations[0] ** 2 + kappa * variations[1] ** 2
    planned = waiting_share(kappa, variance, slots)
    simulated = simulated_waiting(kappa, replicas, variations, slots)
    assert simulated <= planned * 1.05 + 0.002
    assert simulated >= planned * 0.3 - 0.01
