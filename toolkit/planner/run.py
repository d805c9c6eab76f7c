"""The job of a run of this project: what its trainer does with a configuration.

It trains in float32 on one GPU or process for each rank (DDP), recomputes nothing, and its AdamW
needs no temporaries. A colocated teacher is whole in every rank; a replica has one GPU.
"""

from dataclasses import replace
from pathlib import Path

from toolkit.config import Config, ModelSection
from toolkit.planner.coefficients import Coefficients
from toolkit.planner.facts import read_model, shape_of
from toolkit.planner.hardware import Gpu, Network, this_machine
from toolkit.planner.job import Job
from toolkit.planner.memory import Layout
from toolkit.planner.shapes import ModelShape

_ONE_PASS = ("forward_kl", "reverse_kl", "symmetric_kl")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def job_of_run(
    config: Config, gpu: Gpu | None, network: Network, coefficients: Coefficients
) -> Job:
    """Return the job of a configuration.

    Args:
        config: the run.
        gpu: of its nodes; None for this machine's processor.
        network: of its nodes.
        coefficients: of the models.

    Raises:
        InputError: a model's family is not known to the planner, or its configuration is missing.
    """
    students, teachers = config.student.replicas, config.num_teachers
    node = config.cluster.student.nodes
    tokens = config.data.batch_size * config.data.sequence_length
    return Job(
        student=_model("student", config.student),
        teacher=_model("teacher", config.teacher),
        gpu=gpu or this_machine(students + teachers, config.run.threads),
        network=network,
        student_gpus=students,
        teacher_gpus=teachers,
        node_gpus=max(students // node, 1),
        tokens=tokens,
        sequence_length=config.data.sequence_length,
        micro_batches=config.optim.accumulation,
        student_bytes=_ITEM_BYTES[config.student.dtype],
        teacher_bytes=_ITEM_BYTES[config.teacher.dtype],
        has_documents=config.data.packing == "documents",
        sharding="ddp",
        keeps_gradients=config.optim.accumulation > 1,
        recompute="none",
        kernels="eager",
        memory_budget_mib=config.loss.memory_budget_mib,
        loss_strategy=config.loss.strategy,
        has_second_pass=config.loss.divergence not in _ONE_PASS,
        window_rows=config.loss.window_rows,
        shard_columns=config.loss.shard_columns,
        host_slots=config.ring.slots + config.ring.spare_slots,
        spare_slots=config.ring.spare_slots,
        device_slots=1,
        replica_gpus=1,
        teacher_shards=1,
        # The last token of a row has no label.
        trained_share=1 - config.data.batch_size / tokens if tokens > config.data.batch_size else 1,
        coefficients=replace(coefficients, optimizer_bytes=0),
    )


def layout_of(config: Config) -> Layout:
    """Return the layout that a configuration asks for."""
    return "disaggregated" if config.num_teachers else "colocated_fused"


def _model(role: str, section: ModelSection) -> ModelShape:
    if section.path is not None:
        return read_model(str(Path(section.path)))
    assert section.config is not None
    return shape_of(section.config, role)
