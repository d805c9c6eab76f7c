import pytest
import torch
from tiny_models import BLOOM, GPT2, LLAMA, OPT, QWEN3, QWEN3_5, random_model

from toolkit.errors import InputError
from toolkit.models.load import body_of
from toolkit.teacher.forward import hidden_states

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("config", [LLAMA, QWEN3, QWEN3_5, GPT2, OPT, BLOOM])
def test_rows_are_flattened_in_order(config):
    model = random_model(config)
    with torch.no_grad():
        hidden = hidden_states(body_of(model), IDS, torch.arange(12).expand(2, 12))
        expected = model(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
    if config is OPT:  # transformers lists its states before the projection to the head's width
        assert hidden.shape == (24, 16)
    else:
        torch.testing.assert_close(hidden, expected.reshape(24, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2])
def test_packed_documents_are_as_if_alone(config):
    body = body_of(random_model(config))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        packed = hidden_states(body, IDS[:1], positions)
        first = hidden_states(body, IDS[:1, :5], positions[:, :5])
        second = hidden_states(body, IDS[:1, 5:], positions[:, 5:])
        unpacked = hidden_states(body, IDS[:1], torch.arange(12)[None])
    torch.testing.assert_close(packed, torch.cat([first, second]), rtol=1e-4, atol=1e-4)
    assert (packed - unpacked)[5:].abs().max() > 0.1


def test_gradients_are_the_callers():
    body = body_of(random_model(LLAMA))
    assert hidden_states(body, IDS, torch.arange(12).expand(2, 12)).requires_grad


def test_body_without_positions_refuses_packed_rows():
    body = body_of(random_model(BLOOM))
    with pytest.raises(InputError, match=r'BloomModel takes no positions.*data\.packing = "none"'):
        hidden_states(body, IDS, torch.arange(6).repeat(2).expand(2, 12))
