"""The front door of the loss: checks what it is given, plans, then computes.

Shapes: T tokens, Hs and Ht hidden sizes of student and teacher, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import InputError
from toolkit.losses import rows
from toolkit.losses.backends import row_kernels
from toolkit.losses.checks import (
    check_models,
    check_weight_grad,
    check_weights,
    labelled_tokens,
)
from toolkit.losses.divergences import Objective
from toolkit.losses.inputs import LossInputs
from toolkit.losses.operator import call_operator
from toolkit.losses.options import LossOptions
from toolkit.losses.products import adds_unrounded
from toolkit.losses.recompute import RecomputeFunction
from toolkit.losses.rows import statistics_dtype
from toolkit.losses.vocabulary import Shards
from toolkit.losses.windows import WindowsFunction
from toolkit.models.heads import LMHead
from toolkit.planner.loss_plan import Plan, Sizes, make_plan

_Function = TypeVar("_Function", bound=Callable[..., object])


class LossSums(NamedTuple):
    """The loss, and the sums over the labelled tokens that it is made of.

    The sums count every token by its weight, but hold no weight of a term and no temperature
    squared; they carry no gradient.
    """

    loss: Tensor
    """Scalar, differentiable, float32 (float64 for a float64 student)."""
    kd: Tensor
    """Sum of KD."""
    ce: Tensor
    """Sum of cross-entropies."""
    z: Tensor
    """Sum of squared log sum exp of the student's logits."""
    num_tokens: int | Tensor
    """Labelled tokens of this call, whatever the loss was divided by; a tensor where
    `torch.compile` runs the loss."""


def distillation_loss(
    student_hidden: Tensor,
    student_head: LMHead,
    teacher_hidden: Tensor,
    teacher_head: LMHead,
    labels: Tensor,
    options: LossOptions,
    *,
    weights: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    weight_grad: Tensor | None = None,
    vocab_group: dist.ProcessGroup | None = None,
) -> LossSums:
    """Return the distillation loss of a batch, exact over the whole vocabulary.

    Gradients flow to the student's hidden states and to the weight and bias of its head, where
    these require them; never to the teacher. Under autocast, hidden states and heads are cast to
    its dtype, as linear layers do. `torch.compile` sees one operator, which computes the gradients
    along with the loss, whatever the strategy; with weight_grad or vocab_group the loss runs
    between two graphs.

    Args:
        student_hidden: `[T, Hs]`, float64, float32 or bfloat16, the dtype of the head's weight.
        student_head: weight `[V, Hs]`.
        teacher_hidden: `[T, Ht]`, likewise; the dtype may differ from the student's.
        teacher_head: weight `[V, Ht]`.
        labels: `[T]` int64, the token to predict at each position, or `options.ignore_index`.
        options: which loss.
        weights: `[T]`, any floating dtype, factors of the tokens' losses; constants, by default 1.
        num_tokens: what the loss is divided by, for a mean over several calls or processes; by
            default the labelled tokens of this call, whatever their weights.
        weight_grad: `[V, Hs]` float32 (float64 for a float64 student), to which the gradient of
            the head's weight is added; autograd then gets none for it. Strategy `windows` adds in
            forward already: backward must then begin at the loss itself.
        vocab_group: the ranks that share the vocabulary. Each has the same tokens, labels and
            options, and of both heads its own rows, in the order of ranks, at least one. Loss,
            sums and the gradient of the hidden states are then those of the whole vocabulary, on
            every rank: backward must not add them up again. The heads' gradients are each rank's.

    Returns:
        The loss and its sums; all 0 if no token is labelled.

    Raises:
        InputError: shapes, dtypes, vocabularies, labels or weights do not fit, num_tokens is not
            positive, or the memory budget is too small.
    """
    student_hidden, student_head = _autocast(student_hidden, student_head)
    teacher_hidden, teacher_head = _autocast(teacher_hidden, teacher_head)
    models = student_hidden, student_head, teacher_hidden, teacher_head
    if torch.compiler.is_compiling() and weight_grad is None and vocab_group is None:
        value, sums = call_operator(*models, labels, options, weights, num_tokens)
        return LossSums(value, *sums.unbind())
    return _loss(*models, labels, options, weights, num_tokens, weight_grad, vocab_group)


def _uncompiled(function: _Function) -> _Function:
    """Keep `torch.compile` out, and the types that its own decorator loses."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


@_uncompiled
def _loss(
    student_hidden: Tensor,
    student_head: LMHead,
    teacher_hidden: Tensor,
    teacher_head: LMHead,
    labels: Tensor,
    options: LossOptions,
    weights: Tensor | None,
    num_tokens: float | Tensor | None,
    weight_grad: Tensor | None,
    vocab_group: dist.ProcessGroup | None,
) -> LossSums:
    check_models(student_hidden, student_head, teacher_hidden, teacher_head)
    tokens, vocab_size = len(student_hidden), student_head.vocab_size
    shards = None if vocab_group is None else Shards.agreed(vocab_group, vocab_size, labels)
    token_index = labelled_tokens(
        labels, tokens, shards.vocab_size if shards else vocab_size, options.ignore_index
    )
    check_weights(weights, tokens)
    check_weight_grad(weight_grad, student_head.weight)
    count = len(token_index)
    divisor = float(count if num_tokens is None else num_tokens)
    if count and not divisor > 0:
        raise InputError(
            f"num_tokens = {num_tokens} with {count} labelled tokens in this call: give the"
            " labelled tokens of all calls that share the mean"
        )
    dtype = statistics_dtype(student_hidden)
    inputs = LossInputs(
        student_hidden=student_hidden,
        student_head=student_head,
        teacher_hidden=teacher_hidden,
        teacher_head=teacher_head,
        labels=labels[token_index] - (shards.first_column if shards else 0),
        token_index=token_index,
        weights=None if weights is None else weights[token_index].to(dtype),
        objective=_objective(options, student_head, divisor if count else 1.0),
        kernels=row_kernels(options.backend, student_hidden.device.type),
        shards=shards,
    )
    value, (kd, ce, z) = _compute(inputs, _plan(inputs, options, weight_grad), weight_grad)
    return LossSums(value, kd, ce, z, count)


def _autocast(hidden: Tensor, head: LMHead) -> tuple[Tensor, LMHead]:
    """Cast to the dtype of autocast where that is on."""
    if not torch.is_autocast_enabled(hidden.device.type):
        return hidden, head
    dtype = torch.get_autocast_dtype(hidden.device.type)
    bias = None if head.bias is None else head.bias.to(dtype)
    return hidden.to(dtype), replace(head, weight=head.weight.to(dtype), bias=bias)


def _compute(inputs: LossInputs, plan: Plan, weight_grad: Tensor | None) -> tuple[Tensor, Tensor]:
    head = inputs.student_head
    leaves: list[Tensor | None] = [inputs.student_hidden, head.weight, head.bias]
    if not torch.is_grad_enabled():  # else the functions would see that gradients are needed
        leaves = [None if leaf is None else leaf.detach() for leaf in leaves]
    function = WindowsFunction if plan.strategy == "windows" else RecomputeFunction
    with torch.autocast(inputs.student_hidden.device.type, enabled=False):
        return function.apply(*leaves, inputs, plan, weight_grad)  # type: ignore[no-any-return, no-untyped-call]


def _plan(inputs: LossInputs, options: LossOptions, weight_grad: Tensor | None) -> Plan:
    student, teacher = inputs.student_hidden, inputs.teacher_hidden
    weight = inputs.student_head.weight
    sizes = Sizes(
        num_tokens=len(student),
        num_rows=len(inputs.labels),
        # Of the largest shard, for ranks with different windows would wait for each other.
        vocab_size=max(inputs.shards.sizes) if inputs.shards else inputs.vocab_size,
        hidden_sizes=(student.shape[1], teacher.shape[1]),
        itemsizes=(student.itemsize, teacher.itemsize),
        sum_itemsize=statistics_dtype(student).itemsize,
        rounds_products=not adds_unrounded(student),
        own_weight_grad=weight_grad is None and weight.requires_grad and torch.is_grad_enabled(),
        workspace_bytes=rows.workspace_bytes(student) if inputs.kernels is rows else 0,
    )
    return make_plan(
        sizes,
        strategy=options.strategy,
        budget_mib=options.memory_budget_mib,
        window_rows=options.window_rows,
        shard_columns=options.shard_columns,
    )


def _objective(options: LossOptions, student_head: LMHead, divisor: float) -> Objective:
    factor = options.temperature**2 if options.tau_squared else 1.0
    return Objective(
        divergence=options.divergence,
        beta=options.beta,
        skew=options.skew,
        temperature=options.temperature,
        kd_factor=options.kd_weight * factor / divisor,
        ce_factor=options.ce_weight / divisor,
        z_factor=options.z_loss / divisor,
        scale=student_head.scale,
        softcap=student_head.softcap,
    )
