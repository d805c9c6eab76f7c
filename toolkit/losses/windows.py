"""Strategy `windows`: the loss in windows of rows, with its gradients at once.

Shapes: T tokens, N of them labelled, R rows of a window, S columns of a shard, H hidden size,
V vocabulary.
A window's logits are computed shard by shard and kept; once the statistics over all V columns are
known, the gradient is written over the student's logits and multiplied out. Full logits `[T, V]`
never exist, and nothing is computed twice. What it takes says
`toolkit.planner.loss_plan.transient_bytes`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.errors import InputError
from toolkit.losses import rows
from toolkit.losses.huge_pages import in_huge_pages
from toolkit.losses.inputs import LossInputs, row_sums, spans
from toolkit.losses.products import add_product
from toolkit.losses.rows import Tile
from toolkit.planner.loss_plan import Plan


class Gradients:
    """Sums over the windows of the gradients that are needed; the others are None."""

    def __init__(
        self,
        inputs: LossInputs,
        plan: Plan,
        needed: tuple[bool, bool, bool],
        weight_grad: Tensor | None,
    ) -> None:
        """Start at zero, or at `weight_grad`; `needed` is of hidden states, weight and bias."""
        head = inputs.student_head
        self._inputs = inputs
        self._head_weight = head.weight
        self._sum_dtype = rows.statistics_dtype(inputs.student_hidden)
        one_window = len(inputs.labels) <= plan.window_rows
        dtype = head.weight.dtype if one_window else self._sum_dtype
        self.hidden = torch.zeros_like(inputs.student_hidden) if needed[0] else None
        self.weight = weight_grad
        self._is_unset = weight_grad is None and len(inputs.labels) > 0
        if self.weight is None and needed[1]:
            self.weight = in_huge_pages(torch.empty_like(head.weight, dtype=dtype))
            if not self._is_unset:
                self.weight.zero_()
        self.bias = None
        if head.bias is not None and needed[2]:
            self.bias = torch.zeros_like(head.bias, dtype=self._sum_dtype)

    def add(self, hidden: Tensor, index: Tensor, gradient: Tensor, shards: list[slice]) -> None:
        """Add a window, given its hidden states `[R, H]`, their tokens and logit gradients."""
        if self.hidden is not None:
            # One product, hence rounded once; a sum over ranks needs more digits.
            dtype = hidden.dtype if self._inputs.shards is None else self._sum_dtype
            total = torch.empty_like(hidden, dtype=dtype)
            add_product(total, gradient, self._head_weight, first=True)
            self._inputs.add_up(total)
            self.hidden.index_copy_(0, index, total.to(hidden.dtype))
        if self.weight is not None:
            for columns in shards:
                part = self.weight[columns]
                add_product(part, gradient[:, columns].t(), hidden, first=self._is_unset)
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=self._sum_dtype)
        self._is_unset = False


def run_windows(
    inputs: LossInputs, plan: Plan, gradients: Gradients | None
) -> tuple[Tensor, Tensor]:
    """Return loss and sums `[3]`, and add up the gradients where they are wanted."""
    sums = torch.zeros(3, dtype=torch.float64, device=inputs.student_hidden.device)
    size = plan.window_rows, inputs.vocab_size
    logits = Tile.empty(inputs.student_hidden, inputs.teacher_hidden, *size)
    shards = spans(inputs.vocab_size, plan.shard_columns)
    for window in spans(len(inputs.labels), plan.window_rows):
        sums += _run_window(inputs, window, logits, shards, gradients)
    return inputs.loss_of(sums), sums


def _run_window(
    inputs: LossInputs,
    window: slice,
    logits: Tile,
    shards: list[slice],
    gradients: Gradients | None,
) -> Tensor:
    kernels, objective, labels = inputs.kernels, inputs.objective, inputs.labels[window]
    weights = None if inputs.weights is None else inputs.weights[window]
    hidden = inputs.labelled(inputs.student_hidden, window)
    teacher_hidden = inputs.labelled(inputs.teacher_hidden, window)
    state = rows.empty_state(len(labels), hidden)
    logits = logits.rows(slice(len(labels)))
    tiles = [logits.shard(columns) for columns in shards]
    for tile in tiles:
        inputs.fill(tile, hidden, teacher_hidden)
        kernels.statistics(tile, labels, objective, state)
    results = inputs.finish(state)
    if objective.needs_sums:
        for tile in tiles:
            kernels.sums(tile, objective, results)
        inputs.add_up(results.sums)
    if gradients is not None:
        for tile in tiles:
            kernels.gradient(tile, labels, objective, results, weights)
        gradients.add(hidden, inputs.token_index[window], logits.student, shards)
    return row_sums(results, weights)


class WindowsFunction(torch.autograd.Function):
    """Forward computes the gradients too; backward only scales them."""

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
        needed = ctx.needs_input_grad[:3]
        ctx.is_accumulated = needed[1] and weight_grad is not None
        if ctx.is_accumulated:
            _refuse_recomputation()
        gradients = None
        if any(needed):
            buffer = weight_grad if needed[1] else None
            gradients = Gradients(inputs, plan, needed, buffer)
        value, sums = run_windows(inputs, plan, gradients)
        if gradients is not None:
            ctx.save_for_backward(
                gradients.hidden,
                None if ctx.is_accumulated else _cast(gradients.weight, weight),
                _cast(gradients.bias, bias),
            )
        ctx.mark_non_differentiable(sums)
        return value, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias."""
        if ctx.is_accumulated:
            _refuse_factor(grad_loss)
        gradients: tuple[Tensor | None, ...] = ctx.saved_tensors
        if grad_loss.is_cuda or grad_loss != 1:  # to look at it would make a GPU wait
            # Never in place: the saved gradients serve again under retain_graph.
            gradients = tuple(saved if saved is None else saved * grad_loss for saved in gradients)
        return *gradients, None, None, None


def _cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)


def _refuse_recomputation() -> None:
    """Refuse a forward inside of a backward: `weight_grad` got its share in the first forward."""
    if torch._C._current_graph_task_id() != -1:
        raise InputError(
            "weight_grad with strategy = 'windows' is added to in forward, which activation"
            " checkpointing runs twice: use strategy = 'recompute'"
        )


def _refuse_factor(grad_loss: Tensor) -> None:
    if float(grad_loss) != 1:
        raise InputError(
            f"the loss is multiplied by {float(grad_loss)} before backward, but weight_grad got its"
            " gradient in forward already: put the factor into num_tokens, or use strategy ="
            " 'recompute'"
        )
