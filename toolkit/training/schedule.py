"""Learning rate as a function of the step."""

import math

from toolkit.config import OptimSection


def learning_rate(step: int, num_steps: int, section: OptimSection) -> float:
    """Return the learning rate of a step.

    Linear warm-up to `lr`, then: `constant`; `cosine` down to `min_lr_ratio * lr` at the last step
    (Loshchilov and Hutter 2017, arXiv:1608.03983); or `wsd`, stable and then linear down over the
    last `decay_fraction` of the steps (Hu et al. 2024, arXiv:2404.06395).

    Args:
        step: from 0.
        num_steps: steps of the whole run.
        section: peak and shape.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    return section.lr * (
        section.min_lr_ratio + (1 - section.min_lr_ratio) * _shape(step, num_steps, section)
    )


def _shape(step: int, num_steps: int, section: OptimSection) -> float:
    """Return where the rate stands between its minimum (0) and its peak (1)."""
    if section.schedule == "constant":
        return 1.0
    if section.schedule == "cosine":
        span = max(1, num_steps - 1 - section.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - section.warmup_steps) / span)))
    span = max(1, round(section.decay_fraction * num_steps))
    return min(1.0, (num_steps - 1 - step) / span)
