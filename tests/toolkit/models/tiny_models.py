"""Configurations of tiny models, one for every way in which heads differ."""

from typing import Any

from transformers import PreTrainedModel

from toolkit.config import ModelSection
from toolkit.models.load import load_model

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}

LLAMA = {"model_type": "llama", **_COMMON}
QWEN3 = {"model_type": "qwen3", "head_dim": 8, **_COMMON}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    **_COMMON,
}
GEMMA2 = {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0, **_COMMON}
COHERE = {"model_type": "cohere", "logit_scale": 0.3, **_COMMON}
GRANITE = {"model_type": "granite", "logits_scaling": 3.0, **_COMMON}
PHI = {"model_type": "phi", **_COMMON}
OPT = {
    "model_type": "opt",
    "vocab_size": 97,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 16,
    "init_std": 0.2,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}
BLOOM = {"model_type": "bloom", "vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}

# The head applies more than a matrix, a bias, a scale and a soft-cap, or another scale.
HYPERCLOVAX = {"model_type": "hyperclovax", "logits_scaling": 4.0, **_COMMON}
FALCON_H1 = {
    "model_type": "falcon_h1",
    "lm_head_multiplier": 0.5,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    **_COMMON,
}
MODERNBERT = {"model_type": "modernbert-decoder", **_COMMON}
del MODERNBERT["num_key_value_heads"]

ARCHITECTURES = {
    "qwen3": QWEN3,
    "qwen3_5": QWEN3_5,
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "gemma2": GEMMA2,
    "cohere": COHERE,
    "granite": GRANITE,
    "opt": OPT,
    "phi": PHI,
}


def random_section(config: dict[str, Any], **extra: Any) -> ModelSection:
    """Section of a random start."""
    return ModelSection(config=config, seed=7, **extra)


def random_model(config: dict[str, Any], **extra: Any) -> PreTrainedModel:
    """Random start with a head's bias that matters, where there is one."""
    model = load_model(random_section(config, **extra))
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        bias.data.copy_(bias.data.new_tensor(range(len(bias))) / 50)
    return model
