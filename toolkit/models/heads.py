"""The language-model head: what turns hidden states into logits.

Shapes: R rows, H hidden size of the model, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.config import ModelSection
from toolkit.errors import InputError
from toolkit.models.checkpoints import checkpoint_keys, read_tensor, weight_files
from toolkit.models.load import load_config, load_model, meta_model, torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


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

    def to(self, device: torch.device) -> "LMHead":
        """Return the head on a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return LMHead(self.weight.to(device), bias, self.scale, self.softcap)

    def detach(self) -> "LMHead":
        """Return the head in the same memory, without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return LMHead(self.weight.detach(), bias, self.scale, self.softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the whole head, in the dtype of its weight.

        Args:
            hidden: `[R, H]`, dtype of the weight.

        Returns:
            `[R, V]`, same dtype.
        """
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def head_of(model: "PreTrainedModel") -> LMHead:
    """Take the head of a loaded model; the weight stays the model's own parameter.

    Whether the contract really gives the model's logits is for `check_head` to say.

    Raises:
        InputError: the model has no output embeddings, or a contract that is not implemented.
    """
    module = _head_module(model)
    scale, softcap = _contract(model.config)
    return LMHead(module.weight, getattr(module, "bias", None), scale, softcap)


def load_head(section: ModelSection) -> LMHead:
    """Load only the head of a model, without memory for the body where there is a folder.

    Args:
        section: the model; a random start is built whole, since the head depends on the body.

    Returns:
        The head on the CPU in `section.dtype`, equal to `head_of(load_model(section))`, without
        gradients.

    Raises:
        InputError: as `load_model` and `head_of`, or the checkpoint does not hold the head.
    """
    if section.path is None:
        return head_of(load_model(section)).detach()
    return _read_head(Path(section.path), load_config(section), torch_dtype(section))


def _head_module(model: Any) -> Any:
    module = model.get_output_embeddings()
    if getattr(module, "weight", None) is None:
        raise InputError(f"{type(model).__name__} has no single LM head; choose another model")
    return module


def _contract(config: "PreTrainedConfig") -> tuple[float, float | None]:
    """Read scale and soft-cap where the architectures keep them; a missing one is neutral."""
    text = config.get_text_config()
    multiplier = getattr(text, "logit_scale", None)
    divisor = getattr(text, "logits_scaling", None)
    softcap = getattr(text, "final_logit_softcapping", None)
    for name, value in (("logit_scale", multiplier), ("logits_scaling", divisor)):
        if isinstance(value, str) or value == 0:
            raise InputError(f"{name} = {value!r} is not implemented; only a number except 0 is")
    scale = (1.0 if multiplier is None else multiplier) / (1.0 if divisor is None else divisor)
    return float(scale), None if softcap is None else float(softcap)


def _read_head(folder: Path, config: "PreTrainedConfig", dtype: torch.dtype) -> LMHead:
    model = meta_model(config)
    module = _head_module(model)
    files = weight_files(folder)
    keys = checkpoint_keys(model, files)

    own = next(name for name, m in model.named_modules() if m is module)

    def read(parameter: Tensor) -> Tensor:
        named = model.named_parameters(remove_duplicate=False)
        names = [name for name, other in named if other is parameter]
        # The head's own name before the embedding's: where a checkpoint holds both and they
        # differ, transformers does not tie them either.
        names.sort(key=lambda name: name.rpartition(".")[0] != own)
        for name in names:
            if name in keys:
                return read_tensor(files[keys[name]], keys[name]).to(dtype)
        raise InputError(
            f"the checkpoint in {folder} holds no {' or '.join(names)} as it stands; give the"
            " folder of a whole causal LM, saved by transformers"
        )

    bias = getattr(module, "bias", None)
    scale, softcap = _contract(config)
    return LMHead(read(module.weight), None if bias is None else read(bias), scale, softcap)
