"""The vocabulary split over the ranks of a process group, each with its rows of both heads.

Shapes: R rows, V vocabulary of all ranks.
All ranks compute the same tokens. They exchange what each has of its own columns alone: the rows'
states `[R, 8]`, the sums of a second pass `[R, 2]` and the gradients of the hidden states. States
are merged in the order of ranks, so every rank gets the same bits.
"""

from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import InputError
from toolkit.losses.rows import merge_states


@dataclass(frozen=True)
class Shards:
    """Where the columns of each rank lie.

    Attributes:
        group: the ranks.
        sizes: columns of each rank, in the order of ranks.
    """

    group: dist.ProcessGroup
    sizes: tuple[int, ...]

    @classmethod
    def agreed(cls, group: dist.ProcessGroup, num_columns: int, labels: Tensor) -> "Shards":
        """Tell all ranks of a group the columns of this one, and learn theirs.

        Raises:
            InputError: the ranks were given different labels; all of them raise it.
        """
        own = torch.stack(
            [labels.new_tensor(num_columns), labels.new_tensor(len(labels)), labels.sum()]
        )
        parts = _gathered(own, group)
        sizes, *facts = zip(*(part.tolist() for part in parts), strict=True)
        if any(len(set(fact)) > 1 for fact in facts):
            raise InputError(
                f"the ranks of vocab_group have {list(facts[0])} labels with the sums"
                f" {list(facts[1])}: give all of them the same tokens"
            )
        return cls(group, sizes)

    @property
    def vocab_size(self) -> int:
        """V."""
        return sum(self.sizes)

    @property
    def first_column(self) -> int:
        """Where the columns of this rank begin in the whole vocabulary."""
        return sum(self.sizes[: self.group.rank()])

    def merged(self, state: Tensor, temperature: float) -> Tensor:
        """Return the state `[R, 8]` of the whole vocabulary."""
        parts = _gathered(state, self.group)
        return reduce(lambda left, right: merge_states(left, right, temperature), parts)

    def add_up(self, part: Tensor) -> None:
        """Replace every rank's tensor by their sum."""
        dist.all_reduce(part, group=self.group)


def _gathered(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return parts
