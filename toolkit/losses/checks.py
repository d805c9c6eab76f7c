"""What the front doors of the losses refuse.

Shapes: T tokens, H hidden size of a model, V vocabulary.
"""

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.models.heads import LMHead

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


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


def labelled_tokens(labels: Tensor, tokens: int, vocab_size: int, ignore_index: int) -> Tensor:
    """Return the indices of the tokens with a label, after checking the labels."""
    if labels.shape != (tokens,) or labels.dtype != torch.int64:
        raise InputError(
            f"labels have shape {list(labels.shape)} and dtype {labels.dtype}: give [{tokens}] of"
            " torch.int64, one for each hidden state"
        )
    labelled = labels != ignore_index
    wild = labels[labelled & ((labels < 0) | (labels >= vocab_size))]
    if len(wild):
        raise InputError(
            f"label {int(wild[0])} lies outside the vocabulary [0, {vocab_size}):"
            f" tokens that do not count need the label ignore_index = {ignore_index}"
        )
    return labelled.nonzero()[:, 0]


def check_weights(weights: Tensor | None, tokens: int) -> None:
    """Refuse weights of tokens that are not `[tokens]` constants, with an `InputError`."""
    if weights is None:
        return
    if weights.shape != (tokens,) or not weights.is_floating_point():
        raise InputError(
            f"weights have shape {list(weights.shape)} and dtype {weights.dtype}: give [{tokens}]"
            " of a floating dtype, one for each hidden state"
        )
    if weights.requires_grad:
        raise InputError("weights require a gradient, but none reaches them: detach them")


def check_weight_grad(weight_grad: Tensor | None, weight: Tensor) -> None:
    """Refuse a buffer that the gradient of the head cannot be added to, with an `InputError`."""
    if weight_grad is None:
        return
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if weight_grad.shape != weight.shape or weight_grad.dtype != dtype:
        raise InputError(
            f"weight_grad has shape {list(weight_grad.shape)} and dtype {weight_grad.dtype}: give"
            f" {list(weight.shape)} of {dtype}"
        )
