"""How far the student is from the teacher on tokens that it never trains on."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

import torch

from toolkit.data.batches import Batch
from toolkit.teacher.sources import TeacherSource
from toolkit.training.ranks import Ranks
from toolkit.training.student import DistilledStudent


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out tokens.

    Attributes:
        kd: the run's divergence between teacher and student, nats a token.
        perplexity: exp of the student's cross-entropy with the text.
        agreement: share of the tokens for which both choose the same next token.
        num_tokens: how many tokens.
    """

    kd: float
    perplexity: float
    agreement: float
    num_tokens: int


@torch.no_grad()
def evaluate(
    student: DistilledStudent,
    teacher: TeacherSource,
    batches: Iterable[Batch],
    ranks: Ranks,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Compare student and teacher on the batches of all ranks, at least one.

    Returns:
        The means over all batches, or None if a rank should stop before the end.
    """
    was_training = student.training
    student.eval()
    kd = ce = 0.0
    agreed = num_tokens = 0
    for batch, states in teacher.stream(takewhile(lambda batch: not should_stop(), batches)):
        sums = student(batch, states)
        kd += sums.kd.item()
        ce += sums.ce.item()
        agreed += student.agreement(batch, states)
        num_tokens += sums.num_tokens
    student.train(was_training)
    kd, ce, agreement, tokens, stopping = ranks.sum(kd, ce, agreed, num_tokens, should_stop())
    if stopping:
        return None
    return Evaluation(kd / tokens, math.exp(ce / tokens), agreement / tokens, int(tokens))
