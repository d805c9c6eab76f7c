"""What a language model consists of, as far as its memory and its traffic depend on it.

Widths and counts are numbers of elements; h is the model's hidden size.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SoftmaxAttention:
    """Attention with a softmax over the tokens, of grouped heads."""

    heads: int
    kv_heads: int
    head_dim: int
    has_gate: bool = False
    """The queries' projection is twice as wide; its second half gates the output."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norms of queries and keys: one for all heads, or over all heads together."""
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    heads: int
    q_rank: int | None
    """None: queries are projected at once."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    has_bias: bool = False

    @property
    def key_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class GatedDelta:
    """Linear attention by the gated delta rule (arXiv:2412.06464), after a short convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Width of all values together."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class DenseMlp:
    """A feed-forward block of two matrices, or of three where it is gated."""

    width: int
    is_gated: bool = True
    has_bias: bool = False


@dataclass(frozen=True)
class MoeMlp:
    """Routed experts, gated each, and perhaps a shared one that sees all tokens."""

    experts: int
    active: int
    width: int
    shared_width: int = 0
    has_shared_gate: bool = False
    has_bias: bool = False
    """Of router and experts."""


Mixer = SoftmaxAttention | LatentAttention | GatedDelta
Mlp = DenseMlp | MoeMlp


@dataclass(frozen=True)
class Layer:
    """A mixer of tokens, a feed-forward block, and their norms over h."""

    mixer: Mixer
    mlp: Mlp
    norms: int = 2
    norm_vectors: int = 1
    """Parameters of a norm, in vectors of h: 0, a weight, or a weight and a bias."""


@dataclass(frozen=True)
class ModelShape:
    """A causal language model.

    Attributes:
        name: of a bundled model, or where it was read.
        family: `model_type` of transformers.
        hidden_size: h, the width of what a teacher sends.
        vocab_size: V, rows of the head.
        is_tied: whether head and embedding are one matrix.
        layers: from first to last.
        final_vectors: parameters of the last norm, in vectors of h.
        positions: rows of a table of positions.
        head_has_bias: whether the head has one.
        scale: factor of the head's logits.
        softcap: of the head's logits, or None.
        has_wide_norms: norms multiply by (1 + weight) in float32.
        uncertain: what of a bundled model was not read from its configuration.
    """

    name: str
    family: str
    hidden_size: int
    vocab_size: int
    is_tied: bool
    layers: tuple[Layer, ...]
    final_vectors: int = 1
    positions: int = 0
    head_has_bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    has_wide_norms: bool = False
    uncertain: str = ""
