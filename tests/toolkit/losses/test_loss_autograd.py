"""The loss as an autograd function: what it computes, keeps and repeats, in both strategies."""

from dataclasses import replace

import pytest
import torch
from loss_cases import (
    DIVERGENCES,
    RECOMPUTE,
    fused,
    loss_of,
    make_case,
    options_for,
    oracle,
    relative,
    with_leaves,
)

from toolkit.errors import InputError
from toolkit.losses import rows

SINGLES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
both_strategies = pytest.mark.parametrize(
    "layout", [{"window_rows": 7}, RECOMPUTE], ids=["windows", "recompute"]
)


def inputs_of(leaves):
    return leaves.student_hidden, leaves.student_head.weight, leaves.student_head.bias


def trained(case):
    return with_leaves(case, hidden=True, weight=True, bias=True)


@both_strategies
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_calls_with_a_common_count_sum_to_one_call(divergence, layout):
    case, options = make_case(weighted=True), options_for(divergence, **layout)
    whole, whole_gradients = fused(case, options)
    count = whole.num_tokens
    parts = [
        fused(case.rows(part), options, num_tokens=torch.tensor(count))
        for part in (slice(0, 10), slice(10, 23))
    ]
    for name in ("loss", "kd", "ce", "z"):
        total = sum(getattr(sums, name) for sums, _ in parts)
        assert relative(total, getattr(whole, name).double()) < 1e-6
    assert sum(sums.num_tokens for sums, _ in parts) == count
    hidden = torch.cat([gradients[0] for _, gradients in parts])
    assert relative(hidden, whole_gradients[0].double()) < 1e-6
    for index in (1, 2):
        total = parts[0][1][index] + parts[1][1][index]
        assert relative(total, whole_gradients[index].double()) < 1e-6


@both_strategies
@pytest.mark.parametrize("dtypes", SINGLES, ids=str)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_repeats_bit_for_bit(divergence, dtypes, layout):
    case, options = make_case(dtypes=dtypes), options_for(divergence, **layout)
    first, first_gradients = fused(case, options)
    second, second_gradients = fused(case, options)
    assert first.loss == second.loss
    assert all(map(torch.equal, first_gradients, second_gradients))


@both_strategies
@pytest.mark.parametrize("needed", ["hidden", "weight", "bias"])
def test_computes_only_gradients_that_are_needed(needed, layout):
    case, options = make_case(), options_for("jsd", **layout)
    leaves = with_leaves(case, **{needed: True})
    loss_of(leaves, options).loss.backward()
    found = dict(zip(("hidden", "weight", "bias"), inputs_of(leaves), strict=True))
    assert [name for name, leaf in found.items() if leaf.grad is not None] == [needed]
    every = dict(zip(found, fused(case, options)[1], strict=True))
    assert torch.equal(found[needed].grad, every[needed])


@both_strategies
@pytest.mark.parametrize(("grad_enabled", "needed"), [(False, True), (True, False)])
def test_without_gradients_only_the_statistics(monkeypatch, grad_enabled, needed, layout):
    case, options = make_case(), options_for("reverse_kl", **layout)
    expected = fused(case, options)[0]
    monkeypatch.delattr(rows, "gradient")
    leaves = with_leaves(case, hidden=needed, weight=needed, bias=needed)
    with torch.set_grad_enabled(grad_enabled):
        sums = loss_of(leaves, options)
    assert not sums.loss.requires_grad
    assert sums == expected


@both_strategies
def test_sums_carry_no_gradient(layout):
    sums = loss_of(trained(make_case()), options_for("jsd", **layout))
    assert sums.loss.requires_grad
    assert not any(total.requires_grad for total in (sums.kd, sums.ce, sums.z))


@both_strategies
def test_backward_scales_and_repeats(layout):
    case, options = make_case(weighted=True), options_for("jsd", **layout)
    leaves = trained(case)
    loss = loss_of(leaves, options).loss
    quadrupled = torch.autograd.grad(4 * loss, inputs_of(leaves), retain_graph=True)
    halved = torch.autograd.grad(loss / 2, inputs_of(leaves), retain_graph=True)
    once = torch.autograd.grad(loss, inputs_of(leaves))
    for four, half, one, reference in zip(
        quadrupled, halved, once, oracle(case, options)[1], strict=True
    ):
        assert torch.equal(four, 4 * one)
        assert torch.equal(half, one / 2)
        assert relative(one, reference) < 1e-6


@both_strategies
def test_second_derivatives_are_refused(layout):
    leaves = with_leaves(make_case(), hidden=True)
    loss = loss_of(leaves, options_for("jsd", **layout)).loss
    (gradient,) = torch.autograd.grad(loss.square(), leaves.student_hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@both_strategies
def test_gradients_pass_on_to_what_made_the_hidden_states(layout):
    case, options = make_case(), options_for("forward_kl", **layout)
    body = torch.eye(32).requires_grad_()
    loss_of(replace(case, student_hidden=case.student_hidden @ body), options).loss.backward()
    hidden_gradient = oracle(case, options)[1][0]
    assert relative(body.grad, case.student_hidden.double().T @ hidden_gradient) < 1e-6


def test_weight_changed_before_backward_is_refused_where_it_is_used_again():
    leaves = trained(make_case())
    loss = loss_of(leaves, options_for("jsd", **RECOMPUTE)).loss
    with torch.no_grad():
        leaves.student_head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both_strategies
@pytest.mark.parametrize("dtypes", SINGLES, ids=str)
def test_adds_the_gradient_of_the_head_to_a_buffer(dtypes, layout):
    case, options = make_case(dtypes=dtypes), options_for("skew_forward_kl", **layout)
    expected = fused(case, options)[1]
    leaves = trained(case)
    start = 2.0**-12
    buffer = torch.full((1003, 32), start)
    loss_of(leaves, options, weight_grad=buffer).loss.backward()
    assert leaves.student_head.weight.grad is None
    assert torch.equal(leaves.student_hidden.grad, expected[0])
    assert torch.equal(leaves.student_head.bias.grad, expected[2])
    reference = oracle(case, options)[1][1]
    assert relative(buffer - start, reference) < (1e-5 if dtypes == SINGLES[0] else 2e-2)


@both_strategies
@pytest.mark.parametrize(("grad_enabled", "needed"), [(False, True), (True, False)])
def test_buffer_stays_where_no_gradient_is_needed(grad_enabled, needed, layout):
    leaves = with_leaves(make_case(), hidden=True, weight=needed)
    buffer = torch.zeros(1003, 32)
    with torch.set_grad_enabled(grad_enabled):
        loss = loss_of(leaves, options_for("jsd", **layout), weight_grad=buffer).loss
    if loss.requires_grad:
        loss.backward()
    assert not buffer.any()


def test_factor_after_the_loss_reaches_the_buffer_or_is_refused():
    leaves, buffer = trained(make_case()), torch.zeros(1003, 32)
    options = options_for("jsd", **RECOMPUTE)
    (3 * loss_of(leaves, options, weight_grad=buffer).loss).backward()
    assert relative(buffer, 3 * fused(make_case(), options)[1][1].double()) < 1e-6
    loss = loss_of(leaves, options_for("jsd"), weight_grad=buffer).loss
    with pytest.raises(InputError, match=r"multiplied by 3.0 .* strategy = 'recompute'"):
        (3 * loss).backward()


def test_many_windows_and_shards_lose_no_accuracy_in_bfloat16():
    case = make_case(80, 32, dtypes=SINGLES[1])
    errors = []
    for window_rows, shard_columns in ((80, 32), (1, 1)):
        options = options_for("forward_kl", window_rows=window_rows, shard_columns=shard_columns)
        pairs = zip(fused(case, options)[1], oracle(case, options)[1], strict=True)
        errors.append([relative(gradient, reference) for gradient, reference in pairs])
    for one, many in zip(*errors, strict=True):
        assert many < 1.1 * one


@both_strategies
def test_inputs_are_left_alone(layout):
    case = make_case(scale=0.5, softcap=3.0)
    before = [case.student_hidden, case.student_head.weight, case.teacher_head.weight]
    copies = [tensor.clone() for tensor in before]
    fused(case, options_for("jsd", **layout))
    assert all(map(torch.equal, before, copies))
