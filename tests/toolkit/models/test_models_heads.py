import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, LLAMA, OPT, PHI, QWEN3_5, random_model, random_section
from transformers import AutoConfig, Qwen3_5ForConditionalGeneration

from toolkit.config import ModelSection
from toolkit.errors import InputError
from toolkit.models.facts import teacher_facts
from toolkit.models.heads import LMHead, head_of, load_head
from toolkit.models.load import load_config, load_model

every_architecture = pytest.mark.parametrize(
    "config", ARCHITECTURES.values(), ids=ARCHITECTURES.keys()
)


def assert_same_head(loaded: LMHead, expected: LMHead):
    assert not loaded.weight.requires_grad
    assert loaded.weight.dtype == expected.weight.dtype
    assert torch.equal(loaded.weight, expected.weight)
    assert (loaded.bias is None) == (expected.bias is None)
    assert loaded.bias is None or torch.equal(loaded.bias, expected.bias)
    assert (loaded.scale, loaded.softcap) == (expected.scale, expected.softcap)


def assert_folder_gives_same_head(folder, dtype):
    section = ModelSection(path=str(folder), dtype=dtype)
    model = load_model(section)
    head = load_head(section)
    assert_same_head(head, head_of(model))
    teacher = teacher_facts(model.config, head_of(model), None)
    assert teacher_facts(load_config(section), head, None) == teacher


@every_architecture
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contract_gives_the_models_logits(config, dtype):
    model = random_model(config, dtype=dtype)
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        logits = head_of(model).logits(model.base_model(input_ids=ids).last_hidden_state)
    assert logits.dtype == expected.dtype == getattr(torch, dtype)
    assert expected.std() > 0.01
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@every_architecture
def test_random_start_gives_the_same_head_and_facts(config):
    section = random_section(config)
    model = load_model(section)
    head = load_head(section)
    assert_same_head(head, head_of(model))
    teacher = teacher_facts(model.config, head_of(model), None)
    assert teacher_facts(load_config(section), head, None) == teacher


@every_architecture
def test_folder_gives_the_same_head_and_facts(config, tmp_path):
    random_model(config).save_pretrained(tmp_path)
    assert_folder_gives_same_head(tmp_path, "float32")


def test_head_is_cast_to_the_sections_dtype(tmp_path):
    random_model(PHI).save_pretrained(tmp_path)
    assert_folder_gives_same_head(tmp_path, "bfloat16")


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_checkpoint(tied, tmp_path):
    model = random_model({**LLAMA, "tie_word_embeddings": tied})
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_folder_gives_same_head(tmp_path, "float32")


def test_text_model_inside_a_vision_language_checkpoint(tmp_path):
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    tied = {"tie_word_embeddings": True}
    parts = {"text_config": {**QWEN3_5, **tied}, "vision_config": vision}
    config = AutoConfig.for_model("qwen3_5", **parts, **tied)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    keys = load_file(tmp_path / "model.safetensors").keys()
    assert "model.language_model.embed_tokens.weight" in keys
    assert "lm_head.weight" not in keys
    assert_folder_gives_same_head(tmp_path, "float32")


@pytest.mark.parametrize("absent", [None, "lm_head.weight", "model.embed_tokens.weight"])
def test_head_and_embedding_that_a_configuration_calls_tied(absent, tmp_path):
    random_model(LLAMA).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop(absent, None)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    AutoConfig.for_model(**LLAMA, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert_folder_gives_same_head(tmp_path, "float32")


def test_width_is_the_weights_not_the_configurations():
    model = random_model(OPT)
    assert model.config.hidden_size == 32
    assert head_of(model).weight.shape == (97, 16)


def test_head_of_keeps_the_models_own_parameter():
    model = random_model(LLAMA)
    assert head_of(model).weight is model.lm_head.weight


def test_only_pytorch_weights_are_refused(tmp_path):
    model = random_model(LLAMA)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    section = ModelSection(path=str(tmp_path))
    for load in (load_head, load_model):
        with pytest.raises(InputError, match=r"only \.bin weights; convert them to safetensors"):
            load(section)


def test_missing_weights_missing_shards_and_missing_head_are_refused(tmp_path):
    model = random_model(LLAMA)
    model.config.save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path))
    with pytest.raises(InputError, match=r"holds no model\.safetensors"):
        load_head(section)
    body = model.base_model
    body.save_pretrained(tmp_path, max_shard_size="10KB")
    with pytest.raises(InputError, match=r"holds no lm_head\.weight as it stands; give the"):
        load_head(section)
    index = tmp_path / "model.safetensors.index.json"
    shard = min(json.loads(index.read_text())["weight_map"].values())
    (tmp_path / shard).unlink()
    with pytest.raises(InputError, match=f"lacks {shard}, which model.safetensors.index.json"):
        load_head(section)


def test_quantized_head_is_refused(tmp_path):
    model = random_model(LLAMA)
    state = model.state_dict()
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.float8_e4m3fn)
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(InputError, match=r"lm_head\.weight in .* is quantized"):
        load_head(ModelSection(path=str(tmp_path)))


def test_logits_by_hand():
    hidden = torch.tensor([[1.0, 2.0]])
    head = LMHead(torch.tensor([[1.0, 0.0], [0.0, -1.0]]), torch.tensor([1.0, 0.0]), scale=0.5)
    assert head.logits(hidden).tolist() == [[1.0, -1.0]]
    capped = replace(head, softcap=2.0).logits(hidden)
    torch.testing.assert_close(capped, 2 * torch.tanh(torch.tensor([[0.5, -0.5]])))
    assert head.vocab_size == 2


def test_logit_scale_in_words_is_refused():
    config = {"model_type": "mpt", "vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 1}
    with pytest.raises(InputError, match="logit_scale = 'inv_sqrt_d_model' is not implemented"):
        head_of(random_model({**config, "logit_scale": "inv_sqrt_d_model"}))


def test_model_without_an_lm_head_is_refused():
    with pytest.raises(InputError, match="LlamaModel has no single LM head"):
        head_of(random_model(LLAMA).base_model)
