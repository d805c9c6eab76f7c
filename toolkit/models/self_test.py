"""Small experiments at start: does a model do what the run will take for granted?

Shapes: R rows, H hidden size, V vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.models.heads import LMHead
from toolkit.models.load import body_of
from toolkit.teacher.forward import hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS, _TOKENS = 2, 8


@torch.no_grad()
def check_head(model: "PreTrainedModel", head: LMHead, name: str) -> None:
    """Compare the model's own logits with body + head on a short batch of random tokens.

    Args:
        model: in evaluation mode.
        head: of the same device and dtype.
        name: what the run calls the model, for the message.

    Raises:
        InputError: the head does not fit the hidden states, or gives other logits.
    """
    ids = _random_ids(model, _ROWS, _TOKENS)
    positions = torch.arange(_TOKENS, device=ids.device).expand_as(ids)
    hidden = hidden_states(body_of(model), ids, positions)
    who = f"the {name} ({type(model).__name__})"
    if (hidden.shape[1], hidden.dtype) != (head.weight.shape[1], head.weight.dtype):
        raise InputError(
            f"{who} has hidden states of width {hidden.shape[1]} ({hidden.dtype}) but a head of"
            f" width {head.weight.shape[1]} ({head.weight.dtype}); choose another architecture"
            " or dtype"
        )
    expected = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    error, bound = _error_and_bound(head.logits(hidden), expected)
    if not error <= bound:
        raise InputError(
            f"{who} computes other logits than its head's contract softcap(scale * (h W^T + bias))"
            f" with bias {'no' if head.bias is None else 'yes'}, scale {head.scale:g}, softcap"
            f" {head.softcap}: largest error {error:.3g}, rounding explains {bound:.3g};"
            " distillation from hidden states needs an architecture with such a head"
        )


@torch.no_grad()
def check_packing(model: "PreTrainedModel", name: str) -> None:
    """Check that of two documents in one row, the first does not change the second's states.

    Two rows of one batch differ in their first document only. Masked attention adds exact zeros,
    so that the second documents agree bit for bit in any dtype, or are mixed with the first.

    Raises:
        InputError: they differ, so that `data.packing = "documents"` would mix documents.
    """
    first, other, second = _random_ids(model, 3, _TOKENS)
    ids = torch.stack([torch.cat([first, second]), torch.cat([other, second])])
    positions = torch.arange(_TOKENS, device=ids.device).repeat(2).expand_as(ids)
    one, two = hidden_states(body_of(model), ids, positions).view(2, 2, _TOKENS, -1)[:, 1]
    if not torch.equal(one, two):
        raise InputError(
            f"the {name} ({type(model).__name__}) mixes documents packed into one row: another"
            f" first document changes the second's hidden states by {(one - two).abs().max():.3g};"
            ' set data.packing = "none" or choose another architecture'
        )


def _random_ids(model: "PreTrainedModel", rows: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    embeddings: Any = model.get_input_embeddings()
    return torch.randint(embeddings.num_embeddings, (rows, tokens), generator=generator).to(
        model.device
    )


def _error_and_bound(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest difference, and what rounding explains of it.

    Scale and soft-cap round a result up to four times in its own dtype; sums are accumulated in
    float32, in an order that may differ.
    """
    error = (actual.float() - expected.float()).abs().max().item()
    relative = 4 * torch.finfo(expected.dtype).eps + 64 * torch.finfo(torch.float32).eps
    return error, relative * expected.float().abs().max().item()
