"""Reading what a model consists of: a bundled fact, a `config.json` or a folder that has one.

A configuration is read as transformers reads it: a key that is not there has the family's default,
and what would change the model and is not known here is refused.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.planner.families import FAMILIES, Family, Flag
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

Config = Mapping[str, Any]
_BUNDLED = Path(__file__).parent / "models.json"


@cache
def bundled() -> dict[str, dict[str, Any]]:
    """Return what is known of models by name: `config`, `source`, `uncertain`."""
    facts: dict[str, dict[str, Any]] = json.loads(_BUNDLED.read_text(encoding="utf-8"))
    return facts


def read_model(source: str) -> ModelShape:
    """Return a model by its bundled name, or from a `config.json` or a folder that has one.

    Raises:
        InputError: there is no such model, or it is of a family that is not known.
    """
    if source in bundled():
        fact = bundled()[source]
        return shape_of(fact["config"], source, uncertain=fact["uncertain"])
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        names = ", ".join(sorted(bundled()))
        raise InputError(
            f"{source!r} is neither a model folder, nor a config.json, nor one of: {names}"
        ) from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    return shape_of(config, source)


def shape_of(config: Config, name: str, *, uncertain: str = "") -> ModelShape:
    """Return a model from the keys of its configuration; a composite one's text part.

    Raises:
        InputError: its family is not known, or a key is missing or not supported.
    """
    config = config.get("text_config", config)
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise InputError(
            f"{name}: not supported: model_type = {model_type!r}; known are {', '.join(FAMILIES)}"
        )
    return _Reader(config, family, name).shape(uncertain)


class _Reader:
    """Reads one configuration."""

    def __init__(self, config: Config, family: Family, name: str) -> None:
        self._config, self._family, self._name = config, family, name
        for key in family.refused:
            if config.get(key):
                raise InputError(f"{name}: not supported: {key} = {config[key]!r}")

    def shape(self, uncertain: str) -> ModelShape:
        config, family = self._config, self._family
        hidden_size = self._need("hidden_size", "n_embd")
        layers = range(self._need("num_hidden_layers", "n_layer"))
        tied = config.get("tie_word_embeddings")
        scale = family.default_scale if family.scale is None else config.get(family.scale)
        scale = family.default_scale if scale is None else float(scale)
        return ModelShape(
            name=self._name,
            family=config["model_type"],
            hidden_size=hidden_size,
            vocab_size=self._need("vocab_size"),
            is_tied=family.is_tied if tied is None else tied,
            layers=tuple(
                Layer(
                    self._mixer(i, hidden_size),
                    self._mlp(i, hidden_size),
                    family.norms,
                    family.norm_vectors,
                )
                for i in layers
            ),
            final_vectors=family.final_vectors,
            positions=config.get("n_positions", 0),
            head_has_bias=family.head_bias,
            scale=1 / scale if family.scale == "logits_scaling" else scale,
            softcap=config.get("final_logit_softcapping", family.softcap),
            has_wide_norms=family.has_wide_norms,
            uncertain=uncertain,
        )

    def _mixer(self, index: int, hidden_size: int) -> Mixer:
        config, family = self._config, self._family
        if not self._is_full(index):
            return GatedDelta(
                key_heads=self._need("linear_num_key_heads"),
                value_heads=self._need("linear_num_value_heads"),
                key_dim=self._need("linear_key_head_dim"),
                value_dim=self._need("linear_value_head_dim"),
                kernel=self._need("linear_conv_kernel_dim"),
            )
        heads = self._need("num_attention_heads", "n_head")
        if family.mixer == "latent":
            return LatentAttention(
                heads=heads,
                q_rank=config.get("q_lora_rank"),
                kv_rank=self._need("kv_lora_rank"),
                nope_dim=self._need("qk_nope_head_dim"),
                rope_dim=self._need("qk_rope_head_dim"),
                value_dim=self._need("v_head_dim"),
                has_bias=self._is(family.qkv_bias),
            )
        return SoftmaxAttention(
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or family.head_dim or hidden_size // heads,
            has_gate=family.has_gate,
            qk_norm=family.qk_norm,
            qkv_bias=self._is(family.qkv_bias),
            output_bias=self._is(family.output_bias),
            has_sinks=family.has_sinks,
        )

    def _is_full(self, index: int) -> bool:
        types = self._config.get("layer_types")
        if types is not None:
            return bool(types[index] != "linear_attention")
        interval = self._config.get("full_attention_interval")
        if interval is None:
            if "linear_num_value_heads" not in self._config:
                return True
            interval = 4
        return bool((index + 1) % interval == 0)

    def _mlp(self, index: int, hidden_size: int) -> Mlp:
        config, family = self._config, self._family
        if family.expert_width is None or self._is_dense(index):
            width = config.get("n_inner") or config.get("intermediate_size") or 4 * hidden_size
            is_gated = family.mlp == "gated"
            return DenseMlp(width, is_gated=is_gated, has_bias=self._is(family.mlp_bias))
        width = self._need(family.expert_width)
        shared = config.get("n_shared_experts") or 0
        return MoeMlp(
            experts=self._need("num_experts", "num_local_experts", "n_routed_experts"),
            active=self._need("num_experts_per_tok"),
            width=width,
            shared_width=config.get("shared_expert_intermediate_size", shared * width),
            has_shared_gate=family.has_shared_gate,
            has_bias=self._is(family.mlp_bias),
        )

    def _is_dense(self, index: int) -> bool:
        step = self._config.get("decoder_sparse_step", 1)
        return (
            index < self._config.get("first_k_dense_replace", 0)
            or index in (self._config.get("mlp_only_layers") or ())
            or (index + 1) % step != 0
        )

    def _need(self, *keys: str) -> int:
        for key in keys:
            if self._config.get(key) is not None:
                return int(self._config[key])
        raise InputError(f"{self._name}: its configuration lacks {keys[0]}: add it")

    def _is(self, flag: Flag) -> bool:
        if isinstance(flag, bool):
            return flag
        key = flag.removesuffix("!")
        return bool(self._config.get(key, flag.endswith("!")))
