"""What is to be planned: two models, the machines, and how the work is cut."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from toolkit.errors import InputError
from toolkit.planner.activations import HALF, WIDE, Kernels
from toolkit.planner.coefficients import Coefficients
from toolkit.planner.hardware import Gpu, Network
from toolkit.planner.shapes import ModelShape

Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
Recompute = Literal["none", "selective", "full"]
FullLoss = Literal["fp32", "bf16", "jsd"]
LossStrategy = Literal["auto", "windows", "recompute"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "sharding": get_args(Sharding),
    "recompute": get_args(Recompute),
    "kernels": get_args(Kernels),
    "full_loss": get_args(FullLoss),
    "loss_strategy": get_args(LossStrategy),
}
_AT_LEAST_ONE = (
    *("student_gpus", "node_gpus", "tokens", "sequence_length", "micro_batches"),
    *("tensor_parallel", "expert_parallel", "pipeline_parallel", "context_parallel"),
    *("memory_budget_mib", "shard_columns", "vocab_shards", "host_slots"),
)


@dataclass(frozen=True)
class Job:
    """A distillation on a cluster.

    Attributes:
        student: the model that trains.
        teacher: the frozen model.
        gpu: of all nodes.
        network: of a node.
        student_gpus: that train; with a colocated teacher, all.
        teacher_gpus: of all replicas of a disaggregated teacher.
        node_gpus: GPUs of a node.
        tokens: T, of a micro-batch on one data-parallel rank.
        sequence_length: tokens that attend to each other.
        micro_batches: of a data-parallel rank in an optimizer step.
        student_bytes: of a number where the student computes: 2, or 4 without mixed precision.
        teacher_bytes: of a number of the teacher and of its hidden states.
        has_documents: whether a mask tells documents of one row apart, which every layer keeps.
        sharding: of the student's state.
        gradient_bytes: of a number of the gradients.
        keeps_gradients: whether they are there in forward too, as they are when they accumulate.
        recompute: of activations: none, whole layers, or every second layer (`selective`).
        kernels: of norms and gated units.
        tensor_parallel: ranks that share a student's layer, with sequence parallelism.
        expert_parallel: ranks among which the student's routed experts are spread.
        pipeline_parallel: stages of the student.
        context_parallel: ranks that share the tokens of a sequence.
        prefetch: layers that are gathered ahead.
        has_own_head_group: whether the head is sharded apart; else it is gathered all step long.
        full_loss: which loss the layout with full logits has.
        memory_budget_mib: of the fused loss.
        loss_strategy: of the fused loss.
        has_second_pass: whether its divergence needs the logits once more, see `toolkit.losses`.
        window_rows: of the fused loss; by the budget if None.
        shard_columns: of the fused loss, at most.
        vocab_shards: ranks that share the vocabulary of the fused loss.
        device_slots: micro-batches of hidden states on a student's GPU.
        host_slots: the same in its node's memory: the slots of a ring.
        spare_slots: of these, how many are kept for orders of lost teachers.
        teacher_slots: the same on a teacher.
        replica_gpus: GPUs of a replica of the teacher; the fewest that hold it if None.
        teacher_shards: GPUs among which a colocated teacher is sharded; all if None.
        trained_share: of the tokens, those with a label; only their hidden states travel.
        coefficients: what does not follow from sizes.
    """

    student: ModelShape
    teacher: ModelShape
    gpu: Gpu
    network: Network
    student_gpus: int
    teacher_gpus: int
    node_gpus: int = 8
    tokens: int = 8192
    sequence_length: int = 8192
    micro_batches: int = 1
    student_bytes: int = 2
    teacher_bytes: int = 2
    has_documents: bool = False
    sharding: Sharding = "fsdp2"
    gradient_bytes: int = 4
    keeps_gradients: bool = True
    recompute: Recompute = "full"
    kernels: Kernels = "fused"
    tensor_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    prefetch: int = 1
    has_own_head_group: bool = True
    full_loss: FullLoss = "fp32"
    memory_budget_mib: int = 1024
    loss_strategy: LossStrategy = "auto"
    has_second_pass: bool = False
    window_rows: int | None = None
    shard_columns: int = 8192
    vocab_shards: int = 1
    device_slots: int = 2
    host_slots: int = 8
    spare_slots: int = 0
    teacher_slots: int = 4
    replica_gpus: int | None = None
    teacher_shards: int | None = None
    trained_share: float = 1.0
    coefficients: Coefficients = field(default_factory=Coefficients)

    def __post_init__(self) -> None:
        """Refuse sizes that do not go together."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(
                    f"{name} = {getattr(self, name)!r}: choose one of {', '.join(choices)}"
                )
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.student_gpus % self.model_parallel:
            raise InputError(
                f"student_gpus = {self.student_gpus} is no multiple of {self.model_parallel}, the"
                " product of tensor, pipeline and context parallel ranks"
            )
        if self.replicas % self.expert_parallel:
            raise InputError(
                f"expert_parallel = {self.expert_parallel} does not divide the"
                f" {self.replicas} data-parallel ranks"
            )
        for name in ("student_bytes", "teacher_bytes"):
            if getattr(self, name) not in (HALF, WIDE):
                raise InputError(f"{name} = {getattr(self, name)} must be {HALF} or {WIDE}")
        if not 0 < self.trained_share <= 1:
            raise InputError(f"trained_share = {self.trained_share} must lie in (0, 1]")

    @property
    def model_parallel(self) -> int:
        """GPUs that hold one replica of the student."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def replicas(self) -> int:
        """Data-parallel ranks of the student; each has a ring."""
        return self.student_gpus // self.model_parallel

    @property
    def shards(self) -> int:
        """Ranks that shard the student's state among them: data and context parallel ones."""
        return self.student_gpus // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def teacher_ranks(self) -> int:
        """GPUs among which a colocated teacher is sharded."""
        return self.teacher_shards or self.student_gpus

    @property
    def rank_tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.tokens / self.context_parallel
