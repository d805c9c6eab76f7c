"""The same loss in several ways: the matrix products alone, full logits, Liger's, and ours."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.losses import LMHead, LossOptions, distillation_loss
from toolkit.losses.divergences import Divergence

KD_WEIGHT = CE_WEIGHT = 0.5
MIX = 0.5
"""Weight of the teacher in the mixtures of JSD and the skew divergences."""
Way = Callable[[], object]


class Sizes(NamedTuple):
    """Of a case."""

    tokens: int
    student_hidden: int
    teacher_hidden: int
    vocab: int


class Inputs(NamedTuple):
    """Arguments of the loss; those of the student collect gradients."""

    student_hidden: Tensor
    student_weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    labels: Tensor

    def clear(self) -> None:
        """Drop the gradients."""
        self.student_hidden.grad = self.student_weight.grad = None

    def first(self, tokens: int, dtype: torch.dtype) -> "Inputs":
        """Return a copy of some tokens, in another dtype."""
        hidden, weight, teacher_hidden, teacher_weight = (part.detach() for part in self[:4])
        return Inputs(
            hidden[:tokens].to(dtype, copy=True).requires_grad_(),
            weight.to(dtype).requires_grad_(),
            teacher_hidden[:tokens].to(dtype),
            teacher_weight.to(dtype),
            self.labels[:tokens],
        )


def make_inputs(sizes: Sizes, dtype: torch.dtype, device: str) -> Inputs:
    """Draw inputs whose logits deviate by 2."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)

    def weight(hidden: int) -> Tensor:
        return normal(sizes.vocab, hidden).mul_(2 / math.sqrt(hidden))

    return Inputs(
        normal(sizes.tokens, sizes.student_hidden).requires_grad_(),
        weight(sizes.student_hidden).requires_grad_(),
        normal(sizes.tokens, sizes.teacher_hidden),
        weight(sizes.teacher_hidden),
        torch.randint(0, sizes.vocab, (sizes.tokens,), generator=generator, device=device),
    )


WAYS = ("gemm", "eager", "compile", "ours", "ours_recompute", "ours_torch", "liger")


def ways(inputs: Inputs, divergence: Divergence, budget_mib: int = 1024) -> dict[str, Way]:
    """Return what computes loss and gradients of some inputs once, by name.

    `gemm` is the limit: the four matrix products of all tokens, and nothing else. The budget is of
    our loss.
    """
    ours = partial(_ours, memory_budget_mib=budget_mib)

    def run(loss: Callable[..., Tensor]) -> Way:
        def step() -> None:
            inputs.clear()
            loss(inputs, divergence).backward()  # type: ignore[no-untyped-call]

        return step

    found: dict[str, Way] = {
        "gemm": partial(_gemms, inputs),
        "eager": run(full_logits),
        "compile": run(torch.compile(full_logits)),
        "ours": run(partial(ours, strategy="windows")),
        "ours_recompute": run(partial(ours, strategy="recompute")),
        "ours_torch": run(partial(ours, strategy="windows", backend="torch")),
    }
    if (liger := _liger(divergence)) is not None:
        found["liger"] = run(liger)
    return found


@torch.no_grad()
def _gemms(inputs: Inputs) -> None:
    hidden, weight, teacher_hidden, teacher_weight, _ = inputs
    student = hidden @ weight.t()
    teacher = teacher_hidden @ teacher_weight.t()
    del teacher
    hidden.grad, weight.grad = student @ weight, student.t() @ hidden


def _ours(inputs: Inputs, divergence: Divergence, **choice: object) -> Tensor:
    options = LossOptions(
        divergence,
        kd_weight=KD_WEIGHT,
        ce_weight=CE_WEIGHT,
        beta=MIX,
        skew=MIX,
        **choice,  # type: ignore[arg-type]
    )
    student = LMHead(inputs.student_weight)
    teacher = LMHead(inputs.teacher_weight)
    arguments = (inputs.student_hidden, student, inputs.teacher_hidden, teacher, inputs.labels)
    return distillation_loss(*arguments, options).loss


def _liger(divergence: Divergence) -> Callable[..., Tensor] | None:
    """Return Liger's chunked loss, which its authors compile, where it is installed and fits."""
    betas = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": MIX}
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        return None
    if divergence not in betas:
        return None
    module = LigerFusedLinearJSDLoss(KD_WEIGHT, CE_WEIGHT, betas[divergence])

    def loss(inputs: Inputs, divergence: Divergence) -> Tensor:
        result: Tensor = module(*inputs[:4], inputs.labels)
        return result

    return loss


def full_logits(inputs: Inputs, divergence: Divergence) -> Tensor:
    """Return the loss as one would write it, with logits `[T, V]` of both models."""
    student = (inputs.student_hidden @ inputs.student_weight.t()).to(_wide(inputs))
    with torch.no_grad():
        teacher = (inputs.teacher_hidden @ inputs.teacher_weight.t()).to(_wide(inputs))
        log_p = functional.log_softmax(teacher, dim=1)
    log_q = functional.log_softmax(student, dim=1)
    ce = functional.cross_entropy(student, inputs.labels, reduction="sum")
    kd = _divergence(divergence, log_p, log_q)
    return (KD_WEIGHT * kd + CE_WEIGHT * ce) / len(inputs.labels)


def _wide(inputs: Inputs) -> torch.dtype:
    return torch.promote_types(inputs.student_hidden.dtype, torch.float32)


def _kl(log_first: Tensor, log_second: Tensor) -> Tensor:
    return functional.kl_div(log_second, log_first, reduction="sum", log_target=True)


def _divergence(name: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    match name:
        case "forward_kl":
            return _kl(log_p, log_q)
        case "reverse_kl":
            return _kl(log_q, log_p)
        case "symmetric_kl":
            return _kl(log_p, log_q) + _kl(log_q, log_p)
        case "total_variation":
            return (log_p.exp() - log_q.exp()).abs().sum() / 2
    log_m = torch.logaddexp(log_p + math.log(MIX), log_q + math.log1p(-MIX))
    if name == "skew_forward_kl":
        return _kl(log_p, log_m)
    if name == "skew_reverse_kl":
        return _kl(log_q, log_m)
    return MIX * _kl(log_p, log_m) + (1 - MIX) * _kl(log_q, log_m)
