"""The windowed loss and its gradients against full logits in float64."""

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import (
    DIVERGENCES,
    LAYOUTS,
    RECOMPUTE,
    TEMPERATURES,
    eager,
    fused,
    loss_of,
    make_case,
    options_for,
    oracle,
    relative,
)

from toolkit.losses.distillation import distillation_loss
from toolkit.losses.options import LossOptions
from toolkit.losses.reference import reference_loss
from toolkit.models.heads import LMHead

pytestmark = pytest.mark.usefixtures("each_backend")

BF16 = torch.bfloat16
FLOAT64 = (torch.float64, torch.float64)
SIZES = {
    "one token": (1, 1003, 128),
    "shards of one": (23, 2, 1),
    "one shard": (9, 1003, 1003),
    "shard past V": (9, 50, 4096),
    "last shard of one": (14, 301, 300),
}
"""Tokens, vocabulary, columns of a shard."""
EVERYTHING = {"bias": True, "scale": 0.5, "softcap": 2.0, "z_loss": 0.01, "weighted": True}
NOTHING = {"bias": False, "scale": 1.0, "softcap": None, "z_loss": 0.0, "weighted": False}
FEATURES = [EVERYTHING, *({**NOTHING, name: value} for name, value in EVERYTHING.items())]


def thinned(first, second, third):
    """Return all pairs of the first two, each with the third in turn."""
    return [
        (one, two, third[(i + j) % len(third)])
        for i, one in enumerate(first)
        for j, two in enumerate(second)
    ]


LOSS_BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-6, BF16: 2e-2}
GRADIENT_BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, BF16: 2e-2}
JUMP_BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-3, BF16: 5e-2}
"""Of total variation, whose gradient jumps where p = q: rounding can put it on the other side."""


def assert_agrees(case, options, dtype=torch.float32):
    actual, gradients = fused(case, options)
    expected, expected_gradients = oracle(case, options)
    for name in ("loss", "kd", "ce", "z"):
        assert relative(getattr(actual, name), getattr(expected, name)) < LOSS_BOUNDS[dtype], name
    jumps = options.divergence == "total_variation"
    bound = (JUMP_BOUNDS if jumps else GRADIENT_BOUNDS)[dtype]
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert relative(gradient, reference) < bound
    assert actual.num_tokens == expected.num_tokens


@pytest.mark.parametrize(
    ("divergence", "temperature", "layout"), thinned(DIVERGENCES, TEMPERATURES, LAYOUTS)
)
def test_float32(divergence, temperature, layout):
    options = options_for(divergence, temperature=temperature, **layout)
    assert_agrees(make_case(weighted=True), options)


@pytest.mark.parametrize(
    ("divergence", "temperature", "layout"), thinned(DIVERGENCES, TEMPERATURES, LAYOUTS)
)
def test_float32_of_the_divergence_alone(divergence, temperature, layout):
    """At a spread of 2, the rounding of the logits alone costs KD 2e-6, in full logits too."""
    options = LossOptions(divergence, temperature=temperature, shard_columns=200, **layout)
    assert_agrees(make_case(spread=1.0), options)


@pytest.mark.parametrize(
    ("divergence", "temperature", "layout"), thinned(DIVERGENCES, (1.0, 0.7), LAYOUTS)
)
def test_float64_leaves_no_trace_of_a_narrower_type(divergence, temperature, layout):
    case = make_case(dtypes=FLOAT64, scale=0.5, softcap=5.0, weighted=True)
    assert_agrees(case, options_for(divergence, temperature=temperature, **layout), torch.float64)


def check_gradient(divergence, temperature, layout, features):
    features = dict(features)
    z_loss = features.pop("z_loss")
    case = make_case(3, 5, (2, 2), FLOAT64, **features)
    head = case.student_head
    options = options_for(
        divergence, temperature=temperature, z_loss=z_loss, shard_columns=3, **layout
    )

    def loss(hidden, weight, bias=None):
        student = replace(head, weight=weight, bias=bias)
        return loss_of(replace(case, student_hidden=hidden, student_head=student), options).loss

    leaves = [leaf for leaf in (case.student_hidden, head.weight, head.bias) if leaf is not None]
    assert torch.autograd.gradcheck(loss, [leaf.clone().requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("layout", [{"window_rows": 2}, RECOMPUTE], ids=["windows", "recompute"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradcheck_of_everything(divergence, temperature, layout):
    check_gradient(divergence, temperature, layout, EVERYTHING)


@pytest.mark.parametrize(
    ("divergence", "temperature", "features"), thinned(DIVERGENCES, TEMPERATURES, FEATURES[1:])
)
def test_gradcheck_of_one_feature(divergence, temperature, features):
    layout = RECOMPUTE if temperature == 2 else {"window_rows": 2}
    check_gradient(divergence, temperature, layout, features)


@pytest.mark.parametrize(("divergence", "size", "layout"), thinned(DIVERGENCES, SIZES, LAYOUTS))
def test_odd_sizes(divergence, size, layout):
    tokens, vocab, shard_columns = SIZES[size]
    options = options_for(divergence, shard_columns=shard_columns, **layout)
    assert_agrees(make_case(tokens, vocab), options)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_vocabulary_of_one_leaves_nothing_to_learn(divergence):
    sums, gradients = fused(make_case(4, 1), options_for(divergence, z_loss=0.0))
    assert (sums.loss, sums.kd, sums.ce, sums.num_tokens) == (0, 0, 0, 3)
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    ("divergence", "contract", "bias"),
    thinned(DIVERGENCES, ({"scale": 0.25}, {"softcap": 3.0}), (False, True)),
)
def test_contract_of_the_heads(divergence, contract, bias):
    case = make_case(13, 301, bias=bias)
    plain = options_for(divergence)
    student_only = replace(case, student_head=replace(case.student_head, **contract))
    teacher_only = replace(case, teacher_head=replace(case.teacher_head, **contract))
    for changed in (student_only, teacher_only):
        assert_agrees(changed, plain)
        assert relative(fused(changed, plain)[0].kd, oracle(case, plain)[0].kd) > 0.01


@pytest.mark.parametrize(
    ("divergence", "temperature", "layout"), thinned(DIVERGENCES, (1.0, 2.0), LAYOUTS)
)
@pytest.mark.parametrize("student", [BF16, torch.float32], ids=str)
def test_bfloat16(student, divergence, temperature, layout):
    case = make_case(dtypes=(student, BF16), scale=0.5, softcap=10.0, weighted=True)
    options = options_for(divergence, temperature=temperature, **layout)
    assert_agrees(case, options, BF16)
    assert [gradient.dtype for gradient in fused(case, options)[1]] == [student] * 3


@pytest.mark.parametrize(
    ("divergence", "dtype", "layout"),
    thinned(DIVERGENCES, (torch.float32, BF16), ({"window_rows": 64}, RECOMPUTE)),
)
def test_errs_no_more_than_full_logits_in_the_same_type(divergence, dtype, layout):
    case = make_case(100, dtypes=(dtype, dtype))
    options = options_for(divergence, ce_weight=0.1, **layout)
    _, expected = oracle(case, options)
    _, ours = fused(case, options)
    _, theirs = eager(case, options)
    for gradient, other, reference in zip(ours, theirs, expected, strict=True):
        assert relative(gradient, reference) < 1.1 * relative(other, reference)


@pytest.mark.parametrize("layout", [{"window_rows": 64}, RECOMPUTE], ids=str)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_shards_are_rounded_together(divergence, layout):
    """Of products in bfloat16 for each shard alone, the sum would err 1.3 times as much."""
    case = make_case(100, 4001, hidden=(64, 48), dtypes=(BF16, BF16), spread=0.3)
    options = options_for(divergence, **layout | {"shard_columns": 500})
    _, expected = oracle(case, options)
    _, ours = fused(case, options)
    _, theirs = eager(case, options)
    assert relative(ours[0], expected[0]) < 1.1 * relative(theirs[0], expected[0])


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("student", "teacher"), [(torch.float32, torch.float64), (torch.float64, BF16)], ids=str
)
def test_teacher_of_another_type(student, teacher, divergence):
    case, options = make_case(dtypes=(student, teacher)), options_for(divergence)
    # A bfloat16 teacher's own logits are rounded, whatever the student is.
    assert_agrees(case, options, BF16 if teacher is BF16 else student)


@pytest.mark.parametrize(
    "weights",
    [(1.0, 0.0, 0.0, False), (0.0, 1.0, 0.0, False), (0.0, 0.0, 1.0, False), (0.7, 0.2, 0.1, True)],
    ids=str,
)
def test_weights_of_terms_and_tokens(weights):
    kd_weight, ce_weight, z_loss, tau_squared = weights
    options = options_for(
        "jsd",
        temperature=2.0,
        kd_weight=kd_weight,
        ce_weight=ce_weight,
        z_loss=z_loss,
        tau_squared=tau_squared,
    )
    case = make_case(weighted=True)
    assert_agrees(case, options)
    sums = fused(case, options)[0]
    expected = kd_weight * sums.kd * (4 if tau_squared else 1)
    expected += ce_weight * sums.ce + z_loss * sums.z
    assert sums.loss.item() == pytest.approx(expected.item() / sums.num_tokens, rel=1e-6)


def test_weights_of_tokens_are_those_of_repeated_tokens():
    case, options = make_case(bias=False), options_for("symmetric_kl")
    weights = torch.arange(23) % 3
    repeated = case.rows(torch.arange(23).repeat_interleave(weights))
    count = int(weights[case.labels != -100].sum())
    once, gradients = fused(replace(case, weights=weights.double()), options, num_tokens=count)
    more, more_gradients = fused(repeated, options)
    assert more.num_tokens == count
    assert relative(once.loss, more.loss) < 1e-6
    assert relative(gradients[1], more_gradients[1]) < 1e-6


@pytest.mark.parametrize("loss", [reference_loss, distillation_loss])
def test_values_by_hand(loss):
    p, q, tau, beta, skew = (0.2, 0.8), (0.5, 0.5), 2.0, 0.3, 0.1

    def mixed(share, first, second):
        return [share * a + (1 - share) * b for a, b in zip(first, second, strict=True)]

    def kl(first, second):
        return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True))

    m = mixed(beta, p, q)
    expected = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "symmetric_kl": kl(p, q) + kl(q, p),
        "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m),
        "skew_forward_kl": kl(p, mixed(skew, p, q)),
        "skew_reverse_kl": kl(q, mixed(skew, q, p)),
        "total_variation": 0.3,
    }
    assert tuple(expected) == DIVERGENCES
    one = torch.ones(1, 1, dtype=torch.float64)
    student, teacher = (
        LMHead(tau * torch.tensor(row, dtype=torch.float64).log()[:, None]) for row in (q, p)
    )
    z = (math.log(2) + tau * math.log(0.5)) ** 2  # of two logits, both tau log 1/2
    for divergence, value in expected.items():
        options = LossOptions(
            divergence, beta=beta, skew=skew, temperature=tau, ce_weight=0.5, z_loss=0.25
        )
        sums = loss(one, student, one, teacher, torch.tensor([1]), options)
        assert float(sums.kd) == pytest.approx(value, rel=1e-12)
        assert float(sums.ce) == pytest.approx(math.log(2), rel=1e-12)
        assert float(sums.z) == pytest.approx(z, rel=1e-12)
        assert float(sums.loss) == pytest.approx(value + 0.5 * math.log(2) + 0.25 * z, rel=1e-12)
