"""The numbers of the models that do not follow from sizes: named, tagged, to be overridden.

A tag says how far to trust a number: `measured` on real code, an `estimate` that a measurement on
the machine in question should replace, or a `choice` of who plans. What is exact is in the formulas
and has no coefficient.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.errors import InputError
from toolkit.toml_file import read_toml


def _number(default: float | None, tag: str, meaning: str) -> Any:
    return field(default=default, metadata={"tag": tag, "meaning": meaning})


@dataclass(frozen=True)
class Coefficients:
    """Values of all coefficients; `documented` lists them with tag and meaning."""

    full_fp32_bytes: float = _number(
        24, "measured", "bytes per row and vocabulary entry of full logits, float32 softmax"
    )
    full_bf16_bytes: float = _number(14, "measured", "the same, softmax in bfloat16")
    full_jsd_bytes: float = _number(30, "measured", "the same, JSD in bfloat16")
    window_bytes: float | None = _number(
        None, "measured", "bytes per logit of a window; by default as `toolkit.losses` allocates"
    )
    work_hidden: float = _number(
        4, "estimate", "gradients inside of a layer, in bytes per token and hidden element"
    )
    work_layer: float = _number(
        0.35, "estimate", "further gradients inside of a layer, as a share of what it keeps"
    )
    optimizer_bytes: float = _number(
        4, "estimate", "temporary bytes per parameter while the optimizer steps"
    )
    context_gib: float = _number(0.7, "estimate", "GiB of the CUDA context")
    nccl_gib: float = _number(1.6, "estimate", "GiB of NCCL's buffers")
    process_gib: float = _number(
        0.37, "measured", "GiB of a process without a GPU, models and their steps apart"
    )
    fragmentation: float = _number(
        0.06, "estimate", "memory lost between allocations, as a share of what is used"
    )
    expert_imbalance: float = _number(
        1, "estimate", "load of the fullest expert rank over the mean load"
    )
    student_mfu: float = _number(0.40, "estimate", "share of a GPU's peak that training reaches")
    teacher_mfu_dense: float = _number(0.45, "estimate", "the same of a dense teacher's forward")
    teacher_mfu_moe: float = _number(0.25, "estimate", "the same of a mixture of experts")
    rdma_efficiency: float = _number(0.85, "estimate", "share of a port's rate over RDMA")
    tcp_efficiency: float = _number(0.70, "estimate", "share of a port's rate over TCP")
    own_traffic: float = _number(
        1, "choice", "share of the student's weights and gradients that travel between nodes"
    )
    spare_teacher: float = _number(
        1.1, "choice", "teacher rate over student rate to plan for; below 1.05 rings do not help"
    )
    student_variation: float = _number(
        0.1, "estimate", "standard deviation of the student's time a micro-batch over its mean"
    )
    teacher_variation: float = _number(0.5, "estimate", "the same of a teacher replica")
    waiting_share: float = _number(
        0.01, "choice", "share of the student's time that it may wait for teachers"
    )


_FIELDS = fields(Coefficients)


class Documented(NamedTuple):
    """One coefficient."""

    name: str
    default: float | None
    tag: str
    meaning: str


def documented() -> list[Documented]:
    """Return all coefficients."""
    values = vars(Coefficients())
    return [Documented(item.name, values[item.name], **item.metadata) for item in _FIELDS]


def read_coefficients(path: Path | None, overrides: list[str]) -> Coefficients:
    """Return coefficients from a TOML file of `name = number`, and from `name=number` texts.

    Raises:
        InputError: a name is not known, or a value is no number of 0 or more.
    """
    given = {} if path is None else read_toml(path, "coefficients")
    for override in overrides:
        name, _, text = override.partition("=")
        given[name.strip()] = text.strip()
    known = [item.name for item in _FIELDS]
    values = {}
    for name, value in given.items():
        if name not in known:
            raise InputError(f"there is no coefficient {name!r}: known are {', '.join(known)}")
        try:
            values[name] = float(value)
        except (TypeError, ValueError):
            values[name] = -1.0
        if not 0 <= values[name] < float("inf"):
            raise InputError(f"coefficient {name} = {value!r} must be a number of 0 or more")
    return replace(Coefficients(), **values)
