"""From token ids to hidden states: the one forward pass that both models make.

Shapes: B rows of a batch, L tokens of a row, H hidden size.
"""

import inspect

import torch
from torch import Tensor, nn

from toolkit.errors import InputError


def hidden_states(body: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """Run a model's body, its final norm included, over whole rows.

    Documents packed into a row are told apart by their restarting positions alone, which
    transformers honours when it gets neither an attention mask nor a cache.

    Args:
        body: a transformers body (see `toolkit.models.load.body_of`); gradients are the caller's.
        ids: `[B, L]`, int64.
        positions: `[B, L]`, int64, restarting at 0 with every document.

    Returns:
        `[B * L, H]` in the body's dtype.

    Raises:
        InputError: the body takes no positions, and these are not simply 0 to L - 1.
    """
    extra = {}
    if "position_ids" in inspect.signature(body.forward).parameters:
        extra["position_ids"] = positions
    elif not bool((positions == torch.arange(ids.shape[1], device=ids.device)).all()):
        raise InputError(
            f"{type(body).__name__} takes no positions, so that it cannot keep packed documents"
            ' apart; set data.packing = "none"'
        )
    output = body(input_ids=ids, use_cache=False, **extra).last_hidden_state
    hidden: Tensor = output.flatten(0, 1)
    return hidden
