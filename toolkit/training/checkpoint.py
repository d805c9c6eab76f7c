"""Checkpoints: tensors by torch.distributed.checkpoint and one JSON; whole, or not there."""

import json
import os
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from toolkit.training.ranks import ALONE, Ranks

_STATE_FILE = "state.json"
_TENSORS = "tensors"


class Checkpoints:
    """The checkpoints of a run, `step-*` folders; the newest whole one counts."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks = ALONE) -> None:
        """Use `folder`, keeping the newest `keep` checkpoints; `ranks` save and load together."""
        self._folder = folder
        self._keep = keep
        self._ranks = ranks

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        *,
        alone: bool = False,
    ) -> Path:
        """Save under a temporary name, rename, then remove the old ones.

        Args:
            step: number of finished steps.
            model: its parameters and buffers are saved.
            optimizer: its state is saved.
            state: JSON values kept beside them.
            alone: this rank saves all by itself, which replicas can; the others may be gone.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        final = self._folder / f"step-{step:08d}"
        ranks = ALONE if alone else self._ranks
        temporary = self._folder / ranks.share(f".{final.name}.{uuid.uuid4().hex}")
        tensors = _tensors(model, optimizer)
        _quietly(save, tensors, checkpoint_id=temporary / _TENSORS, no_dist=ranks.size == 1)
        if ranks.is_first:
            self._finish(temporary, final, {"step": step, **state})
        ranks.wait()
        return final

    def _finish(self, temporary: Path, final: Path, state: dict[str, Any]) -> None:
        text = json.dumps(state | {"torch": torch.__version__}, indent=1)
        (temporary / _STATE_FILE).write_text(text + "\n", encoding="utf-8")
        if final.exists():  # the same step, saved by a run that was resumed from an older one
            shutil.rmtree(final)
        os.replace(temporary, final)
        self._remove_old()

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint, or None."""
        whole = self._whole()
        return whole[-1] if whole else None

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Load a checkpoint in place and return the JSON values beside it."""
        tensors = _tensors(model, optimizer)
        _quietly(load, tensors, checkpoint_id=path / _TENSORS)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )
        state: dict[str, Any] = json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
        return state

    def _whole(self) -> list[Path]:
        return sorted(path.parent for path in self._folder.glob(f"step-*/{_STATE_FILE}"))

    def _remove_old(self) -> None:
        for path in self._whole()[: -self._keep]:
            shutil.rmtree(path)
        for torn in self._folder.glob(".step-*"):
            shutil.rmtree(torn)


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the student's parameters and buffers of a checkpoint, by name, on the CPU."""
    reader = FileSystemReader(path / _TENSORS)
    entries = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    _quietly(load, weights, storage_reader=reader)
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def _quietly(call: Any, *arguments: Any, **options: Any) -> None:
    """Call torch.distributed.checkpoint without its warning that a lone process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        warnings.filterwarnings("ignore", message=".*assuming the intent is to.*")
        call(*arguments, **options)
