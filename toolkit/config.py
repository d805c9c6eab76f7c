"""The configuration of a run: one TOML file, frozen and typed, unknown keys refused."""

from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

DType = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """Base of all sections: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunSection(Section):
    """What the run is: where it is kept, how long it goes on, on what it computes."""

    folder: str
    steps: PositiveInt
    seed: NonNegativeInt = 0
    device: Literal["cpu", "cuda"] = "cpu"
    threads: PositiveInt = 1
    """CPU threads of each process; a part of the run's arithmetic, hence never guessed."""


class DataSection(Section):
    """Which tokens are trained on, and how they are cut into rows."""

    tokens: str
    sequence_length: PositiveInt
    batch_size: PositiveInt = 1
    """Rows of a micro-batch."""
    packing: Literal["none", "documents"] = "none"
    """`documents` restarts positions and attention after every end-of-text token."""
    eval_rows: NonNegativeInt = 0
    """Rows at the end of the file that are never trained on, for evaluation before and after."""


class ModelSection(Section):
    """A model: a Hugging Face folder, or an architecture with random weights."""

    path: str | None = None
    config: dict[str, Any] | None = None
    """Keys of a transformers configuration, `model_type` first, for a random start."""
    seed: NonNegativeInt = 0
    """Seed of the random start; unused with `path`."""
    tokenizer: str | None = None
    """Folder of the tokenizer, where it is not in `path`."""
    dtype: DType = "float32"

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of `path` (a model folder) and `config` (a table)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` needs `model_type`, for example model_type = 'qwen3'")
        return self


class TeacherSection(ModelSection):
    """The frozen teacher and where it runs."""

    placement: Literal["colocated", "disaggregated"] = "disaggregated"
    replicas: PositiveInt = 1


class StudentSection(ModelSection):
    """The student; its parameters and optimizer state are kept in float32."""

    dtype: Literal["float32"] = "float32"
    replicas: PositiveInt = 1
    """Data-parallel ranks; each trains on micro-batches of its own."""


class LossSection(Section):
    """The distillation loss: a mean of KD, cross-entropy and z-loss over labelled tokens."""

    divergence: Literal[
        "forward_kl",
        "reverse_kl",
        "symmetric_kl",
        "jsd",
        "skew_forward_kl",
        "skew_reverse_kl",
        "total_variation",
    ] = "forward_kl"
    beta: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Weight of the teacher in the mixture of `jsd`."""
    skew: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Weight of the model that a skew divergence compares with the mixture."""
    temperature: PositiveFloat = 1.0
    kd_weight: NonNegativeFloat = 1.0
    ce_weight: NonNegativeFloat = 0.0
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log sum exp of the student's logits."""
    tau_squared: bool = False
    """Multiply KD by temperature squared (Hinton et al. 2015, arXiv:1503.02531)."""
    strategy: Literal["auto", "windows", "recompute"] = "auto"
    memory_budget_mib: PositiveInt = 1024
    """Memory that the loss may take at a time, above its inputs and gradients."""
    window_rows: PositiveInt | None = None
    """Tokens of a window; by default as many as fit the budget."""
    shard_columns: PositiveInt = 8192
    backend: Literal["auto", "torch", "native"] = "auto"
    """Who computes the rows: torch ops, the native kernels, or these where they are built."""


class RingSection(Section):
    """The ring of hidden states in the student's memory."""

    slots: int = Field(default=4, ge=2)
    """Micro-batches that teachers may be ahead of the student."""
    spare_slots: PositiveInt = 2
    """Further slots, for orders of lost teachers, which may still write to their own."""
    slot_tokens: PositiveInt | None = None
    """Rows that one slot holds; by default exactly a micro-batch."""


class OptimSection(Section):
    """AdamW, its schedule, and the size of a step."""

    lr: PositiveFloat = 1e-3
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat | None = 1.0
    accumulation: PositiveInt = 1
    """Micro-batches of one optimizer step."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    decay_fraction: float = Field(default=0.2, gt=0.0, le=1.0)
    """Share of the steps in which `wsd` decays, at the end."""


class CheckpointSection(Section):
    """When the run is saved, besides at its end and when it is stopped."""

    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2


class TransportSection(Section):
    """UCX and the control channel."""

    interface: str | None = None
    """Network interface of all traffic; without it `lo`, which reaches this machine alone."""
    tls: str | None = None
    """UCX_TLS, for example `posix` or `tcp`; by default UCX chooses."""
    binding: Literal["native", "ucx-py", "auto"] = "auto"
    """Binding to UCX; `auto` takes ucx-py only where the native one does not load."""
    require: Literal["any", "rdma"] = "any"
    """`rdma` refuses to start where hidden states would not go over RDMA."""
    checksum: bool = False
    """Whether teachers send a CRC-32C with every payload, which the student then checks."""
    heartbeat_s: PositiveFloat = 1.0
    dead_after_s: PositiveFloat = 10.0
    """Silence after which a teacher's orders go to others, and a student's orders wait."""
    grace_s: PositiveFloat = 60.0
    """How long a student waits when no teacher is left, and a teacher without students."""
    order_timeout_s: PositiveFloat = 60.0
    """After which time an order goes to another teacher, if there is one."""
    connect_timeout_s: PositiveFloat = 300.0
    """How long a student waits for teachers to load; also how long a teacher waits for one."""
    take_timeout_s: PositiveFloat = 600.0
    """How long a student waits for one micro-batch of hidden states before it gives up."""

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> Self:
        if self.dead_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"dead_after_s = {self.dead_after_s} must be at least twice "
                f"heartbeat_s = {self.heartbeat_s}"
            )
        return self


class ComponentSection(Section):
    """The nodes of one role in a Slurm job; its tasks are spread evenly over them."""

    nodes: PositiveInt = 1
    partition: str | None = None
    cpus_per_task: PositiveInt | None = None
    gpus_per_node: PositiveInt | None = None
    options: dict[str, str | int | bool] = {}
    """Further sbatch options; true is a flag without value, false removes a default."""
    srun_options: list[str] = []
    """Further options of this role's part of srun, for example --container-image=..."""


class ClusterSection(Section):
    """The Slurm job of a run."""

    time_min: PositiveInt = 60
    warning_s: PositiveInt = 120
    """Seconds before the time limit at which the run saves and has itself requeued."""
    end_s: PositiveInt = 600
    """How long tasks may take to save and end after a failure, before they are ended."""
    max_restarts: NonNegativeInt = 20
    setup: list[str] = []
    """Shell lines before the tasks start: modules, conda."""
    environment: dict[str, str] = {}
    """Variables of all tasks, for example NCCL_* and UCX_*."""
    gpu: str | None = None
    """GPU of the nodes, as `disaggkd plan` calls it, for example `h100-80`."""
    network: str | None = None
    """Network of a node for the planner, for example `8x400`, or `1x100tcp` without RDMA."""
    options: dict[str, str | int | bool] = {}
    """Further sbatch options of both roles."""
    student: ComponentSection = ComponentSection()
    teacher: ComponentSection = ComponentSection()


class Config(Section):
    """A whole run."""

    run: RunSection
    data: DataSection
    teacher: TeacherSection
    student: StudentSection
    loss: LossSection = LossSection()
    ring: RingSection = RingSection()
    optim: OptimSection = OptimSection()
    checkpoint: CheckpointSection = CheckpointSection()
    transport: TransportSection = TransportSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="after")
    def _batch_fits_slot(self) -> Self:
        tokens = self.data.batch_size * self.data.sequence_length
        if self.ring.slot_tokens is not None and tokens > self.ring.slot_tokens:
            raise ValueError(
                f"a micro-batch has {self.data.batch_size} x {self.data.sequence_length} = {tokens}"
                f" tokens but ring.slot_tokens = {self.ring.slot_tokens}: raise ring.slot_tokens,"
                " or lower data.sequence_length or data.batch_size"
            )
        return self

    @model_validator(mode="after")
    def _tasks_fit_nodes(self) -> Self:
        for role, replicas, nodes in (
            ("student", self.student.replicas, self.cluster.student.nodes),
            ("teacher", self.teacher.replicas, self.cluster.teacher.nodes),
        ):
            if replicas % nodes:
                raise ValueError(
                    f"{role}.replicas = {replicas} cannot be spread evenly over "
                    f"cluster.{role}.nodes = {nodes}"
                )
        return self

    @property
    def num_teachers(self) -> int:
        """Teacher processes of the run."""
        return self.teacher.replicas if self.teacher.placement == "disaggregated" else 0

    @property
    def interface(self) -> str:
        """Network interface of all traffic of the run."""
        return self.transport.interface or "lo"

    @property
    def slot_tokens(self) -> int:
        """Rows that one slot of the ring holds."""
        return self.ring.slot_tokens or self.data.batch_size * self.data.sequence_length
