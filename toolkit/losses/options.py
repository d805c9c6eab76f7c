"""What the loss is: its terms and their weights."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from toolkit.errors import InputError
from toolkit.losses.backends import Backend
from toolkit.losses.divergences import Divergence


@dataclass(frozen=True)
class LossOptions:
    """Which loss: `kd_weight * KD [* temperature^2] + ce_weight * CE + z_loss * Z`.

    Attributes:
        divergence: the KD term, see `toolkit.losses.divergences`.
        beta: weight of the teacher in the mixture of `jsd`.
        skew: weight of the teacher in the mixture of `skew_forward_kl`, and of the student in that
            of `skew_reverse_kl`.
        temperature: divides both models' logits in the KD term, not in CE or Z.
        kd_weight: weight of the KD term.
        ce_weight: weight of the cross-entropy with the labels.
        z_loss: weight of Z, the square of log sum exp of the student's logits (Chowdhery et al.
            2022, arXiv:2204.02311).
        tau_squared: multiply KD by temperature squared (Hinton et al. 2015, arXiv:1503.02531).
        ignore_index: label of tokens that do not count.
        strategy: `windows` keeps the logits of some tokens for the whole vocabulary; `recompute`
            those of all tokens for a part of it, computed twice; `auto` decides by the budget.
        memory_budget_mib: limit of the memory that a call takes at a time, above its inputs and
            gradients, see `toolkit.planner.loss_plan.transient_bytes`.
        window_rows: tokens of a window, whatever the budget; by default as many as fit.
        shard_columns: tokens of the vocabulary that one matrix product covers, at most.
        backend: who computes the rows, see `toolkit.losses.backends`.
    """

    divergence: Divergence
    beta: float = 0.5
    skew: float = 0.1
    temperature: float = 1.0
    kd_weight: float = 1.0
    ce_weight: float = 0.0
    z_loss: float = 0.0
    tau_squared: bool = False
    ignore_index: int = -100
    strategy: Literal["auto", "windows", "recompute"] = "auto"
    memory_budget_mib: int = 1024
    window_rows: int | None = None
    shard_columns: int = 8192
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.divergence not in get_args(Divergence):
            raise InputError(
                f"divergence = {self.divergence!r}: choose one of {', '.join(get_args(Divergence))}"
            )
        if self.backend not in get_args(Backend):
            raise InputError(
                f"backend = {self.backend!r}: choose one of {', '.join(get_args(Backend))}"
            )
        if not 0 < self.beta < 1:
            raise InputError(
                f"beta = {self.beta} must lie between 0 and 1, both excluded: for the limits use"
                " divergence forward_kl (beta 0) or reverse_kl (beta 1)"
            )
        if not 0 < self.skew < 1:
            raise InputError(
                f"skew = {self.skew} must lie between 0 and 1, both excluded: for skew 0 use"
                " divergence forward_kl or reverse_kl"
            )
        if not 0 < self.temperature < math.inf:
            raise InputError(f"temperature = {self.temperature} must be positive and finite")
        for name in ("kd_weight", "ce_weight", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} = {getattr(self, name)} must be 0 or more, and finite")
        for name in ("memory_budget_mib", "window_rows", "shard_columns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} = {value} must be at least 1")
        if self.strategy not in ("auto", "windows", "recompute"):
            raise InputError(
                f"strategy = {self.strategy!r}: choose one of auto, windows, recompute"
            )
        if self.strategy == "recompute" and self.window_rows is not None:
            raise InputError(
                f"window_rows = {self.window_rows} with strategy = 'recompute', which takes all"
                " tokens at a time: leave it out"
            )
