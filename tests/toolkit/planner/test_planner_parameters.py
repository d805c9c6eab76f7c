"""Parameter counts against transformers' own models, on the meta device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import InputError
from toolkit.planner.facts import FAMILIES, bundled, read_model, shape_of
from toolkit.planner.parameters import Counts, count

NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}}
"""What a default configuration lacks."""
VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 64}),
    ("qwen2_moe", {"qkv_bias": False, "decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention"] * 16}),
    ("deepseek_v2", {"num_experts_per_tok": 6, "q_lora_rank": None, "n_shared_experts": 2}),
    ("deepseek_v3", {"attention_bias": True, "num_hidden_layers": 5}),
    ("stablelm", {"use_qkv_bias": True}),
    ("starcoder2", {"use_bias": False}),
    ("gpt_neox", {"attention_bias": False}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True}),
    ("gpt_oss", {"attention_bias": False, "num_hidden_layers": 4}),
]


def counted(config) -> Counts:
    """Count the parameters of transformers' model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    own_head = head.weight is not embedding
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        parts = name.split(".")
        if parts[1] in ("layers", "h"):
            layers[parts[2]] = layers.get(parts[2], 0) + size
    own = sum(p.numel() for p in head.parameters()) if own_head else 0
    positions = sum(size for name, size in sizes.items() if ".wpe." in name)
    return Counts(
        total=sum(sizes.values()),
        embedding=embedding.numel() + positions,
        head=own,
        head_matrix=head.weight.numel(),
        body=sum(sizes.values()) - own - embedding.numel() - positions,
        body_active=-1,
        routed=sum(size for name, size in sizes.items() if ".experts." in name),
        largest_layer=max(layers.values()),
    )


def assert_counts(config, shape) -> None:
    expected, actual = vars(counted(config)), vars(count(shape))
    differences = {
        key: (actual[key], value) for key, value in expected.items() if actual[key] != value
    }
    assert not {key: pair for key, pair in differences.items() if key != "body_active"}


@pytest.mark.parametrize("name", bundled())
def test_bundled_models_have_as_many_as_in_transformers(name: str) -> None:
    settings = dict(bundled()[name]["config"])
    assert_counts(AutoConfig.for_model(settings.pop("model_type"), **settings), read_model(name))


@pytest.mark.parametrize(
    ("model_type", "keys"), [(name, NEEDED.get(name, {})) for name in FAMILIES] + VARIANTS
)
def test_saved_configurations_have_as_many_as_in_transformers(
    model_type: str, keys: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(model_type, **keys)
    assert_counts(config, shape_of(config.to_diff_dict(), model_type))


def test_composite_configuration_is_read_by_its_text_part() -> None:
    config = AutoConfig.for_model("qwen3_5")
    shape = shape_of(config.to_diff_dict(), "composite")
    assert count(shape) == count(shape_of(config.text_config.to_diff_dict(), "text"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "not supported: model_type = 'mamba'; known are arcee"),
        ({"hidden_size": 8}, "not supported: model_type = None"),
        ({"model_type": "llama"}, "lacks hidden_size"),
        ({"model_type": "cohere", "use_qk_norm": True}, "not supported: use_qk_norm = True"),
    ],
)
def test_unknown_models_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shape_of(config, "theirs")


def test_models_are_read_from_folders_and_files(tmp_path: Path) -> None:
    config = bundled()["Qwen3-8B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (tmp_path, tmp_path / "config.json"):
        assert read_model(str(source)).layers == read_model("Qwen3-8B").layers
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        read_model(str(tmp_path))
    with pytest.raises(InputError, match=r"'Qwen9' is neither a model folder.*Qwen3-8B"):
        read_model("Qwen9")
