"""How often student and teacher choose the same token.

Shapes: T tokens, R rows of a window, S columns of a shard, V vocabulary.
"""

import torch
from torch import Tensor

from toolkit.losses.checks import check_models
from toolkit.losses.inputs import logits_into, spans
from toolkit.models.heads import LMHead


@torch.no_grad()
def top1_agreement(
    student_hidden: Tensor,
    student_head: LMHead,
    teacher_hidden: Tensor,
    teacher_head: LMHead,
    *,
    window_rows: int = 1024,
    shard_columns: int = 8192,
) -> Tensor:
    """Return the number of tokens for which both heads rank the same token first.

    Of equal logits the lowest token counts. At most `window_rows` x `shard_columns` logits of a
    model exist at a time.

    Args:
        student_hidden: `[T, Hs]`, float64, float32 or bfloat16, the dtype of the head's weight.
        student_head: weight `[V, Hs]`.
        teacher_hidden: `[T, Ht]`, likewise; the dtype may differ from the student's.
        teacher_head: weight `[V, Ht]`.
        window_rows: R.
        shard_columns: S.

    Returns:
        Scalar int64.

    Raises:
        InputError: shapes, dtypes or vocabularies do not fit.
    """
    check_models(student_hidden, student_head, teacher_hidden, teacher_head)
    count = torch.zeros((), dtype=torch.int64, device=student_hidden.device)
    for window in spans(len(student_hidden), window_rows):
        student = _top1(student_hidden[window], student_head, shard_columns)
        teacher = _top1(teacher_hidden[window], teacher_head, shard_columns)
        count += (student == teacher).sum()
    return count


def _top1(hidden: Tensor, head: LMHead, shard_columns: int) -> Tensor:
    best = hidden.new_full((len(hidden),), -torch.inf)
    token = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for columns in spans(head.vocab_size, shard_columns):
        logits = hidden.new_empty(len(hidden), columns.stop - columns.start)
        logits_into(logits, hidden, head, columns)
        value, column = logits.max(1)
        token = torch.where(value > best, column + columns.start, token)
        best = torch.maximum(best, value)
    return token
