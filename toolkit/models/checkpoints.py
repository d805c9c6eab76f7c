"""Single tensors out of a safetensors checkpoint, without loading the rest."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from toolkit.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def weight_files(folder: Path) -> dict[str, Path]:
    """Map every tensor of a checkpoint to the file that holds it.

    Args:
        folder: holds `model.safetensors`, or shards with `model.safetensors.index.json`.

    Raises:
        InputError: the folder has neither, or shards of the index are missing.
    """
    from safetensors import safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    if not index.is_file():
        raise InputError(_no_safetensors(folder))
    shards = json.loads(index.read_text())["weight_map"]
    if missing := sorted({name for name in shards.values() if not (folder / name).is_file()}):
        raise InputError(f"{folder} lacks {', '.join(missing)}, which {index.name} names")
    return {key: folder / name for key, name in shards.items()}


def checkpoint_keys(model: "PreTrainedModel", keys: Collection[str]) -> dict[str, str]:
    """Map the names of a model's weights to the keys under which a checkpoint holds them.

    The two differ by prefixes, and where transformers has renamed its modules. Weights that
    transformers assembles from several tensors are left out.

    Args:
        model: may be on the meta device.
        keys: all keys of the checkpoint.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    names = model.state_dict()  # decides about the body's prefix
    found = {}
    for key in keys:
        name, converter = rename_source_key(
            key, renamings, converters, model.base_model_prefix, names
        )
        if converter is None:
            found[name] = key
    return found


def read_tensor(file: Path, key: str) -> Tensor:
    """Read one tensor of a safetensors file, in the file's dtype.

    Raises:
        InputError: the tensor is quantized.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(key)
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise InputError(
            f"{key} in {file} is quantized ({tensor.dtype}); give a folder with float32, bfloat16"
            " or float16 weights"
        )
    return tensor


def _no_safetensors(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return (
            f"{folder} holds only .bin weights; convert them to safetensors: load the model with"
            " transformers and call save_pretrained"
        )
    return f"{folder} holds no model.safetensors; give a folder with safetensors weights"
