"""The student with its loss: one module, so that wrappers around it see a single forward."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from toolkit.config import LossSection
from toolkit.data.batches import Batch
from toolkit.losses.agreement import top1_agreement
from toolkit.losses.distillation import LossSums, distillation_loss
from toolkit.losses.options import LossOptions
from toolkit.models.heads import LMHead, head_of
from toolkit.models.load import body_of
from toolkit.teacher.forward import hidden_states


class DistilledStudent(nn.Module):
    """Computes the distillation loss of a micro-batch from the teacher's hidden states."""

    def __init__(
        self,
        model: PreTrainedModel,
        teacher_head: LMHead,
        section: LossSection,
        device: torch.device,
    ) -> None:
        """Move a student to its device.

        Args:
            model: the student, a causal language model.
            teacher_head: frozen head of the teacher.
            section: which loss.
            device: where student and loss are computed.
        """
        super().__init__()
        self.model = model
        nn.Module.to(self, device)
        self.teacher_head = teacher_head.to(device)
        """Frozen."""
        self._options = LossOptions(**section.model_dump())

    def forward(self, batch: Batch, teacher_states: Tensor) -> LossSums:
        """Return the loss of a batch, divided by the labelled tokens of its whole step.

        Args:
            batch: the micro-batch.
            teacher_states: `[R, Ht]`, hidden states of its labelled rows.
        """
        return distillation_loss(
            self.states(batch),
            head_of(self.model),
            teacher_states,
            self.teacher_head,
            batch.labels.to(self.model.device),
            self._options,
            num_tokens=batch.step_tokens,
        )

    def states(self, batch: Batch) -> Tensor:
        """Return the student's hidden states of the labelled rows, `[R, Hs]`."""
        device = self.model.device
        states = hidden_states(
            body_of(self.model), batch.ids.to(device), batch.positions.to(device)
        )
        return states[batch.rows.to(device)]

    def no_states(self, batch: Batch) -> Tensor:
        """Return zeros in place of the teacher's hidden states of a batch, `[R, Ht]`."""
        weight = self.teacher_head.weight
        return weight.new_zeros(batch.num_tokens, weight.shape[1])

    def agreement(self, batch: Batch, teacher_states: Tensor) -> int:
        """Return for how many labelled rows student and teacher choose the same token."""
        count = top1_agreement(
            self.states(batch),
            head_of(self.model),
            teacher_states,
            self.teacher_head,
        )
        return int(count)
