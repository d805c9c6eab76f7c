from dataclasses import replace

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    BLOOM,
    COHERE,
    FALCON_H1,
    GEMMA2,
    GPT2,
    GRANITE,
    HYPERCLOVAX,
    LLAMA,
    MODERNBERT,
    OPT,
    PHI,
    QWEN3,
    QWEN3_5,
    random_model,
)

from toolkit.errors import InputError
from toolkit.models.heads import head_of
from toolkit.models.self_test import check_head, check_packing

dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
@dtypes
def test_heads_within_the_contract_pass(config, dtype):
    model = random_model(config, dtype=dtype)
    check_head(model, head_of(model), "teacher")


@pytest.mark.parametrize(
    ("config", "model_class"),
    [
        (MODERNBERT, "ModernBertDecoderForCausalLM"),
        (FALCON_H1, "FalconH1ForCausalLM"),
        (HYPERCLOVAX, "HyperCLOVAXForCausalLM"),
    ],
)
@dtypes
def test_heads_beyond_the_contract_are_refused(config, model_class, dtype):
    model = random_model(config, dtype=dtype)
    message = rf"the teacher \({model_class}\) computes other logits .* largest error \d"
    with pytest.raises(InputError, match=message):
        check_head(model, head_of(model), "teacher")


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (PHI, {"bias": None}),
        (COHERE, {"scale": 1.0}),
        (GRANITE, {"scale": 0.3}),
        (GEMMA2, {"softcap": None}),
        (GEMMA2, {"softcap": 2.2}),
    ],
)
@dtypes
def test_a_wrong_contract_is_noticed(config, change, dtype):
    model = random_model(config, dtype=dtype)
    with pytest.raises(InputError, match="computes other logits"):
        check_head(model, replace(head_of(model), **change), "teacher")


def test_not_a_number_is_noticed():
    model = random_model(LLAMA)
    model.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(InputError, match="largest error nan"):
        check_head(model, head_of(model), "student")


def test_width_and_dtype_must_fit():
    model = random_model(LLAMA)
    head = head_of(model)
    message = r"the student \(LlamaForCausalLM\) has hidden states of width 32 .* width 16"
    with pytest.raises(InputError, match=message):
        check_head(model, replace(head, weight=head.weight[:, :16]), "student")
    with pytest.raises(InputError, match=r"torch\.float32.*torch\.bfloat16"):
        check_head(model, replace(head, weight=head.weight.bfloat16()), "student")


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2, GEMMA2])
@dtypes
def test_attention_keeps_packed_documents_apart(config, dtype):
    check_packing(random_model(config, dtype=dtype), "student")


@pytest.mark.parametrize("config", [QWEN3_5, OPT])
@dtypes
def test_mixing_packed_documents_is_refused(config, dtype):
    model = random_model(config, dtype=dtype)
    message = rf'the student \({type(model).__name__}\) mixes documents .* data\.packing = "none"'
    with pytest.raises(InputError, match=message):
        check_packing(model, "student")


def test_packing_without_positions_is_refused():
    with pytest.raises(InputError, match=r"BloomModel takes no positions"):
        check_packing(random_model(BLOOM), "student")
