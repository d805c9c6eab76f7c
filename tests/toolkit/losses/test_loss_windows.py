"""The windowed loss as an autograd function: what it computes, keeps and repeats."""

from dataclasses import replace

import pytest
import torch
from loss_cases import (
    DIVERGENCES,
    fused,
    loss_of,
    make_case,
    options_for,
    oracle,
    relative,
    with_leaves,
)
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.losses import rows

SINGLES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_calls_with_a_common_count_sum_to_one_call(divergence):
    case, options = make_case(weighted=True), options_for(divergence)
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


@pytest.mark.parametrize("dtypes", SINGLES, ids=str)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_repeats_bit_for_bit(divergence, dtypes):
    case, options = make_case(dtypes=dtypes), options_for(divergence)
    first, first_gradients = fused(case, options)
    second, second_gradients = fused(case, options)
    assert first.loss == second.loss
    assert all(map(torch.equal, first_gradients, second_gradients))


@pytest.mark.parametrize("needed", ["hidden", "weight", "bias"])
def test_computes_only_gradients_that_are_needed(needed):
    case, options = make_case(), options_for("jsd")
    leaves = with_leaves(case, **{needed: True})
    loss_of(leaves, options).loss.backward()
    head = leaves.student_head
    found = {"hidden": leaves.student_hidden, "weight": head.weight, "bias": head.bias}
    assert [name for name, leaf in found.items() if leaf.grad is not None] == [needed]
    every = dict(zip(found, fused(case, options)[1], strict=True))
    assert torch.equal(found[needed].grad, every[needed])


def test_frozen_head_has_no_gradient_buffer():
    # So wide a head that its gradient would be the largest tensor by far.
    case = make_case(8, 1003, hidden=(64, 64))
    frozen, trained = with_leaves(case, hidden=True), with_leaves(case, hidden=True, weight=True)
    options = options_for("forward_kl", window_rows=2, shard_columns=100)
    largest = []
    for leaves in (frozen, trained):
        with LargestTensor() as mode:
            loss_of(leaves, options)
        largest.append(mode.elements)
    assert largest == [64 * 100, 64 * 1003]


@pytest.mark.parametrize(("grad_enabled", "trained"), [(False, True), (True, False)])
def test_without_gradients_only_the_statistics(monkeypatch, grad_enabled, trained):
    case, options = make_case(), options_for("reverse_kl")
    expected = fused(case, options)[0]
    monkeypatch.delattr(rows, "gradient")
    leaves = with_leaves(case, hidden=trained, weight=trained, bias=trained)
    with torch.set_grad_enabled(grad_enabled):
        sums = loss_of(leaves, options)
    assert not sums.loss.requires_grad
    assert sums == expected


def test_sums_carry_no_gradient():
    sums = loss_of(with_leaves(make_case(), hidden=True), options_for("jsd"))
    assert sums.loss.requires_grad
    assert not any(total.requires_grad for total in (sums.kd, sums.ce, sums.z))


def test_backward_scales_and_repeats():
    case, options = make_case(), options_for("jsd")
    leaves = with_leaves(case, hidden=True, weight=True, bias=True)
    inputs = (leaves.student_hidden, leaves.student_head.weight, leaves.student_head.bias)
    loss = loss_of(leaves, options).loss
    tripled = torch.autograd.grad(3 * loss, inputs, retain_graph=True)
    halved = torch.autograd.grad(loss / 2, inputs, retain_graph=True)
    once = torch.autograd.grad(loss, inputs)
    for three, half, one, reference in zip(
        tripled, halved, once, oracle(case, options)[1], strict=True
    ):
        assert torch.equal(three, 3 * one)
        assert torch.equal(half, one / 2)
        assert relative(one, reference) < 1e-6


def test_second_derivatives_are_refused():
    leaves = with_leaves(make_case(), hidden=True)
    loss = loss_of(leaves, options_for("jsd")).loss
    (gradient,) = torch.autograd.grad(loss.square(), leaves.student_hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_gradients_pass_on_to_what_made_the_hidden_states():
    case, options = make_case(), options_for("forward_kl")
    body = torch.eye(32).requires_grad_()
    loss_of(replace(case, student_hidden=case.student_hidden @ body), options).loss.backward()
    hidden_gradient = oracle(case, options)[1][0]
    assert relative(body.grad, case.student_hidden.double().T @ hidden_gradient) < 1e-6


def test_many_windows_and_shards_lose_no_accuracy_in_bfloat16():
    case = make_case(80, 32, dtypes=SINGLES[1])
    errors = []
    for window_rows, shard_columns in ((80, 32), (1, 1)):
        options = options_for("forward_kl", window_rows=window_rows, shard_columns=shard_columns)
        pairs = zip(fused(case, options)[1], oracle(case, options)[1], strict=True)
        errors.append([relative(gradient, reference) for gradient, reference in pairs])
    for one, many in zip(*errors, strict=True):
        assert many < 1.1 * one


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_full_logits_never_exist(divergence):
    tokens, vocab, window_rows = 64, 1003, 8
    case = make_case(tokens, vocab, hidden=(4, 4), dtypes=SINGLES[1])
    leaves = with_leaves(case, hidden=True, weight=True, bias=True)
    options = options_for(divergence, window_rows=window_rows, shard_columns=2000)
    with LargestTensor() as mode:
        loss_of(leaves, options).loss.backward()
    assert mode.elements == window_rows * vocab


def test_windows_share_the_buffers_of_their_logits(monkeypatch):
    made = []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args: made.append(args[1:]) or new_empty(*args)
    )
    loss_of(make_case(), options_for("jsd", window_rows=2, shard_columns=502))
    assert sorted(made) == [(2, 501)] * 2 + [(2, 502)] * 2


def test_weights_are_left_alone():
    case = make_case(scale=0.5, softcap=3.0)
    before = [case.student_hidden, case.student_head.weight, case.teacher_head.weight]
    copies = [tensor.clone() for tensor in before]
    fused(case, options_for("jsd"))
    assert all(map(torch.equal, before, copies))
