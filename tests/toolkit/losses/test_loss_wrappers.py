"""The loss inside of what training loops wrap around a model."""

from dataclasses import replace

import pytest
import torch
from loss_cases import RECOMPUTE, fused, loss_of, make_case, options_for, relative, with_leaves
from loss_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from toolkit.errors import InputError
from toolkit.losses import LMHead

LAYOUTS = {"windows": {"window_rows": 7}, "recompute": RECOMPUTE}
both_strategies = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
BF16 = torch.bfloat16


class Student(nn.Module):
    """A body of one layer, a head, and the loss of a case in one forward."""

    def __init__(self, case, layout):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1003, bias=False)
        self.options = options_for("jsd", **layout)
        self.teacher = case

    def forward(self, hidden, labels, teacher_hidden, num_tokens):
        case = replace(
            self.teacher,
            student_hidden=torch.tanh(self.body(hidden)),
            student_head=LMHead(self.head.weight),
            teacher_hidden=teacher_hidden,
            labels=labels,
        )
        return loss_of(case, self.options, num_tokens=num_tokens).loss


def gradients_of(model, case, num_tokens=None):
    model(case.student_hidden, case.labels, case.teacher_hidden, num_tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(actual[name], gradient.double()) < tolerance, name


@pytest.fixture
def compiler():
    """Forget what is compiled before and after."""
    torch.compiler.reset()
    yield torch.compile
    torch.compiler.reset()


@both_strategies
@pytest.mark.parametrize("hidden_dtype", [BF16, torch.float32], ids=str)
def test_autocast_casts_as_linear_layers_do(layout, hidden_dtype):
    case, options = make_case(weighted=True), options_for("jsd", **layout)
    head = case.student_head
    narrow = replace(
        case,
        student_hidden=case.student_hidden.to(BF16),
        student_head=replace(head, weight=head.weight.to(BF16), bias=head.bias.to(BF16)),
        teacher_hidden=case.teacher_hidden.to(BF16),
        teacher_head=LMHead(case.teacher_head.weight.to(BF16), case.teacher_head.bias.to(BF16)),
    )
    expected, expected_gradients = fused(narrow, options)
    mixed = replace(case, student_hidden=case.student_hidden.to(hidden_dtype))
    leaves = with_leaves(mixed, hidden=True, weight=True, bias=True)
    with torch.autocast("cpu", BF16):
        sums = loss_of(leaves, options)
        sums.loss.backward()
    assert sums == expected
    head = leaves.student_head
    gradients = [leaf.grad for leaf in (leaves.student_hidden, head.weight, head.bias)]
    assert [g.dtype for g in gradients] == [hidden_dtype, torch.float32, torch.float32]
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(gradient, reference.to(gradient.dtype))


@both_strategies
@pytest.mark.parametrize("num_tokens", [None, 40.0, torch.tensor(40)], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model_computes_the_same_in_one_graph(compiler, layout, num_tokens, backend):
    case = make_case(weighted=True, scale=0.7, softcap=30.0)
    expected = gradients_of(Student(case, layout), case, num_tokens)
    model = Student(case, layout)
    compiled = compiler(model, backend=backend, fullgraph=True)
    loss = compiled(case.student_hidden, case.labels, case.teacher_hidden, num_tokens)
    (3 * loss).backward()
    actual = {name: parameter.grad / 3 for name, parameter in model.named_parameters()}
    assert_same(actual, expected, 1e-6)


@both_strategies
def test_compiled_loss_returns_the_same_sums(compiler, layout):
    case, options = make_case(), options_for("jsd", **layout)
    compiled = compiler(loss_of, backend="aot_eager", fullgraph=True)
    assert_equal_sums(compiled(case, options), loss_of(case, options))
    leaves = with_leaves(case, hidden=True, bias=True)
    expected, gradients = fused(case, options)
    with torch.no_grad():
        assert not compiled(leaves, options).loss.requires_grad
    with torch.autocast("cpu", BF16):
        assert_equal_sums(compiled(leaves, options), loss_of(leaves, options))
    sums = compiled(leaves, options)
    sums.loss.backward()
    assert_equal_sums(sums, expected)
    assert torch.equal(leaves.student_hidden.grad, gradients[0])
    assert torch.equal(leaves.student_head.bias.grad, gradients[2])
    assert leaves.student_head.weight.grad is None


def assert_equal_sums(actual, expected):
    for part, reference in zip(actual, expected, strict=True):
        assert torch.as_tensor(part).item() == torch.as_tensor(reference).item()


def test_operator_keeps_the_rules_of_torch():
    case = make_case(tokens=6, vocab=50, hidden=(4, 6))
    leaves = [
        part.requires_grad_()
        for part in (case.student_hidden, case.student_head.weight, case.student_head.bias)
    ]
    teacher = case.teacher_hidden, case.teacher_head.weight, case.teacher_head.bias
    contract, options = [1.0, 0.0], "{'divergence': 'jsd'}"
    needed = [True, True, True]
    torch.library.opcheck(
        torch.ops.disaggkd.distillation_loss.default,
        (*leaves, *teacher, case.labels, None, None, contract, contract, options, needed),
    )


def test_compiled_model_adds_to_a_given_buffer(compiler):
    case, options = make_case(), options_for("jsd")
    expected = fused(case, options)[1][1]
    leaves = with_leaves(case, weight=True)
    buffer = torch.zeros_like(expected)
    compiled = compiler(lambda: 2 * loss_of(leaves, options, weight_grad=buffer).loss / 2)
    compiled().backward()
    assert torch.equal(buffer, expected)


@both_strategies
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_around_it(layout, use_reentrant):
    case = make_case()
    expected = gradients_of(Student(case, layout), case)
    model = Student(case, layout)
    hidden = case.student_hidden.clone().requires_grad_()  # reentrant needs one that requires it
    checkpoint(
        model, hidden, case.labels, case.teacher_hidden, None, use_reentrant=use_reentrant
    ).backward()
    actual = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_around_a_given_buffer(use_reentrant):
    case = make_case()

    def run(layout, buffer):
        leaves = with_leaves(case, hidden=True, weight=True)

        def loss(hidden):
            options = options_for("jsd", **layout)
            return loss_of(replace(leaves, student_hidden=hidden), options, weight_grad=buffer).loss

        checkpoint(loss, leaves.student_hidden, use_reentrant=use_reentrant).backward()

    buffer = torch.zeros(1003, 32)
    run(LAYOUTS["recompute"], buffer)
    assert relative(buffer, fused(case, options_for("jsd"))[1][1].double()) < 1e-6
    with pytest.raises(InputError, match=r"checkpointing runs twice: use strategy = 'recompute'"):
        run(LAYOUTS["windows"], torch.zeros(1003, 32))


def gradients_on_rank(rank):
    """Return the averaged gradients of a rank's half of the tokens, whole, of every wrapper."""
    case = make_case()
    part = case.rows(slice(0, 10) if rank == 0 else slice(10, 23))
    num_tokens = int((case.labels != -100).sum())
    found = {}
    for layout in LAYOUTS:
        for wrapper in ("ddp", "fsdp2"):
            model = Student(case, LAYOUTS[layout])
            if wrapper == "fsdp2":
                fully_shard(model.body)
            wrapped = DistributedDataParallel(model) if wrapper == "ddp" else fully_shard(model)
            gradients_of(wrapped, part, num_tokens / 2)  # the wrappers average over two ranks
            found[layout, wrapper] = {
                name: parameter.grad.full_tensor() if wrapper == "fsdp2" else parameter.grad
                for name, parameter in model.named_parameters()
            }
    return found


def test_data_parallel_wrappers_average_to_the_gradient_of_all_tokens(tmp_path):
    case = make_case()
    for found in run_ranks(gradients_on_rank, 2, tmp_path):
        assert len(found) == 4
        for (layout, _), actual in found.items():
            assert_same(actual, gradients_of(Student(case, LAYOUTS[layout]), case), 1e-5)
