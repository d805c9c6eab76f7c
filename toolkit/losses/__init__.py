"""The fused distillation loss: two LM heads and their loss, without full logits."""

from toolkit.losses.distillation import LossSums, distillation_loss
from toolkit.losses.module import DistillationLoss
from toolkit.losses.options import LossOptions
from toolkit.models.heads import LMHead, head_of

__all__ = [
    "DistillationLoss",
    "LMHead",
    "LossOptions",
    "LossSums",
    "distillation_loss",
    "head_of",
]
