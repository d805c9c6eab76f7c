"""A trained model as a Hugging Face folder."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)


def export_model(model: "PreTrainedModel", folder: Path, tokenizer: Path | None) -> None:
    """Write a folder that `from_pretrained` loads; it appears whole or not at all.

    Args:
        model: with plain tensors for weights (gathered, where they were sharded).
        folder: must not exist yet.
        tokenizer: folder whose tokenizer files are copied beside the weights.

    Raises:
        InputError: `folder` exists, its parent does not, or `tokenizer` holds no tokenizer.
    """
    if folder.exists():
        raise InputError(f"{folder} exists; remove it or export to another folder")
    if not folder.parent.is_dir():
        raise InputError(f"{folder.parent} is no folder; create it first")
    files = [] if tokenizer is None else _tokenizer_files(tokenizer)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        model.save_pretrained(unfinished)
        for file in files:
            shutil.copy2(file, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _tokenizer_files(folder: Path) -> list[Path]:
    files = {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)}
    if not files:
        raise InputError(f"{folder} holds no tokenizer files; give a tokenizer's folder")
    return sorted(file for file in files if file.is_file())
