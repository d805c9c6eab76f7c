"""Strategy `recompute`: one shard of the vocabulary at a time, for all rows.

Shapes: N labelled tokens, S columns of a shard, H hidden size, V vocabulary.
Forward keeps the statistics of the rows alone; backward computes the logits a second time, shard by
shard, writes the gradient over the student's and multiplies it out. The gradient of a shard of the
head is one matrix product, in the head's own dtype; that of the hidden states is added up in the
dtype of the statistics. Costs 2 (4 with a second pass) more matrix products than `windows`, and
keeps no gradient between forward and backward.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.losses import rows
from toolkit.losses.huge_pages import in_huge_pages
from toolkit.losses.inputs import LossInputs, row_sums, spans
from toolkit.losses.products import add_product
from toolkit.losses.rows import RowResults, Tile
from toolkit.planner.loss_plan import Plan


def run_statistics(inputs: LossInputs, plan: Plan) -> RowResults:
    """Return the results of all rows."""
    objective, kernels = inputs.objective, inputs.kernels
    state = rows.empty_state(len(inputs.labels), inputs.student_hidden)
    hidden = inputs.labelled(inputs.student_hidden)
    for tile in _tiles(inputs, plan, hidden):
        kernels.statistics(tile, inputs.labels, objective, state)
    results = inputs.finish(state)
    if objective.needs_sums:
        for tile in _tiles(inputs, plan, hidden):
            kernels.sums(tile, objective, results)
        inputs.add_up(results.sums)
    return results


def run_gradients(
    inputs: LossInputs,
    plan: Plan,
    results: RowResults,
    weights: Tensor,
    needed: tuple[bool, bool, bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states `[T, H]`, weight and bias that are needed.

    Args:
        inputs: what the loss was computed from.
        plan: the size of the shards.
        results: of `run_statistics`.
        weights: `[N]` factors of the rows, in the dtype of the statistics.
        needed: which gradients.
        weight_grad: `[V, H]` float32, to which the weight's gradient is added instead.
    """
    head, hidden = inputs.student_head, inputs.labelled(inputs.student_hidden)
    total = torch.empty_like(hidden, dtype=weights.dtype) if needed[0] else None
    weight = None
    if needed[1] and weight_grad is None:
        weight = in_huge_pages(torch.empty_like(head.weight))
    bias = torch.empty_like(head.bias) if needed[2] and head.bias is not None else None
    for tile in _tiles(inputs, plan, hidden):
        inputs.kernels.gradient(tile, inputs.labels, inputs.objective, results, weights)
        if total is not None:
            first = tile.first_column == 0
            add_product(total, tile.student, head.weight[tile.columns], first=first)
        if weight is not None:
            torch.mm(tile.student.t(), hidden, out=weight[tile.columns])
        elif needed[1] and weight_grad is not None:
            add_product(weight_grad[tile.columns], tile.student.t(), hidden)
        if bias is not None:
            bias[tile.columns] = tile.student.sum(0, dtype=weights.dtype)
    if total is not None:
        inputs.add_up(total)
    return _scattered(inputs, total), weight, bias


def _scattered(inputs: LossInputs, labelled: Tensor | None) -> Tensor | None:
    if labelled is None:
        return None
    labelled = labelled.to(inputs.student_hidden.dtype)
    if len(labelled) == len(inputs.student_hidden):
        return labelled
    return torch.zeros_like(inputs.student_hidden).index_copy_(0, inputs.token_index, labelled)


def _tiles(inputs: LossInputs, plan: Plan, student_hidden: Tensor) -> Iterator[Tile]:
    """Yield the logits of all rows `[N, H]`, shard by shard, in the same memory."""
    teacher_hidden = inputs.labelled(inputs.teacher_hidden)
    size = len(inputs.labels), plan.shard_columns
    student, teacher, _ = Tile.empty(student_hidden, teacher_hidden, *size)
    for columns in spans(inputs.vocab_size, plan.shard_columns):
        width = columns.stop - columns.start
        tile = Tile(_narrowed(student, width), _narrowed(teacher, width), columns.start)
        inputs.fill(tile, student_hidden, teacher_hidden)
        yield tile


def _narrowed(buffer: Tensor, width: int) -> Tensor:
    """Return the beginning of a buffer `[N, S]` as a dense `[N, width]`."""
    return buffer.view(-1)[: len(buffer) * width].view(len(buffer), width)


class RecomputeFunction(torch.autograd.Function):
    """Forward computes the loss, backward the logits again and the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: LossInputs,
        plan: Plan,
        weight_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and sums `[3]`, the latter without gradient."""
        results = run_statistics(inputs, plan)
        sums = row_sums(results, inputs.weights)
        ctx.save_for_backward(hidden, weight, bias, *results)
        ctx.inputs, ctx.plan, ctx.weight_grad = inputs, plan, weight_grad
        ctx.mark_non_differentiable(sums)
        return inputs.loss_of(sums), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias."""
        hidden, weight, bias, *parts = ctx.saved_tensors
        results = RowResults(*parts)
        head = replace(ctx.inputs.student_head, weight=weight, bias=bias)
        inputs = replace(ctx.inputs, student_hidden=hidden, student_head=head)
        factors = grad_loss.to(results.ce.dtype).expand(len(inputs.labels)).contiguous()
        if inputs.weights is not None:
            factors = factors * inputs.weights
        needed = ctx.needs_input_grad[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = run_gradients(inputs, ctx.plan, results, factors, needed, ctx.weight_grad)
        return *gradients, None, None, None
