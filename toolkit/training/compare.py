"""Two runs side by side: the largest difference of their losses and of their weights."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import InputError
from toolkit.training.checkpoint import Checkpoints, load_weights
from toolkit.training.metrics import Record, read_steps

_LOSSES = ("loss", "kd", "ce")


@dataclass(frozen=True)
class Comparison:
    """Largest absolute differences between two runs.

    Attributes:
        num_steps: steps that both did.
        loss: of loss, KD and CE over all steps.
        loss_step: the step at which it occurs.
        weight: over all elements of all parameters after the last step.
        weight_name: the parameter in which it occurs.
    """

    num_steps: int
    loss: float
    loss_step: int
    weight: float
    weight_name: str

    def within(self, tolerance: float) -> bool:
        """Say whether both differences are at most `tolerance`."""
        return self.loss <= tolerance and self.weight <= tolerance


def compare_runs(
    metrics: tuple[Path, Path], checkpoints: tuple[Path, Path]
) -> tuple[Comparison, list[tuple[Record, Record]]]:
    """Compare the metrics files and the newest checkpoints of two runs.

    Returns:
        The differences, and the step records of both runs, step by step.

    Raises:
        InputError: the runs have not done the same steps or have not the same parameters.
    """
    first, second = (read_steps(path) for path in metrics)
    if not first or first.keys() != second.keys():
        raise InputError(
            f"{metrics[0]} has {len(first)} steps, {metrics[1]} has {len(second)}: "
            "only runs that have done the same steps can be compared"
        )
    pairs = [(first[step], second[step]) for step in sorted(first)]
    loss, step = max((_loss_difference(a, b), a["step"]) for a, b in pairs)
    weight, name = _weight_difference(*checkpoints)
    return Comparison(len(pairs), loss, step, weight, name), pairs


def _loss_difference(first: Record, second: Record) -> float:
    return max(abs(float(first[name]) - float(second[name])) for name in _LOSSES)


def _weight_difference(first: Path, second: Path) -> tuple[float, str]:
    weights = []
    for folder in (first, second):
        newest = Checkpoints(folder, keep=1).latest()
        if newest is None:
            raise InputError(f"{folder} has no checkpoint: let the run come to its end")
        weights.append(load_weights(newest))
    if weights[0].keys() != weights[1].keys():
        raise InputError(f"{first} and {second} hold different models: they cannot be compared")
    return max(
        (float((tensor.double() - weights[1][name].double()).abs().max()), name)
        for name, tensor in weights[0].items()
    )
