"""What a layer keeps for its backward pass, in bytes per token, without dropout.

h hidden size, e bytes of a number. Attention is one fused kernel that keeps queries, keys, values,
output and a row's log sum exp (FlashAttention, arXiv:2205.14135). `fused` norms and gated units
keep their inputs and compute the rest again (Liger, Transformer Engine, Apex); `eager` is the
Python of transformers, measured to 0.1 % for Llama, Qwen3, Qwen3-MoE and the full attention of
Qwen3.5. Gated delta layers and fused kernels are estimates. With plain attention, GELU and width
4 h this is the formula of Korthikanti et al. (arXiv:2205.05198) without its dropout masks.
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
    MoeMlp,
    SoftmaxAttention,
)

Kernels = Literal["fused", "eager"]

HALF, WIDE = 2, 4
"""Bytes of a number in bfloat16 and in float32."""

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
    model: ModelShape, layer: Layer, kernels: Kernels, expert_imbalance: float, item_bytes: int = 2
) -> Saved:
    """Return what a layer keeps; `item_bytes` is e: 2 in bfloat16, 4 in float32."""
    h, e = model.hidden_size, item_bytes
    norm = _Norm(kernels, model.has_wide_norms, e)
    mixer_replicated, mixer_divided = _of_mixer(layer.mixer, norm, e)
    mlp_replicated, mlp_divided, routed = _of_mlp(layer.mlp, h, kernels, expert_imbalance, e)
    # Two norms, and their outputs, which the projections need.
    replicated = 2 * norm.bytes_of(h) + 2 * e * h + mixer_replicated + mlp_replicated
    return Saved(replicated, mixer_divided + mlp_divided, routed)


class _Norm:
    def __init__(self, kernels: Kernels, is_wide: bool, e: int) -> None:
        self.is_eager = kernels == "eager"
        # Eager: the input in float32 and the normalized copy, which is float32 if norms are wide.
        self.per_element = e if not self.is_eager else 8 if is_wide else 4 + e

    def bytes_of(self, width: int) -> float:
        """Return what a norm keeps besides its output; 4 bytes are the row's factor."""
        return self.per_element * width + 4


def _of_mixer(mixer: Mixer, norm: _Norm, e: int) -> tuple[float, float]:
    match mixer:
        case SoftmaxAttention():
            q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
            divided = float(e * (q + 2 * kv) + e * q + 4 * mixer.heads)
            if mixer.qk_norm != "none":
                divided += norm.per_element * (q + kv) + 4 * (mixer.heads + mixer.kv_heads)
            if mixer.has_gate:
                # Its sigmoid, what that multiplies, the product; and the gate itself where the
                # queries' norm keeps the tensor that holds both, uncast.
                divided += (4 if norm.is_eager and e == WIDE else 3) * e * q
            return 0.0, divided
        case LatentAttention():
            ranks = [rank for rank in (mixer.q_rank, mixer.kv_rank) if rank is not None]
            compressed = sum(norm.bytes_of(rank) + e * rank for rank in ranks)
            heads = e * (2 * mixer.key_dim + mixer.value_dim) + e * mixer.value_dim + 4
            return compressed, float(mixer.heads * heads)
        case GatedDelta():
            keys = mixer.key_heads * mixer.key_dim
            kept = e * (2 * mixer.conv_width + 3 * mixer.value_width + 2 * keys)
            return 0.0, float(kept + (e * _DELTA_CHUNK + 12) * mixer.value_heads)


def _of_mlp(
    mlp: Mlp, h: int, kernels: Kernels, expert_imbalance: float, e: int
) -> tuple[float, float, float]:
    # Gate, up and their product; eager keeps the activation of the gate too.
    gated = (3 if kernels == "fused" else 4) * e
    if isinstance(mlp, DenseMlp):
        return 0.0, float((gated if mlp.is_gated else 2 * e) * mlp.width), 0.0
    router = 8.0 * mlp.experts + 16 * mlp.active
    shared = float(gated * mlp.shared_width + (e * h if mlp.shared_width else 0))
    routed = expert_imbalance * mlp.active * (e * h + gated * mlp.width + e * h)
    return router, shared, routed


def forward_bytes(
    model: ModelShape, ranks: int, expert_imbalance: float, item_bytes: int = HALF
) -> float:
    """Return the peak of a forward pass alone, per token: three buffers of h, and a layer's moment.

    Nothing is kept across layers, and keys and values of a layer go with it. `ranks` share a layer.
    """
    h, e = model.hidden_size, item_bytes
    widest = max(
        max(_widest_of_mixer(layer.mixer, e), _widest_of_mlp(layer.mlp, h, expert_imbalance, e))
        for layer in model.layers
    )
    return 3 * e * h + widest / ranks


def _widest_of_mixer(mixer: Mixer, e: int) -> float:
    match mixer:
        case SoftmaxAttention():
            q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
            projected = (2 if mixer.has_gate else 1) * q
            return float(e * (2 * projected + 4 * kv + q))
        case LatentAttention():
            return float(e * mixer.heads * (4 * mixer.key_dim + 2 * mixer.value_dim))
        case GatedDelta():
            return float(e * 3 * (mixer.conv_width + mixer.value_width))


def _widest_of_mlp(mlp: Mlp, h: int, expert_imbalance: float, e: int) -> float:
    if isinstance(mlp, MoeMlp):
        routed = mlp.active * (2 * e * h + 3 * e * mlp.width)
        return expert_imbalance * routed + 8.0 * mlp.experts
    return float(3 * e * mlp.width)
