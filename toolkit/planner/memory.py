"""How much memory a GPU needs: a static part, plus the largest of the moments of a step.

All in bytes. Adding all parts up would overestimate: activations are gone when the optimizer steps.
P parameters, h hidden size, V vocabulary, W = V h the head's matrix, T tokens of a micro-batch on a
rank; s and t stand for student and teacher. Weights are bfloat16 where they compute; the student's
state is that of mixed precision with AdamW: 2 bytes of weights, 4 of gradients, 12 of float32
weights and moments (ZeRO, arXiv:1910.02054, section 3.1). `docs/memory-model.md` derives the
formulas and says what they leave out.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from toolkit.planner.activations import HALF, WIDE, forward_bytes, saved_by_layer
from toolkit.planner.job import Job, Sharding
from toolkit.planner.loss_plan import Plan, Sizes, make_plan, transient_bytes
from toolkit.planner.parameters import LayerCounts, count, count_layer
from toolkit.planner.shapes import GatedDelta
from transport.layout import RingGeometry

Layout = Literal["colocated_full", "colocated_fused", "disaggregated"]
LAYOUTS: tuple[Layout, ...] = ("colocated_full", "colocated_fused", "disaggregated")


@dataclass(frozen=True)
class Memory:
    """Needs of one GPU.

    Attributes:
        static: bytes by component, there all the time.
        moments: further bytes by moment of a step.
        kept: of them, activations between forward and backward.
    """

    static: dict[str, float]
    moments: dict[str, float]
    kept: float = 0.0

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment."""
        return sum(self.static.values()) + self.moments[self.moment]

    @property
    def moment(self) -> str:
        """The fullest moment."""
        return max(self.moments, key=self.moments.__getitem__)


def student_memory(job: Job, layout: Layout) -> Memory:
    """Return what a GPU needs that trains the student."""
    counts, item = count(job.student), job.student_bytes
    is_gathered = job.sharding in ("zero3", "fsdp2")
    head = counts.head_matrix / job.tensor_parallel
    root = head_weight = head_gradient = gathered_layer = 0.0
    if is_gathered:
        head_gradient = WIDE * head
        gathered_layer = (item * (1 + job.prefetch) + WIDE) * _largest_layer(job)
        if job.has_own_head_group:
            head_weight = item * head
        else:
            root = item * (counts.embedding + counts.head) / job.tensor_parallel
    state = state_bytes(job)
    gradients = 0.0
    if not job.keeps_gradients:
        gradients = state.pop("gradients")
        head_gradient = max(head_gradient, job.gradient_bytes * head)
    kept, work = activation_bytes(job)
    loss = loss_bytes(job, layout) + head_weight + head_gradient + root
    if layout == "colocated_fused":  # its head is gathered, or there anyway
        shared = job.teacher_ranks > 1
        loss += shared * job.teacher_bytes * job.teacher.vocab_size * job.teacher.hidden_size
    own_gradient = 0.0 if job.has_own_head_group else head_gradient
    if job.student.is_tied and not is_gathered:  # what its two uses give is there beside the sum
        own_gradient = job.gradient_bytes * head
    moments = {
        "loss": kept + loss,
        "backward": max(gradients, kept) + work + root + own_gradient + gathered_layer,
        "optimizer": gradients + _optimizer_bytes(job),
    }
    if layout != "disaggregated":
        moments["teacher forward"] = _teacher_moment(job, layout)
    return Memory(state | _teacher_static(job, layout), moments, kept)


def state_bytes(job: Job) -> dict[str, float]:
    """Return weights, gradients and AdamW's state of a student's GPU."""
    counts = count(job.student)
    stages = job.tensor_parallel * job.pipeline_parallel
    routed_stages = job.expert_parallel * job.pipeline_parallel
    dense = sharded_bytes(
        (counts.total - counts.routed) / stages,
        job.sharding,
        job.shards,
        gradient_bytes=job.gradient_bytes,
        weight_bytes=job.student_bytes,
    )
    routed = sharded_bytes(
        counts.routed / routed_stages,
        job.sharding,
        job.student_gpus // routed_stages,
        gradient_bytes=job.gradient_bytes,
        weight_bytes=job.student_bytes,
    )
    state = {name: dense[name] + routed[name] for name in dense}
    if job.sharding == "ddp" and job.replicas > 1:
        state["gradient buckets"] = state["gradients"]
    return state


def sharded_bytes(
    parameters: float,
    sharding: Sharding,
    shards: int,
    *,
    gradient_bytes: int = WIDE,
    weight_bytes: int = HALF,
) -> dict[str, float]:
    """Return the state of some parameters: weights, gradients, AdamW's moments and main weights.

    Weights that compute in float32 are the main ones; so are those of `fsdp2`, which casts them
    where it gathers.
    """
    main = WIDE if weight_bytes == HALF and sharding != "fsdp2" else 0
    weights = WIDE if sharding == "fsdp2" else weight_bytes
    sharded = {
        "ddp": (),
        "zero1": ("optimizer",),
        "zero2": ("optimizer", "gradients"),
        "zero3": ("optimizer", "gradients", "weights"),
        "fsdp2": ("optimizer", "gradients", "weights"),
    }[sharding]
    sizes = {"weights": weights, "gradients": gradient_bytes, "optimizer": 2 * WIDE + main}
    return {
        name: size * parameters / (shards if name in sharded else 1) for name, size in sizes.items()
    }


def _optimizer_bytes(job: Job) -> float:
    parameters = count(job.student).total / (job.tensor_parallel * job.pipeline_parallel)
    is_gathered = job.sharding in ("zero3", "fsdp2")
    return job.coefficients.optimizer_bytes * parameters / (job.shards if is_gathered else 1)


def activation_bytes(job: Job) -> tuple[float, float]:
    """Return what is kept until backward, and what backward of one layer takes besides.

    With pipeline stages, the first one keeps a micro-batch for each of them (1F1B).
    """
    h, parallel = job.student.hidden_size, job.tensor_parallel
    imbalance = job.coefficients.expert_imbalance
    mask = 2 * job.student_bytes * job.sequence_length if job.has_documents else 0
    layers = [
        saved_by_layer(job.student, layer, job.kernels, imbalance, job.student_bytes).on_rank(
            parallel
        )
        + mask * (not isinstance(layer.mixer, GatedDelta))
        for layer in job.student.layers
    ]
    whole, largest = sum(layers) / len(layers), max(layers)
    boundary = job.student_bytes * h / parallel
    per_layer = {"none": whole, "selective": (whole + boundary) / 2, "full": boundary}
    in_stage = ceil(len(layers) / job.pipeline_parallel)
    kept = in_stage * job.pipeline_parallel * per_layer[job.recompute]
    work = job.coefficients.work_hidden * h * job.student_bytes / HALF
    work += job.coefficients.work_layer * largest
    work += 0.0 if job.recompute == "none" else largest
    return kept * job.rank_tokens, work * job.rank_tokens


def loss_bytes(job: Job, layout: Layout) -> float:
    """Return the peak of the loss, without weights of the heads and their gradients."""
    tokens, columns = job.rank_tokens, job.student.vocab_size / job.tensor_parallel
    coefficients = job.coefficients
    if layout == "colocated_full":
        per_logit = {
            "fp32": coefficients.full_fp32_bytes,
            "bf16": coefficients.full_bf16_bytes,
            "jsd": coefficients.full_jsd_bytes,
        }[job.full_loss]
        return per_logit * tokens * columns
    plan, sizes = fused_plan(job)
    if coefficients.window_bytes is None:
        return transient_bytes(plan, sizes)
    # The window, the product for the head's gradient, the hidden states' gradient, statistics.
    h, shard = job.student.hidden_size, plan.shard_columns
    window = coefficients.window_bytes * plan.window_rows * sizes.vocab_size
    return window + HALF * shard * h + HALF * tokens * h + 24 * tokens


def fused_plan(job: Job) -> tuple[Plan, Sizes]:
    """Return how the loss cuts its logits; the head's gradient is counted with the head."""
    tokens = ceil(job.rank_tokens)
    columns = ceil(job.student.vocab_size / (job.tensor_parallel * job.vocab_shards))
    sizes = Sizes(
        num_tokens=tokens,
        num_rows=max(1, round(tokens * job.trained_share)),
        vocab_size=columns,
        hidden_sizes=(job.student.hidden_size, job.teacher.hidden_size),
        itemsizes=(job.student_bytes, job.teacher_bytes),
        sum_itemsize=WIDE,
        rounds_products=True,
        own_weight_grad=False,
        workspace_bytes=0,
    )
    plan = make_plan(
        sizes,
        strategy=job.loss_strategy,
        budget_mib=job.memory_budget_mib,
        window_rows=job.window_rows,
        shard_columns=job.shard_columns,
    )
    return plan, sizes


def ring_geometry(job: Job) -> RingGeometry:
    """Return the ring of one student rank, as the transport lays it out."""
    tokens = ceil(job.rank_tokens)
    return RingGeometry(job.host_slots, tokens, job.teacher.hidden_size, job.teacher_bytes)


def teacher_memory(job: Job, gpus: int) -> Memory:
    """Return what a GPU of a teacher replica on some GPUs needs; its head is not loaded."""
    teacher, counts = job.teacher, count(job.teacher)
    hidden = job.tokens * teacher.hidden_size
    static = {
        "weights": job.teacher_bytes * (counts.total - counts.head) / gpus,
        "staging": float(job.teacher_bytes * job.teacher_slots * hidden),
    }
    gathered = 3 * job.teacher_bytes * hidden if gpus > 1 else 0
    forward = job.tokens * _forward_bytes(job, gpus)
    return Memory(static, {"forward": forward + gathered})


def _largest_layer(job: Job) -> float:
    def on_rank(counts: LayerCounts) -> float:
        dense = (counts.total - counts.routed) / job.tensor_parallel
        return dense + counts.routed / max(job.expert_parallel, job.tensor_parallel)

    layers = set(job.student.layers)
    return max(on_rank(count_layer(layer, job.student.hidden_size)) for layer in layers)


def _teacher_static(job: Job, layout: Layout) -> dict[str, float]:
    teacher = job.teacher
    hidden = float(job.teacher_bytes * job.rank_tokens * teacher.hidden_size)
    if layout == "disaggregated":
        head = job.teacher_bytes * teacher.vocab_size * teacher.hidden_size
        return {
            "teacher head": head / max(job.tensor_parallel, job.vocab_shards),
            # Without a GPU the trainer reads the ring itself.
            "hidden states": ring_geometry(job).total_bytes
            if job.gpu.is_cpu
            else job.device_slots * hidden,
        }
    weights = job.teacher_bytes * count(teacher).total / job.teacher_ranks
    static = {"teacher weights": weights}
    return static | ({"hidden states": hidden} if layout == "colocated_fused" else {})


def _teacher_moment(job: Job, layout: Layout) -> float:
    """Return the forward of a colocated teacher, layer by layer gathered, before the student's."""
    teacher, counts = job.teacher, count(job.teacher)
    needed = job.rank_tokens * _forward_bytes(job, 1)
    if job.teacher_ranks > 1:
        needed += job.teacher_bytes * (1 + job.prefetch) * counts.largest_layer
    if layout == "colocated_full":
        needed += job.teacher_bytes * (job.rank_tokens * teacher.vocab_size + counts.head_matrix)
    return needed


def _forward_bytes(job: Job, ranks: int) -> float:
    """Return what a token of the teacher's forward pass takes."""
    return forward_bytes(job.teacher, ranks, job.coefficients.expert_imbalance, job.teacher_bytes)
