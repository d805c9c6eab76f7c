"""The language-model head: what turns hidden states into logits.

Shapes: R rows, H hidden size of the model, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LMHead:
    """A head's contract: `logits = softcap(scale * (hidden @ weight.T + bias))`.

    Attributes:
        weight: `[V, H]`, any floating dtype.
        bias: `[V]` or None.
        scale: factor on the logits (Cohere multiplies; for Granite it is `1 / logits_scaling`).
        softcap: `c` in `c * tanh(z / c)` (Gemma 2), or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        """Number of rows of the weight."""
        return self.weight.shape[0]
