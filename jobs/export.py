"""The trained student of a run, for use elsewhere."""

from pathlib import Path

from jobs.run_folder import RunFolder
from toolkit.errors import InputError
from toolkit.models.export import export_model
from toolkit.models.load import load_model
from toolkit.training.checkpoint import Checkpoints, load_weights


def export_run(folder: RunFolder, output: Path) -> Path:
    """Write the student of the newest checkpoint as a Hugging Face folder.

    Returns:
        The checkpoint.

    Raises:
        InputError: the run has no checkpoint, or `output` exists.
    """
    config = folder.load()
    newest = Checkpoints(folder.checkpoints, config.checkpoint.keep).latest()
    if newest is None:
        raise InputError(f"{folder.path} has no checkpoint yet")
    model = load_model(config.student)
    model.load_state_dict(load_weights(newest))
    tokenizer = config.student.tokenizer or config.student.path
    export_model(model, output, None if tokenizer is None else Path(tokenizer))
    return newest
