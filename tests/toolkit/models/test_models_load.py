import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA, random_model, random_section

from toolkit.config import ModelSection
from toolkit.errors import InputError
from toolkit.models.load import body_of, load_config, load_model


def test_random_start_is_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    first = load_model(random_section(LLAMA))
    torch.manual_seed(2)
    second = load_model(random_section(LLAMA))
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    other = load_model(ModelSection(config=LLAMA, seed=8))
    assert not torch.equal(other.lm_head.weight, first.lm_head.weight)


def test_random_start_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load_model(random_section(LLAMA))
    assert torch.equal(torch.rand(4), expected)


def test_configuration_table_is_not_written_into():
    config = {**LLAMA, "rope_parameters": {"rope_theta": 1e4}}
    before = json.dumps(config)
    load_config(random_section(config))
    assert json.dumps(config) == before


def test_dtype_and_evaluation_mode(tmp_path):
    random_model(LLAMA).save_pretrained(tmp_path)
    for section in (
        random_section(LLAMA, dtype="bfloat16"),
        ModelSection(path=str(tmp_path), dtype="bfloat16"),
    ):
        model = load_model(section)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert not model.training


def test_body_is_the_model_without_its_head():
    model = random_model(LLAMA)
    assert body_of(model) is model.model
    with pytest.raises(InputError, match="LlamaModel has no body apart from its head"):
        body_of(model.model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, r"no model_type = 'lama'; did you mean 'llama'\?"),
        ({"hidden_sise": 64}, r"'llama' has no key 'hidden_sise'; did you mean 'hidden_size'\?"),
        ({"hidden_size": "64"}, "'hidden_size' expected int, got str"),
        ({"hidden_size": 33}, r"The hidden size \(33\) is not a multiple"),
        ({"pad_token_id": 97}, "'llama' makes no causal language model: Padding_idx"),
        ({"model_type": "clip"}, "'clip' makes no causal language model"),
    ],
)
def test_bad_table_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        load_model(random_section({**LLAMA, **change}))


def test_undeclared_key_that_the_model_reads_is_kept():
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    config = {**LLAMA, "model_type": "qwen3_moe", **experts, "head_dim": 16}
    model = load_model(random_section(config))
    assert model.model.layers[0].self_attn.q_proj.weight.shape[0] == 4 * 16


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"absent does not exist; models are never downloaded"):
        load_model(ModelSection(path=str(tmp_path / "absent")))
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model(ModelSection(path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(InputError, match=r"cannot use .*config\.json: .*lama"):
        load_model(ModelSection(path=str(tmp_path)))


def test_missing_weights_are_never_made_up(tmp_path):
    random_model(LLAMA).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 weights .* among them 'model\.norm\.weight'"):
        load_model(ModelSection(path=str(tmp_path)))
