"""The row kernels' state: any cut of the columns says the same of a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.losses import rows
from toolkit.losses.divergences import Objective
from toolkit.losses.rows import Tile

OBJECTIVE = Objective("forward_kl", beta=0.5, temperature=0.7, kd_factor=1.0, ce_factor=1.0)


def state_of(student, teacher, labels, cuts, order=None):
    state = rows.empty_state(len(student), student)
    spans = list(zip([0, *cuts], [*cuts, student.shape[1]], strict=True))
    for index in order or range(len(spans)):
        start, stop = spans[index]
        tile = Tile(student[:, start:stop], teacher[:, start:stop], start)
        rows.statistics(tile, labels, OBJECTIVE, state)
    return state


def logits(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (
        spread * torch.randn(3, 20, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return student, teacher, torch.randint(0, 20, (3,), generator=generator)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31), st.sampled_from([1.0, 30.0]), st.sets(st.integers(1, 19)), st.randoms()
)
def test_any_cut_in_any_order_is_the_same_state(seed, spread, cuts, random):
    student, teacher, labels = logits(seed, spread)
    order = list(range(len(cuts) + 1))
    random.shuffle(order)
    cut = state_of(student, teacher, labels, sorted(cuts), order)
    torch.testing.assert_close(cut, state_of(student, teacher, labels, []), rtol=1e-9, atol=1e-9)


def test_empty_state_changes_nothing():
    state = state_of(*logits(0, 1.0), cuts=[])
    empty = rows.empty_state(3, state)
    assert torch.equal(rows.merge_states(state, empty, 0.7), state)
    assert torch.equal(rows.merge_states(empty, state, 0.7), state)
    assert torch.equal(rows.merge_states(empty, empty, 0.7), empty)


def test_common_offset_costs_no_digits():
    student, teacher, labels = (
        tensor.float() if tensor.is_floating_point() else tensor for tensor in logits(1, 1.0)
    )
    # Multiples of 1/64 below 8192 + 16 keep all their bits in float32.
    student, teacher = (64 * student).round() / 64, (64 * teacher).round() / 64
    near = rows.finish(state_of(student, teacher, labels, [7]), OBJECTIVE)
    far = rows.finish(state_of(student + 8192, teacher - 8192, labels, [7]), OBJECTIVE)
    assert torch.equal(near.sums, far.sums)
    assert torch.equal(near.ce, far.ce)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_dtype_of_the_statistics(dtype, expected):
    student, teacher, labels = logits(2, 1.0)
    assert state_of(student.to(dtype), teacher, labels, [5]).dtype == expected
