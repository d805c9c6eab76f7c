"""What the loss is computed from, and the steps that its strategies share.

Shapes: T tokens, N of them labelled, R rows, S columns of a vocabulary shard, Hs and Ht hidden
sizes of student and teacher, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.losses import rows
from toolkit.losses.divergences import Objective
from toolkit.losses.rows import RowKernels, RowResults, Tile
from toolkit.losses.vocabulary import Shards
from toolkit.models.heads import LMHead


@dataclass(frozen=True)
class LossInputs:
    """The checked arguments of the loss.

    Attributes:
        student_hidden: `[T, Hs]`, float64, float32 or bfloat16.
        student_head: the student's head, of the dtype of its hidden states.
        teacher_hidden: `[T, Ht]`.
        teacher_head: the teacher's head, of the dtype of its hidden states.
        labels: `[N]` int64, columns of these heads; with `shards` others lie outside of them.
        token_index: `[N]` int64 ascending, which of the T tokens the labels belong to.
        weights: `[N]` factors of the tokens in the dtype of the statistics, or None.
        objective: what is computed from the logits.
        kernels: the backend of the row kernels.
        shards: of which vocabulary the heads hold a part, or None if they hold all of it.
    """

    student_hidden: Tensor
    student_head: LMHead
    teacher_hidden: Tensor
    teacher_head: LMHead
    labels: Tensor
    token_index: Tensor
    weights: Tensor | None
    objective: Objective
    kernels: RowKernels = rows
    shards: Shards | None = None

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.student_head.vocab_size

    def labelled(self, hidden: Tensor, window: slice = slice(None)) -> Tensor:
        """Return the hidden states `[R, H]` of some of the labelled tokens, not copied if all."""
        if len(self.token_index) == len(hidden):
            return hidden[window]
        return hidden.index_select(0, self.token_index[window])

    def fill(self, tile: Tile, student_hidden: Tensor, teacher_hidden: Tensor) -> None:
        """Write the logits of both models into a tile, from hidden states `[R, H]`."""
        logits_into(tile.student, student_hidden, self.student_head, tile.columns)
        logits_into(tile.teacher, teacher_hidden, self.teacher_head, tile.columns)

    def finish(self, state: Tensor) -> RowResults:
        """Return the results of rows from the states `[R, 8]` of all columns of these heads."""
        if self.shards is not None:
            state = self.shards.merged(state, self.objective.temperature)
        return self.kernels.finish(state, self.objective)

    def add_up(self, part: Tensor) -> None:
        """Add, in place, what the other holders of the vocabulary have of a sum over it."""
        if self.shards is not None:
            self.shards.add_up(part)

    def loss_of(self, sums: Tensor) -> Tensor:
        """Return the loss (scalar, dtype of the statistics) from the sums `[3]`."""
        objective = self.objective
        factors = (objective.kd_factor, objective.ce_factor, objective.z_factor)
        parts = [factor * total for factor, total in zip(factors, sums, strict=True)]
        return torch.stack(parts).sum().to(rows.statistics_dtype(self.student_hidden))


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


def row_sums(results: RowResults, weights: Tensor | None) -> Tensor:
    """Return the sums `[3]` (float64) of KD, CE and squared log-normalizers over the rows."""
    terms = torch.stack([results.sums[:, 0], results.ce, results.log_normalizer.square()])
    if weights is not None:
        terms *= weights
    return terms.sum(1, dtype=torch.float64)
