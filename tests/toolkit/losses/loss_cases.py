"""Random inputs for the tests of the loss, and losses with gradients from them."""

from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from toolkit.losses.distillation import LossSums, distillation_loss
from toolkit.losses.divergences import Divergence
from toolkit.losses.options import LossOptions
from toolkit.losses.reference import reference_loss
from toolkit.models.heads import LMHead

default_backend = "auto"
"""Backend of `options_for`; the fixture `each_backend` sets it."""
DIVERGENCES = get_args(Divergence)
TEMPERATURES = (1.0, 2.0, 0.7)
RECOMPUTE = {"strategy": "recompute", "window_rows": None}
LAYOUTS = ({"window_rows": 1}, {"window_rows": 7}, {"window_rows": 64}, RECOMPUTE)
"""How the logits are cut, as options."""


@dataclass(frozen=True)
class Case:
    """Arguments of the loss."""

    student_hidden: Tensor
    student_head: LMHead
    teacher_hidden: Tensor
    teacher_head: LMHead
    labels: Tensor
    weights: Tensor | None = None

    def in_float64(self) -> "Case":
        return Case(
            self.student_hidden.double(),
            _with_dtype(self.student_head, torch.float64),
            self.teacher_hidden.double(),
            _with_dtype(self.teacher_head, torch.float64),
            self.labels,
            None if self.weights is None else self.weights.double(),
        )

    def rows(self, part: slice) -> "Case":
        return replace(
            self,
            student_hidden=self.student_hidden[part],
            teacher_hidden=self.teacher_hidden[part],
            labels=self.labels[part],
            weights=None if self.weights is None else self.weights[part],
        )


def make_case(
    tokens: int = 23,
    vocab: int = 1003,
    hidden: tuple[int, int] = (32, 48),
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    bias: bool = True,
    spread: float = 2.0,
    weighted: bool = False,
    **contract: Any,
) -> Case:
    """Draw a case with every fifth token ignored, the others weighted or not.

    `spread` is the deviation of the logits but for the bias; `contract` holds for both heads.
    """
    generator = torch.Generator().manual_seed(tokens + vocab)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[1::5] = -100
    models: list[Any] = []
    for size, dtype in zip(hidden, dtypes, strict=True):
        weight = (spread * normal(vocab, size) / size**0.5).to(dtype)
        head = LMHead(weight, normal(vocab).to(dtype) if bias else None, **contract)
        models += [normal(tokens, size).to(dtype), head]
    weights = torch.rand(tokens, generator=generator) * 2 if weighted else None
    return Case(*models, labels, weights)


def fused(case: Case, options: LossOptions, **kwargs: Any) -> tuple[LossSums, list[Tensor]]:
    """Return the windowed loss and the gradients of hidden states, weight and bias."""
    return _with_gradients(distillation_loss, case, options, kwargs)


def oracle(case: Case, options: LossOptions, **kwargs: Any) -> tuple[LossSums, list[Tensor]]:
    """Return the same from full logits in float64."""
    return _with_gradients(reference_loss, case.in_float64(), options, kwargs)


def eager(case: Case, options: LossOptions) -> tuple[LossSums, list[Tensor]]:
    """Return the same from full logits in the case's own dtype."""
    return _with_gradients(reference_loss, case, options, {})


def loss_of(case: Case, options: LossOptions, **kwargs: Any) -> LossSums:
    """Return the windowed loss."""
    return _call(distillation_loss, case, options, kwargs)


def with_leaves(case: Case, hidden: bool = False, weight: bool = False, bias: bool = False) -> Case:
    """Return a copy of the case in which some tensors require a gradient."""
    head = case.student_head
    student_head = replace(
        head,
        weight=head.weight.clone().requires_grad_(weight),
        bias=None if head.bias is None else head.bias.clone().requires_grad_(bias),
    )
    student_hidden = case.student_hidden.clone().requires_grad_(hidden)
    return replace(case, student_hidden=student_hidden, student_head=student_head)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    return float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm())


def options_for(divergence: str, **kwargs: Any) -> LossOptions:
    """Return options in which every term takes part, unless told otherwise."""
    return LossOptions(
        divergence,
        **{
            "beta": 0.3,
            "skew": 0.2,
            "ce_weight": 0.5,
            "z_loss": 0.01,
            "window_rows": 7,
            "shard_columns": 300,
            "backend": default_backend,
        }
        | kwargs,
    )


def _with_dtype(head: LMHead, dtype: torch.dtype) -> LMHead:
    bias = None if head.bias is None else head.bias.to(dtype)
    return replace(head, weight=head.weight.to(dtype), bias=bias)


def _with_gradients(
    loss: Any, case: Case, options: LossOptions, kwargs: dict[str, Any]
) -> tuple[LossSums, list[Tensor]]:
    leaves = with_leaves(case, hidden=True, weight=True, bias=True)
    sums = _call(loss, leaves, options, kwargs)
    sums.loss.backward()
    inputs = (leaves.student_hidden, leaves.student_head.weight, leaves.student_head.bias)
    return sums, [leaf.grad for leaf in inputs if leaf is not None]


def _call(loss: Any, case: Case, options: LossOptions, kwargs: dict[str, Any]) -> LossSums:
    return loss(
        case.student_hidden,
        case.student_head,
        case.teacher_hidden,
        case.teacher_head,
        case.labels,
        options,
        weights=case.weights,
        **kwargs,
    )
