"""The divergences between teacher and student: value and gradient of a row.

Shapes: R rows, S columns (a shard of the vocabulary V).
Teacher logits zt and student logits zs with temperature tau give p = softmax(zt / tau) and
q = softmax(zs / tau). All but forward_kl have the gradient

    tau * dvalue/dzs = q (g - sum q g) [+ q - p for symmetric_kl]

| divergence | value | slope g |
| --- | --- | --- |
| forward_kl | sum p log(p/q) | gradient q - p |
| reverse_kl | sum q log(q/p) | log(q/p) |
| symmetric_kl | forward_kl + reverse_kl | log(q/p) |
| jsd | sum beta p log(p/m) + (1 - beta) q log(q/m) | (1 - beta) log(q/m) |
| skew_forward_kl | sum p log(p/m) | -(1 - skew) (p/m - 1) |
| skew_reverse_kl | sum q log(q/m) | log(q/m) - skew (q/m - 1) |
| total_variation | sum abs(p - q) / 2 | sign(q - p) / 2 |

The mixture m is beta p + (1 - beta) q in jsd, skew p + (1 - skew) q in skew_forward_kl and
skew q + (1 - skew) p in skew_reverse_kl. A constant in g has no effect; these are chosen such that
g is exactly 0 where p = q.

symmetric_kl is the divergence of Jeffreys 1946, the sum and not the mean of its halves; jsd is the
generalized one of Agarwal et al. 2023 (arXiv:2306.13649); the skew ones are those of Ko et al. 2024
(arXiv:2402.03898). A token of probability 0 contributes 0, as the limit does; hence a teacher logit
of -inf is harmless except to reverse_kl and symmetric_kl, which are infinite where q > 0 = p.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal[
    "forward_kl",
    "reverse_kl",
    "symmetric_kl",
    "jsd",
    "skew_forward_kl",
    "skew_reverse_kl",
    "total_variation",
]


@dataclass(frozen=True)
class Objective:
    """What is computed from a row of teacher and student logits.

    Attributes:
        divergence: which KD term.
        beta: weight of the teacher in the mixture of `jsd`.
        skew: weight in the mixture of the skew divergences, of the model that is compared with it.
        temperature: tau of the KD term; CE and z-loss always have temperature 1.
        kd_factor: factor of a row's KD in the loss, the normaliser included.
        ce_factor: factor of a row's cross-entropy in the loss, the normaliser included.
        z_factor: factor of a row's squared log sum exp(zs), the normaliser included.
        scale: the student head's factor on its logits.
        softcap: the student head's soft-cap, or None.
    """

    divergence: Divergence
    beta: float
    temperature: float
    kd_factor: float
    ce_factor: float
    z_factor: float = 0.0
    scale: float = 1.0
    softcap: float | None = None
    skew: float = 0.1

    @property
    def needs_sums(self) -> bool:
        """Whether the rows need a second pass, because p and q are known only after the first."""
        return self.divergence not in ("forward_kl", "reverse_kl", "symmetric_kl")

    @property
    def teacher_share(self) -> float | None:
        """Weight of the teacher in the mixture m, or None if there is no mixture."""
        shares = {"jsd": self.beta, "skew_forward_kl": self.skew, "skew_reverse_kl": 1 - self.skew}
        return shares.get(self.divergence)


def expectation(probability: Tensor, term: Tensor) -> Tensor:
    """Return the sums `[R]` of probability times term `[R, S]`, where 0 x inf is 0."""
    return _weighted(probability, term).sum(1)


def kl_from_statistics(cross: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) `[R]` from the centred cross term and the normalisers `[R]`.

    With u and v the logits less their maxima, `cross` = sum e^u (u - v), `first` = sum e^u and
    `second` = sum e^v. Equal rows give exactly 0.
    """
    return cross / first - torch.log(first / second)


def second_pass_sums(objective: Objective, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the value and sum q g (see the module) of the columns `[R, S]`, as sums `[R, 2]`."""
    p, q = log_p.exp(), log_q.exp()
    p_ratio, q_ratio = _log_ratios(objective, log_p, log_q)
    if objective.divergence == "jsd":
        value = objective.beta * expectation(p, p_ratio)
        value += (1 - objective.beta) * expectation(q, q_ratio)
    elif objective.divergence == "skew_forward_kl":
        value = expectation(p, p_ratio)
    elif objective.divergence == "skew_reverse_kl":
        value = expectation(q, q_ratio)
    else:
        value = (p - q).abs_().sum(1) / 2
    return torch.stack([value, expectation(q, _slope(objective, p_ratio, q_ratio))], dim=1)


def logit_gradient(objective: Objective, log_p: Tensor, log_q: Tensor, mean: Tensor) -> Tensor:
    """Return tau * dvalue/dzs `[R, S]`.

    Args:
        objective: names the divergence.
        log_p: `[R, S]` logarithms of the teacher's probabilities.
        log_q: `[R, S]` logarithms of the student's.
        mean: `[R, 1]`, sum q g; unused by forward_kl.
    """
    q = log_q.exp()
    if objective.divergence == "forward_kl":
        return q.sub_(log_p.exp())
    slope = _slope(objective, *_log_ratios(objective, log_p, log_q))
    result = _weighted(q, slope.sub_(mean))
    if objective.divergence == "symmetric_kl":
        result += q.sub_(log_p.exp())
    return result


def _weighted(probability: Tensor, term: Tensor) -> Tensor:
    return (probability * term).masked_fill_(probability == 0, 0.0)


def _slope(objective: Objective, p_ratio: Tensor, q_ratio: Tensor) -> Tensor:
    """Return g `[R, S]` from `_log_ratios`, which may be overwritten."""
    match objective.divergence:
        case "jsd":
            return q_ratio.mul_(1 - objective.beta)
        case "skew_forward_kl":
            return p_ratio.expm1_().mul_(objective.skew - 1)
        case "skew_reverse_kl":
            return q_ratio - q_ratio.expm1().mul_(objective.skew)
        case "total_variation":
            return q_ratio.sign_().div_(2)
        case _:
            return q_ratio


def _log_ratios(objective: Objective, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return log(p/m) and log(q/m); without a mixture m is the other model.

    In a mixture the larger of the two is -log(1 + w (e^-d - 1)) with d = |log p - log q| and w the
    other side's weight in m: no overflow, and exactly 0 where p = q.
    """
    difference = log_p - log_q
    share = objective.teacher_share
    if share is None:
        return difference, -difference
    p_larger = difference > 0
    distance = difference.abs_()
    decrease = torch.expm1(-distance)
    larger = -torch.where(p_larger, (1 - share) * decrease, share * decrease).log1p_()
    smaller = larger - distance
    return torch.where(p_larger, larger, smaller), torch.where(p_larger, smaller, larger)
