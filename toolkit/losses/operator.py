"""The loss as an operator of torch, for `torch.compile` of what surrounds it.

Shapes: T tokens, Hs and Ht hidden sizes of student and teacher, V vocabulary.
The compiler sees one operator with known shapes; inside of it the loss runs as ever. It returns the
gradients along with the loss, whatever the strategy, and backward scales them.
"""

import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from toolkit.losses.options import LossOptions
from toolkit.losses.rows import statistics_dtype
from toolkit.models.heads import LMHead

_OPTIONS = tuple(field.name for field in fields(LossOptions))


def call_operator(
    student_hidden: Tensor,
    student_head: LMHead,
    teacher_hidden: Tensor,
    teacher_head: LMHead,
    labels: Tensor,
    options: LossOptions,
    weights: Tensor | None,
    num_tokens: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the sums `[4]` (float64) of KD, CE, Z and labelled tokens.

    Arguments are those of `toolkit.losses.distillation_loss`.
    """
    leaves = student_hidden, student_head.weight, student_head.bias
    needed = [
        leaf is not None and leaf.requires_grad and torch.is_grad_enabled() for leaf in leaves
    ]
    if not (num_tokens is None or isinstance(num_tokens, Tensor)):
        num_tokens = torch.tensor(num_tokens, dtype=torch.float64)
    # An operator takes numbers and text alone.
    text = ", ".join(f"{name!r}: {getattr(options, name)!r}" for name in _OPTIONS)
    value, sums, *_ = _operator(
        *leaves,
        teacher_hidden,
        teacher_head.weight,
        teacher_head.bias,
        labels,
        weights,
        num_tokens,
        [student_head.scale, student_head.softcap or 0.0],
        [teacher_head.scale, teacher_head.softcap or 0.0],
        "{" + text + "}",
        needed,
    )
    return value, sums


@torch.library.custom_op("disaggkd::distillation_loss", mutates_args=())
def _operator(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    num_tokens: Tensor | None,
    student_contract: Sequence[float],
    teacher_contract: Sequence[float],
    options: str,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from toolkit.losses.distillation import distillation_loss  # which calls this operator

    leaves = [
        None if leaf is None else leaf.detach().requires_grad_(need)
        for leaf, need in zip((student_hidden, student_weight, student_bias), needed, strict=True)
    ]
    hidden, weight, bias = leaves
    assert hidden is not None and weight is not None
    with torch.enable_grad():
        loss, kd, ce, z, count = distillation_loss(
            hidden,
            LMHead(weight, bias, student_contract[0], student_contract[1] or None),
            teacher_hidden,
            LMHead(teacher_weight, teacher_bias, teacher_contract[0], teacher_contract[1] or None),
            labels,
            LossOptions(**ast.literal_eval(options)),
            weights=weights,
            num_tokens=num_tokens,
        )
    if any(needed):
        loss.backward()  # type: ignore[no-untyped-call]
    hidden_grad, weight_grad, bias_grad = (  # operators return no tensor twice, and never None
        student_hidden.new_empty(0) if leaf is None or leaf.grad is None else leaf.grad
        for leaf in leaves
    )
    sums = torch.stack([kd, ce, z, kd.new_tensor(count)])
    return loss.detach(), sums, hidden_grad, weight_grad, bias_grad


@_operator.register_fake
def _shapes(
    student_hidden: Tensor, student_weight: Tensor, student_bias: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    *_, needed = others
    leaves = zip((student_hidden, student_weight, student_bias), needed, strict=True)
    return (
        student_hidden.new_empty((), dtype=statistics_dtype(student_hidden)),
        student_hidden.new_empty(4, dtype=torch.float64),
        *(
            student_hidden.new_empty(0) if leaf is None or not need else torch.empty_like(leaf)
            for leaf, need in leaves
        ),
    )


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.num_inputs, ctx.needed = len(inputs), inputs[-1]


def _backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    gradients = [
        gradient * grad_loss if need else None
        for gradient, need in zip(ctx.saved_tensors, ctx.needed, strict=True)
    ]
    return *gradients, *[None] * (ctx.num_inputs - len(gradients))


_operator.register_autograd(_backward, setup_context=_keep_gradients)
