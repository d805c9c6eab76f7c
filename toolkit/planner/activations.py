"""What a layer keeps for its backward pass, in bytes per token: bfloat16, no dropout.

h hidden size. Attention is one fused kernel that keeps queries, keys, values, output and a row's
log sum exp (FlashAttention, arXiv:2205.14135). `fused` norms and gated units keep their inputs and
compute the rest again (Liger, Transformer Engine, Apex); `eager` is the Python of transformers,
measured to 0.05 % for Llama, Qwen3, Qwen3-MoE and the full attention of Qwen3.5. Gated delta layers
and fused kernels are estimates. With plain attention, GELU and width 4 h this is the formula of
Korthikanti et al. (arXiv:2205.05198) without its dropout masks.
"""

from typing import Literal, NamedTuple

from toolkit.planner.shapes import (
    DenseMlp,
    GatedDelta,
    LatentAttention,
    Layer,
    Mixer,
    Mlp,
    ModelShape,
    SoftmaxAttention,
)

Kernels = Literal["fused", "eager"]

_DELTA_CHUNK = 64
"""Tokens that the gated delta kernel takes at a time; it keeps a matrix of them for each head."""


class Saved(NamedTuple):
    """Bytes per token, by how tensor and expert parallelism divide them."""

    replicated: float
    """On every rank, unless sequence parallelism divides it."""
    divided: float
    """Divided by the tensor-parallel ranks."""
    routed: float
    """Of routed experts; expert parallelism moves tokens, it does not remove them."""

    def on_rank(self, tensor_parallel: int) -> float:
        """Return the bytes of one rank, with sequence parallelism."""
        return sum(self) / tensor_parallel


def saved_by_layer(
    model: ModelShape, layer: Layer, kernels: Kernels, expert_imbalance: float
) -> Saved:
    """Return what a layer keeps."""
    h = model.hidden_size
    norm = _Norm(kernels, model.has_wide_norms)
    mixer_replicated, mixer_divided = _of_mixer(layer.mixer, norm)
    mlp_replicated, mlp_divided, routed = _of_mlp(layer.mlp, h, kernels, expert_imbalance)
    # Two norms, and their outputs, which the projections need.
    replicated = 2 * norm.bytes_of(h) + 2 * 2 * h + mixer_replicated + mlp_replicated
    return Saved(replicated, mixer_divided + mlp_divided, routed)


class _Norm:
    def __init__(self, kernels: Kernels, is_wide: bool) -> None:
        # Eager: the input in float32 and the normalized copy, which is float32 if norms are wide.
        self.per_element = 2 if kernels == "fused" else 8 if is_wide else 6

    def bytes_of(self, width: int) -> float:
        """Return what a norm keeps besides its output; 4 bytes are the row's factor."""
        return self.per_element * width + 4


def _of_mixer(mixer: Mixer, norm: _Norm) -> tuple[float, float]:
    match mixer:
        case SoftmaxAttention():
            q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
            divided = 2.0 * (q + 2 * kv) + 2 * q + 4 * mixer.heads
            if mixer.qk_norm != "none":
                divided += norm.per_element * (q + kv) + 4 * (mixer.heads + mixer.kv_heads)
            return 0.0, divided + mixer.has_gate * 6 * q  # gate, its sigmoid, the product
        case LatentAttention():
            ranks = [rank for rank in (mixer.q_rank, mixer.kv_rank) if rank is not None]
            compressed = sum(norm.bytes_of(rank) + 2 * rank for rank in ranks)
            heads = 2 * (2 * mixer.key_dim + mixer.value_dim) + 2 * mixer.value_dim + 4
            return compressed, float(mixer.heads * heads)
        case GatedDelta():
            keys = mixer.key_heads * mixer.key_dim
            kept = 4 * mixer.conv_width + 6 * mixer.value_width + 4 * keys
            per_head = 2 * _DELTA_CHUNK + 12
            return 0.0, float(kept + per_head * mixer.value_heads)


def _of_mlp(
    mlp: Mlp, h: int, kernels: Kernels, expert_imbalance: float
) -> tuple[float, float, float]:
    # Gate, up and their product; eager keeps the activation of the gate too.
    gated = 6 if kernels == "fused" else 8
    if isinstance(mlp, DenseMlp):
        return 0.0, float((gated if mlp.is_gated else 4) * mlp.width), 0.0
    router = 8.0 * mlp.experts + 16 * mlp.active
    shared = float(gated * mlp.shared_width + (2 * h if mlp.shared_width else 0))
    routed = expert_imbalance * mlp.active * (2 * h + gated * mlp.width + 2 * h)
    return router, shared, routed
