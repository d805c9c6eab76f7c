"""The plan of a run before it starts: one line, and a refusal of what cannot fit."""

from itertools import islice
from typing import NamedTuple

from jobs.planning.report import REMEDIES, job_of_config
from toolkit.config import Config
from toolkit.errors import InputError
from toolkit.planner.coefficients import Coefficients
from toolkit.planner.hardware import GIB
from toolkit.planner.plans import make_plan
from toolkit.planner.run import layout_of
from toolkit.planner.verdict import remedies


class Gate(NamedTuple):
    """Whether a run fits: None if that is not known; and why, in one line."""

    fits: bool | None
    text: str


def plan_gate(config: Config, *, is_here: bool) -> Gate:
    """Return whether a run fits its machines.

    Args:
        config: the run.
        is_here: whether it runs on this machine, whose memory is known.
    """
    if config.run.device == "cpu" and not is_here:
        return Gate(None, "not planned: run.device = 'cpu', and the nodes' memory is not known")
    if config.run.device == "cuda" and config.cluster.gpu is None:
        return Gate(None, "not planned: cluster.gpu does not say which GPU the nodes have")
    try:
        job = job_of_config(config, None, None, None, Coefficients())
    except InputError as error:
        return Gate(None, f"not planned: {error}")
    layout = layout_of(config)
    plan = make_plan(job, layout)
    usable = job.gpu.usable_bytes(job.coefficients)
    text = (
        f"planned: a student rank takes {plan.memory.peak / GIB:.3g} of {usable / GIB:.3g} GiB"
        f" ({job.gpu.name})"
    )
    if plan.fits:
        return Gate(True, text)
    changes = "; or ".join(islice(remedies(job, layout), REMEDIES)) or "a larger GPU"
    return Gate(False, f"{text}, {plan.reason}; it would fit with {changes}")
