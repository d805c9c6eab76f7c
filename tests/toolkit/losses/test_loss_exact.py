"""The windowed loss and its gradients against full logits in float64."""

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import DIVERGENCES, fused, make_case, options_for, oracle, relative

from toolkit.losses.distillation import LossOptions, distillation_loss
from toolkit.losses.reference import reference_loss
from toolkit.models.heads import LMHead

BF16 = torch.bfloat16


def assert_agrees(case, options, loss_tolerance, gradient_tolerance):
    actual, gradients = fused(case, options)
    expected, expected_gradients = oracle(case, options)
    for name in ("loss", "kd", "ce"):
        assert relative(getattr(actual, name), getattr(expected, name)) < loss_tolerance, name
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert relative(gradient, reference) < gradient_tolerance
    assert actual.num_tokens == expected.num_tokens


@pytest.mark.parametrize("window_rows", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_float32(divergence, temperature, window_rows):
    options = options_for(divergence, temperature=temperature, window_rows=window_rows)
    assert_agrees(make_case(), options, 1e-6, 1e-6)


@pytest.mark.parametrize("window_rows", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_float32_without_cross_entropy(divergence, temperature, window_rows):
    """At a spread of 2, the rounding of the logits alone costs KD 2e-6, in full logits too."""
    options = LossOptions(
        divergence, temperature=temperature, window_rows=window_rows, shard_columns=200
    )
    assert_agrees(make_case(spread=1.0), options, 1e-6, 1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_float64_leaves_no_trace_of_a_narrower_type(divergence, temperature):
    case = make_case(dtypes=(torch.float64, torch.float64), scale=0.5, softcap=5.0)
    assert_agrees(case, options_for(divergence, temperature=temperature), 1e-13, 1e-13)


@pytest.mark.parametrize("window_rows", [1, 2, 8])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.7])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradcheck(divergence, temperature, window_rows):
    case = make_case(5, 7, (2, 3), (torch.float64, torch.float64), scale=0.5, softcap=2.0)
    options = options_for(
        divergence, temperature=temperature, window_rows=window_rows, shard_columns=3
    )

    def loss(hidden, weight, bias):
        head = replace(case.student_head, weight=weight, bias=bias)
        return distillation_loss(
            hidden, head, case.teacher_hidden, case.teacher_head, case.labels, options
        ).loss

    leaves = (case.student_hidden, case.student_head.weight, case.student_head.bias)
    assert torch.autograd.gradcheck(loss, [leaf.clone().requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("tokens", "vocab", "shard_columns"),
    [(1, 1003, 128), (23, 2, 1), (9, 1003, 1003), (9, 50, 4096), (14, 301, 300)],
    ids=["one token", "shards of one", "one shard", "shard past V", "last shard of one"],
)
def test_odd_sizes(tokens, vocab, shard_columns, divergence):
    options = options_for(divergence, shard_columns=shard_columns)
    assert_agrees(make_case(tokens, vocab), options, 1e-6, 1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_vocabulary_of_one_leaves_nothing_to_learn(divergence):
    sums, gradients = fused(make_case(4, 1), options_for(divergence))
    assert (sums.loss, sums.kd, sums.ce, sums.num_tokens) == (0, 0, 0, 3)
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("contract", [{"scale": 0.25}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_contract_of_the_heads(bias, contract, divergence):
    case = make_case(bias=bias)
    plain = options_for(divergence)
    student_only = replace(case, student_head=replace(case.student_head, **contract))
    teacher_only = replace(case, teacher_head=replace(case.teacher_head, **contract))
    for changed in (student_only, teacher_only):
        assert_agrees(changed, plain, 1e-6, 1e-6)
        assert relative(fused(changed, plain)[0].kd, oracle(case, plain)[0].kd) > 0.01


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("window_rows", [7, 64])
@pytest.mark.parametrize("student", [BF16, torch.float32], ids=str)
def test_bfloat16(student, window_rows, divergence, temperature):
    case = make_case(dtypes=(student, BF16), scale=0.5, softcap=10.0)
    options = options_for(divergence, temperature=temperature, window_rows=window_rows)
    assert_agrees(case, options, 2e-2, 2e-2)
    assert [gradient.dtype for gradient in fused(case, options)[1]] == [student] * 3


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("student", "teacher"), [(torch.float32, torch.float64), (torch.float64, BF16)], ids=str
)
def test_teacher_of_another_type(student, teacher, divergence):
    # A bfloat16 teacher's own logits are rounded, whatever the student is.
    tolerance = 2e-2 if teacher is BF16 else 1e-6
    assert_agrees(make_case(dtypes=(student, teacher)), options_for(divergence), *[tolerance] * 2)


@pytest.mark.parametrize(
    "weights", [(1.0, 0.0, False), (0.0, 1.0, False), (0.7, 0.2, True)], ids=str
)
def test_weights(weights):
    kd_weight, ce_weight, tau_squared = weights
    options = options_for(
        "jsd", temperature=2.0, kd_weight=kd_weight, ce_weight=ce_weight, tau_squared=tau_squared
    )
    case = make_case()
    assert_agrees(case, options, 1e-6, 1e-6)
    sums = fused(case, options)[0]
    expected = kd_weight * sums.kd * (4 if tau_squared else 1) + ce_weight * sums.ce
    assert sums.loss.item() == pytest.approx(expected.item() / sums.num_tokens, rel=1e-6)


@pytest.mark.parametrize("loss", [reference_loss, distillation_loss])
def test_values_by_hand(loss):
    p, q, tau, beta = (0.2, 0.8), (0.5, 0.5), 2.0, 0.3
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]

    def kl(first, second):
        return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True))

    expected = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m),
    }
    one = torch.ones(1, 1, dtype=torch.float64)
    student, teacher = (
        LMHead(tau * torch.tensor(row, dtype=torch.float64).log()[:, None]) for row in (q, p)
    )
    for divergence, value in expected.items():
        options = LossOptions(divergence, beta=beta, temperature=tau, ce_weight=0.5)
        sums = loss(one, student, one, teacher, torch.tensor([1]), options)
        assert float(sums.kd) == pytest.approx(value, rel=1e-12)
        assert float(sums.ce) == pytest.approx(math.log(2), rel=1e-12)
        assert float(sums.loss) == pytest.approx(value + 0.5 * math.log(2), rel=1e-12)
