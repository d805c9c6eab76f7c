"""What the configuration of a family of models does not say, and which keys say the rest."""

from dataclasses import dataclass, replace
from typing import Literal

Flag = bool | str
"""A fact of the family, or the key that says it, with a `!` where it is true by default."""


@dataclass(frozen=True)
class Family:
    """What the configuration of a `model_type` does not say, and which keys say the rest."""

    is_tied: bool = False
    """Default of `tie_word_embeddings`."""
    mixer: Literal["softmax", "latent"] = "softmax"
    qkv_bias: Flag = False
    output_bias: Flag = False
    has_gate: bool = False
    has_sinks: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    norms: int = 2
    norm_vectors: int = 1
    final_vectors: int = 1
    has_wide_norms: bool = False
    mlp: Literal["gated", "plain"] = "gated"
    mlp_bias: Flag = False
    expert_width: str | None = None
    """Key of the width of an expert, where there are any."""
    has_shared_gate: bool = False
    head_bias: bool = False
    scale: Literal["logit_scale", "logits_scaling"] | None = None
    """Key of the head's factor; logits are divided by the second one."""
    default_scale: float = 1.0
    softcap: float | None = None
    head_dim: int | None = None
    """Default where it is not h / heads."""
    refused: tuple[str, ...] = ()
    """Keys that must not be true."""


_LLAMA = Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias")
_GEMMA = Family(
    is_tied=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    has_wide_norms=True,
    head_dim=256,
)
_LATENT = Family(mixer="latent", qkv_bias="attention_bias", expert_width="moe_intermediate_size")
_BIASED = Family(
    qkv_bias=True, output_bias=True, norm_vectors=2, final_vectors=2, mlp="plain", mlp_bias=True
)


_QWEN3 = replace(_LLAMA, qk_norm="head", mlp_bias=False, head_dim=128)
_QWEN3_5 = replace(_QWEN3, has_gate=True, has_wide_norms=True, head_dim=256)
_COHERE = replace(
    _LLAMA,
    is_tied=True,
    norms=1,
    mlp_bias=False,
    scale="logit_scale",
    default_scale=0.0625,
    refused=("use_qk_norm",),
)
_GRANITE = replace(_LLAMA, scale="logits_scaling")
_GLM = Family(qkv_bias="attention_bias", head_dim=128)

FAMILIES: dict[str, Family] = {
    "arcee": replace(_LLAMA, mlp="plain"),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "cwm": _LLAMA,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "exaone4": replace(_QWEN3, qkv_bias=False, output_bias=False, head_dim=None),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4, softcap=30.0),
    "gemma3_text": replace(_GEMMA, norms=4, qk_norm="head"),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "gpt2": replace(_BIASED, is_tied=True),
    "gpt_neox": replace(_BIASED, qkv_bias="attention_bias!", output_bias="attention_bias!"),
    "gpt_oss": Family(
        qkv_bias="attention_bias!",
        output_bias="attention_bias!",
        has_sinks=True,
        mlp_bias=True,
        expert_width="intermediate_size",
        head_dim=64,
    ),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, mlp_bias=False, expert_width="intermediate_size"),
    "helium": replace(_LLAMA, head_dim=128),
    "llama": _LLAMA,
    "minimax_m2": Family(qk_norm="full", expert_width="intermediate_size"),
    "ministral3": Family(),
    "mistral": Family(),
    "mixtral": Family(expert_width="intermediate_size"),
    "nanochat": Family(norms=0, final_vectors=0, mlp="plain", softcap=15.0),
    "olmo": replace(_LLAMA, norms=0, final_vectors=0, mlp_bias=False),
    "olmo2": replace(_LLAMA, qk_norm="full", mlp_bias=False),
    "olmo3": replace(_LLAMA, qk_norm="full", mlp_bias=False),
    "olmoe": replace(_LLAMA, qk_norm="full", mlp_bias=False, expert_width="intermediate_size"),
    "phi": replace(_BIASED, norms=1, head_bias=True, refused=("qk_layernorm",)),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias!", expert_width="moe_intermediate_size", has_shared_gate=True
    ),
    "qwen3": _QWEN3,
    "qwen3_5_moe_text": replace(
        _QWEN3_5, expert_width="moe_intermediate_size", has_shared_gate=True
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": replace(_QWEN3, expert_width="moe_intermediate_size", head_dim=None),
    "qwen3_next": replace(_QWEN3_5, expert_width="moe_intermediate_size", has_shared_gate=True),
    "seed_oss": replace(_LLAMA, qkv_bias="attention_bias!", output_bias="attention_out_bias"),
    "smollm3": replace(_LLAMA, is_tied=True),
    "stablelm": Family(
        qkv_bias="use_qkv_bias",
        norm_vectors=2,
        final_vectors=2,
        refused=("qk_layernorm", "use_parallel_residual"),
    ),
    "starcoder2": replace(
        _BIASED, is_tied=True, qkv_bias="use_bias!", output_bias="use_bias!", mlp_bias="use_bias!"
    ),
    "youtu": replace(_LATENT, is_tied=True, expert_width=None),
}
"""By `model_type`; the text part of a composite one has a `model_type` of its own."""
