"""The same loss from full logits, in plain differentiable torch operations.

Shapes: T tokens, Hs and Ht hidden sizes of student and teacher, V vocabulary.
It is the oracle of the tests, best given float64, and shares no arithmetic with the windows.
"""

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.losses.distillation import LossOptions, LossSums
from toolkit.models.heads import LMHead


def reference_loss(
    student_hidden: Tensor,
    student_head: LMHead,
    teacher_hidden: Tensor,
    teacher_head: LMHead,
    labels: Tensor,
    options: LossOptions,
    *,
    num_tokens: int | None = None,
) -> LossSums:
    """Return what `distillation_loss` does, from logits `[T, V]` that exist all at once.

    Args:
        student_hidden: `[T, Hs]`, any floating dtype; the arithmetic is done in it.
        student_head: weight `[V, Hs]`, same dtype.
        teacher_hidden: `[T, Ht]`.
        teacher_head: weight `[V, Ht]`.
        labels: `[T]` int64 in [0, V), or `options.ignore_index`.
        options: which loss; the sizes of windows and shards have no effect.
        num_tokens: what the loss is divided by; by default the labelled tokens.
    """
    labelled = labels != options.ignore_index
    student = student_head.logits(student_hidden[labelled])
    teacher = teacher_head.logits(teacher_hidden[labelled]).detach()
    kd = _divergence(teacher / options.temperature, student / options.temperature, options).sum()
    ce = functional.cross_entropy(student, labels[labelled], reduction="sum")
    count = int(labelled.sum())
    factor = options.temperature**2 if options.tau_squared else 1.0
    loss = options.kd_weight * factor * kd + options.ce_weight * ce
    return LossSums(loss / (num_tokens or max(count, 1)), kd.detach(), ce.detach(), count)


def _divergence(teacher: Tensor, student: Tensor, options: LossOptions) -> Tensor:
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if options.divergence == "forward_kl":
        return _mean(p, log_p - log_q)
    if options.divergence == "reverse_kl":
        return _mean(q, log_q - log_p)
    mixture = options.beta * p + (1 - options.beta) * q
    log_m = torch.where(mixture > 0, mixture, 1.0).log()
    return options.beta * _mean(p, log_p - log_m) + (1 - options.beta) * _mean(q, log_q - log_m)


def _mean(probability: Tensor, term: Tensor) -> Tensor:
    return (probability * torch.where(probability > 0, term, 0.0)).sum(-1)
