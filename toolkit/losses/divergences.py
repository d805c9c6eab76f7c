"""The divergences between teacher and student: value and gradient of a row.

Shapes: R rows, S columns (a shard of the vocabulary V).
Teacher logits zt and student logits zs with temperature tau give p = softmax(zt / tau) and
q = softmax(zs / tau). JSD is the generalized one of Agarwal et al. 2023 (arXiv:2306.13649), with
m = beta p + (1 - beta) q:

| divergence | value | dvalue/dzs |
| --- | --- | --- |
| forward_kl | sum p log(p/q) | (q - p) / tau |
| reverse_kl | sum q log(q/p) =: L | q (log(q/p) - L) / tau |
| jsd | sum beta p log(p/m) + (1 - beta) q log(q/m) | (1 - beta) q (log(q/m) - M) / tau |

where M = sum q log(q/m). A token of probability 0 contributes 0, as the limit does; hence a teacher
logit of -inf is harmless except to reverse_kl, which is infinite where q > 0 = p.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Objective:
    """What is computed from a row of teacher and student logits.

    Attributes:
        divergence: which KD term.
        beta: weight of the teacher in the mixture of `jsd`.
        temperature: tau of the KD term; CE always has temperature 1.
        kd_factor: factor of a row's KD in the loss, the normaliser included.
        ce_factor: factor of a row's cross-entropy in the loss, the normaliser included.
        scale: the student head's factor on its logits.
        softcap: the student head's soft-cap, or None.
    """

    divergence: Divergence
    beta: float
    temperature: float
    kd_factor: float
    ce_factor: float
    scale: float = 1.0
    softcap: float | None = None

    @property
    def needs_sums(self) -> bool:
        """Whether the rows need a second pass, because m is known only after the first."""
        return self.divergence == "jsd"


def expectation(probability: Tensor, term: Tensor) -> Tensor:
    """Return the sums `[R]` of probability times term `[R, S]`, where 0 x inf is 0."""
    return _weighted(probability, term).sum(1)


def kl_from_statistics(cross: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) `[R]` from the centred cross term and the normalisers `[R]`.

    With u and v the logits less their maxima, `cross` = sum e^u (u - v), `first` = sum e^u and
    `second` = sum e^v. Equal rows give exactly 0.
    """
    return cross / first - torch.log(first / second)


def jsd_terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return JSD and M (see the module) of the columns `[R, S]`, as sums `[R]`."""
    p_to_m, q_to_m = _log_ratios_to_mixture(log_p, log_q, beta)
    mean = expectation(log_q.exp(), q_to_m)
    return beta * expectation(log_p.exp(), p_to_m) + (1 - beta) * mean, mean


def logit_gradient(objective: Objective, log_p: Tensor, log_q: Tensor, mean: Tensor) -> Tensor:
    """Return tau * dvalue/dzs `[R, S]`.

    Args:
        objective: names the divergence.
        log_p: `[R, S]` logarithms of the teacher's probabilities.
        log_q: `[R, S]` logarithms of the student's.
        mean: `[R, 1]`, L of reverse_kl or M of jsd; unused by forward_kl.
    """
    q = log_q.exp()
    if objective.divergence == "forward_kl":
        return q.sub_(log_p.exp())
    if objective.divergence == "reverse_kl":
        return _weighted(q, (log_q - log_p).sub_(mean))
    _, q_to_m = _log_ratios_to_mixture(log_p, log_q, objective.beta)
    return _weighted(q, q_to_m.sub_(mean)).mul_(1 - objective.beta)


def _weighted(probability: Tensor, term: Tensor) -> Tensor:
    return (probability * term).masked_fill_(probability == 0, 0.0)


def _log_ratios_to_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return log(p/m) and log(q/m).

    The larger of the two is -log(1 + w (e^-d - 1)) with d = |log p - log q| and w the other
    side's weight in m: no overflow, and exactly 0 where p = q.
    """
    difference = log_p - log_q
    p_larger = difference > 0
    distance = difference.abs_()
    decrease = torch.expm1(-distance)
    larger = -torch.where(p_larger, (1 - beta) * decrease, beta * decrease).log1p_()
    smaller = larger - distance
    return torch.where(p_larger, larger, smaller), torch.where(p_larger, smaller, larger)
