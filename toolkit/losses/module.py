"""The loss as a module, for training loops that compose modules."""

import torch.distributed as dist
from torch import Tensor, nn

from toolkit.losses.distillation import LossSums, distillation_loss
from toolkit.losses.options import LossOptions
from toolkit.models.heads import LMHead


class DistillationLoss(nn.Module):
    """`distillation_loss` with fixed options; it has no parameters and keeps no state."""

    def __init__(self, options: LossOptions) -> None:
        """Fix which loss is computed."""
        super().__init__()
        self.options = options

    def forward(
        self,
        student_hidden: Tensor,
        student_head: LMHead,
        teacher_hidden: Tensor,
        teacher_head: LMHead,
        labels: Tensor,
        *,
        weights: Tensor | None = None,
        num_tokens: float | Tensor | None = None,
        weight_grad: Tensor | None = None,
        vocab_group: dist.ProcessGroup | None = None,
    ) -> LossSums:
        """Return the loss of a batch; arguments and errors are those of `distillation_loss`."""
        return distillation_loss(
            student_hidden,
            student_head,
            teacher_hidden,
            teacher_head,
            labels,
            self.options,
            weights=weights,
            num_tokens=num_tokens,
            weight_grad=weight_grad,
            vocab_group=vocab_group,
        )

    def extra_repr(self) -> str:
        """Show the options where the module is printed."""
        return str(self.options)
