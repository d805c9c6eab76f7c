"""Models through transformers: from a Hugging Face folder, or with random weights."""

import copy
import dataclasses
import difflib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config import ModelSection
from toolkit.errors import InputError
from toolkit.models.checkpoints import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_config(section: ModelSection) -> "PreTrainedConfig":
    """Read or build the transformers configuration of a model.

    Args:
        section: names a folder with a `config.json`, or holds the keys of a configuration.

    Returns:
        The configuration, with every default filled in.

    Raises:
        InputError: no such folder, an unknown `model_type`, or keys that its class refuses.
    """
    if section.path is not None:
        return _folder_config(Path(section.path))
    assert section.config is not None
    return _table_config(section.config)


def load_model(section: ModelSection) -> "PreTrainedModel":
    """Load or randomly start a causal language model, in evaluation mode on the CPU.

    Attention is transformers' own choice: SDPA wherever the architecture has it.

    Args:
        section: folder or configuration, seed of the random start, and dtype of the weights.

    Returns:
        The whole model with its head.

    Raises:
        InputError: the configuration is refused (see `load_config`), the architecture is no
            causal language model, or the folder lacks weights.
    """
    config = load_config(section)
    dtype = torch_dtype(section)
    if section.path is not None:
        return _folder_model(config, Path(section.path), dtype)
    assert section.config is not None
    _refuse_unread_keys(section.config, config)
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the GPUs, which are not forked here.
        torch.default_generator.manual_seed(section.seed)
        return _from_config(config, dtype)


def body_of(model: "PreTrainedModel") -> torch.nn.Module:
    """Return the model without its head, so that the head's memory can go with `del model`.

    Raises:
        InputError: the architecture has no body of its own.
    """
    body: torch.nn.Module = model.base_model
    if body is model:
        raise InputError(
            f"{type(model).__name__} has no body apart from its head; choose another architecture"
        )
    return body


def meta_model(config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build a causal language model without memory for its weights: names and shapes only.

    Raises:
        InputError: the architecture is no causal language model.
    """
    with torch.device("meta"):
        return _from_config(config, torch.float32)


def torch_dtype(section: ModelSection) -> torch.dtype:
    """Return the dtype of a model's weights."""
    dtype = getattr(torch, section.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _auto_model() -> Any:  # transformers' auto classes are hardly typed
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _folder_config(folder: Path) -> "PreTrainedConfig":
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not folder.is_dir():
        raise InputError(f"model folder {folder} does not exist; models are never downloaded")
    if not (folder / "config.json").is_file():
        raise InputError(f"model folder {folder} has no config.json; give a Hugging Face folder")
    try:
        # Code that comes with a model is never run (None would ask on the terminal).
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, StrictDataclassError) as error:
        raise InputError(f"cannot use {folder / 'config.json'}: {error}") from error
    return config


def _table_config(table: dict[str, Any]) -> "PreTrainedConfig":
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = table["model_type"]
    if model_type not in CONFIG_MAPPING:
        nearest = _nearest(model_type, CONFIG_MAPPING.keys())
        raise InputError(f"transformers knows no model_type = {model_type!r}{nearest}")
    try:
        # transformers writes into nested tables (rope_parameters) while it reads them.
        config: PreTrainedConfig = AutoConfig.for_model(**copy.deepcopy(table))
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise InputError(f"model_type = {model_type!r} refuses its table: {error}") from error
    return config


def _refuse_unread_keys(table: dict[str, Any], config: "PreTrainedConfig") -> None:
    """Refuse misspelt keys, which transformers keeps as plain attributes without a word.

    Some undeclared ones do count (`head_dim` of Qwen3-MoE): the model's source reads them.
    """
    declared = {field.name for field in dataclasses.fields(config)}
    undeclared = sorted((table.keys() & vars(config).keys()) - declared)
    if not undeclared:
        return
    source = inspect.getsource(sys.modules[type(meta_model(config)).__module__])
    for key in undeclared:
        if key not in source:
            nearest = _nearest(key, declared)
            raise InputError(f"model_type = {config.model_type!r} has no key {key!r}{nearest}")


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _from_config(config: "PreTrainedConfig", dtype: torch.dtype) -> "PreTrainedModel":
    try:
        model: PreTrainedModel = _auto_model().from_config(config, dtype=dtype)
    except (AssertionError, ValueError) as error:  # torch asserts that padding is in the vocabulary
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"model_type = {config.model_type!r} makes no causal language model: {reason}"
        ) from error
    model.train(False)
    return model


def _folder_model(
    config: "PreTrainedConfig", folder: Path, dtype: torch.dtype
) -> "PreTrainedModel":
    weight_files(folder)
    try:
        model, report = _auto_model().from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise InputError(f"cannot load {folder} as a causal language model: {error}") from error
    # transformers would start missing weights at random, with no more than a warning.
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"the checkpoint in {folder} lacks {len(missing)} weights of {type(model).__name__},"
            f" among them {missing[0]!r}; give the folder of a whole causal LM"
        )
    loaded: PreTrainedModel = model
    return loaded
