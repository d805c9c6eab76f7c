"""The same loss from full logits, in plain differentiable torch operations.

Shapes: T tokens, Hs and Ht hidden sizes of student and teacher, V vocabulary.
It is the oracle of the tests, best given float64, and shares no arithmetic with the windows.
"""

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.losses.distillation import LossSums
from toolkit.losses.options import LossOptions
from toolkit.models.heads import LMHead


def reference_loss(
    student_hidden: Tensor,
    student_head: LMHead,
    teacher_hidden: Tensor,
    teacher_head: LMHead,
    labels: Tensor,
    options: LossOptions,
    *,
    weights: Tensor | None = None,
    num_tokens: float | None = None,
) -> LossSums:
    """Return what `distillation_loss` does, from logits `[T, V]` that exist all at once.

    Args:
        student_hidden: `[T, Hs]`, any floating dtype; what follows the logits has float32 at least.
        student_head: weight `[V, Hs]`, same dtype.
        teacher_hidden: `[T, Ht]`.
        teacher_head: weight `[V, Ht]`.
        labels: `[T]` int64 in [0, V), or `options.ignore_index`.
        options: which loss; the sizes of windows and shards have no effect.
        weights: `[T]` factors of the tokens' losses.
        num_tokens: what the loss is divided by; by default the labelled tokens.
    """
    labelled = labels != options.ignore_index
    student = _upcast(student_head.logits(student_hidden[labelled]))
    teacher = _upcast(teacher_head.logits(teacher_hidden[labelled])).detach()
    terms = {
        "kd": _divergence(teacher / options.temperature, student / options.temperature, options),
        "ce": functional.cross_entropy(student, labels[labelled], reduction="none"),
        "z": student.logsumexp(-1).square(),
    }
    if weights is not None:
        terms = {name: weights[labelled] * term for name, term in terms.items()}
    kd, ce, z = (term.sum() for term in terms.values())
    count = int(labelled.sum())
    factor = options.temperature**2 if options.tau_squared else 1.0
    loss = options.kd_weight * factor * kd + options.ce_weight * ce + options.z_loss * z
    divisor = num_tokens or max(count, 1)
    return LossSums(loss / divisor, kd.detach(), ce.detach(), z.detach(), count)


def _upcast(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _divergence(teacher: Tensor, student: Tensor, options: LossOptions) -> Tensor:
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    match options.divergence:
        case "forward_kl":
            return _kl(p, log_p, log_q)
        case "reverse_kl":
            return _kl(q, log_q, log_p)
        case "symmetric_kl":
            return _kl(p, log_p, log_q) + _kl(q, log_q, log_p)
        case "jsd":
            log_m = _log_mixture(options.beta, p, q)
            return options.beta * _kl(p, log_p, log_m) + (1 - options.beta) * _kl(q, log_q, log_m)
        case "skew_forward_kl":
            return _kl(p, log_p, _log_mixture(options.skew, p, q))
        case "skew_reverse_kl":
            return _kl(q, log_q, _log_mixture(options.skew, q, p))
        case "total_variation":
            return (p - q).abs().sum(-1) / 2


def _log_mixture(share: float, first: Tensor, second: Tensor) -> Tensor:
    mixture = share * first + (1 - share) * second
    return torch.where(mixture > 0, mixture, 1.0).log()


def _kl(first: Tensor, log_first: Tensor, log_second: Tensor) -> Tensor:
    ratio = torch.where(first > 0, log_first - log_second, 0.0)
    return (first * ratio).sum(-1)
