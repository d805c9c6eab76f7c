"""How fast both sides compute, what travels between them, and how deep the ring has to be.

Rates in tokens/s of one GPU, sizes in bytes, times in seconds. h hidden size, V vocabulary, T
tokens of a micro-batch on a rank; s and t stand for student and teacher. A product of a token with
a matrix counts 2 operations per number of it. `docs/traffic-model.md` derives the formulas.
"""

from dataclasses import dataclass
from math import ceil, expm1, inf, log, sqrt

from toolkit.planner.activations import HALF
from toolkit.planner.job import Job, Recompute
from toolkit.planner.memory import fused_plan
from toolkit.planner.parameters import count
from toolkit.planner.shapes import GatedDelta, LatentAttention, Mixer, ModelShape, MoeMlp

TOP_K = 64
"""Of a method that sends the largest logits: 2 bytes of logit and 4 of index each."""

_DELTA_CHUNK = 64
_LEAST_VARIANCE, _LARGEST_EXPONENT = 1e-12, 700.0
_FORWARDS = {"none": 3.0, "selective": 3.5, "full": 4.0}
"""Work of a training step in forward passes: one, two backward, and what is computed again."""


def forward_flops(model: ModelShape, sequence_length: int) -> float:
    """Return the operations of a token's forward pass, without the head; attention is causal."""
    mixers = sum(_mixing_flops(layer.mixer, sequence_length) for layer in model.layers)
    return 2 * count(model).body_active + mixers


def student_flops(
    student: ModelShape,
    teacher: ModelShape,
    sequence_length: int,
    recompute: Recompute,
    passes: int = 1,
) -> float:
    """Return the operations of a token's training step, both heads included.

    Args:
        student: the model that trains.
        teacher: whose head the loss multiplies out too.
        sequence_length: tokens that attend to each other.
        recompute: of activations.
        passes: how often logits are computed, see `toolkit.planner.loss_plan`.
    """
    heads = 2 * count(student).head_matrix * (passes + 2)
    heads += 2 * count(teacher).head_matrix * passes
    return forward_flops(student, sequence_length) * _FORWARDS[recompute] + heads


def _mixing_flops(mixer: Mixer, sequence_length: int) -> float:
    match mixer:
        case GatedDelta():
            widths = mixer.key_dim + mixer.value_dim
            state = 6 * mixer.key_dim * mixer.value_dim
            return mixer.value_heads * (state + 4 * _DELTA_CHUNK * widths)
        case LatentAttention():
            return float(sequence_length * mixer.heads * (mixer.key_dim + mixer.value_dim))
        case _:
            return float(sequence_length * mixer.heads * 2 * mixer.head_dim)


@dataclass(frozen=True)
class Rates:
    """Tokens per second and GPU.

    Attributes:
        student: of one that trains.
        teacher: of one that runs the frozen model.
    """

    student: float
    teacher: float

    @property
    def teachers_per_student(self) -> float:
        """Teacher GPUs that keep one student GPU busy."""
        return self.student / self.teacher


def rates(job: Job, passes: int | None = None) -> Rates:
    """Return what GPUs do where they wait for nothing; logits are computed in some passes."""
    coefficients, peak = job.coefficients, job.gpu.peak_tflops * 1e12
    is_moe = any(isinstance(layer.mlp, MoeMlp) for layer in job.teacher.layers)
    mfu = coefficients.teacher_mfu_moe if is_moe else coefficients.teacher_mfu_dense
    flops = student_flops(
        job.student, job.teacher, job.sequence_length, job.recompute, passes or head_passes(job)
    )
    return Rates(
        student=coefficients.student_mfu * peak / flops,
        teacher=mfu * peak / forward_flops(job.teacher, job.sequence_length),
    )


def head_passes(job: Job) -> int:
    """Return how often the fused loss computes the logits."""
    return 1 if fused_plan(job)[0].strategy == "windows" else 2 + job.has_second_pass


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that a token takes on the wire.

    Attributes:
        hidden: its hidden state.
        logits: its logits.
        top_k: its largest logits.
    """

    hidden: int
    logits: int
    top_k: int


def token_bytes(teacher: ModelShape, item_bytes: int = HALF) -> TokenBytes:
    """Return the bytes of a token; in bfloat16 if not said."""
    return TokenBytes(
        item_bytes * teacher.hidden_size,
        item_bytes * teacher.vocab_size,
        TOP_K * (item_bytes + 4),
    )


def gather_bytes(model: ModelShape, nodes: int) -> float:
    """Return what enters a node where a model is sharded over all nodes and gathered once."""
    return HALF * count(model).total * (nodes - 1) / nodes


def own_bytes(job: Job) -> float:
    """Return what enters a student's node in a micro-batch for the student's own sake.

    With ZeRO-3 and FSDP2 weights are gathered for forward and for backward and gradients are
    scattered, in every micro-batch; else gradients are summed over the ranks once a step.
    """
    nodes = ceil(job.student_gpus / job.node_gpus)
    if job.sharding in ("zero3", "fsdp2"):
        per_parameter = 2.0 * job.student_bytes + job.gradient_bytes
    else:
        per_parameter = 2 * job.gradient_bytes / job.micro_batches
    share = job.coefficients.own_traffic * (nodes - 1) / nodes
    return per_parameter * count(job.student).total * share


def hidden_bytes(job: Job) -> float:
    """Return what enters a student's node in a micro-batch of all ranks for the teacher's sake."""
    token = token_bytes(job.teacher, job.teacher_bytes).hidden * job.trained_share
    ranks = job.replicas * min(job.node_gpus, job.student_gpus) / job.student_gpus
    return job.tokens * ranks * token


def network_rate(job: Job) -> float:
    """Return the tokens per second of all students together that their nodes can take in."""
    seconds = (own_bytes(job) + hidden_bytes(job)) / job.network.bytes_per_s(job.coefficients)
    return job.tokens * job.replicas / seconds


def break_even_tokens(teacher: ModelShape, nodes: int, node_gpus: int) -> float:
    """Return for how many tokens of a micro-batch per GPU hidden states are as much traffic as a
    sharded teacher gathered once: below it hidden states are less."""
    return gather_bytes(teacher, nodes) / (node_gpus * token_bytes(teacher).hidden)


@dataclass(frozen=True)
class Ring:
    """How many slots a ring needs.

    Attributes:
        in_flight: orders that are under way all the time.
        jitter: further ones against uneven times; None where the teacher is too slow for any
            number to help.
        kappa: teacher rate over student rate.
    """

    in_flight: int
    jitter: int | None
    kappa: float

    @property
    def slots(self) -> int | None:
        """All, with the one that is being consumed."""
        return None if self.jitter is None else self.in_flight + self.jitter + 1


def ring_slots(job: Job, teachers: float, teacher_s: float, student_s: float) -> Ring:
    """Return the slots for a job in which a teacher takes teacher_s a micro-batch.

    Args:
        job: its coefficients hold variations and the share of waiting.
        teachers: replicas, for each student rank.
        teacher_s: seconds of a replica for a micro-batch, the way to the student included.
        student_s: seconds of the student for one.
    """
    coefficients = job.coefficients
    kappa = teachers * student_s / teacher_s
    variance = coefficients.student_variation**2 + kappa * coefficients.teacher_variation**2
    jitter = jitter_slots(kappa, variance, coefficients.waiting_share)
    in_flight = open_orders(teachers, teacher_s, student_s, coefficients.teacher_variation)
    return Ring(ceil(in_flight), ceil(jitter) if jitter < inf else None, kappa)


def open_orders(
    teachers: float, teacher_s: float, student_s: float, teacher_variation: float
) -> float:
    """Return how many orders are under way all the time: Little's law.

    Answers are taken in the order in which they were asked for, so each waits for the slowest of
    those that several teachers compute at once: on average up to sqrt(2 ln N) standard deviations
    above the mean (of N normal numbers).
    """
    slowest = 1 + teacher_variation * sqrt(2 * log(max(teachers, 1.0)))
    return teacher_s / student_s * slowest


def share_of_waiting(
    teachers: float,
    teacher_s: float,
    student_s: float,
    slots: int,
    variations: tuple[float, float],
) -> float:
    """Return the share of its time that a student waits.

    Args:
        teachers: for each student rank.
        teacher_s: mean seconds of a teacher for a micro-batch.
        student_s: mean seconds of the student for one.
        slots: orders that may be open at a time, with the one that the student works on.
        variations: standard deviation over mean, of the student's and the teachers' times.
    """
    kappa = teachers * student_s / teacher_s
    variance = variations[0] ** 2 + kappa * variations[1] ** 2
    in_flight = open_orders(teachers, teacher_s, student_s, variations[1])
    of_jitter = waiting_share(kappa, variance, max(slots - 1 - in_flight, 1.0))
    return max(of_jitter, 1 - (slots - 1) / in_flight)


def jitter_slots(kappa: float, variance: float, waiting_share: float) -> float:
    """Return the slots K with which a student waits for a share of its time, at most.

    A random walk between two walls: share = mu / (exp(2 mu K / c2) - 1) with mu = kappa - 1, and
    c2 / (2 K) for mu = 0. Against an event simulation it is on the safe side up to 8 slots, and 20
    to 25 % low at kappa = 1 and 32 slots.

    Args:
        kappa: teacher rate over student rate.
        variance: c2, squared variation of the student's times plus kappa times the teacher's.
        waiting_share: at most, for example 0.01.

    Returns:
        Slots; infinite where the teacher is too slow for any number.
    """
    mu = kappa - 1
    if abs(mu) < 1e-9:
        return variance / (2 * waiting_share)
    if mu < 0 and -mu > waiting_share:
        return inf
    return variance / (2 * mu) * log(1 + mu / waiting_share)


def waiting_share(kappa: float, variance: float, slots: float) -> float:
    """Return the share of its time that a student waits with some slots; see `jitter_slots`."""
    mu = kappa - 1
    if abs(mu) < 1e-9:
        return variance / (2 * slots)
    exponent = 2 * mu * slots / max(variance, _LEAST_VARIANCE)
    return mu / expm1(min(exponent, _LARGEST_EXPONENT))
