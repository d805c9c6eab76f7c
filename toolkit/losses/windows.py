"""The loss in windows of rows and shards of the vocabulary, with its gradients.

Shapes: T tokens, N of them labelled, R rows of a window, S columns of a shard, H hidden size,
V vocabulary.
A window's logits are computed shard by shard and kept; once the statistics over all V columns are
known, the gradient is written over the student's logits and multiplied out. Full logits `[T, V]`
never exist, and nothing is computed twice. Transient memory: two tiles of R x V, a few R x S of
the row kernels in torch ops, and, for bfloat16 with more than one window, dW in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from toolkit.losses import rows
from toolkit.losses.divergences import Objective
from toolkit.losses.rows import RowKernels, RowResults, Tile
from toolkit.models.heads import LMHead


def spans(size: int, step: int) -> list[slice]:
    """Cut range(size) into slices of `step`, the last one shorter."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def logits_into(out: Tensor, hidden: Tensor, head: LMHead, columns: slice) -> None:
    """Write the head's logits of some columns into `out` `[R, S]`; hidden is `[R, H]`."""
    weight = head.weight[columns].t()
    if head.bias is None:
        torch.mm(hidden, weight, out=out)
    else:
        torch.addmm(head.bias[columns], hidden, weight, out=out)
    if head.softcap is not None:
        out.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap)
    elif head.scale != 1.0:
        out.mul_(head.scale)


@dataclass(frozen=True)
class WindowedLoss:
    """The inputs of the loss; `compute` gives its value.

    Attributes:
        student_hidden: `[T, H]`, float64, float32 or bfloat16.
        student_head: the student's head, of the dtype of its hidden states.
        teacher_hidden: `[T, H of the teacher]`.
        teacher_head: the teacher's head, of the dtype of its hidden states.
        labels: `[N]` int64 in [0, V).
        token_index: `[N]` int64, which of the T tokens the labels belong to.
        weights: `[N]` factors of the tokens in the dtype of the statistics, or None.
        objective: what is computed from the logits.
        window_rows: R.
        shard_columns: S.
        kernels: the backend of the row kernels.
    """

    student_hidden: Tensor
    student_head: LMHead
    teacher_hidden: Tensor
    teacher_head: LMHead
    labels: Tensor
    token_index: Tensor
    weights: Tensor | None
    objective: Objective
    window_rows: int
    shard_columns: int
    kernels: RowKernels = rows

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the loss (scalar, differentiable) and the sums `[3]` of KD, CE and z (float64)."""
        head = self.student_head
        if not torch.is_grad_enabled():
            return self.run(None)
        return _Function.apply(  # type: ignore[no-untyped-call, no-any-return]
            self.student_hidden, head.weight, head.bias, self
        )

    def run(self, gradients: "Gradients | None") -> tuple[Tensor, Tensor]:
        """Compute the loss and the sums, and add up the gradients where they are wanted."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.student_hidden.device)
        buffers = self._buffers()
        for window in spans(len(self.labels), self.window_rows):
            sums += self._run_window(window, buffers, gradients)
        factors = (self.objective.kd_factor, self.objective.ce_factor, self.objective.z_factor)
        loss = torch.stack([factor * total for factor, total in zip(factors, sums, strict=True)])
        return loss.sum().to(rows.statistics_dtype(self.student_hidden)), sums

    def _run_window(
        self, window: slice, buffers: list[Tile], gradients: "Gradients | None"
    ) -> Tensor:
        index, labels = self.token_index[window], self.labels[window]
        weights = None if self.weights is None else self.weights[window]
        hidden = self.student_hidden.index_select(0, index)
        state = rows.empty_state(len(index), hidden)
        tiles = []
        for tile in self._tiles(hidden, self.teacher_hidden.index_select(0, index), buffers):
            self.kernels.statistics(tile, labels, self.objective, state)
            tiles.append(tile)
        results = self.kernels.finish(state, self.objective)
        if self.objective.needs_sums:
            for tile in tiles:
                self.kernels.sums(tile, self.objective, results)
        if gradients is not None:
            for tile in tiles:
                self.kernels.gradient(tile, labels, self.objective, results, weights)
            gradients.add(hidden, index, tiles)
        return _row_sums(results, weights)

    def _buffers(self) -> list[Tile]:
        window_rows = min(self.window_rows, len(self.labels))
        return [
            Tile(
                self.student_hidden.new_empty(window_rows, columns.stop - columns.start),
                self.teacher_hidden.new_empty(window_rows, columns.stop - columns.start),
                columns.start,
            )
            for columns in spans(self.student_head.vocab_size, self.shard_columns)
        ]

    def _tiles(
        self, student_hidden: Tensor, teacher_hidden: Tensor, buffers: list[Tile]
    ) -> Iterator[Tile]:
        count = len(student_hidden)
        for buffer in buffers:
            tile = Tile(buffer.student[:count], buffer.teacher[:count], buffer.first_column)
            logits_into(tile.student, student_hidden, self.student_head, tile.columns)
            logits_into(tile.teacher, teacher_hidden, self.teacher_head, tile.columns)
            yield tile


class Gradients:
    """Sums over the windows of the gradients that are needed; the others are None."""

    def __init__(self, loss: WindowedLoss, needed: tuple[bool, bool, bool]) -> None:
        """Start at zero; `needed` says so of hidden states, weight and bias."""
        head = loss.student_head
        self._weight = head.weight
        self._sum_dtype = rows.statistics_dtype(loss.student_hidden)
        one_window = len(loss.labels) <= loss.window_rows
        dtype = head.weight.dtype if one_window else self._sum_dtype
        self.hidden = torch.zeros_like(loss.student_hidden) if needed[0] else None
        self.weight = torch.zeros_like(head.weight, dtype=dtype) if needed[1] else None
        self.bias = (
            torch.zeros_like(head.bias, dtype=self._sum_dtype)
            if head.bias is not None and needed[2]
            else None
        )

    def add(self, hidden: Tensor, index: Tensor, tiles: list[Tile]) -> None:
        """Add a window, given its hidden states `[R, H]`, their tokens and logit gradients."""
        if self.hidden is not None:
            total = torch.zeros_like(hidden, dtype=self._sum_dtype)
            for tile in tiles:
                _add_product(total, tile.student, self._weight[tile.columns])
            self.hidden.index_copy_(0, index, total.to(hidden.dtype))
        for tile in tiles:
            if self.weight is not None:
                _add_product(self.weight[tile.columns], tile.student.t(), hidden)
            if self.bias is not None:
                self.bias[tile.columns] += tile.student.sum(0, dtype=self._sum_dtype)


def _row_sums(results: RowResults, weights: Tensor | None) -> Tensor:
    """Return the sums `[3]` of KD, CE and squared log-normalizers over the rows."""
    terms = torch.stack([results.sums[:, 0], results.ce, results.log_normalizer.square()])
    if weights is not None:
        terms *= weights
    return terms.sum(1, dtype=torch.float64)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: WindowedLoss
    ) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad[:3]
        gradients = Gradients(loss, needed) if any(needed) else None
        value, sums = loss.run(gradients)
        if gradients is not None:
            ctx.save_for_backward(
                gradients.hidden,
                None if gradients.weight is None else gradients.weight.to(weight.dtype),
                None if gradients.bias is None or bias is None else gradients.bias.to(bias.dtype),
            )
        ctx.mark_non_differentiable(sums)
        return value, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Never in place: the saved gradients serve again under retain_graph.
        scaled = [None if saved is None else saved * grad_loss for saved in ctx.saved_tensors]
        return *scaled, None
