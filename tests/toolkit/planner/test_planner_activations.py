"""What layers keep for backward, and what training takes, against torch's own storages."""

from typing import Any

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks

from toolkit.config import OptimSection
from toolkit.planner.activations import saved_by_layer
from toolkit.planner.facts import shape_of
from toolkit.planner.memory import sharded_bytes
from toolkit.planner.parameters import count
from toolkit.planner.shapes import DenseMlp, Layer, ModelShape, SoftmaxAttention
from toolkit.training.trainer import make_optimizer

TOKENS = 256
BASE = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


def saved_bytes(model: torch.nn.Module) -> int:
    """Return the storages that a forward pass keeps, parameters apart."""
    parts = [*model.parameters(), *model.buffers()]
    own = {part.untyped_storage().data_ptr() for part in parts}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def per_layer(model_type: str, dtype: torch.dtype, keys: dict[str, Any]) -> float:
    """Return the bytes per token that one further layer keeps."""
    sizes = []
    for layers in (2, 4):
        kinds = {"layer_types": ["full_attention"] * layers} if "qwen3_5" in model_type else {}
        config = transformers.AutoConfig.for_model(
            model_type, **BASE, **keys, **kinds, num_hidden_layers=layers
        )
        config._attn_implementation = "sdpa"
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        sizes.append(saved_bytes(model.base_model))
    return (sizes[1] - sizes[0]) / 2 / TOKENS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("model_type", "keys"),
    [("llama", {}), ("qwen3", {}), ("qwen3_moe", EXPERTS), ("qwen3_5_text", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_keep_what_is_planned(
    model_type: str, keys: dict[str, Any], dtype: torch.dtype
) -> None:
    shape = shape_of({"model_type": model_type, **BASE, **keys, "num_hidden_layers": 1}, model_type)
    planned = sum(saved_by_layer(shape, shape.layers[0], "eager", 1.0, dtype.itemsize))
    assert planned == pytest.approx(per_layer(model_type, dtype, keys), rel=1e-3)


def test_formula_of_korthikanti_without_dropout() -> None:
    """34 s b h per layer, of which 2 are dropout's masks; the kernel keeps a row's log sum exp."""
    h, heads = 1024, 16
    layer = Layer(SoftmaxAttention(heads, heads, h // heads), DenseMlp(4 * h, is_gated=False))
    shape = ModelShape("gpt", "gpt2", h, 50257, True, (layer,))
    row_factors = 2 * 4 + 4 * heads
    assert sum(saved_by_layer(shape, layer, "fused", 1.0)) == 32 * h + row_factors


def test_gradients_and_optimizer_take_what_is_planned() -> None:
    keys = {**BASE, "num_hidden_layers": 2}
    shape = shape_of({"model_type": "llama", **keys}, "llama")
    config = transformers.AutoConfig.for_model("llama", **keys)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = make_optimizer(model, OptimSection())
    model(input_ids=torch.zeros(1, 8, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    state = [
        part
        for values in optimizer.state.values()
        for part in values.values()
        if part.ndim  # the count of steps is a scalar
    ]
    planned = sharded_bytes(count(shape).total, "ddp", 1, weight_bytes=4)
    assert planned == {
        "weights": sum(part.nbytes for part in model.parameters()),
        "gradients": sum(part.grad.nbytes for part in model.parameters() if part.grad is not None),
        "optimizer": sum(part.nbytes for part in state),
    }


def test_examples_of_deepspeed() -> None:
    """Of its documentation: 2,851 million parameters, 32 million in a layer, 8 GPUs."""
    parameters, layer, gib = 2851e6, 32e6, 2**30
    zero2 = sum(sharded_bytes(parameters, "zero2", 8).values())
    whole_gradients = 2 * parameters
    assert f"{(zero2 + whole_gradients) / gib:.2f}" == "15.93"
    zero3 = sum(sharded_bytes(parameters, "zero3", 8).values())
    assert f"{(zero3 + 4 * layer) / gib:.2f}" == "6.09"


@pytest.mark.parametrize(
    ("sharding", "per_parameter"),
    [("ddp", 18), ("zero1", 6 + 12 / 64), ("zero3", 18 / 64), ("fsdp2", 16 / 64)],
)
def test_formulas_of_megatron_and_fsdp(sharding: Any, per_parameter: float) -> None:
    assert sum(sharded_bytes(1.0, sharding, 64).values()) == per_parameter
