"""The loss where numbers are extreme, equal, infinite or not there."""

from dataclasses import replace

import pytest
import torch
from loss_cases import DIVERGENCES, RECOMPUTE, Case, fused, make_case, oracle, relative
from loss_cases import options_for as windows_for

from toolkit.models.heads import LMHead

pytestmark = [
    pytest.mark.parametrize("divergence", DIVERGENCES),
    pytest.mark.parametrize("strategy", ["windows", "recompute"]),
]


def options_for(divergence, strategy, **kwargs):
    return windows_for(divergence, **kwargs | (RECOMPUTE if strategy == "recompute" else {}))


def without_columns(head, columns):
    bias = head.bias.clone()
    bias[columns] = -torch.inf
    return replace(head, bias=bias)


def assert_agrees(case, options, tolerance):
    actual, gradients = fused(case, options)
    expected, expected_gradients = oracle(case, options)
    assert relative(actual.loss, expected.loss) < tolerance
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert relative(gradient, reference) < tolerance


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_models_have_exactly_no_divergence(divergence, strategy, dtype, temperature):
    case = make_case(dtypes=(dtype, dtype), softcap=9.0)
    twin = replace(case, teacher_hidden=case.student_hidden, teacher_head=case.student_head)
    options = options_for(divergence, strategy, temperature=temperature, ce_weight=0.0, z_loss=0.0)
    sums, gradients = fused(twin, options)
    assert sums.kd == 0
    assert sums.loss == 0
    assert all(not gradient.any() for gradient in gradients)
    assert fused(case, options)[0].kd > 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_of_ten_thousand(divergence, strategy, temperature):
    # Inputs of few bits: the logits are exact in float32, so that only the loss itself can err.
    case = make_case(9, 203, hidden=(8, 8))
    coarse = [(4 * tensor).round() / 4 for tensor in (case.student_hidden, case.teacher_hidden)]
    heads = [
        LMHead((4 * head.weight).round() / 4, offset + (4 * head.bias).round() / 4)
        for head, offset in ((case.student_head, 1e4), (case.teacher_head, -1e4))
    ]
    case = Case(coarse[0], heads[0], coarse[1], heads[1], case.labels)
    options = options_for(
        divergence, strategy, temperature=temperature, shard_columns=64, window_rows=4
    )
    assert_agrees(case, options, 1e-6)


def test_logits_far_apart_stay_finite(divergence, strategy):
    case = make_case(9, 203)
    far = replace(case, student_head=replace(case.student_head, scale=2000.0))
    sums, gradients = fused(far, options_for(divergence, strategy, shard_columns=64))
    assert relative(sums.loss, oracle(far, options_for(divergence, strategy))[0].loss) < 1e-5
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    "columns", [slice(0, 5), slice(64, 128), slice(0, 64)], ids=["few", "a shard", "first shard"]
)
def test_tokens_both_models_exclude_contribute_nothing(divergence, strategy, columns):
    case = make_case(9, 203)
    excluded = replace(
        case,
        labels=torch.full((9,), 150),
        student_head=without_columns(case.student_head, columns),
        teacher_head=without_columns(case.teacher_head, columns),
    )
    assert_agrees(
        excluded, options_for(divergence, strategy, shard_columns=64, temperature=0.7), 1e-6
    )


@pytest.mark.parametrize("columns", [slice(0, 5), slice(64, 128)], ids=["few", "a shard"])
def test_tokens_the_teacher_excludes(divergence, strategy, columns):
    case = make_case(9, 203)
    excluded = replace(case, teacher_head=without_columns(case.teacher_head, columns))
    options = options_for(divergence, strategy, shard_columns=64, temperature=0.7)
    if divergence in ("reverse_kl", "symmetric_kl"):
        # The truth: the student's mass lies where the teacher has none.
        assert fused(excluded, options)[0].kd == oracle(excluded, options)[0].kd == torch.inf
    else:
        assert_agrees(excluded, options, 1e-6)


def test_ignored_rows_may_hold_anything(divergence, strategy):
    case = make_case()
    ignored = case.labels == -100
    dirty_student, dirty_teacher = case.student_hidden.clone(), case.teacher_hidden.clone()
    dirty_student[ignored], dirty_teacher[ignored] = torch.nan, torch.inf
    dirty = replace(case, student_hidden=dirty_student, teacher_hidden=dirty_teacher)
    options = options_for(divergence, strategy, window_rows=2)
    sums, gradients = fused(dirty, options)
    clean_sums, clean_gradients = fused(case, options)
    assert sums.loss == clean_sums.loss
    assert all(map(torch.equal, gradients, clean_gradients))
    assert not gradients[0][ignored].any()


@pytest.mark.parametrize("num_tokens", [None, 0, 12])
def test_nothing_labelled(divergence, strategy, num_tokens):
    case = make_case()
    empty = replace(case, labels=torch.full_like(case.labels, -100))
    sums, gradients = fused(empty, options_for(divergence, strategy), num_tokens=num_tokens)
    assert sums == (0, 0, 0, 0, 0)
    assert sums.loss.requires_grad
    assert len(gradients) == 3
    assert all(not gradient.any() for gradient in gradients)
