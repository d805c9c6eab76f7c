"""The row kernels: all of the loss between two tiles of logits and the student's gradient.

Shapes: R rows of a window, S columns of a vocabulary shard.
`RowKernels` is what a backend offers; the functions of this module are the backend in torch ops.
They run per window of rows, for all its tiles in turn: `statistics`, once `finish`, `sums` where
the objective needs them, `gradient`. Kernels check nothing; their callers do.

A row's state is 8 numbers `[R, 8]`, with u = (zt - mt) / tau and v = (zs - ms) / tau:

    mt, sum e^u, ms, sum e^v, sum e^u (u - v), sum e^v (v - u), sum e^(zs - ms), zs of the label

The maxima mt and ms are kept undivided by tau, hence exact, and serve temperature 1 (for CE and
z-loss) too.
The cross terms are centred: logits with a large common offset lose no digits in them.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from toolkit.losses.divergences import (
    Objective,
    expectation,
    kl_from_statistics,
    logit_gradient,
    second_pass_sums,
)
from toolkit.losses.huge_pages import in_huge_pages

LOWEST = -1e30
"""Maximum of an empty state; finite, so that merging it needs no case of its own."""

_BLOCK = {"cpu": 2**18, "cuda": 2**24}
"""Numbers of a tile that are computed at a time: few for a cache, many for a GPU."""
_TEMPORARIES = 10
"""Copies of a block in the dtype of the statistics that exist at a time, at most."""


class Tile(NamedTuple):
    """Logits of a window's rows in one vocabulary shard; the dtypes may differ."""

    student: Tensor
    """`[R, S]`; `gradient` overwrites it."""
    teacher: Tensor
    """`[R, S]`."""
    first_column: int

    @classmethod
    def empty(cls, student: Tensor, teacher: Tensor, rows: int, columns: int) -> "Tile":
        """Return a tile `[rows, columns]` to be filled, with dtypes and device of these tensors."""
        logits, teacher_logits = (like.new_empty(rows, columns) for like in (student, teacher))
        return cls(in_huge_pages(logits), in_huge_pages(teacher_logits), 0)

    @property
    def columns(self) -> slice:
        """Where the tile lies in the vocabulary."""
        return slice(self.first_column, self.first_column + self.student.shape[1])

    def rows(self, span: slice) -> "Tile":
        """Return some of the rows, in the same memory."""
        return Tile(self.student[span], self.teacher[span], self.first_column)

    def shard(self, columns: slice) -> "Tile":
        """Return some of the columns, in the same memory."""
        first = self.first_column + columns.start
        return Tile(self.student[:, columns], self.teacher[:, columns], first)


class RowResults(NamedTuple):
    """What the statistics of whole rows say."""

    constants: Tensor
    """`[R, 5]`: mt, log sum e^u, ms, log sum e^v, log sum e^(zs - ms)."""
    sums: Tensor
    """`[R, 2]`: KD, and the mean of the slope that `logit_gradient` subtracts."""
    ce: Tensor
    """`[R]` cross-entropy."""

    def rows(self, span: slice) -> "RowResults":
        """Return some of the rows, in the same memory."""
        return RowResults(*(part[span] for part in self))

    @property
    def log_normalizer(self) -> Tensor:
        """`[R]` log sum e^zs, which the z-loss squares."""
        return self.constants[:, 2] + self.constants[:, 4]


class RowKernels(Protocol):
    """The four functions of a backend."""

    def statistics(self, tile: Tile, labels: Tensor, objective: Objective, state: Tensor) -> None:
        """Merge a tile into the state `[R, 8]`, in place; labels `[R]` are int64 columns."""

    def finish(self, state: Tensor, objective: Objective) -> RowResults:
        """Return the results of rows whose tiles are all in; `sums` is 0 if a pass is to come."""

    def sums(self, tile: Tile, objective: Objective, results: RowResults) -> None:
        """Add a tile's part to `results.sums`, in place."""

    def gradient(
        self,
        tile: Tile,
        labels: Tensor,
        objective: Objective,
        results: RowResults,
        weights: Tensor | None = None,
    ) -> None:
        """Overwrite the student's logits with dloss/d(hidden W^T + bias).

        `weights` `[R]`, in the dtype of the statistics, multiply the whole gradient of a row.
        """


def empty_state(rows: int, like: Tensor) -> Tensor:
    """Return the state `[rows, 8]` of rows without any column, on the device of `like`.

    Its dtype is float64 for a float64 `like`, else float32.
    """
    dtype = statistics_dtype(like)
    state = torch.zeros(rows, 8, dtype=dtype, device=like.device)
    state[:, 0] = state[:, 2] = LOWEST
    return state


def statistics_dtype(student: Tensor) -> torch.dtype:
    """Return the dtype in which sums over a student's logits are kept."""
    return torch.promote_types(student.dtype, torch.float32)


def merge_states(left: Tensor, right: Tensor, temperature: float) -> Tensor:
    """Return the state `[R, 8]` of the columns of both, which must be disjoint."""
    teacher_max = torch.maximum(left[:, 0], right[:, 0])
    student_max = torch.maximum(left[:, 2], right[:, 2])
    merged = _recentred(left, teacher_max, student_max, temperature)
    merged += _recentred(right, teacher_max, student_max, temperature)
    merged[:, 0], merged[:, 2] = teacher_max, student_max
    return merged


def statistics(tile: Tile, labels: Tensor, objective: Objective, state: Tensor) -> None:
    """Merge a tile into the state; see `RowKernels`."""
    temperature = objective.temperature
    for span in _blocks(tile):
        part = _tile_state(tile.rows(span), labels[span], temperature, state.dtype)
        state[span] = merge_states(state[span], part, temperature)


def finish(state: Tensor, objective: Objective) -> RowResults:
    """Return the results of rows whose tiles are all in; see `RowKernels`."""
    teacher_max, teacher_z, student_max, student_z, forward, reverse, ce_z, label = state.unbind(1)
    constants = torch.stack(
        [teacher_max, teacher_z.log(), student_max, student_z.log(), ce_z.log()], dim=1
    )
    sums = torch.zeros_like(state[:, :2])
    if objective.divergence == "forward_kl":
        sums[:, 0] = kl_from_statistics(forward, teacher_z, student_z)
    elif objective.divergence == "reverse_kl":
        sums[:] = kl_from_statistics(reverse, student_z, teacher_z)[:, None]
    elif objective.divergence == "symmetric_kl":
        sums[:] = kl_from_statistics(reverse, student_z, teacher_z)[:, None]
        sums[:, 0] += kl_from_statistics(forward, teacher_z, student_z)
    return RowResults(constants, sums, (student_max - label) + ce_z.log())


def sums(tile: Tile, objective: Objective, results: RowResults) -> None:
    """Add a tile's part to the sums of the second pass; see `RowKernels`."""
    for span in _blocks(tile):
        block = results.rows(span)
        log_p, log_q = _log_probabilities(tile.rows(span), objective, block)
        block.sums.add_(second_pass_sums(objective, log_p, log_q))


def gradient(
    tile: Tile,
    labels: Tensor,
    objective: Objective,
    results: RowResults,
    weights: Tensor | None = None,
) -> None:
    """Overwrite the student's logits with their gradient; see `RowKernels`."""
    for span in _blocks(tile):
        factors = None if weights is None else weights[span]
        _block_gradient(tile.rows(span), labels[span], objective, results.rows(span), factors)


def workspace_bytes(student: Tensor) -> int:
    """Return the memory that a function of this module takes at most, for such logits."""
    return _TEMPORARIES * _BLOCK[student.device.type] * statistics_dtype(student).itemsize


def _blocks(tile: Tile) -> list[slice]:
    """Cut the rows into blocks, so that temporary tensors stay small."""
    count, columns = tile.student.shape
    step = max(1, _BLOCK[tile.student.device.type] // columns)
    return [slice(start, start + step) for start in range(0, count, step)]


def _block_gradient(
    tile: Tile, labels: Tensor, objective: Objective, results: RowResults, weights: Tensor | None
) -> None:
    log_p, log_q = _log_probabilities(tile, objective, results)
    result = logit_gradient(objective, log_p, log_q, results.sums[:, 1:])
    result *= objective.kd_factor / objective.temperature * objective.scale
    if objective.ce_factor or objective.z_factor:
        _add_softmax_gradient(result, tile, labels, objective, results)
    if weights is not None:
        result *= weights[:, None]
    if objective.softcap is not None:
        result *= 1 - (tile.student.to(result.dtype) / objective.softcap).square_()
    tile.student.copy_(result)


def _tile_state(tile: Tile, labels: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    teacher_max = tile.teacher.amax(1).to(dtype).clamp_min_(LOWEST)
    student_max = tile.student.amax(1).to(dtype).clamp_min_(LOWEST)
    u = _centred(tile.teacher, teacher_max).div_(temperature)
    v = _centred(tile.student, student_max)
    ce_z = v.exp().sum(1)
    v.div_(temperature)
    difference = u - v
    exp_u, exp_v = u.exp_(), v.exp_()
    column, inside = _label_column(tile, labels)
    label = tile.student.gather(1, column)[:, 0].to(dtype).masked_fill_(~inside, 0.0)
    teacher_z, student_z = exp_u.sum(1), exp_v.sum(1)
    forward, reverse = expectation(exp_u, difference), -expectation(exp_v, difference)
    columns = [teacher_max, teacher_z, student_max, student_z, forward, reverse, ce_z, label]
    return torch.stack(columns, dim=1)


def _recentred(
    state: Tensor, teacher_max: Tensor, student_max: Tensor, temperature: float
) -> Tensor:
    """Return the state's sums around other maxima; the maxima themselves are left at 0."""
    old_teacher_max, teacher_z, old_student_max, student_z, forward, reverse, ce_z, label = (
        state.unbind(1)
    )
    teacher_shift = (old_teacher_max - teacher_max) / temperature
    student_shift = (old_student_max - student_max) / temperature
    shift = teacher_shift - student_shift
    keep_p, keep_q = teacher_shift.exp(), student_shift.exp()
    ce_z = ce_z * (old_student_max - student_max).exp()
    forward = keep_p * (forward + teacher_z * shift)
    reverse = keep_q * (reverse - student_z * shift)
    zero = torch.zeros_like(label)
    return torch.stack(
        [zero, keep_p * teacher_z, zero, keep_q * student_z, forward, reverse, ce_z, label], dim=1
    )


def _log_probabilities(
    tile: Tile, objective: Objective, results: RowResults
) -> tuple[Tensor, Tensor]:
    teacher_max, log_teacher_z, student_max, log_student_z, _ = results.constants.unbind(1)
    log_p = _centred(tile.teacher, teacher_max).div_(objective.temperature)
    log_q = _centred(tile.student, student_max).div_(objective.temperature)
    return log_p.sub_(log_teacher_z[:, None]), log_q.sub_(log_student_z[:, None])


def _add_softmax_gradient(
    result: Tensor, tile: Tile, labels: Tensor, objective: Objective, results: RowResults
) -> None:
    """Add the gradient of cross-entropy and z-loss."""
    _, _, student_max, _, log_ce_z = results.constants.unbind(1)
    label_factor = objective.ce_factor * objective.scale
    factor = label_factor + 2 * objective.z_factor * objective.scale * results.log_normalizer
    log_softmax = _centred(tile.student, student_max).sub_(log_ce_z[:, None])
    result += log_softmax.exp_().mul_(factor[:, None])
    # Gathered and scattered, not scatter_add_: the latter is atomic on CUDA.
    column, inside = _label_column(tile, labels)
    label = result.gather(1, column)
    result.scatter_(1, column, torch.where(inside[:, None], label - label_factor, label))


def _centred(logits: Tensor, maximum: Tensor) -> Tensor:
    # The maximum's dtype, float32 at least, prevails over that of a bfloat16 tile.
    return logits - maximum[:, None]


def _label_column(tile: Tile, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each label's column `[R, 1]` in the tile, clamped, and whether it lies there `[R]`."""
    last = tile.student.shape[1] - 1
    column = labels - tile.first_column
    return column.clamp(0, last)[:, None], (column >= 0) & (column <= last)
