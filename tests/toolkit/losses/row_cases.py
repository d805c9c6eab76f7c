"""Tiles of logits for the tests of the row kernels, and a window's results from them."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.losses import rows
from toolkit.losses.divergences import Objective
from toolkit.losses.rows import RowKernels, RowResults, Tile


@dataclass(frozen=True)
class RowCase:
    """A window of logits `[R, V]` and what is wanted of it."""

    student: Tensor
    teacher: Tensor
    labels: Tensor
    objective: Objective
    weights: Tensor | None = None
    cuts: list[int] = field(default_factory=list)

    def in_float64(self) -> "RowCase":
        weights = None if self.weights is None else self.weights.double()
        return replace(
            self, student=self.student.double(), teacher=self.teacher.double(), weights=weights
        )

    def to(self, device: str) -> "RowCase":
        tensors = ("student", "teacher", "labels", "weights")
        moved = {name: getattr(self, name) for name in tensors}
        moved = {name: tensor.to(device) for name, tensor in moved.items() if tensor is not None}
        return replace(self, **moved)


class WindowResults(NamedTuple):
    """What the kernels say of a window."""

    state: Tensor
    results: RowResults
    gradient: Tensor


def make_rows(
    divergence: str,
    shape: tuple[int, int] = (5, 1003),
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    cuts: tuple[int, ...] = (),
    **objective: Any,
) -> RowCase:
    """Draw logits with a deviation of 3, teacher and student alike, every term of the loss on."""
    generator = torch.Generator().manual_seed(shape[0] + shape[1])
    student, noise = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    teacher = 3 * student + noise
    terms = {"beta": 0.3, "skew": 0.2, "temperature": 1.0, "scale": 1.3, "softcap": 20.0}
    terms |= {"kd_factor": 0.7, "ce_factor": 0.5, "z_factor": 0.1}
    weights = torch.rand(shape[0], generator=generator, dtype=torch.float64) + 0.5
    return RowCase(
        (3 * student).to(dtypes[0]),
        teacher.to(dtypes[1]),
        torch.randint(0, shape[1], shape[:1], generator=generator),
        Objective(divergence, **terms | objective),
        weights.to(torch.promote_types(dtypes[0], torch.float32)),
        list(cuts),
    )


def compute(kernels: RowKernels, case: RowCase) -> WindowResults:
    """Run the four functions over the tiles that the cuts leave; the case keeps its logits."""
    student = case.student.clone()
    spans = zip([0, *case.cuts], [*case.cuts, student.shape[1]], strict=True)
    tiles = [Tile(student[:, a:b], case.teacher[:, a:b], a) for a, b in spans]
    state = rows.empty_state(len(student), student)
    for tile in tiles:
        kernels.statistics(tile, case.labels, case.objective, state)
    results = kernels.finish(state, case.objective)
    if case.objective.needs_sums:
        for tile in tiles:
            kernels.sums(tile, case.objective, results)
    for tile in tiles:
        kernels.gradient(tile, case.labels, case.objective, results, case.weights)
    return WindowResults(state, results, student)


def errors(actual: WindowResults, expected: WindowResults) -> dict[str, float]:
    """Return the norms of the differences over the norms of what is expected."""
    names = ("state", "constants", "sums", "ce", "gradient")
    return {
        name: float((a.double() - e).norm() / e.norm().clamp_min(1e-300))
        for name, a, e in zip(names, _tensors(actual), _tensors(expected), strict=True)
    }


def equal_bits(left: WindowResults, right: WindowResults) -> bool:
    """Whether two windows have the same bits, NaN included."""
    pairs = zip(_tensors(left), _tensors(right), strict=True)
    return all(torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)) for a, b in pairs)


def _tensors(window: WindowResults) -> list[Tensor]:
    return [window.state, *window.results, window.gradient]
