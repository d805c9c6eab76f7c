"""The front door of the loss: checks what it is given, then computes in windows.

Shapes: T tokens, Hs and Ht hidden sizes of student and teacher, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.losses.divergences import Divergence, Objective
from toolkit.losses.windows import WindowedLoss
from toolkit.models.heads import LMHead

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class LossOptions:
    """Which loss: `kd_weight * KD [* temperature^2] + ce_weight * CE`.

    Attributes:
        divergence: the KD term, see `toolkit.losses.divergences`.
        beta: weight of the teacher in the mixture of `jsd`.
        temperature: divides both models' logits in the KD term, not in CE.
        kd_weight: weight of the KD term.
        ce_weight: weight of the cross-entropy with the labels.
        tau_squared: multiply KD by temperature squared (Hinton et al. 2015, arXiv:1503.02531).
        ignore_index: label of tokens that do not count.
        window_rows: tokens whose logits exist at a time.
        shard_columns: tokens of the vocabulary that one matrix product covers.
    """

    divergence: Divergence
    beta: float = 0.5
    temperature: float = 1.0
    kd_weight: float = 1.0
    ce_weight: float = 0.0
    tau_squared: bool = False
    ignore_index: int = -100
    window_rows: int = 1024
    shard_columns: int = 16384

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.divergence not in get_args(Divergence):
            raise InputError(
                f"divergence = {self.divergence!r}: choose one of {', '.join(get_args(Divergence))}"
            )
        if not 0 < self.beta < 1:
            raise InputError(
                f"beta = {self.beta} must lie between 0 and 1, both excluded: for the limits use"
                " divergence forward_kl (beta 0) or reverse_kl (beta 1)"
            )
        if not 0 < self.temperature < math.inf:
            raise InputError(f"temperature = {self.temperature} must be positive and finite")
        for name in ("kd_weight", "ce_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} = {getattr(self, name)} must be 0 or more, and finite")
        for name in ("window_rows", "shard_columns"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)} must be at least 1")


class LossSums(NamedTuple):
    """The loss, and the sums that it is made of."""

    loss: Tensor
    """Scalar, differentiable, float32 (float64 for a float64 student)."""
    kd: Tensor
    """Sum of KD over the labelled tokens, without weight or temperature squared; no gradient."""
    ce: Tensor
    """Sum of cross-entropies over the labelled tokens; no gradient."""
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
    num_tokens: int | Tensor | None = None,
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
        num_tokens: what the loss is divided by, for a mean over several calls or processes; by
            default the labelled tokens of this call.

    Returns:
        The loss and its sums; all 0 if no token is labelled.

    Raises:
        InputError: shapes, dtypes, vocabularies or labels do not fit, or num_tokens is not
            positive.
    """
    check_models(student_hidden, student_head, teacher_hidden, teacher_head)
    token_index = _labelled_tokens(labels, student_hidden, student_head, options.ignore_index)
    count = len(token_index)
    divisor = float(count if num_tokens is None else num_tokens)
    if count and not divisor > 0:
        raise InputError(
            f"num_tokens = {num_tokens} with {count} labelled tokens in this call: give the"
            " labelled tokens of all calls that share the mean"
        )
    loss = WindowedLoss(
        student_hidden=student_hidden,
        student_head=student_head,
        teacher_hidden=teacher_hidden,
        teacher_head=teacher_head,
        labels=labels[token_index],
        token_index=token_index,
        objective=_objective(options, student_head, divisor if count else 1.0),
        window_rows=options.window_rows,
        shard_columns=options.shard_columns,
    )
    value, (kd, ce) = loss.compute()
    return LossSums(value, kd, ce, count)


def check_models(
    student_hidden: Tensor, student_head: LMHead, teacher_hidden: Tensor, teacher_head: LMHead
) -> None:
    """Refuse hidden states and heads that do not belong together, with an `InputError`."""
    _check_model("student", student_hidden, student_head)
    _check_model("teacher", teacher_hidden, teacher_head)
    if len(student_hidden) != len(teacher_hidden):
        raise InputError(
            f"the student has hidden states of {len(student_hidden)} tokens, the teacher of"
            f" {len(teacher_hidden)}: both must see the same tokens"
        )
    if student_head.vocab_size != teacher_head.vocab_size:
        raise InputError(
            f"the student's head has a vocabulary of {student_head.vocab_size}, the teacher's of"
            f" {teacher_head.vocab_size}: cut both heads to the vocabulary they share"
        )


def _check_model(name: str, hidden: Tensor, head: LMHead) -> None:
    if hidden.ndim != 2 or hidden.shape[1] != head.weight.shape[1]:
        raise InputError(
            f"the {name}'s hidden states have shape {list(hidden.shape)}: its head needs"
            f" [tokens, {head.weight.shape[1]}]"
        )
    if hidden.dtype not in DTYPES:
        raise InputError(
            f"the {name}'s hidden states are {hidden.dtype}: use float64, float32 or bfloat16"
        )
    for part in (head.weight, head.bias):
        if part is not None and part.dtype != hidden.dtype:
            raise InputError(
                f"the {name}'s hidden states are {hidden.dtype} but its head is {part.dtype}:"
                " cast one of them"
            )


def _labelled_tokens(
    labels: Tensor, student_hidden: Tensor, student_head: LMHead, ignore_index: int
) -> Tensor:
    tokens = len(student_hidden)
    if labels.shape != (tokens,) or labels.dtype != torch.int64:
        raise InputError(
            f"labels have shape {list(labels.shape)} and dtype {labels.dtype}: give [{tokens}] of"
            " torch.int64, one for each hidden state"
        )
    labelled = labels != ignore_index
    wild = labels[labelled & ((labels < 0) | (labels >= student_head.vocab_size))]
    if len(wild):
        raise InputError(
            f"label {int(wild[0])} lies outside the vocabulary [0, {student_head.vocab_size}):"
            f" tokens that do not count need the label ignore_index = {ignore_index}"
        )
    return labelled.nonzero()[:, 0]


def _objective(options: LossOptions, student_head: LMHead, divisor: float) -> Objective:
    factor = options.temperature**2 if options.tau_squared else 1.0
    return Objective(
        divergence=options.divergence,
        beta=options.beta,
        temperature=options.temperature,
        kd_factor=options.kd_weight * factor / divisor,
        ce_factor=options.ce_weight / divisor,
        scale=student_head.scale,
        softcap=student_head.softcap,
    )
