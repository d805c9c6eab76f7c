"""The front door of the loss: checks what it is given, then computes in windows.

Shapes: T tokens, Hs and Ht hidden sizes of student and teacher, V vocabulary.
"""

from typing import NamedTuple

from torch import Tensor

from toolkit.errors import InputError
from toolkit.losses.checks import check_models, check_weights, labelled_tokens
from toolkit.losses.divergences import Objective
from toolkit.losses.options import LossOptions
from toolkit.losses.rows import statistics_dtype
from toolkit.losses.windows import WindowedLoss
from toolkit.models.heads import LMHead


class LossSums(NamedTuple):
    """The loss, and the sums over the labelled tokens that it is made of.

    The sums count every token by its weight, but hold no weight of a term and no temperature
    squared; they carry no gradient.
    """

    loss: Tensor
    """Scalar, differentiable, float32 (float64 for a float64 student)."""
    kd: Tensor
    """Sum of KD."""
    ce: Tensor
    """Sum of cross-entropies."""
    z: Tensor
    """Sum of squared log sum exp of the student's logits."""
    num_tokens: int
    """Labelled tokens of this call, whatever the loss was divided by."""


def distillation_loss(
    student_hidden: Tensor,
    student_head: LMHead,
    teacher_hidden: Tensor,
    teacher_head: LMHead,
    labels: Tensor,
    options: LossOptions,
    *,
    weights: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> LossSums:
    """Return the distillation loss of a batch, exact over the whole vocabulary.

    Gradients flow to the student's hidden states and to the weight and bias of its head, where
    these require them; never to the teacher. They are computed together with the loss.

    Args:
        student_hidden: `[T, Hs]`, float64, float32 or bfloat16, the dtype of the head's weight.
        student_head: weight `[V, Hs]`.
        teacher_hidden: `[T, Ht]`, likewise; the dtype may differ from the student's.
        teacher_head: weight `[V, Ht]`.
        labels: `[T]` int64, the token to predict at each position, or `options.ignore_index`.
        options: which loss.
        weights: `[T]`, any floating dtype, factors of the tokens' losses; constants, by default 1.
        num_tokens: what the loss is divided by, for a mean over several calls or processes; by
            default the labelled tokens of this call, whatever their weights.

    Returns:
        The loss and its sums; all 0 if no token is labelled.

    Raises:
        InputError: shapes, dtypes, vocabularies, labels or weights do not fit, or num_tokens is not
            positive.
    """
    check_models(student_hidden, student_head, teacher_hidden, teacher_head)
    tokens, vocab_size = len(student_hidden), student_head.vocab_size
    token_index = labelled_tokens(labels, tokens, vocab_size, options.ignore_index)
    check_weights(weights, tokens)
    count = len(token_index)
    divisor = float(count if num_tokens is None else num_tokens)
    if count and not divisor > 0:
        raise InputError(
            f"num_tokens = {num_tokens} with {count} labelled tokens in this call: give the"
            " labelled tokens of all calls that share the mean"
        )
    dtype = statistics_dtype(student_hidden)
    loss = WindowedLoss(
        student_hidden=student_hidden,
        student_head=student_head,
        teacher_hidden=teacher_hidden,
        teacher_head=teacher_head,
        labels=labels[token_index],
        token_index=token_index,
        weights=None if weights is None else weights[token_index].to(dtype),
        objective=_objective(options, student_head, divisor if count else 1.0),
        window_rows=options.window_rows,
        shard_columns=options.shard_columns,
    )
    value, (kd, ce, z) = loss.compute()
    return LossSums(value, kd, ce, z, count)


def _objective(options: LossOptions, student_head: LMHead, divisor: float) -> Objective:
    factor = options.temperature**2 if options.tau_squared else 1.0
    return Objective(
        divergence=options.divergence,
        beta=options.beta,
        skew=options.skew,
        temperature=options.temperature,
        kd_factor=options.kd_weight * factor / divisor,
        ce_factor=options.ce_weight / divisor,
        z_factor=options.z_loss / divisor,
        scale=student_head.scale,
        softcap=student_head.softcap,
    )
