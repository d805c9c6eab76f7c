"""How many parameters a model has: exact, as `*ForCausalLM` of transformers counts them.

h hidden size, V vocabulary. A test compares with transformers' models on the meta device.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class LayerCounts:
    """Parameters of a layer."""

    total: int
    routed: int
    """Of experts that only some tokens pass."""
    active: int
    """Of all but the experts that a token does not pass."""


@dataclass(frozen=True)
class Counts:
    """Parameters of a model.

    Attributes:
        total: of the text model.
        embedding: V h, and a table of positions.
        head: of its own, 0 if tied.
        head_matrix: V h, tied or not.
        body: layers and last norm.
        body_active: of them, what a token passes.
        routed: of the body, in routed experts.
        largest_layer: of the layer with the most.
    """

    total: int
    embedding: int
    head: int
    head_matrix: int
    body: int
    body_active: int
    routed: int
    largest_layer: int


def count(model: ModelShape) -> Counts:
    """Return the parameters of a model."""
    h = model.hidden_size
    layers = [count_layer(layer, h) for layer in model.layers]
    embedding = (model.vocab_size + model.positions) * h
    head_bias = model.vocab_size if model.head_has_bias else 0
    head = (0 if model.is_tied else model.vocab_size * h) + head_bias
    final = model.final_vectors * h
    body = sum(layer.total for layer in layers) + final
    return Counts(
        total=embedding + head + body,
        embedding=embedding,
        head=head,
        head_matrix=model.vocab_size * h,
        body=body,
        body_active=sum(layer.active for layer in layers) + final,
        routed=sum(layer.routed for layer in layers),
        largest_layer=max(layer.total for layer in layers),
    )


def count_layer(layer: Layer, h: int) -> LayerCounts:
    """Return the parameters of a layer."""
    always = _of_mixer(layer.mixer, h) + layer.norms * layer.norm_vectors * h
    always += _of_mlp(layer.mlp, h)
    routed = active = 0
    if isinstance(layer.mlp, MoeMlp):
        expert = 3 * h * layer.mlp.width + layer.mlp.has_bias * (2 * layer.mlp.width + h)
        routed, active = layer.mlp.experts * expert, layer.mlp.active * expert
    return LayerCounts(always + routed, routed, always + active)


def _of_mixer(mixer: Mixer, h: int) -> int:
    match mixer:
        case SoftmaxAttention():
            return _of_softmax(mixer, h)
        case LatentAttention():
            return _of_latent(mixer, h)
        case GatedDelta():
            projections = mixer.conv_width + mixer.value_width + 2 * mixer.value_heads
            small = mixer.kernel * mixer.conv_width + 2 * mixer.value_heads + mixer.value_dim
            return h * projections + mixer.value_width * h + small


def _of_softmax(mixer: SoftmaxAttention, h: int) -> int:
    q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    projected = q * (2 if mixer.has_gate else 1) + 2 * kv
    norms = {"none": 0, "head": 2 * mixer.head_dim, "full": q + kv}[mixer.qk_norm]
    biases = mixer.qkv_bias * projected + mixer.output_bias * h
    return h * projected + q * h + norms + biases + mixer.has_sinks * mixer.heads


def _of_latent(mixer: LatentAttention, h: int) -> int:
    queries = mixer.heads * mixer.key_dim
    if mixer.q_rank is None:
        of_queries = h * queries
    else:
        of_queries = h * mixer.q_rank + mixer.q_rank + mixer.q_rank * queries
        of_queries += mixer.has_bias * mixer.q_rank
    compressed = mixer.kv_rank + mixer.rope_dim
    of_keys = h * compressed + mixer.kv_rank
    of_keys += mixer.kv_rank * mixer.heads * (mixer.nope_dim + mixer.value_dim)
    return (
        of_queries + of_keys + mixer.heads * mixer.value_dim * h + mixer.has_bias * (compressed + h)
    )


def _of_mlp(mlp: Mlp, h: int) -> int:
    """Return all but routed experts."""
    match mlp:
        case DenseMlp():
            biases = mlp.has_bias * ((2 if mlp.is_gated else 1) * mlp.width + h)
            return (3 if mlp.is_gated else 2) * h * mlp.width + biases
        case MoeMlp():
            shared = 3 * h * mlp.shared_width + mlp.has_shared_gate * h
            return mlp.experts * h + shared + mlp.has_bias * mlp.experts
